"""The command line's flags, made from options; the only module that uses absl's flags."""

import dataclasses
import os
import re
import textwrap
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from absl import flags

from tfdist.cli.arguments import check_arguments, count_flags, find_flag, is_set
from tfdist.cli.config import expand_config
from tfdist.cli.inputs import check_code
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.cli.synonyms import find_meaning
from tfdist.cli.xla_cache import AUTO, NONE, use_xla_cache
from tfdist.errors import TfdistError, make_unknown_name_error
from tfdist.options import CommandOptions
from tfdist.reading import read_text

Options = TypeVar("Options", bound=CommandOptions)

_IMPORTED = ("task", "strategy", "strategies")  # options whose code is imported with the flags


def parse_flags(
    command: type[Options], arguments: Sequence[str], *, runs_here: bool = True
) -> Options:
    """Turns command-line arguments into options.

    Args:
      arguments: the arguments, without the program's name. They may include `--flagfile=FILE`.
      runs_here: whether the code that the flags name must be on this machine.

    Raises:
      TfdistError: a flag is unknown (the closest ones are named), a value is malformed, or an
        argument has a control character.
    """
    arguments = expand_flag_files(arguments)
    check_arguments(arguments)
    try:
        if runs_here:
            check_code(_list_items(command.list_groups()), arguments)
        groups = _list_groups(command, arguments)
        values = _parse(groups, arguments)
        for group in groups.values():
            presets = getattr(group, "presets", {})
            if presets and values["preset"].value in presets:
                # The last value of a flag counts, so arguments override presets.
                values = _parse(groups, [*presets[values["preset"].value], *arguments])
        return command(
            **{
                name: group(**{i.name: _read(values, i) for i in dataclasses.fields(group)})
                for name, group in groups.items()
            }
        )
    except TfdistError as error:
        raise TfdistError(name_flags(error, command)) from error


def name_flags(error: BaseException, *commands: type[CommandOptions]) -> str:
    """Returns the message of an error, with parameters in backquotes written as flags."""
    names = {item.name for command in commands for item in _list_items(command.list_groups())}

    def write(match: re.Match[str]) -> str:
        return f"--{match[1]}{match[2]}" if match[1] in names else match[0]

    return re.sub(r"`(\w+)((?:=[^`]*)?)`", write, str(error))


def _list_groups(command: type[CommandOptions], arguments: Sequence[str]) -> dict[str, Any]:
    """Returns a command's groups, with the options that the given values add."""
    items = _list_items(command.list_groups())
    given = {item.name: find_flag(arguments, item.name) for item in items}
    check_code(items, arguments, names=_IMPORTED)
    imported = [i.name for i in items if i.name in _IMPORTED and i.metadata.get("is_open")]
    if any(":" in (given[name] or "") for name in imported):
        # The user's module imports TensorFlow, which reads the place of the cache while it starts.
        default: Any = next((item.default for item in items if item.name == "xla_cache"), NONE)
        if given.get("xla_cache") or (default == AUTO and is_set(arguments, "jit_compile")):
            chosen = given["xla_cache"] or default
            use_xla_cache(chosen, deterministic=is_set(arguments, "deterministic"))
        start_tensorflow_quietly()
    return command.list_groups({name: text for name, text in given.items() if text is not None})


def _parse(groups: Mapping[str, type], arguments: Sequence[str]) -> flags.FlagValues:
    values = flags.FlagValues()
    items = _list_items(groups)
    _define(values, items)
    try:
        rest = values(["tfdist", *arguments])[1:]
    except flags.UnrecognizedFlagError as error:
        raise _make_unknown_flag_error(error.flagname, items) from error
    except flags.IllegalFlagValueError as error:
        raise _make_value_error(str(error), items) from error
    except flags.Error as error:
        raise _make_flag_error(error) from error
    if rest:
        if os.path.splitext(rest[0])[1] == ".py":
            raise TfdistError(
                f"{rest[0]!r} is a script: run python -m tfdist.run --strategy=NAME SCRIPT, "
                "or give a task of your own as --task=FILE:Class."
            )
        raise TfdistError(
            f"Cannot read the argument {rest[0]!r}: flags are written --name=value. See --help."
        )
    return values


