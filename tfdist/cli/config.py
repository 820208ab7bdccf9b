"""Configuration files: options by name, in TOML, JSON or YAML."""

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.cli.arguments import find_flag
from tfdist.errors import TfdistError
from tfdist.named_code import CODE_OPTIONS, check_recorded_code, remember_code

CONFIG = "config"
PRINT_CONFIG = "--print_config"


def expand_config(arguments: Sequence[str]) -> list[str]:
    """Returns the options of `--config=FILE` followed by the arguments, which override them.

    Args:
      arguments: the command line.

    Raises:
      TfdistError: the file cannot be read, or it is a run's record that names unknown code.
    """
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
    """Returns options as TOML, with a table for each group; values of None are left out.

    Args:
      groups: group -> option -> value, as `CommandOptions.to_dict` returns them.
    """
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
        with open(os.path.expanduser(path), "rb") as file:
            if kind == ".toml":
                return tomllib.load(file)
            if kind == ".json":
                return json.load(file)
            if kind in (".yaml", ".yml"):
                import yaml

                return yaml.safe_load(file)
    except ImportError:
        raise TfdistError(
            f"Cannot read --config={path} without PyYAML. Run `pip install pyyaml`, or write TOML."
        ) from None
    except OSError as error:
        raise TfdistError(f"Cannot read --config={path}: {error.strerror}.") from error
    except Exception as error:  # from one of three parsers
        raise TfdistError(f"Cannot read --config={path}: {' '.join(str(error).split())}") from error
    raise TfdistError(f"Cannot read --config={path}: the file must be .toml, .yaml or .json.")


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
    return {name: value for name, value in flat.items() if value is not None}


def _to_argument(name: str, value: Any) -> str:
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
