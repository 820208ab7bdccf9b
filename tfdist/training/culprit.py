"""Names the part of a program for which it matters which examples are together."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.internals import Operation
from tfdist.training.compilation import describe_layer
from tfdist.training.divisible import is_of_batch, list_losses
from tfdist.training.outcomes import differs
from tfdist.training.replacing import replaced
from tfdist.training.step_checks import overrides

_TOLERANCE = 1e-3


class Culprit(NamedTuple):
    """A part of a program that cannot be divided.

    Attributes:
      text: its description.
      is_loss: whether it is a loss for which outputs can be gathered.
    """

    text: str
    is_loss: bool = False


class _Pass(NamedTuple):
    """A forward pass: outputs, added losses, and by id: operation, its inputs and outputs."""

    outputs: Any
    added: list[float]
    of_operations: dict[int, tuple[Any, Any, Any]]


def find_loss_of_batch(model: keras.Model) -> Culprit | None:
    """Returns a loss of Keras that computes one number from a whole batch, if there is one."""
    loss = next(filter(is_of_batch, list_losses(model)), None)
    if loss is None or overrides(model, "train_step"):
        return None
    return Culprit(f"the loss {loss.name!r} is not a mean over examples", is_loss=True)


def find_culprit(model: keras.Model, batch: Any) -> Culprit:
    """Finds the likely culprit by running the parts of a program on a batch and on its halves."""
    own = overrides(model, "train_step", "compute_loss")
    with contextlib.suppress(Exception):  # the user's code may fail on other batch sizes
        found = _compare_halves(model, batch, gathers="train_step" not in own)
        if found is not None:
            return found
    if own:
        return Culprit(f"{type(model).__name__}.{own[0]}", own[0] == "compute_loss")
    return Culprit("a layer combines the examples of a batch")


def _compare_halves(model: keras.Model, batch: Any, *, gathers: bool) -> Culprit | None:
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    rows = next(t.shape[0] for t in tf.nest.flatten(x) if t is not None and t.shape.rank)
    half = rows // 2
    cuts = (0, rows), (0, half), (half, rows)
    passes = [_call(model, slice_batch(x, *cut)) for cut in cuts]
    whole = passes[0]
    for key, (operation, *_) in whole.of_operations.items():
        if all(key in each.of_operations for each in passes):
            _, inputs, outputs = zip(*(each.of_operations[key] for each in passes), strict=True)
            if _are_divided(*inputs) and not _are_divided(*outputs):
                kind = "layer" if isinstance(operation, keras.Layer) else "operation"
                return Culprit(f"the {kind} {describe_layer(operation)} combines the examples")

    def is_mean(whole: float, first: float, second: float) -> bool:
        mean = first * half / rows + second * (rows - half) / rows
        return not differs(mean, whole, _TOLERANCE, floor=1e-6)

    if not all(map(is_mean, *(each.added for each in passes))):
        return Culprit("a layer's add_loss is not a mean: add one value per example")
    for loss in list_losses(model):
        values = [
            float(tf.reduce_sum(loss(*(slice_batch(t, *cut) for t in (y, whole.outputs, weight)))))
            for cut in cuts
        ]
        if not is_mean(*values):
            return Culprit(f"the loss {loss.name!r} is not a mean over examples", gathers)
    return None


def _call(model: keras.Model, x: Any) -> _Pass:
    """Calls a model without effects, and keeps what its layers get and return."""
    state = [(v, tf.convert_to_tensor(v.numpy())) for v in model.variables]
    with (
        _recording() as found,
        keras.StatelessScope(state, collect_losses=True),
    ):
        outputs = model(x, training=True) if model._call_has_training_arg else model(x)
        added = [float(tf.reduce_sum(loss)) for loss in model.losses]
    return _Pass(outputs, added, found)


@contextlib.contextmanager
def _recording() -> Iterator[dict[int, tuple[Any, Any, Any]]]:
    """Collects the first inputs and outputs of each layer and operation, in their order."""
    found: dict[int, tuple[Any, Any, Any]] = {}

    def wrap(call: Any) -> Any:
        def recorded(operation: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = call(operation, *args, **kwargs)
            found.setdefault(id(operation), (operation, (args, kwargs), outputs))
            return outputs

        return recorded

    with contextlib.ExitStack() as stack:
        for owner in (keras.Layer, Operation):
            stack.enter_context(replaced(owner, "__call__", wrap(vars(owner)["__call__"])))
        yield found


def _are_divided(whole: Any, first: Any, second: Any) -> bool:
    """Returns whether two structures hold the examples of a third one, or the same as it."""
    structures = [_list_rows(each) for each in (whole, first, second)]
    if len({len(each) for each in structures}) > 1:
        return False
    for of_whole, *halves in zip(*structures, strict=True):
        is_by_row = halves[0].shape[0] != of_whole.shape[0]
        found = [tf.concat(halves, 0)] if is_by_row else halves
        if any(differs(each, of_whole, _TOLERANCE, floor=1e-6) for each in found):
            return False
    return True


def _list_rows(structure: Any) -> list[tf.Tensor]:
    leaves = [leaf for leaf in keras.tree.flatten(structure) if tf.is_tensor(leaf)]
    return [tf.cast(t, "float64") for t in leaves if t.shape.rank and t.dtype != tf.string]


def slice_batch(batch: Any, first: int, last: int) -> Any:
    """Returns some examples of a batch; None and scalars stay as they are."""
    return tf.nest.map_structure(
        lambda t: t if t is None or t.shape.rank == 0 else t[first:last], batch
    )
