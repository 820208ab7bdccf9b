"""The command line's flags, made from `tfdist.options`, and the only reader of absl's FLAGS."""

import dataclasses
import re
import textwrap
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from absl import flags

from tfdist.command_line import check_arguments
from tfdist.errors import TfdistError, make_unknown_name_error
from tfdist.options import CommandOptions, TrainOptions
from tfdist.presets import PRESETS

Options = TypeVar("Options", bound=CommandOptions)


def parse_train_flags(arguments: Sequence[str]) -> TrainOptions:
    """Turns the arguments of `tfdist.train` into options; see `parse_flags`."""
    return parse_flags(TrainOptions, arguments)


def parse_flags(command: type[Options], arguments: Sequence[str]) -> Options:
    """Turns command-line arguments into options.

    Args:
      command: the class of the command's options.
      arguments: the arguments, without the program's name. `--flagfile=FILE` works.

    Raises:
      TfdistError: an unknown flag (with the closest ones), a malformed value, or a control
        character.
    """
    arguments = expand_flag_files(arguments)
    check_arguments(arguments)
    values = _parse(command, arguments)
    if "preset" in values and values["preset"].value in PRESETS:
        # Of a flag that is given twice, the last one counts.
        values = _parse(command, [*PRESETS[values["preset"].value], *arguments])
    return command(
        **{
            name: group(**{item.name: _read(values, item) for item in dataclasses.fields(group)})
            for name, group in command.list_groups().items()
        }
    )


def _parse(command: type[CommandOptions], arguments: Sequence[str]) -> flags.FlagValues:
    values = flags.FlagValues()
    items = _list_items(command)
    _define(values, items)
    try:
        rest = values(["tfdist", *arguments])[1:]
    except flags.UnrecognizedFlagError as error:
        raise make_unknown_name_error(
            "flag",
            f"--{error.flagname}",
            [f"--{item.name}" for item in items],
            where_all="See --help.",
        ) from error
    except flags.IllegalFlagValueError as error:
        raise _make_value_error(str(error), items) from error
    except flags.Error as error:
        raise _make_flag_error(error) from error
    if rest:
        raise TfdistError(
            f"Cannot read the argument {rest[0]!r}: flags are written --name=value. See --help."
        )
    return values


def expand_flag_files(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with those of their `--flagfile`s in place of these.

    Raises:
      TfdistError: a file cannot be read.
    """
    try:
        return flags.FlagValues().read_flags_from_files(list(arguments))
    except flags.Error as error:
        raise _make_flag_error(error) from error


def drop_flag(arguments: Sequence[str], name: str) -> list[str]:
    """Returns the arguments without a flag, written `--name=value` or `--name value`."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        flag, separator, _ = argument.partition("=")
        if skip or flag in (f"--{name}", f"-{name}"):
            skip = not skip and not separator
        else:
            kept.append(argument)
    return kept


def format_help(program: str, command: type[CommandOptions] = TrainOptions) -> str:
    """Returns the help text: every flag in its group, with default and valid values."""
    lines = [f"usage: python -m {program} [--flag=value ...]{command.rest}", ""]
    for group in command.list_groups().values():
        lines.append((group.__doc__ or "").strip().rstrip("."))
        for item in dataclasses.fields(group):
            lines += _format_flag(item)
        lines.append("")
    lines.append("--flagfile=FILE reads flags from a file, one a line. --help shows this.")
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
    choices = item.metadata.get("choices")
    if choices and value not in choices:
        raise make_unknown_name_error(f"--{item.name}", value, choices)
    if value == "auto" and _find_type(item) is int:
        return item.metadata["auto"]
    if _find_type(item) is not tuple:
        _check_range(item, value)
        return value
    members = typing.get_args(item.type)
    many = members[-1] is ...
    kinds = members[:1] * len(value) if many else members
    try:
        return tuple(kind(text) for kind, text in zip(kinds, value, strict=True))
    except ValueError as error:
        example = f"--{item.name}={_to_text(item.default)}"
        raise TfdistError(
            f"--{item.name}={','.join(value)} is not {item.metadata['metavar']}. "
            f"Write {'numbers' if many else 'two numbers'}, for example {example}."
        ) from error


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
        text += ", nor auto"
    return TfdistError(f"{match[1]} is not {text}.")


def _check_range(item: dataclasses.Field, value: Any) -> None:
    if value is None:
        return
    minimum, above = item.metadata.get("minimum"), item.metadata.get("above")
    if minimum is not None and not value >= minimum:
        raise TfdistError(f"--{item.name}={value} is too small: give {minimum} or more.")
    if above is not None and not value > above:
        raise TfdistError(f"--{item.name}={value} is too small: give more than {above}.")


def _find_type(item: dataclasses.Field) -> type:
    annotation: Any = item.type
    if isinstance(annotation, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not types.NoneType)
    return typing.get_origin(annotation) or annotation


def _list_items(command: type[CommandOptions]) -> list[dataclasses.Field]:
    groups = command.list_groups().values()
    return [item for group in groups for item in dataclasses.fields(group)]


def _to_text(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value
