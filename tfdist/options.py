"""Options: frozen dataclasses whose fields are also the command line's flags.

A field defines everything about its flag: group, help text, unit and valid values. The module that
uses an option owns its dataclass. `tfdist.cli.flags` defines flags from the fields and fills the
dataclasses from parsed flags. This module needs only the standard library.
"""

import dataclasses
import inspect
import numbers
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from tfdist.errors import TfdistError, make_unknown_name_error

_DIRECTORIES = "DIR", "DIR_OR_FILE", "DIR|auto|none"
_PATHS = (
    "DIR|auto|none",
    "DIR",
    "FILE",
    "DIR_OR_FILE",
    "DIR_OR_GLOB",
)  # values in which a leading ~ is the home directory


def option(default: object, help_text: str, **metadata: Any) -> Any:
    """Returns a dataclass field that is also a flag.

    Args:
      default: the default; its type, or the field's annotation, is the flag's type.
      help_text: the text for `--help`, units included.
      **metadata: `must_exist`, what a path that is read must hold: the last sentence of the error
        if there is nothing, see `tfdist.cli.inputs`; `must_exist_if`, (option, value) of the group
        without which the path need not exist;
        `choices`, the valid values, and with `is_open` also `package.module:NAME`;
        `minimum`, the lowest valid value; `above` and `below`, limits that values must not reach
        (these four apply to each member of a list); `auto`, the whole number that the word auto
        stands for; `metavar`, the form of the value, one of `_PATHS` for a path; `result=False` if
        the option does not affect the result, so that it may change when a run is continued;
        `must_match=True` if all workers must nevertheless agree on it; `may_increase=True` if it
        may grow when a finished run is continued.
    """
    return field(default=default, metadata={"help": help_text, **metadata})


class OptionGroup:
    """A group of options: a frozen dataclass that expands `~` in its paths.

    The docstring of a subclass need not list its options: their help texts are added to it.

    Raises:
      TfdistError: a value is of another type, not one of the option's choices, or out of range.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        inherited: dict[str, Any] = {}
        for base in reversed(cls.__mro__[1:]):
            inherited |= vars(base).get("__dataclass_fields__", {})
        fields = {n: f for n, f in {**inherited, **vars(cls)}.items() if _is_option(f)}
        text = inspect.cleandoc(vars(cls).get("__doc__") or "")
        if fields and "Args:" not in text:
            lines = (f"  {name}: {item.metadata['help']}." for name, item in fields.items())
            cls.__doc__ = "\n".join([f"{text}\n\nArgs:", *lines])

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            value = _convert(item, getattr(self, item.name))
            object.__setattr__(self, item.name, value)
            _check_value(item, value)
            if value and item.metadata.get("metavar") in _PATHS:
                value = os.path.expanduser(value)
                if item.metadata["metavar"] in _DIRECTORIES:
                    # In a bucket, "run//model" and "run/model" are different files.
                    value = value.rstrip("/") or "/"
                object.__setattr__(self, item.name, value)

    @classmethod
    def describe(cls) -> str:
        """Returns the first paragraph of the docstring, which is the group's title."""
        return " ".join((cls.__doc__ or "").partition("\n\n")[0].split())

    @classmethod
    def widen(cls, chosen: Mapping[str, str]) -> type["OptionGroup"]:
        """Returns the group's class, extended by the options that given values add."""
        return cls

    def takes(self, item: dataclasses.Field) -> bool:
        """Returns whether an option has an effect, given the values of the others."""
        return True


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """All options of a command: a frozen dataclass whose fields are groups of options.

    Attributes:
      rest: what follows the options on the command line, for `--help`.
      common: the options that `--help` shows, most used first; by default all.
    """

    rest: ClassVar[str] = ""
    common: ClassVar[tuple[str, ...]] = ()

    def reads_inputs(self) -> bool:
        """Returns whether the command reads the paths that must exist."""
        return True

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns group -> field -> value, ready for JSON."""
        return {
            group: {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in fields.items()
            }
            for group, fields in dataclasses.asdict(self).items()
        }

    @classmethod
    def list_groups(cls, chosen: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Returns group -> class, in the order of `--help`; given values may add options."""
        groups: dict[str, Any] = {i.name: type(i.default) for i in dataclasses.fields(cls)}
        return {name: group.widen(chosen or {}) for name, group in groups.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Returns the options in a result of `to_dict`, regardless of their groups.

        Missing options get their defaults.
        """
        flat: dict[str, Any] = {}
        for fields in values.values():
            flat |= fields if isinstance(fields, Mapping) else {}
        return cls(
            **{
                name: group(
                    **{
                        item.name: tuple(value) if isinstance(value, list) else value
                        for item in dataclasses.fields(group)
                        for value in [flat.get(item.name, item.default)]
                    }
                )
                for name, group in cls.list_groups(flat).items()
            }
        )

    def select_result(self) -> dict[str, Any]:
        """Returns the options that affect the result, as option -> JSON value."""
        return self._select(lambda limits: limits.get("result", True))

    def select_alike(self) -> dict[str, Any]:
        """Returns the options on which all workers must agree, as option -> JSON value.

        A difference in them would change the result, or make workers wait for each other forever.
        """
        return self._select(lambda m: m.get("result", True) or m.get("must_match", False))

    @classmethod
    def list_growing(cls) -> list[str]:
        """Returns the options that may grow when a finished run is continued."""
        return [
            item.name
            for group in cls.list_groups().values()
            for item in dataclasses.fields(group)
            if item.metadata.get("may_increase")
        ]

    def _select(self, belongs: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
        values = self.to_dict()
        groups = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {
            item.name: values[name][item.name]
            for name, group in groups.items()
            for item in dataclasses.fields(group)
            if belongs(item.metadata) and group.takes(item)
        }


def inherit(group: type, name: str, default: object = dataclasses.MISSING, **metadata: Any) -> Any:
    """Returns a copy of another group's option, with the given default and metadata if any."""
    item = next(item for item in dataclasses.fields(group) if item.name == name)
    value = item.default if default is dataclasses.MISSING else default
    return field(default=value, metadata={**item.metadata, **metadata})


def _is_option(item: object) -> bool:
    return isinstance(item, dataclasses.Field) and "help" in item.metadata


_TYPES: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: ((str, os.PathLike), "a text"),
}


