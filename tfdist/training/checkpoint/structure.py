"""Describes the variables of a checkpoint, so that no other model continues with their values."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import keras

# What Keras appends to a name that it has already used in the process: dense_1, dense_2.
_AUTO_NUMBER = re.compile(r"_\d+(?=[_/]|$)")
_MODEL, _OPTIMIZER, _STRATEGY = "model", "optimizer", "strategy"


@dataclass(frozen=True)
class VariableRecord:
    """The description of a variable.

    Attributes:
      role: the owner: "model", "optimizer" or "strategy".
      path: Keras's path; the numbers in it may differ between processes.
      trainable: whether it is a weight that the optimizer changes.
    """

    role: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool

    def __str__(self) -> str:
        return f"the {self.role}'s {self.path}, {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Structure:
    """The descriptions of a checkpoint's variables, in order.

    Attributes:
      variables: name of an array in the checkpoint -> the variable whose value it is.
      optimizer: the optimizer's class, with those of the optimizers it wraps; None if unknown.
    """

    variables: Mapping[str, VariableRecord]
    optimizer: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns JSON-serializable content for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Structure":
        """Returns the structure that `to_json` converted to this content."""
        return cls(
            variables={
                name: VariableRecord(**{**record, "shape": tuple(record["shape"])})
                for name, record in content["variables"].items()
            },
            optimizer=content["optimizer"],
        )

    def list_optimizer_names(self) -> list[str]:
        """Returns the names of the optimizer and of those it wraps, without Keras's numbers."""
        owners = [_get_owner(v.path) for v in self.variables.values() if v.role == _OPTIMIZER]
        return list(dict.fromkeys(map(_drop_numbers, owners)))


def describe_structure(
    variables: Mapping[str, keras.Variable], *, optimizer: keras.optimizers.Optimizer | None = None
) -> Structure:
    """Returns the structure of variables.

    Args:
      variables: name of an array in the checkpoint -> its variable: first the model's, then the
        optimizer's, then others of the strategy.
    """
    # Keras puts an optimizer's variables, including its number of updates, under its name.
    owners = {_get_owner(variable.path) for variable in variables.values()}
    paths = {variable.path for variable in variables.values()}
    optimizers = {owner for owner in owners if f"{owner}/iteration" in paths}
    records = {}
    others = _MODEL
    for name, variable in variables.items():
        role = others
        if _get_owner(variable.path) in optimizers:
            role, others = _OPTIMIZER, _STRATEGY
        records[name] = VariableRecord(
            role=role,
            path=variable.path,
            shape=tuple(variable.shape),
            dtype=str(variable.dtype),
            trainable=role == _MODEL and bool(variable.trainable),
        )
    return Structure(records, None if optimizer is None else _name_class(optimizer))


def find_difference(saved: Structure, here: Structure) -> str | None:
    """Describes the first difference between a checkpoint's variables and a run's.

    Paths are compared without the numbers that Keras appends, so that the same program can
    continue from its checkpoint in another process, or again in the same one.

    Returns:
      A clause in which "it" is the checkpoint; None if both are the same.
    """
    if saved.optimizer and here.optimizer:
        there, mine = saved.optimizer, here.optimizer
    else:
        there, mine = ("+".join(s.list_optimizer_names()) for s in (saved, here))
    if there != mine:
        return f"it has the optimizer {there or 'none'}, this run has {mine or 'none'}"
    for old, new in zip_longest(saved.variables.values(), here.variables.values()):
        if old is None or new is None or _make_key(old) != _make_key(new):
            return _describe_pair(old, new)
    # If all names are the same, the numbers in them may be the user's own: head_1 and head_2.
    olds, news = _list_of_model(saved), _list_of_model(here)
    if sorted(record.path for record in olds) == sorted(record.path for record in news):
        pairs = zip(olds, news, strict=True)
        return next((_describe_pair(old, new) for old, new in pairs if old.path != new.path), None)
    return None


def _describe_pair(old: VariableRecord | None, new: VariableRecord | None) -> str:
    there, mine = (record or "no more variables" for record in (old, new))
    return f"it has {there}, where this run has {mine}"


def _list_of_model(structure: Structure) -> list[VariableRecord]:
    return [record for record in structure.variables.values() if record.role == _MODEL]


def _make_key(record: VariableRecord) -> tuple[Any, ...]:
    path = record.path
    if record.role == _OPTIMIZER:
        path = path.partition("/")[2]  # The optimizer itself is compared by its class.
    return record.role, _drop_numbers(path), record.shape, record.dtype


def _drop_numbers(path: str) -> str:
    return _AUTO_NUMBER.sub("", path)


def _get_owner(path: str) -> str:
    return path.partition("/")[0]


def _name_class(optimizer: keras.optimizers.Optimizer) -> str:
    name = type(optimizer).__name__
    inner = getattr(optimizer, "inner_optimizer", None)
    return name if inner is None else f"{name}({_name_class(inner)})"