def expand_flag_files(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with those in `--flagfile` and `--config` files inserted."""
    try:
        found = _CheckedFlagFiles().read_flags_from_files(list(arguments))
    except flags.Error as error:
        raise _make_flag_error(error) from error
    return expand_config(found)


def split_command(
    command: type[CommandOptions], arguments: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Returns a command's flags, and what follows them: another command and its arguments.

    >>> from tfdist.runs.options import TrainOptions
    >>> split_command(TrainOptions, ["--flip", "--epochs", "3", "a.py", "--lr=2"])
    (['--flip', '--epochs', '3'], ['a.py', '--lr=2'])
    """
    booleans = {i.name for i in _list_items(command.list_groups()) if _find_type(i) is bool}
    alone = {*booleans, *(f"no{name}" for name in booleans), "h", "help"}
    place = count_flags(arguments, lambda flag: flag.lstrip("-") in alone)
    return list(arguments[:place]), list(arguments[place:])


def drop_flags(
    arguments: Sequence[str], names: Collection[str], alone: Collection[str] = ()
) -> list[str]:
    """Returns the flags of a command line without those of some names.

    >>> drop_flags(["--lr", "1", "--epochs=3", "--nodry_run"], {"lr", "dry_run"}, {"dry_run"})
    ['--epochs=3']

    Args:
      alone: the flags that need no value.
    """
    kept, skips = [], False
    for argument in arguments:
        flag, has_value, _ = argument.lstrip("-").partition("=")
        name = flag if flag in names else flag.removeprefix("no")
        if skips:
            skips = False
        elif argument.startswith("-") and name in names:
            skips = not has_value and name not in alone
        else:
            kept.append(argument)
    return kept


def format_help(program: str, command: type[CommandOptions], arguments: Sequence[str] = ()) -> str:
    """Returns the help text: the common flags by their groups, with default and valid values.

    Args:
      arguments: the command line. `--help=all` shows all flags, `--help=FLAG` shows one of them;
        some values of other flags add options.

    Raises:
      TfdistError: `--help=FLAG` names no flag.
    """
    groups = _list_groups(command, arguments)
    items = _list_items(groups)
    topic = next((a.partition("=")[2] for a in arguments if is_help(a)), "")
    if topic not in ("", "all"):
        item = next((item for item in items if item.name == topic.strip("-")), None)
        if item is None:
            raise _make_unknown_flag_error(topic, items)
        return "\n".join(_format_flag(item))
    shown = {item.name for item in items}
    if command.common and topic != "all":
        usual = {item.name for item in _list_items(command.list_groups())}
        shown -= usual - set(command.common)  # the flags of a task of one's own are shown
    lines = [f"usage: python -m {program} [--flag=value ...]{command.rest}", ""]
    for group in groups.values():
        flags_shown = [item for item in dataclasses.fields(group) if item.name in shown]
        if flags_shown:
            lines.append(group.describe().rstrip("."))
            lines += [line for item in flags_shown for line in _format_flag(item)]
            lines.append("")
    if len(shown) < len(items):
        lines += [f"--help=all shows all {len(items)} flags, --help=FLAG shows one.", ""]
    lines += [
        "--config=FILE reads options from TOML, YAML, JSON or a run's options.json; flags override",
        "them. --print_config prints all options. --flagfile=FILE reads flags, one per line.",
    ]
    return "\n".join(lines)


def _format_flag(item: dataclasses.Field) -> list[str]:
    kind = _find_type(item)
    if kind is bool:
        head = f"  --[no]{item.name}"
    else:
        metavar = item.metadata.get("metavar") or {int: "N", float: "X"}.get(kind, "NAME")
        head = f"  --{item.name}={metavar}"
    text = item.metadata["help"]
    if "choices" in item.metadata:
        text += f": {', '.join(item.metadata['choices'])}"
    default = _to_text(item.default)
    if default not in ("", None):
        text += f" [{default}]"
    body = textwrap.wrap(text, 66)
    if len(head) > 28:
        return [head, *(" " * 30 + line for line in body)]
    return [f"{head:<30}{body[0]}", *(" " * 30 + line for line in body[1:])]


def _define(values: flags.FlagValues, items: Sequence[dataclasses.Field]) -> None:
    define: dict[type, Any] = {
        bool: flags.DEFINE_boolean,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        tuple: flags.DEFINE_list,
        str: flags.DEFINE_string,
    }
    for item in items:
        if item.metadata.get("auto") is not None:
            parser: Any = _IntegerOrAutoParser()
            flags.DEFINE(parser, item.name, item.default, item.metadata["help"], values)
            continue
        kind = _find_type(item)
        default = _to_text(item.default) if kind is tuple else item.default
        define[kind](item.name, default, item.metadata["help"], flag_values=values)


def _read(values: flags.FlagValues, item: dataclasses.Field) -> Any:
    value: Any = values[item.name].value
    auto = item.metadata.get("auto")
    if auto is not None and value == "auto":
        return auto
    if auto is not None and value == auto:
        least = item.metadata["minimum"]
        raise TfdistError(f"`{item.name}={value}` is too small: give {least} or more.")
    if _find_type(item) is not tuple:
        return value
    members = typing.get_args(item.type)
    many = members[-1] is ...
    kinds = members[:1] * len(value) if many else members
    try:
        return tuple(kind(text) for kind, text in zip(kinds, value, strict=True))
    except ValueError as error:
        default = _to_text(item.default)
        example = f", for example --{item.name}={default}" if default else ""
        raise TfdistError(
            f"--{item.name}={','.join(value)} is not {item.metadata['metavar']}. "
            f"Write {'numbers' if many else 'two numbers'}{example}."
        ) from error


def is_help(argument: str) -> bool:
    """Returns whether an argument asks for help.

    >>> [is_help(argument) for argument in ("-h", "--help", "--help=all", "--helper")]
    [True, True, True, False]
    """
    return argument == "-h" or argument.partition("=")[0] in ("--help", "-help")


class _CheckedFlagFiles(flags.FlagValues):
    """Flags whose files are text; absl would wait for a FIFO."""

    def _get_flag_file_lines(self, filename: str, parsed_file_stack: Any = None) -> list[str]:
        try:
            read_text(filename) if filename else ""
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TfdistError(f"Cannot read --flagfile={filename}: {reason}.") from error
        return super()._get_flag_file_lines(filename, parsed_file_stack)


def _make_unknown_flag_error(name: str, items: Sequence[dataclasses.Field]) -> TfdistError:
    meaning = find_meaning(name, [item.name for item in items])
    if meaning is not None:
        return TfdistError(f"Unknown flag '--{name.strip('-')}'. {meaning}")
    valid = [f"--{item.name}" for item in items]
    return make_unknown_name_error(
        "flag", f"--{name.strip('-')}", valid, where_all="See --help=all."
    )


class _IntegerOrAutoParser(flags.IntegerParser):
    def parse(self, argument: Any) -> Any:
        return argument if argument == "auto" else super().parse(argument)


def _make_flag_error(error: flags.Error) -> TfdistError:
    return TfdistError(f"{str(error).strip().removeprefix('ERROR:: ')}. See --help.")


def _make_value_error(message: str, items: Sequence[dataclasses.Field]) -> TfdistError:
    match = re.match(r"flag (--(\w+)=.*?): ", message)
    item = next((item for item in items if match and item.name == match[2]), None)
    if match is None or item is None:
        return TfdistError(f"{message.strip()}. See --help.")
    expected = {bool: "true or false", int: "a whole number", float: "a number"}
    text = expected.get(_find_type(item), "understood")
    if item.metadata.get("auto") is not None:
        text += " or auto"
    return TfdistError(f"{match[1]} is not {text}.")


def _find_type(item: dataclasses.Field) -> type:
    annotation: Any = item.type
    if isinstance(annotation, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not types.NoneType)
    return typing.get_origin(annotation) or annotation


def _list_items(groups: Mapping[str, type]) -> list[dataclasses.Field]:
    return [item for group in groups.values() for item in dataclasses.fields(group)]


def _to_text(value: object) -> Any:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value
