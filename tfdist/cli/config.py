"""Configuration files: options by name, in TOML, JSON or YAML."""

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.cli.arguments import find_flag
from tfdist.errors import TfdistError
from tfdist.named_code import CODE_OPTIONS, check_recorded_code, remember_code
from tfdist.reading import read_text

CONFIG = "config"
PRINT_CONFIG = "--print_config"

_MOST_LEVELS = 3


def expand_config(arguments: Sequence[str]) -> list[str]:
    """Returns the options of `--config=FILE`, whose code must be known, and then the arguments."""
    given = [(find_flag(arguments, name) or "").split(",") for name in CODE_OPTIONS]
    remember_code(name for names in given for name in names if ":" in name)
    path = find_flag(arguments, CONFIG)
    if path is None:
        return list(arguments)
    found = _read(path)
    values = _flatten(found, path)
    if "result" in found or os.path.basename(path) == "options.json":  # from a run directory
        check_recorded_code(
            values, where=f"--config={path}", cure="give that option on the command line as well"
        )
    return [_to_argument(name, value) for name, value in values.items()] + _drop(arguments)


def format_config(groups: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns groups of options as TOML tables; values of None are left out."""
    tables = []
    for group, options in groups.items():
        lines = [
            f"{name} = {json.dumps(value)}" for name, value in options.items() if value is not None
        ]
        tables.append("\n".join([f"[{group}]", *lines]))
    return "\n\n".join(tables)


def _read(path: str) -> Any:
    kind = os.path.splitext(path)[1].lower()
    try:
        text = read_text(os.path.expanduser(path))
        if kind == ".toml":
            return tomllib.loads(text)
        if kind == ".json":
            return json.loads(text)
        if kind in (".yaml", ".yml"):
            return _parse_yaml(text)
    except ImportError:
        raise TfdistError(
            f"Cannot read --config={path} without PyYAML. Run `pip install pyyaml`, or write TOML."
        ) from None
    except OSError as error:
        raise TfdistError(f"Cannot read --config={path}: {error.strerror or error}.") from error
    except Exception as error:  # from one of three parsers
        raise TfdistError(f"Cannot read --config={path}: {' '.join(str(error).split())}") from error
    raise TfdistError(f"Cannot read --config={path}: the file must be .toml, .yaml or .json.")


def _parse_yaml(text: str) -> Any:
    import yaml

    depth = 0
    for event in yaml.parse(text):
        # A few aliases can stand for more values than fit in memory.
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has YAML aliases, such as *name; write the values")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_LEVELS:  # PyYAML's time is quadratic in them
            raise ValueError("its values are nested")
    return yaml.safe_load(text)


def _flatten(values: Any, path: str) -> dict[str, Any]:
    """Returns the options in a file, regardless of their groups.

    From a run's `options.json`, only the options that affect the result are used.
    """
    if not isinstance(values, Mapping):
        raise TfdistError(f"--config={path} contains no options. Write name = value.")
    values = values.get("result", values)
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= value if isinstance(value, Mapping) else {name: value}
    for name, value in flat.items():
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, (list, Mapping)) for part in parts):
            raise TfdistError(
                f"--config={path}: the value of {name} is nested. Write a value, or a list of them."
            )
    return {name: value for name, value in flat.items() if value is not None}


def _to_argument(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    if isinstance(value, list):
        return f"--{name}={','.join(map(str, value))}"
    return f"--{name}={value}"


def _drop(arguments: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skips = False
    for argument in arguments:
        if skips:
            skips = False
        elif argument in (f"--{CONFIG}", f"-{CONFIG}"):
            skips = True
        elif not argument.startswith((f"--{CONFIG}=", f"-{CONFIG}=")):
            kept.append(argument)
    return kept
