"""Measures the steps of candidates, in a process that `tfdist.auto.trials` starts."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.auto.candidates import apply, list_candidates
from tfdist.auto.prediction import MOST_S, explain_omission, order, predict
from tfdist.errors import TfdistError
from tfdist.runs import processes
from tfdist.runs.batch_size.measuring import make_trainer, measure_memory
from tfdist.runs.batch_size.trials import RepeatedSource
from tfdist.runs.clock import Clock
from tfdist.runs.options import TrainOptions

_ROUNDS = 8
_ROUND_S = 0.3
_WARMUP_LOOPS, _LEAST_LOOPS, _MOST_LOOPS = 1, 2, 1000


def measure(
    options: TrainOptions,
    global_batch_size: int,
    *,
    info: Mapping[str, Any],
    examples: Any,
    names: Sequence[str],
    predicted: Mapping[str, float],
    rounds: int = _ROUNDS,
    most_s: float = MOST_S,
) -> dict[str, Any]:
    """Trains with the candidates in turns, so that other load slows all of them.

    Args:
      options, global_batch_size, info, examples: see `tfdist.runs.batch_size.measuring`.
      predicted: see `tfdist.auto.prediction`; made here once one device was measured.
      most_s: no candidate is tried after so many seconds.

    Returns:
      `rates`, candidate -> examples per second in each round; `problems`, candidate -> why it was
      left out; `predicted`; and the memory, see `tfdist.runs.batch_size.measuring`.
    """
    until = time.monotonic() + most_s
    options, _ = processes.start_process(options)
    candidates = list_candidates(options)
    contestants: dict[str, _Contestant] = {}
    problems: dict[str, str] = {}
    # The first round of a candidate warms up: it is slower by a third for small models.
    first: dict[str, float] = {}
    memory: dict[str, int | None] = {"peak": 0, "gpu_limit": None}  # if all are refused
    waiting = list(names)
    while waiting:
        name = waiting.pop(0)
        problem = explain_omission(name, predicted, left_s=until - time.monotonic())
        if problem:
            problems[name] = problem
            continue
        try:
            contestants[name] = _Contestant(apply(options, candidates[name]), info, examples)
            first[name] = contestants[name].run()
        except TfdistError as error:
            problems[name] = f"refused: {error}"
            continue
        strategy = contestants[name].trainer.strategy
        memory = measure_memory(strategy)
        if not predicted and strategy.num_replicas_in_sync == 1:
            model, limit = contestants[name].trainer.model, memory["gpu_limit"]
            predicted = predict(options, model, rate=first[name], gpu_limit=limit)
            waiting = order(waiting, predicted)
    rates: dict[str, list[float]] = {name: [] for name in first}
    for _ in range(rounds):
        for name, found in rates.items():
            found.append(contestants[name].run())
    return {"rates": rates, "problems": problems, "predicted": dict(predicted), **memory}


class _Contestant:
    """A candidate whose trainer is kept between rounds."""

    def __init__(self, options: TrainOptions, info: Mapping[str, Any], examples: Any):
        self._loop = options.step.steps_per_loop
        self._batch = options.training.global_batch_size
        self._augmentation = options.task.select().make_augmentation(info)
        steps = self._loop * (_WARMUP_LOOPS + _MOST_LOOPS)
        self._source = RepeatedSource(examples, num_examples=steps * self._batch)
        self.trainer = make_trainer(options, info)

    def run(self) -> float:
        """Trains one round, and returns examples per second."""
        timer = _Timer(self._loop)
        self.trainer.fit(
            self._source,
            global_batch_size=self._batch,
            augmentation=self._augmentation,
            callbacks=[timer],
            verbose=0,
        )
        return self._batch / timer.step_s


class _Timer(Clock):
    """Records when each step ends, and stops training after some time."""

    async_safe = False

    def __init__(self, steps_per_loop: int):
        super().__init__()
        self._loop = steps_per_loop
        self._warmup = steps_per_loop * _WARMUP_LOOPS

    @property
    def step_s(self) -> float:
        """The median seconds of a step after the first loops."""
        windows = self.list_windows(self._warmup, self._loop)
        return statistics.median(self.measure_seconds(*w) for w in windows) / self._loop

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if self.steps >= self._warmup + self._loop * _LEAST_LOOPS:
            seconds = self.measure_seconds(self._warmup, self.steps)
            self.model.stop_training = seconds >= _ROUND_S
