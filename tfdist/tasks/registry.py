"""The table of tasks, and the options that each of them adds to a command.

To add a task, write a package in `tfdist.tasks` whose module `task` has a subclass of `Task`.
"""

import dataclasses
import functools
import importlib.util
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tfdist import tasks
from tfdist.errors import TfdistError, make_unknown_name_error
from tfdist.imports import find_subclasses, import_named
from tfdist.options import OptionGroup, option
from tfdist.tasks.base import Task
from tfdist.tasks.segmentation.task import Segmentation

_PACKAGES = pkgutil.iter_modules(tasks.__path__, prefix=f"{tasks.__name__}.")
_MODULES = [f"{package.name}.task" for package in _PACKAGES if package.ispkg]
TASKS: dict[str, type[Task]] = {
    found.name: found for found in find_subclasses(filter(importlib.util.find_spec, _MODULES), Task)
}
"""Name, as in `--task=NAME` -> class."""


def find_task(name: str) -> type[Task]:
    """Returns the class for a key of `TASKS`, `package.module:Class` or `FILE.py:Class`."""
    if name in TASKS:
        return TASKS[name]
    if ":" not in name:
        raise make_unknown_name_error("`task`", name, [*TASKS, "FILE.py:Class"])
    found = import_named("task", name)
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise TfdistError(
            f"`task={name}` is a {type(found).__name__}, not a subclass of tfdist.Task."
        )
    return found


@dataclass(frozen=True, kw_only=True)
class TaskOptions(OptionGroup):
    """The task and its options."""

    presets: ClassVar[Mapping[str, Sequence[str]]] = {}

    task: str = option(
        Segmentation.name,
        "task to train, or package.module:Class or FILE.py:Class for one of your own",
        choices=tuple(TASKS),
        is_open=True,
    )
    preset: str = option(
        "none", "published hyperparameters; explicit flags override them", result=False
    )

    @classmethod
    def widen(cls, chosen: Mapping[str, str]) -> type["TaskOptions"]:
        """Returns the class with the options of the chosen task."""
        kind: Any = find_task(chosen.get("task", Segmentation.name))
        return _widen(kind)

    def list_directories(self) -> dict[str, str]:
        """Returns the directories among the task's options: option -> path."""
        values = {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if item.metadata.get("metavar") == "DIR"
        }
        return {name: value for name, value in values.items() if value}

    def select(self) -> Task:
        """Returns the chosen task, with its options."""
        return select_task(self)


def make_task_options(**values: Any) -> TaskOptions:
    """Returns the options of a task; the value of `task` names it."""
    return TaskOptions.widen({"task": values.get("task", Segmentation.name)})(**values)


@functools.cache
def join_task(group: type[Any], kind: type[Task]) -> type[Any]:
    """Returns a group of options plus those of a task whose names the group does not have."""
    own = {item.name for item in dataclasses.fields(group)}
    fields: list[Any] = [
        (item.name, item.type, dataclasses.field(default=item.default, metadata=item.metadata))
        for item in dataclasses.fields(kind)
        if item.name not in own
    ]
    joined = dataclasses.make_dataclass(
        group.__name__, fields, bases=(group,), frozen=True, kw_only=True
    )
    joined.__doc__ = group.__doc__
    return joined


@dataclass(frozen=True, kw_only=True)
class OwnTaskOptions(OptionGroup):
    """Base class of groups that a task of one's own extends by its options."""

    task: str = option(
        "",
        "a task of your own to use instead, with its flags: package.module:Class or FILE.py:Class",
        metavar="FILE.py:Class",
    )

    @classmethod
    def widen(cls, chosen: Mapping[str, str]) -> type[Any]:
        """Returns the class with the options of the chosen task, if any."""
        group: Any = cls
        kind: Any = find_task(chosen["task"]) if chosen.get("task") else None
        return join_task(group, kind) if kind else group


def select_task(options: Any) -> Task:
    """Returns the task that the option `task` of a group names, with its options."""
    kind = find_task(options.task)
    return kind(**{item.name: getattr(options, item.name) for item in dataclasses.fields(kind)})


@functools.cache
def _widen(kind: Any) -> type[TaskOptions]:
    """Returns `TaskOptions` with the options of a task, and the task's presets as choices."""
    preset = next(item for item in dataclasses.fields(TaskOptions) if item.name == "preset")
    metadata = {**preset.metadata, "choices": ("none", *kind.presets)}
    joined: Any = dataclasses.make_dataclass(
        "TaskOptions",
        [("preset", str, dataclasses.field(default="none", metadata=metadata))],
        bases=(TaskOptions,),
        namespace={"presets": kind.presets},
        frozen=True,
        kw_only=True,
    )
    joined.__doc__ = f"Task: {(kind.__doc__ or kind.__name__).strip().splitlines()[0]}"
    return join_task(joined, kind)
