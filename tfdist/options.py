"""What options are: frozen dataclasses whose fields are also the command line's flags.

Standard library only. A field says once what a flag needs: its group, its help, its unit and
what it may be. The module that consumes an option owns its dataclass; `tfdist.cli.flags` turns the
fields into flags and the flags into these.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from tfdist.errors import TfdistError, make_unknown_name_error

_PATHS = ("DIR", "FILE", "DIR_OR_GLOB")  # options whose leading ~ is the home directory


def option(default: Any, help_text: str, **metadata: Any) -> Any:
    """Returns a dataclass field that is also a flag.

    Args:
      default: the default; its type, or the field's annotation, is the flag's type.
      help_text: one line for `--help`, units included.
      **metadata: `choices`, valid values shown in `--help`, and with `is_open` also
        `package.module:NAME`; `minimum`, the lowest valid value, or `above`, the highest that no
        longer is, all three of a list's members; `auto`, what the word auto stands for beside whole
        numbers; `metavar`, how the value looks, one of `_PATHS` for a path; `result=False`, for
        what may change when a run is continued because it does not change what the run computes;
        `alike=True`, for what all workers must have alike although it does not; `grows=True`, for
        what may grow when a finished run is continued.
    """
    return field(default=default, metadata={"help": help_text, **metadata})


class OptionGroup:
    """A group of options: a frozen dataclass, whose paths are those of the user's own machine.

    Raises:
      TfdistError: a value that is none of the option's choices, or out of its range.
    """

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            _check_value(item, value)
            if value and item.metadata.get("metavar") in _PATHS:
                value = os.path.expanduser(value)
                if item.metadata["metavar"] == "DIR":
                    # In a bucket, "run//model" is another file than "run/model".
                    value = value.rstrip("/") or "/"
                object.__setattr__(self, item.name, value)

    @classmethod
    def widen(cls, chosen: Mapping[str, str]) -> type["OptionGroup"]:
        """Returns the group with the options that the choice of others brings.

        Args:
          chosen: option -> what is given for it.
        """
        return cls

    def takes(self, item: dataclasses.Field) -> bool:
        """Returns whether an option means something beside what the others are."""
        return True


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Everything that a command takes: a frozen dataclass whose fields are groups of options.

    Attributes:
      rest: what else a command line has after these, for `--help`.
    """

    rest: ClassVar[str] = ""

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
    def list_groups(cls, chosen: Mapping[str, str] | None = None) -> dict[str, type]:
        """Returns the groups' classes by their names, in the order of `--help`.

        Args:
          chosen: option -> what is given for it, which may bring others.
        """
        groups: dict[str, Any] = {i.name: type(i.default) for i in dataclasses.fields(cls)}
        return {name: group.widen(chosen or {}) for name, group in groups.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Returns the options that `to_dict` gave, in whatever groups they were.

        What is missing has its default.
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
        """Returns the options that decide what is computed, as flag -> JSON value."""
        return self._select(lambda limits: limits.get("result", True))

    def select_alike(self) -> dict[str, Any]:
        """Returns the options that all workers must have alike, as flag -> JSON value.

        Those of the result, and those without which workers would wait for one another forever.
        """
        return self._select(lambda m: m.get("result", True) or m.get("alike", False))

    @classmethod
    def list_growing(cls) -> list[str]:
        """Returns the options that may grow when a finished run is continued."""
        return [
            item.name
            for group in cls.list_groups().values()
            for item in dataclasses.fields(group)
            if item.metadata.get("grows")
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


def inherit(group: type, name: str, default: Any = dataclasses.MISSING, **metadata: Any) -> Any:
    """Returns the option of another group, possibly with another default or other metadata."""
    item = next(item for item in dataclasses.fields(group) if item.name == name)
    value = item.default if default is dataclasses.MISSING else default
    return field(default=value, metadata={**item.metadata, **metadata})


def _check_value(item: dataclasses.Field, value: Any) -> None:
    limits = item.metadata
    choices, minimum, above = (limits.get(key) for key in ("choices", "minimum", "above"))
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
