"""Writes the report of a run, from its records alone and without TensorFlow."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.errors import TfdistError, shorten_error
from tfdist.named_code import TRUST, check_recorded_code
from tfdist.records.durable_files import write_output
from tfdist.records.recorded_run import RecordedRun
from tfdist.report.run_page import make_run_page
from tfdist.runs.options import TrainOptions
from tfdist.tasks.base import Task
from tfdist.tasks.registry import find_task


def write_report(
    run: RecordedRun, output: str = "", *, task: Task | None = None, trust_task: bool = False
) -> str:
    """Writes the report of a run, and returns its path.

    Args:
      output: the file; `report.html` in the run's directory by default.
      task: the run's task; found by its name in the run's options by default.
      trust_task: whether to execute any code that the run's options name.

    Raises:
      TfdistError: the task cannot be found, the run's options name code that no command line has
        named on this machine, or the file cannot be written.
    """
    if task is None and not trust_task:
        check_recorded_code(run.options, where=f"The run in {run.path}", cure=TRUST)
    with naming_damage(f"The run in {run.path}"):
        task = task or _find_task(run)
        page = make_run_page(
            run, task.make_report(run), monitor=task.monitor, defaults=_list_defaults(run)
        )
    return write_page(output or f"{run.path}/report.html", page)


@contextlib.contextmanager
def naming_damage(what: str) -> Iterator[None]:
    """Raises an error that a changed record causes as one line about `what`."""
    try:
        yield
    except TfdistError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise TfdistError(
            f"{what} cannot be shown: a value in options.json, metrics.jsonl or summary.json was "
            f"changed, or is of another version ({type(error).__name__}: {shorten_error(error)}). "
            "Restore these files."
        ) from error


def write_page(path: str, page: str) -> str:
    """Writes a page, and returns its path."""
    try:
        write_output(path, page)
    except OSError as error:
        raise TfdistError(
            f"Cannot write {path}: {shorten_error(error)}. Check its permissions and the free "
            "space."
        ) from error
    return path


def list_pictures(run: RecordedRun) -> tuple[str, ...]:
    """Returns the pictures of a run of one of tfdist's own tasks; nothing of another task."""
    name = str((run.options.get("task") or {}).get("task"))
    return () if ":" in name else find_task(name).pictures


def _find_task(run: RecordedRun) -> Task:
    """Returns the task of a run, with the options that this version still knows."""
    options = run.options.get("task") or {}
    kind = find_task(str(options.get("task")))
    known = {item.name for item in dataclasses.fields(kind)}
    return kind(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in options.items()
            if name in known
        }
    )


def _list_defaults(run: RecordedRun) -> Mapping[str, Any]:
    """Returns option -> default, as JSON has it."""
    chosen = {name: run.options.get(name, {}).get(name, "") for name in ("strategy", "task")}
    groups = TrainOptions.list_groups(chosen)
    return {
        item.name: list(item.default) if isinstance(item.default, tuple) else item.default
        for group in groups.values()
        for item in dataclasses.fields(group)
    }
