"""The guard: refuses a program that replicas cannot divide, before its first step.

Several replicas give the result of one device if the mean of their values is that of the global
batch. This holds for most programs, and the guard tests it: the step runs twice, without lasting
effects, once with a batch divided over the replicas and once with the whole batch on every
replica, which is what one device computes. Losses, metrics, gradients and states must agree.
"""

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError, shorten_error
from tfdist.strategies.registry import find_traits
from tfdist.training.replica_optimizers import list_optimizers
from tfdist.training.step import Steps
from tfdist.training.step_checks import overrides
from tfdist.training.synchronous import to_numbers

# So many examples per replica show the same as all of them.
_ROWS = 8
_LIBRARIES = ("keras.", "keras_hub.", "models.", "tfdist.")
# Keras's own losses that compute a single number from all examples that they see.
_OF_BATCHES = (keras.losses.Dice, keras.losses.Tversky, keras.losses.CTC)
# TensorFlow's stateful random operations; those of Keras's generators are stateless.
_DRAWS = {
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGammaV2",
    "RandomGamma",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "SampleDistortedBoundingBoxV2",
    "TruncatedNormal",
}
# Operations that compute in float32 for every dtype of their input.
_FLOAT32 = {"CropAndResize", "ResizeArea", "ResizeBicubic", "ResizeBilinear", "ScaleAndTranslate"}
# The part of the tolerance by which weights are moved, and how many times its effect is allowed.
_ROUNDING, _MOVES = 1e-4, 30
_TOLERANCES = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}


class _Outcome(NamedTuple):
    """The results of a step: name -> number or array."""

    logs: dict[str, Any]
    gradients: dict[str, np.ndarray]
    states: dict[str, np.ndarray]


def is_known(model: keras.Model) -> bool:
    """Returns whether a model consists only of parts that are known to be divisible.

    These are the layers, losses and optimizers of Keras and of this project, and Keras's steps.
    """
    if overrides(model, "train_step", "test_step", "compute_loss", "compute_metrics"):
        return False
    if not all(_is_of_library(type(part)) for part in list_optimizers(model)):
        return False
    layers = model._flatten_layers()
    plain = [layer for layer in layers if not isinstance(layer, keras.Model) or layer is not model]
    if any(isinstance(layer, keras.layers.Lambda) for layer in plain):
        return False
    if not all(_is_of_library(type(layer)) for layer in layers):
        return False
    functions = [getattr(layer, "activation", None) for layer in plain]
    functions += [getattr(layer, "activity_regularizer", None) for layer in plain]
    if not all(f is None or _is_of_library(f) or _is_of_library(type(f)) for f in functions):
        return False
    operations = getattr(model, "operations", None) or layers
    if not all(isinstance(operation, keras.layers.Layer) for operation in operations):
        return False
    compiled = model._compile_loss
    losses = [flat.loss for flat in getattr(compiled, "_flat_losses", None) or ()]
    return bool(losses) and all(_is_known_loss(loss) for loss in losses)


