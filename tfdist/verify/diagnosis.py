"""Finds the cause of a difference by running the parts of the first step on several replicas.

The first part that differs, in the order of the computation, is the cause: a layer's output,
the loss, a gradient, an update, or only a metric. That part is then run alone, to find out how
it depends on the examples in its batch.
"""

import collections
import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Batch, BatchIterator, Nested
from tfdist.training.fit.trainer import Trainer
from tfdist.training.inputs.data_adapter import DataAdapter, take_next
from tfdist.training.inputs.example_order import ExampleOrder
from tfdist.training.inputs.make_adapter import make_data_adapter
from tfdist.training.replicas.batch_share import make_part
from tfdist.training.replicas.division import Division
from tfdist.training.replicas.random_layers import hide_rows
from tfdist.verify.comparison import (
    EVALUATION,
    GRADIENTS,
    LOSSES,
    Comparison,
    Tolerance,
    measure_difference,
)
from tfdist.verify.problem import Problem

# Thread -> (layer, its input if that is a single tensor, else None; its output) per call.
Calls = dict[int, list[tuple[keras.Layer, Any, Any]]]


def diagnose(
    problem: Problem,
    comparison: Comparison,
    strategies: Sequence[tf.distribute.Strategy],
    tolerance: Tolerance,
) -> str:
    """Returns a description of the cause of a difference, as far as it can be found.

    Args:
      strategies: a strategy for one device, and one for several replicas in this process.
    """
    one, several = (_Forward(problem, strategy) for strategy in strategies)
    for (layer, inputs, expected), (_, _, found) in zip(one.outputs, several.outputs, strict=False):
        if measure_difference(found, expected, floor=1e-6) > tolerance.first:
            return _explain_layer(layer, inputs)
    if measure_difference(several.loss, one.loss, floor=1e-6) > tolerance.first:
        return _explain_loss(one, several, tolerance)
    gradients = comparison.find(GRADIENTS)
    if gradients is not None and not gradients.holds:
        return _explain_gradient(one, gradients.wrong)
    if not comparison.first_update_holds:
        name = type(one.model.optimizer).__name__
        return (
            "The gradients agree, but the weights after the first step do not: the optimizer "
            f"{name} does not compute the same update on all replicas."
        )
    for kind in (LOSSES, EVALUATION):
        difference = comparison.find(kind)
        if difference is not None and not difference.holds:
            return _explain_metric(one, difference.wrong)
    return "The first step agrees; why a later step differs is unknown."


def find_batch_layers(problem: Problem, strategy: tf.distribute.Strategy) -> list[str]:
    """Returns the layers whose output for an example depends on other examples of the batch."""
    calls = _Forward(problem, strategy).outputs
    return [
        _describe(layer)
        for layer, inputs, _ in calls
        if inputs is not None and _couples_rows(layer, inputs)
    ]


class _Forward:
    """The forward pass and the loss of the first global batch, with the outputs of all layers."""

    def __init__(self, problem: Problem, strategy: tf.distribute.Strategy):
        self._adapter: DataAdapter = make_data_adapter(
            *problem.train,
            global_batch_size=problem.global_batch_size,
            num_replicas=strategy.num_replicas_in_sync,
            order=ExampleOrder(problem.seed),
            augmentation=problem.augmentation,
        )
        problem.reset_process()
        trainer = Trainer(problem.build_model, strategy=strategy, seed=problem.seed)
        trainer.engine.prepare(*problem.train[:2], global_batch_size=problem.global_batch_size)
        self.model = trainer.model
        self._strategy = strategy
        self._layers: list[Any] = []
        iterator = self._adapter.iterate_train(strategy, start_step=0)
        batch, outputs, shares = self._run(iterator)
        self.batch = keras.tree.map_structure(self._join, batch)
        self.loss = sum(float(share) for share in strategy.experimental_local_results(shares))
        self.outputs = [
            (layer, None if inputs is None else self._join(inputs), self._join(output))
            for layer, (inputs, output) in zip(self._layers, outputs, strict=True)
        ]

    def _join(self, value: tf.Tensor) -> np.ndarray:
        parts = [part.numpy() for part in self._strategy.experimental_local_results(value)]
        return np.concatenate(parts) if parts[0].ndim else np.sum(parts)

    def _run(self, iterator: BatchIterator) -> Any:
        division = Division(self.model, self._strategy)
        watched: Calls = collections.defaultdict(list)

        def replica_run(data: Batch, place: tf.Tensor | tuple[()]) -> Any:
            hidden = hide_rows(data)
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(hidden)
            part = make_part(hidden, None if isinstance(place, tuple) else place)
            with division.of(part, draws_rows=True):
                y_pred = self.model(x, training=True)
                loss = _compute_loss(self.model, x, y, y_pred, sample_weight)
                share = loss * tf.cast(part.weight, loss.dtype)
            calls = watched[threading.get_ident()]
            self._layers = [layer for layer, _, _ in calls]
            return data, [(inputs, output) for _, inputs, output in calls], share

        @tf.function(autograph=False)
        def run() -> Any:
            with division.intercept(), _watch_layers(self.model, watched):
                return self._strategy.run(replica_run, args=take_next(self._strategy, iterator))

        return run()


