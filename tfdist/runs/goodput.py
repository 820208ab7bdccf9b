"""Goodput: the part of a run's time that became progress, over all starts of its directory.

Where the rest went has the names of Google's library ml-goodput-measurement (its `BadputType`).
"""

import itertools
import time
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from tfdist.devices import measure_process_age
from tfdist.records.run_directory import RunDirectory
from tfdist.training.fit.trainer import Trainer

GOODPUT = "goodput.jsonl"
_EVERY_S = 10.0
_NUMBERS = (
    *("first_step", "measured_steps", "start", "time", "prep_s", "first_step_s", "steps_s"),
    *("input_s", "save_s", "restore_s"),
)
_BUCKETS = (
    *("training_prep", "program_startup", "data_loading_sync", "unproductive_checkpoint_save_time"),
    *("unproductive_checkpoint_restore_time", "wasted_progress_from_disruption"),
    *("infrastructure_recovery_from_disruption", "other"),
)


class GoodputLog(keras.callbacks.Callback):
    """Writes a line of `goodput.jsonl`, from which `summarize_goodput` counts a run's time.

    Each start has a line. It is written anew every ten seconds, so that a start that ends in a
    failure is known to within ten seconds.

    Args:
      trainer: the trainer whose steps are counted.
    """

    async_safe = True

    def __init__(self, run: RunDirectory, trainer: Trainer):
        super().__init__()
        self._run, self._trainer = run, trainer
        self._others = read_goodput(run)
        known = max((line["time"] for line in self._others), default=0.0)
        # A process that continues a run that it began counts no time twice.
        self._start = max(time.time() - measure_process_age(), known)
        self._written = 0.0

    def on_train_begin(self, logs=None):
        now, recovery = time.time(), self._trainer.recovery
        self._begun, self._first_step = now, self._trainer.step
        self._restore_s = recovery.restore_s if recovery else 0.0
        self._save_s = recovery.save_s if recovery else 0.0
        self._first_end: float | None = None
        self._before = (0.0, 0.0)  # seconds in steps and of input at the first step's end

    def on_train_batch_end(self, batch, logs=None):
        now = time.time()
        if self._first_end is None:
            self._first_end, self._after_first = now, self._trainer.step
            self._before = self._read_seconds()
        if now - self._written >= _EVERY_S:
            self._write(now, has_ended=False)

    def on_train_end(self, logs=None):
        if self._first_end is not None:  # a finished command that is repeated changes nothing
            self._write(time.time(), has_ended=True)

    def _read_seconds(self) -> tuple[float, float]:
        trainer = self._trainer
        return trainer.progress.steps_s, trainer.engine.seconds_of_input or 0.0

    def _write(self, now: float, *, has_ended: bool) -> None:
        assert self._first_end is not None
        recovery = self._trainer.recovery
        steps_s, input_s = (x - y for x, y in zip(self._read_seconds(), self._before, strict=True))
        line = {
            "step": self._trainer.step,
            "first_step": self._first_step,
            "measured_steps": self._trainer.step - self._after_first,
            "start": self._start,
            "time": now,
            "prep_s": self._begun - self._start - self._restore_s,
            "first_step_s": self._first_end - self._begun,
            "steps_s": steps_s,
            "input_s": input_s,
            "save_s": recovery.save_s - self._save_s if recovery else 0.0,
            "restore_s": self._restore_s,
            "has_ended": has_ended,
        }
        self._run.write_metrics(*self._others, line, name=GOODPUT)
        self._written = now


def read_goodput(run: RunDirectory) -> list[dict[str, Any]]:
    """Returns the lines of `goodput.jsonl` that were not changed."""
    return [
        line
        for line in run.read_metrics(GOODPUT)
        if all(isinstance(line.get(name), (int, float)) for name in _NUMBERS)
    ]


def summarize_goodput(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the entries of `summary.json` about a run's goodput; nothing of nothing.

    Progress is the number of steps that count times the mean time of a step, without the first of
    each start and without what steps waited for input. A start that did not end by itself lost the
    steps after its last checkpoint, and the time until the next one.

    Args:
      lines: the lines of `goodput.jsonl`.
    """
    starts = list(lines)
    seconds = dict.fromkeys(_BUCKETS, 0.0)
    progress, total = 0.0, 0.0
    for line, after in itertools.zip_longest(starts, starts[1:]):
        spent = line["time"] - line["start"]
        taken = line["step"] - line["first_step"]
        measured = line["measured_steps"]
        computed = max(0.0, line["steps_s"] - line["input_s"])
        # A start of a single step has no other to compare it with.
        step_s = computed / measured if measured else line["first_step_s"] / max(1, taken)
        lost = 0 if after is None else max(0, min(taken, line["step"] - after["first_step"]))
        found = {
            "training_prep": line["prep_s"],
            "program_startup": max(0.0, line["first_step_s"] - (taken - measured) * step_s),
            "data_loading_sync": line["input_s"],
            "unproductive_checkpoint_save_time": line["save_s"],
            "unproductive_checkpoint_restore_time": line["restore_s"],
            "wasted_progress_from_disruption": lost * step_s,
        }
        made = (taken - lost) * step_s
        found["other"] = max(0.0, spent - made - sum(found.values()))
        if after is not None and not line.get("has_ended"):
            gap = max(0.0, after["start"] - line["time"])
            found["infrastructure_recovery_from_disruption"] = gap
            spent += gap
        for name, value in found.items():
            seconds[name] += value
        progress, total = progress + made, total + spent
    if not total:
        return {}
    return {
        "goodput": round(min(1.0, progress / total), 4),
        "goodput_seconds": {
            "total": round(total, 2),
            "progress": round(progress, 2),
            **{name: round(value, 2) for name, value in seconds.items()},
        },
    }
