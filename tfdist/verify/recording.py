"""Trains a few steps under a strategy and records what can be compared."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.placement.options import Placement
from tfdist.strategies.registry import find_options
from tfdist.training.fit.trainer import Trainer
from tfdist.training.step_options import StepOptions
from tfdist.verify.problem import Problem

GRADIENTS, FIRST, WEIGHTS, OPTIMIZER, STATISTICS = (
    "gradients",
    "weights after step 1",
    "weights",
    "optimizer",
    "statistics",
)


@dataclass
class Recording:
    """The results of a few steps under one strategy.

    Attributes:
      arrays: kind -> name -> value: gradients of the first step, after any clipping; weights
        after it; weights, optimizer state and normalization statistics at the end.
      logs: losses and metrics of every step.
      norms: for every step, name -> norm of each of the model's float variables after it.
    """

    arrays: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    logs: list[dict[str, float]] = field(default_factory=list)
    norms: list[dict[str, float]] = field(default_factory=list)
    evaluation: dict[str, float] = field(default_factory=dict)

    def save(self, path: str) -> None:
        """Writes the recording to an `.npz` file."""
        keys = [(kind, name) for kind, values in self.arrays.items() for name in values]
        numbers = {"logs": self.logs, "norms": self.norms, "evaluation": self.evaluation}
        arrays: dict[str, Any] = {
            f"array{i}": self.arrays[kind][name] for i, (kind, name) in enumerate(keys)
        }
        text = json.dumps({"keys": keys, "numbers": numbers})
        np.savez(path, text=np.array(text), **arrays)

    @classmethod
    def load(cls, path: str) -> "Recording":
        """Reads a recording that `save` wrote."""
        with np.load(path) as file:
            content = json.loads(str(file["text"]))
            arrays: dict[str, dict[str, np.ndarray]] = {}
            for i, (kind, name) in enumerate(content["keys"]):
                arrays.setdefault(kind, {})[name] = file[f"array{i}"]
        return cls(arrays=arrays, **content["numbers"])


def record(
    problem: Problem,
    strategy: tf.distribute.Strategy,
    *,
    steps: int,
    placement: Placement | None = None,
    shard_optimizer: bool = False,
    report: Callable[[int], None] = lambda step: None,
) -> Recording:
    """Trains under a strategy and returns the recording; all workers must call this.

    Args:
      placement: how the model of a replica is divided, if at all.
      shard_optimizer: whether the optimizer's state is divided over the replicas.
      report: called after every step, with its number.
    """

    def build_model() -> keras.Model:
        model = problem.build_model()
        keep_first_gradients(model.optimizer)
        return model

    problem.reset_process()
    chosen = find_options(strategy)
    exact_steps = chosen.exact_steps if chosen else {}
    trainer = Trainer(
        build_model,
        strategy=strategy,
        seed=problem.seed,
        step_options=StepOptions(check="off", shard_optimizer=shard_optimizer, **exact_steps),
        placement=placement,
    )
    recording = Recording()
    observer = _Observer(recording, report)
    problem.fit(trainer, max_steps=steps, callbacks=[observer], steps_per_epoch=1)
    recording.evaluation = problem.evaluate(trainer)
    model = trainer.model
    trainable = {id(variable) for variable in model.trainable_variables}
    recording.arrays[WEIGHTS] = _read(model.trainable_variables)
    kept: Any = model.optimizer.first_gradients
    recording.arrays[GRADIENTS] = dict(
        zip(recording.arrays[WEIGHTS], _read(kept).values(), strict=True)
    )
    kept_ids = {id(variable) for variable in kept}
    recording.arrays[OPTIMIZER] = _read(
        [variable for variable in model.optimizer.variables if id(variable) not in kept_ids]
    )
    recording.arrays[STATISTICS] = _read(
        [
            variable
            for variable in model.weights
            if id(variable) not in trainable and _is_float(variable)
        ]
    )
    return recording


def keep_first_gradients(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer keep the gradients of its first step, in `first_gradients`.

    They are kept in slot variables of the optimizer, which every strategy can handle.
    """
    kind: Any = type(optimizer)

    class Keeping(kind):
        def build(self, variables: Sequence[keras.Variable]) -> None:
            super().build(variables)
            if not hasattr(self, "first_gradients"):
                self.first_gradients = self.add_optimizer_variables(variables, "first_gradient")

        def update_step(
            self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
        ) -> None:
            # Called after clipping, which each worker of parameter servers does by itself, and
            # with the part of a gradient that a device updates.
            is_first = tf.equal(tf.convert_to_tensor(self.iterations), 0)
            slot = self.first_gradients[self._get_variable_index(variable)]
            whole = tf.cast(tf.convert_to_tensor(gradient), slot.dtype)
            self.assign(slot, tf.where(is_first, whole, tf.convert_to_tensor(slot)))
            super().update_step(gradient, variable, learning_rate)

    Keeping.__name__ = kind.__name__
    optimizer.__class__ = Keeping


class _Observer(keras.callbacks.Callback):
    """Records the logs and the norms of the weights for every step; each step is an epoch."""

    def __init__(self, recording: Recording, report: Callable[[int], None]):
        super().__init__()
        self._recording = recording
        self._report = report

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        values = _read([v for v in self.model.weights if _is_float(v)])
        if epoch == 0:
            names = {variable.path for variable in self.model.trainable_variables}
            self._recording.arrays[FIRST] = {k: v for k, v in values.items() if k in names}
        self._recording.logs.append({name: float(value) for name, value in (logs or {}).items()})
        self._recording.norms.append({k: float(np.linalg.norm(v)) for k, v in values.items()})
        self._report(epoch + 1)


def _read(variables: Sequence[keras.Variable]) -> dict[str, np.ndarray]:
    values: dict[str, np.ndarray] = {}
    for variable in variables:
        name = variable.path
        while name in values:
            name += "'"
        values[name] = np.asarray(variable.numpy(), "float64")
    return values


def _is_float(variable: keras.Variable) -> bool:
    return tf.as_dtype(variable.dtype).is_floating