@contextlib.contextmanager
def _watch_layers(model: keras.Model, watched: Calls) -> Iterator[None]:
    """Records the inputs and outputs of the layers as they finish, inner layers first.

    MirroredStrategy traces the replicas one after the other, each in its own thread.
    """
    layers = [
        layer
        for layer in model._flatten_layers(include_self=False)
        if not isinstance(layer, keras.layers.InputLayer)
    ]
    graph = tf.compat.v1.get_default_graph()
    for layer in layers:
        object.__setattr__(layer, "call", _make_watched(layer, watched, graph))
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("call", None)


def _make_watched(layer: keras.Layer, watched_calls: Calls, graph: tf.Graph) -> Any:
    call = type(layer).call

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = call(layer, *args, **kwargs)
        # A tensor inside a loop of the graph cannot be accessed from outside.
        if isinstance(output, tf.Tensor) and output.graph is graph and output.shape.rank:
            tensors = [t for t in keras.tree.flatten((args, kwargs)) if isinstance(t, tf.Tensor)]
            is_plain = len(tensors) == 1 and args and tensors[0] is args[0]
            call_of = (layer, args[0] if is_plain else None, output)
            watched_calls[threading.get_ident()].append(call_of)
        return output

    return watched


def _explain_layer(layer: keras.Layer, inputs: np.ndarray | None) -> str:
    """Runs a layer alone on one device, if it has a single input, to explain its difference."""
    name = _describe(layer)
    if inputs is None:
        return f"{name} gives other results on several replicas than on one device."
    if _differs(_call(layer, inputs), _call(layer, inputs)):
        return (
            f"{name} gives another output each time: it draws from a generator of TensorFlow, "
            "which is seeded per replica, not per global batch. Draw with keras.random and a "
            "keras.random.SeedGenerator."
        )
    rows = _call(layer, np.repeat(inputs[:1], len(inputs), 0))
    if _differs(rows, np.repeat(rows[:1], len(rows), 0)):
        return (
            f"{name} gives different outputs for equal examples: it draws random numbers per "
            "replica, with a fixed seed or one of the replica. Draw with keras.random and a "
            "keras.random.SeedGenerator."
        )
    if _couples_rows(layer, inputs):
        moving = [v.path for v in layer.non_trainable_variables if "float" in v.dtype]
        if moving:
            return (
                f"{name} normalizes by the examples of its own replica: it is batch normalization "
                f"without synchronization, as {', '.join(moving)} also shows. Use "
                "tfdist.models.layers.FusedBatchNormalization, or synchronized=True in Keras."
            )
        return (
            f"{name} computes a statistic over the examples of its own replica. Reduce it over the "
            "replicas, or compute it per example."
        )
    return f"{name} gives other results on several replicas than on one device."


def _describe(layer: keras.Layer) -> str:
    return f"Layer {layer.path!r} ({type(layer).__name__})"