def check_division(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    steps: Steps,
    batch: Any,
    *,
    kind: str,
    generators: Sequence[keras.random.SeedGenerator],
) -> float:
    """Checks that replicas give the result of one device. All workers must call this.

    Args:
      model: a compiled and built model.
      strategy: the strategy it was built under.
      steps: its steps.
      batch: a global batch, the same on all workers.
      kind: the kind of step, `train` or `test`.
      generators: the seed generators of the model's layers.

    Returns:
      The seconds that it took; 0 if each replica gets all examples because they are too few.

    Raises:
      TfdistError: they do not; the message names what depends on which examples are together.
    """
    began = time.perf_counter()
    replicas = strategy.num_replicas_in_sync
    own = min(_count_rows(batch) // replicas, _ROWS)
    if not own:
        return 0.0
    rows = own * replicas
    batch = _slice(batch, 0, rows)
    run = steps.show(kind)
    seeds: set[int] = set()

    def compute(bounds: list[tuple[int, int]], *, moved_by: float = 0.0) -> _Outcome:
        with _without_effect(model, steps, strategy):
            if moved_by:
                move_weights(model, strategy, moved_by)
            try:
                logs, gradients = run(batch, _to_bounds(bounds, strategy))
            except (tf.errors.OpError, TypeError, ValueError) as error:
                raise TfdistError(
                    f"Cannot divide a batch over {replicas} replicas: {type(model).__name__} fails "
                    f"on a part of it: {_shorten(error)}. Make it accept batches of any size, or "
                    "train on one device."
                ) from error
            states = {
                v.path: np.asarray(v.numpy(), "float64")
                for v in model.variables
                if id(v) not in seeds and v.dtype != "string"
            }
        named = {str(place): np.asarray(g, "float64") for place, g in enumerate(gradients)}
        return _Outcome(to_numbers(logs), named, states)

    parts = [(r * own, (r + 1) * own) for r in range(replicas)]
    graph = None
    if hasattr(run, "get_concrete_function"):
        # One trace for any number of examples. It also creates what only tracing creates.
        spec = keras.tree.map_structure(_hide_rows, batch)
        graph = run.get_concrete_function(spec, _to_bounds(parts, strategy)).graph
    operations = _list_operations(graph)
    drawing = next((name for name in operations if name in _DRAWS), None)
    if drawing is not None:
        raise TfdistError(
            f"Cannot divide a batch over {replicas} replicas: {type(model).__name__} draws with "
            f"TensorFlow's {drawing}, which differs on each. Draw with keras.random and a "
            'SeedGenerator, train on one device, or give check="off" to train anyway.'
        )
    seeds.update(id(generator.state) for generator in [*generators, *steps.generators])
    sums = [state.numpy() for state in steps.read_states()]  # those of a continued epoch
    divided = compute(parts)
    whole = compute([(0, rows)] * replicas)
    tolerance = _find_tolerance(model, operations)
    culprit = _compare(divided, whole, tolerance)
    if culprit is not None:
        # Some networks amplify rounding: allow for its effect on the undivided batch.
        moved = compute([(0, rows)] * replicas, moved_by=tolerance * _ROUNDING)
        culprit = _compare(divided, whole, tolerance, moved)
    if culprit is not None:
        part, is_loss = _explain(model, batch)
        gather = "gather the outputs with gather_outputs=True, " if is_loss else ""
        raise TfdistError(
            f"Cannot divide a batch over {replicas} replicas: {culprit} depends on which examples "
            f"are together ({part}). Make it a mean over the examples, {gather}train on one "
            'device, or give check="off" to train anyway.'
        )
    steps.write_states(sums)
    return time.perf_counter() - began


def _is_of_library(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "").startswith(_LIBRARIES)


def _is_known_loss(loss: Any) -> bool:
    if isinstance(loss, _OF_BATCHES):
        return False
    function = getattr(loss, "fn", None)
    return _is_of_library(type(loss)) and (function is None or _is_of_library(function))


def _count_rows(batch: Any) -> int:
    leaves = [t for t in tf.nest.flatten(batch) if t is not None and t.shape.rank]
    return int(leaves[0].shape[0])


def _hide_rows(leaf: Any) -> Any:
    if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
        return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)
    return leaf


def _to_bounds(bounds: list[tuple[int, int]], strategy: tf.distribute.Strategy) -> Any:
    """Returns the bounds of the replicas' examples, as a tensor unless sizes must be static."""
    if find_traits(strategy).fixes_shapes:
        return tuple(bounds)
    return tf.constant(bounds, tf.int64)


def _list_operations(graph: Any) -> list[str]:
    """Returns the types of the operations of a graph and its functions."""
    if graph is None:
        return []
    definition = graph.as_graph_def()
    functions = (node for function in definition.library.function for node in function.node_def)
    return [node.op for node in (*definition.node, *functions)]


def _shorten(error: Exception) -> str:
    """Returns the message of an error, in one line."""
    text = getattr(error, "message", "") or str(error)
    found = re.search(r"\(0\) (.*)", text)  # the first of TensorFlow's root errors
    return (found[1] if found else shorten_error(error))[:300].rstrip(".")


def _slice(batch: Any, first: int, last: int) -> Any:
    return tf.nest.map_structure(
        lambda t: t if t is None or t.shape.rank == 0 else t[first:last], batch
    )


@contextlib.contextmanager
def _without_effect(
    model: keras.Model, steps: Steps, strategy: tf.distribute.Strategy
) -> Iterator[None]:
    """Restores the values of all variables on exit."""
    metrics = {id(v) for v in steps.metrics.list_variables()}
    states = [v for v in model.variables if id(v) not in metrics]
    states += [g.state for g in steps.generators if not any(g.state is v for v in states)]
    before = [variable.numpy() for variable in states]
    steps.reset_metrics()
    try:
        yield
    finally:
        with strategy.scope():
            for variable, value in zip(states, before, strict=True):
                variable.assign(value)
        steps.reset_metrics()


def _find_tolerance(model: keras.Model, operations: Sequence[str]) -> float:
    """Returns the relative difference that two computations of a model may have."""
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()}
    dtypes.add(keras.dtype_policies.get(model.dtype_policy).compute_dtype)
    tolerance = max(_TOLERANCES.get(dtype, 1e-3) for dtype in dtypes)
    least = _TOLERANCES["float32"]
    if tolerance < least and not _FLOAT32.isdisjoint(operations):
        return least
    return tolerance