def _convert(item: dataclasses.Field, value: object) -> Any:
    """Returns a value from Python, such as one of NumPy's numbers, as the option's own type."""
    kinds = [k for k in typing.get_args(item.type) if k is not type(None)] or [item.type]
    auto = item.metadata.get("auto")
    may_be_none = item.default is None or type(None) in typing.get_args(item.type)
    if (value is None and may_be_none) or (auto is not None and value == auto):
        return value
    if typing.get_origin(item.type) is tuple:
        if value is None:
            return item.default
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise TfdistError(f"`{item.name}={value}` is not a list. Give a list or a tuple.")
        return tuple(_convert_part(item, kinds[0], part) for part in value)
    return _convert_part(item, kinds[0], value)


def _convert_part(item: dataclasses.Field, kind: Any, value: Any) -> Any:
    if kind not in _TYPES:
        return value
    accepted, words = _TYPES[kind]
    is_truth = isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")
    if is_truth != (kind is bool) or not (is_truth or isinstance(value, accepted)):
        raise TfdistError(f"`{item.name}={value}` is not {words}. Give {words}.")
    return os.fspath(value) if kind is str else kind(value)


def _check_value(item: dataclasses.Field, value: object) -> None:
    limits = item.metadata
    choices, minimum = limits.get("choices"), limits.get("minimum")
    above, below = limits.get("above"), limits.get("below")
    auto = limits.get("auto")
    for part in value if isinstance(value, tuple) else (value,):
        if choices and part not in choices and not (limits.get("is_open") and ":" in part):
            raise make_unknown_name_error(f"`{item.name}`", part, choices)
        if part is None or (auto is not None and part == auto):
            continue
        if minimum is not None and not part >= minimum:
            raise TfdistError(f"`{item.name}={part}` is too small: give {minimum} or more.")
        if above is not None and not part > above:
            raise TfdistError(f"`{item.name}={part}` is too small: give more than {above}.")
        if below is not None and not part < below:
            raise TfdistError(f"`{item.name}={part}` is too large: give less than {below}.")