def _couples_rows(layer: keras.Layer, inputs: np.ndarray) -> bool:
    """Returns whether the last examples affect the outputs of the first, and not just chance."""
    half = max(1, len(inputs) // 2)
    other = np.concatenate([inputs[:half], inputs[:1].repeat(len(inputs) - half, 0)])
    plain, again, changed = (_call(layer, x)[:half] for x in (inputs, inputs, other))
    return _differs(changed, plain) and not _differs(again, plain)


def _differs(found: np.ndarray, expected: np.ndarray) -> bool:
    return measure_difference(found, expected, floor=1e-6) > 1e-5


def _call(layer: keras.Layer, inputs: np.ndarray) -> np.ndarray:
    """Returns a layer's output in training mode, without changing its state."""
    state = [(v, tf.convert_to_tensor(v.numpy())) for v in layer.variables]
    with keras.StatelessScope(state, collect_losses=True):
        arguments = {"training": True} if layer._call_has_training_arg else {}
        return np.asarray(layer(tf.constant(inputs), **arguments))


def _explain_loss(one: _Forward, several: _Forward, tolerance: Tolerance) -> str:
    """Explains a difference of the loss, by comparing it with the mean over halves of a batch."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(one.batch)
    num_rows = len(keras.tree.flatten(x)[0])
    y_pred = one.model(x, training=False)

    def measure(*cuts: int) -> float:
        total = 0.0
        for first, last in itertools.pairwise(cuts):
            part = _take(slice(first, last), (x, y, y_pred, sample_weight))
            total += float(_compute_loss(one.model, *part)) * (last - first)
        return total / num_rows

    compiled = one.model._compile_loss
    flats = compiled._flat_losses if compiled else []
    names = [getattr(flat.loss, "name", flat.name) for flat in flats]
    text = (
        f"The outputs of the model agree, but the loss is {several.loss:.6g} on several replicas "
        f"and {one.loss:.6g} on one device. Loss {', '.join(map(str, names)) or 'compute_loss'}"
    )
    whole, halves = measure(0, num_rows), measure(0, -(-num_rows // 2), num_rows)
    if measure_difference(halves, whole, floor=1e-6) > tolerance.first:
        return (
            f"{text} is averaged per replica: it normalizes by a quantity of the examples that it "
            "is given. Return one value per example, or use a sample weight."
        )
    return f"{text} depends on the replica that computes it."


def _explain_gradient(one: _Forward, wrong: Sequence[str]) -> str:
    """Explains a difference of gradients: one that does not grow with the loss is clipped."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(one.batch)
    variables = [v for v in one.model.trainable_variables if v.path in wrong]

    def differentiate(scale: float) -> list[np.ndarray]:
        with tf.GradientTape() as tape:
            y_pred = one.model(x, training=False)
            loss = scale * _compute_loss(one.model, x, y, y_pred, sample_weight)
        gradients = tape.gradient(loss, [v.value for v in variables])
        return [np.asarray(tf.convert_to_tensor(g)) / scale for g in gradients if g is not None]

    text = f"Outputs and loss agree, but the gradient of {', '.join(wrong[:4])} does not"
    pairs = list(zip(differentiate(1e-3), differentiate(1.0), strict=True))
    size = max((float(np.abs(plain).max(initial=0.0)) for _, plain in pairs), default=0.0)
    if any(measure_difference(*pair, floor=size * 1e-3) > 1e-3 for pair in pairs):
        return (
            f"{text}: it does not grow with the loss, so something clips it before the reduction "
            "over the replicas. Clip in the optimizer (global_clipnorm, clipnorm, clipvalue)."
        )
    return f"{text}: a custom gradient is not a sum over the examples."


def _compute_loss(
    model: keras.Model,
    x: Nested[tf.Tensor],
    y: Nested[tf.Tensor],
    y_pred: Nested[tf.Tensor],
    sample_weight: Nested[tf.Tensor],
) -> tf.Tensor:
    return model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=False)


def _take(rows: slice, tree: Any) -> Any:
    return keras.tree.map_structure(lambda t: None if t is None else t[rows], tree)


def _explain_metric(one: _Forward, wrong: Sequence[str]) -> str:
    """Explains a difference of metrics, by comparing a whole batch with its halves."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(one.batch)
    y_pred = one.model(x, training=False)
    cut = -(-len(keras.tree.flatten(x)[0]) // 2)
    metrics = one.model._compile_metrics

    def measure(parts: Sequence[slice]) -> dict[str, float]:
        metrics.reset_state()
        for rows in parts:
            metrics.update_state(*_take(rows, (y, y_pred, sample_weight)))
        return {k: float(v) for k, v in metrics.result().items()}

    whole, halves = measure([slice(None)]), measure([slice(0, cut), slice(cut, None)])
    found = [
        name for name in whole if measure_difference(halves[name], whole[name], floor=1e-6) > 1e-6
    ]
    named = [name for name in found if any(name in other for other in wrong)] or found
    if named:
        return (
            f"Metric {', '.join(named)} is averaged over replicas: it is a mean of the means of "
            "their parts. Keep a sum and a count, as keras.metrics.Mean does."
        )
    return f"Weights agree, but {', '.join(wrong[:4])} does not: it counts something per replica."