def move_weights(model: keras.Model, strategy: tf.distribute.Strategy, share: float) -> None:
    """Changes every weight by a fraction of its value, up or down."""
    with strategy.scope():
        for number, variable in enumerate(model.trainable_variables):
            value = variable.numpy()
            signs = np.random.default_rng(number).choice([-1, 1], value.shape)
            variable.assign(value * (1 + share * signs).astype(value.dtype))


def _compare(
    divided: _Outcome, whole: _Outcome, tolerance: float, moved: _Outcome | None = None
) -> str | None:
    """Describes the first difference between two outcomes; returns None if there is none.

    Args:
      divided, whole: the outcomes to compare.
      tolerance: the relative tolerance.
      moved: the whole batch computed with slightly moved weights. A multiple of its distance from
        `whole` is allowed as well.
    """

    def differs(kind: str, name: str, expected: Any, *, floor: float) -> bool:
        found = getattr(divided, kind).get(name)
        other = getattr(moved, kind).get(name) if moved else None
        least = 0.0 if other is None else _MOVES * _measure_gap(other, expected)
        return _differs(found, expected, tolerance, floor=floor, least=least)

    for name, expected in whole.logs.items():
        if differs("logs", name, expected, floor=1e-3):
            is_loss = name == "loss" or name.endswith("_loss")
            return f"the {'loss' if is_loss else 'metric'} {name!r}"
    largest = max((np.abs(g).max(initial=0) for g in whole.gradients.values()), default=0.0)
    for name, expected in whole.gradients.items():
        if differs("gradients", name, expected, floor=largest * 1e-2):
            return "the gradient"
    for name, expected in whole.states.items():
        size = np.abs(expected).max(initial=0) * 1e-2
        if differs("states", name, expected, floor=max(size, 1e-6)):
            return f"the state {name}"
    return None


def _differs(
    found: Any, expected: Any, tolerance: float, *, floor: float, least: float = 0.0
) -> bool:
    expected = np.asarray(expected, "float64")
    size = np.abs(np.where(np.isfinite(expected), expected, 0)).max(initial=0)
    return bool(_measure_gap(found, expected) > max(tolerance * max(size, floor), least))


def _measure_gap(found: Any, expected: Any) -> float:
    """Returns the largest difference of two arrays; infinite if their shapes differ."""
    found, expected = np.asarray(found, "float64"), np.asarray(expected, "float64")
    if found.shape != expected.shape:
        return np.inf
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    gap = np.abs(found - expected, where=~same, out=np.zeros(found.shape))
    return float(np.where(np.isnan(gap), np.inf, gap).max(initial=0))


def _explain(model: keras.Model, batch: Any) -> tuple[str, bool]:
    """Finds the likely culprit in a program by running its parts on a whole batch and on halves.

    Returns:
      A description, and whether the culprit is a loss for which outputs can be gathered.
    """
    own = overrides(model, "train_step", "compute_loss")
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    rows = _count_rows(batch)
    cuts = [(0, rows), (0, rows // 2), (rows // 2, rows)]

    def call(first: int, last: int) -> tuple[Any, list[float]]:
        part = _slice(x, first, last)
        state = [(v, tf.convert_to_tensor(v.numpy())) for v in model.variables]
        with keras.StatelessScope(state, collect_losses=True):
            outputs = model(part, training=True) if model._call_has_training_arg else model(part)
            return outputs, [float(tf.reduce_sum(loss)) for loss in model.losses]

    try:
        (whole, added), (_, first), (_, second) = (call(*cut) for cut in cuts)
        if any(
            _differs((a + b) / 2, c, 1e-3, floor=1e-6)
            for a, b, c in zip(first, second, added, strict=False)
        ):
            return "a layer's add_loss is not a mean: add one value per example", False
        for flat in getattr(model._compile_loss, "_flat_losses", None) or ():
            values = [
                float(
                    tf.reduce_mean(
                        flat.loss(_slice(y, *cut), _slice(whole, *cut), _slice(sample_weight, *cut))
                    )
                )
                for cut in cuts
            ]
            is_mean = not _differs((values[1] + values[2]) / 2, values[0], 1e-3, floor=1e-6)
            if isinstance(flat.loss, _OF_BATCHES) or not is_mean:
                name = getattr(flat.loss, "name", flat.loss)
                return f"the loss {name!r} is not a mean over examples", "train_step" not in own
    except Exception:  # the user's code may fail on batch sizes that it was not written for
        pass
    if own:
        return f"{type(model).__name__}.{own[0]}", own[0] == "compute_loss"
    return "a layer combines the examples of a batch", False
