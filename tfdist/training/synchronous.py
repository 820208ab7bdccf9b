"""What a trainer does at its steps under a synchronous strategy, on one worker or several."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.training.compilation import explain_compile_errors
from tfdist.training.feed import Feed
from tfdist.training.replica_optimizers import list_optimizers
from tfdist.training.step import Found, Steps
from tfdist.training.step_options import StepOptions
from tfdist.training.training_steps import Trained, TrainingSteps
from tfdist.training.workers import Workers


class SynchronousSteps(TrainingSteps):
    """The steps under a synchronous strategy.

    Args:
      model: as of `TrainingSteps`.
      strategy: the strategy.
      workers: the processes that train together.
      options: how a training step is computed.
      create_variable: the creator of the model's variables.
      is_apart: whether each worker trains by itself.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        workers: Workers,
        options: StepOptions,
        *,
        create_variable: Callable[..., Any],
        is_apart: bool = False,
    ):
        super().__init__(model)
        self.input_s: float = 0.0
        self._strategy = strategy
        self._workers = workers
        self.steps = Steps(
            model,
            strategy,
            options,
            create_variable=create_variable,
            is_apart=is_apart,
            is_chief=workers.is_chief or not is_apart,
        )
        self._train_loop: Any = self.steps.make_train_loop() if options.steps_per_loop > 1 else None
        self._predict = self.steps.make_predict()

    @property
    def state(self) -> list[keras.Variable]:
        """The optimizers besides the model's own, and generators that no layer tracks."""
        model = self._model
        known = {id(v) for v in [*model.variables, *_list_variables(model.optimizer)]}
        others = [v for o in list_optimizers(model)[1:] for v in o.variables]
        others += [generator.state for generator in self.steps.generators]
        return [v for v in others if id(v) not in known]

    def prepare(self, feed: Feed) -> None:
        if self._model.run_eagerly:
            return
        iterator = feed.iterate_train(self._strategy, start_step=0, place=self._workers.place_input)
        with explain_compile_errors(self._model):
            if self._train_loop is None:
                self.steps.train.get_concrete_function(iterator)
            else:
                self._train_loop.get_concrete_function(iterator, tf.constant(1))

    def iterate_train(
        self, feed: Feed, *, start_step: int, steps_per_epoch: int, total_steps: int
    ) -> Any:
        return feed.iterate_train(
            self._strategy, start_step=start_step, place=self._workers.place_input
        )

    def iterate_eval(self, feed: Feed, *, steps: int | None = None) -> Any:
        return feed.iterate_eval(self._strategy, self._workers.place_input)

    def train(self, iterator: Any, num_steps: int = 1) -> list[Trained]:
        with explain_compile_errors(self._model):
            if self._train_loop is None:
                return [self._take(self.steps.train(iterator))]
            found = self._train_loop(iterator, tf.constant(num_steps))
        return [
            self._take(tf.nest.map_structure(lambda t, i=step: t[i], found))
            for step in range(num_steps)
        ]

    def evaluate(self, iterator: Any) -> dict[str, Any]:
        return to_numbers(self.steps.test(iterator).logs)

    def predict(self, iterator: Any) -> list[tuple[Any, bool]]:
        return self._predict(iterator)

    def read_metrics(self) -> list[np.ndarray]:
        return [state.numpy() for state in self.steps.read_states()]

    def write_metrics(self, values: Sequence[Any]) -> None:
        self.steps.write_states(values)

    def reset_metrics(self) -> None:
        self.steps.reset_metrics()

    def count_traces(self) -> dict[str, int]:
        counts = {}
        for name, function in (
            ("train", self._train_loop or self.steps.train),
            ("evaluate", self.steps.test),
        ):
            count = getattr(function, "experimental_get_tracing_count", None)
            counts[name] = count() if count else 0
        return counts

    def _take(self, found: Found) -> Trained:
        self.input_s += float(found.waited_s)
        return Trained(to_numbers(found.logs), found.vector, float(found.rows))


def to_numbers(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns logs as Python's numbers, and NumPy's arrays where they are vectors."""
    return {name: _to_number(value) for name, value in logs.items()}


def _to_number(value: Any) -> Any:
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array


def _list_variables(optimizer: Any) -> list[keras.Variable]:
    return list(optimizer.variables) if optimizer is not None else []
