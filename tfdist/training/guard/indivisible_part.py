"""Names the part of a program for which it matters which examples are together."""

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Batch, Nested
from tfdist.internals import Operation, get_keras_mask, set_keras_mask
from tfdist.replacing import find_function, replaced
from tfdist.training.guard.compare_steps import measure_gap
from tfdist.training.guard.examples import slice_batch
from tfdist.training.replicas.compilation import describe_layer
from tfdist.training.replicas.divisible import (
    is_known_layer,
    is_of_batch,
    list_losses,
    list_losses_of_outputs,
)
from tfdist.training.replicas.step_checks import overrides

# The relative differences of a culprit, from the clearest on.
_CLEAR, _SMALL = 1e-3, (1e-4, 1e-5)


class Culprit(NamedTuple):
    """A part of a program that cannot be divided, and whether outputs can be gathered for it."""

    text: str
    is_loss: bool = False


class _Suspect(NamedTuple):
    """A part of a program, and by how much its halves of a batch differ from the whole.

    Attributes:
      after: the relative difference of what it returns.
      before: that of what it gets, which is not its fault.
    """

    culprit: Culprit
    after: float
    before: float = 0.0


class _Call(NamedTuple):
    """A call of a layer or operation."""

    operation: Any
    inputs: Any
    outputs: Any


# The calls of a forward pass, by the id of the operation and the number of its call.
_Calls = dict[tuple[int, int], _Call]


class _Pass(NamedTuple):
    """A forward pass."""

    outputs: Any
    added: list[float]
    calls: _Calls


def find_loss_of_batch(model: keras.Model) -> Culprit | None:
    """Returns a loss of Keras that computes one number from a whole batch, if there is one."""
    loss = next(filter(is_of_batch, list_losses(model)), None)
    if loss is None or overrides(model, "train_step"):
        return None
    return Culprit(f"the loss {loss.name!r} is not a mean over examples", is_loss=True)


def find_culprit(model: keras.Model, batch: Batch, states: Sequence[str] = ()) -> Culprit:
    """Finds the likely culprit by running parts, and states that differ, on halves of a batch."""
    own = overrides(model, "train_step", "compute_loss")
    suspects: list[_Suspect] = []
    with contextlib.suppress(Exception):  # the user's code may fail on other batch sizes
        for each in _compare_halves(model, batch, gathers="train_step" not in own):
            suspects.append(each)
    found = _find_first(suspects, _CLEAR)
    if found is not None:
        return found
    for layer in model._flatten_layers():
        variables = [*layer._trainable_variables, *layer._non_trainable_variables]
        state = next((v for v in variables if v.path in states), None)
        if state is not None and not is_known_layer(layer):
            owner = "the model" if layer is model else f"the layer {describe_layer(layer)}"
            return Culprit(f"{owner} updates {state.name!r} from the examples of a batch")
    dtypes = {each.compute_dtype for each in model._flatten_layers()}
    if dtypes <= {"float32", "float64", None}:
        for size in _SMALL:
            found = _find_first(suspects, size)
            if found is not None:
                return found
    if own:
        return Culprit(f"{type(model).__name__}.{own[0]}", own[0] == "compute_loss")
    return Culprit("a layer combines the examples of a batch")


def _find_first(suspects: Sequence[_Suspect], size: float) -> Culprit | None:
    return next((each.culprit for each in suspects if each.before <= size < each.after), None)


def _compare_halves(model: keras.Model, batch: Batch, *, gathers: bool) -> Iterator[_Suspect]:
    """Yields the parts of a program, computed on a batch and on its halves."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    rows = next(t.shape[0] for t in tf.nest.flatten(x) if t is not None and t.shape.rank)
    half = (rows + 1) // 2  # as the guard divides a batch over two replicas
    cuts = (0, rows), (0, half), (half, rows)
    whole = _call(model, x)
    passes = [whole, *(_call(model, slice_batch(x, *cut), whole.calls, cut) for cut in cuts[1:])]
    for key, (operation, *_) in whole.calls.items():
        if not _is_cleared(operation) and all(key in each.calls for each in passes):
            _, inputs, outputs = zip(*(each.calls[key] for each in passes), strict=True)
            kind = "layer" if isinstance(operation, keras.Layer) else "operation"
            text = f"the {kind} {describe_layer(operation)} combines the examples"
            yield _Suspect(Culprit(text), _measure_halves(*outputs), _measure_halves(*inputs))

    def measure_mean(whole: float, first: float, second: float) -> float:
        mean = first * half / rows + second * (rows - half) / rows
        return abs(mean - whole) / max(abs(whole), 1e-6)

    added = [measure_mean(*each) for each in zip(*(each.added for each in passes), strict=True)]
    text = "a layer's add_loss is not a mean: add one value per example"
    yield _Suspect(Culprit(text), max(added, default=0.0))
    for path, loss in list_losses_of_outputs(model):
        seen = [_take(t, path) for t in (y, whole.outputs, weight)]
        values = [float(tf.reduce_sum(loss(*(slice_batch(t, *cut) for t in seen)))) for cut in cuts]
        text = f"the loss {loss.name!r} is not a mean over examples"
        yield _Suspect(Culprit(text, gathers), measure_mean(*values))


def _call(
    model: keras.Model,
    x: Nested[tf.Tensor],
    whole: _Calls | None = None,
    cut: tuple[int, int] = (0, 0),
) -> _Pass:
    """Calls a model without effects, and records what its layers get and return.

    Args:
      whole: the calls with the whole batch, if `x` are only its examples within `cut`.
      cut: the first example, and the one after the last.
    """
    state = [(v, tf.convert_to_tensor(v.numpy())) for v in model.variables]
    with _recording(whole or {}, cut) as calls, keras.StatelessScope(state, collect_losses=True):
        outputs = model(x, training=True) if model._call_has_training_arg else model(x)
        added = [float(tf.reduce_sum(loss)) for loss in model.losses]
    return _Pass(outputs, added, calls)


@contextlib.contextmanager
def _recording(whole: _Calls, cut: tuple[int, int]) -> Iterator[_Calls]:
    """Records the calls of layers and operations, in their order.

    A layer that is cleared returns what it returned for these examples with the whole batch.
    """
    calls: _Calls = {}
    counts: collections.Counter[int] = collections.Counter()

    def wrap(call: Callable[..., Any]) -> Any:
        def recorded(operation: keras.Operation, *args: Any, **kwargs: Any) -> Any:
            key = id(operation), counts[id(operation)]
            counts[id(operation)] += 1
            outputs = call(operation, *args, **kwargs)
            calls[key] = _Call(operation, (args, kwargs), outputs)
            if key in whole and _is_cleared(operation):
                outputs = tf.nest.map_structure(cut_like, whole[key].outputs, outputs)
            return outputs

        return recorded

    def cut_like(of_whole: Any, own: Any) -> Any:
        part = of_whole[slice(*cut)] if tf.is_tensor(own) and own.shape.rank else own
        if part is own or part.shape != own.shape:
            return own
        mask = get_keras_mask(own)
        if mask is not None:
            set_keras_mask(part, mask)
        return part

    with contextlib.ExitStack() as stack:
        for owner in (keras.Layer, Operation):
            stack.enter_context(replaced(owner, "__call__", wrap(find_function(owner, "__call__"))))
        yield calls


def _is_cleared(operation: keras.Operation) -> bool:
    """Returns whether replicas divide a layer, though its halves alone may differ.

    Batch normalization uses the moments of the global batch, and each example has its own draws.
    """
    is_layer = isinstance(operation, keras.Layer)
    return is_layer and (is_known_layer(operation) or bool(operation._seed_generators))


def _measure_halves(whole: Any, first: Any, second: Any) -> float:
    """Returns how far two structures are from the examples of a third one, or from the same."""
    structures = [_list_rows(each) for each in (whole, first, second)]
    if len({len(each) for each in structures}) > 1:
        return np.inf
    largest = 0.0
    for of_whole, *halves in zip(*structures, strict=True):
        is_by_row = halves[0].shape[0] != of_whole.shape[0]
        size = max(float(tf.reduce_max(tf.abs(of_whole))) if tf.size(of_whole) else 0.0, 1e-6)
        found = [tf.concat(halves, 0)] if is_by_row else halves
        largest = max([largest, *(measure_gap(each, of_whole) / size for each in found)])
    return largest


def _take(structure: Any, path: Sequence[Any]) -> Any:
    """Returns a part of a structure; weights may be those of all outputs."""
    for key in path if keras.tree.is_nested(structure) else ():
        structure = structure[key]
    return structure


def _list_rows(structure: Nested[tf.Tensor]) -> list[tf.Tensor]:
    leaves = [leaf for leaf in keras.tree.flatten(structure) if tf.is_tensor(leaf)]
    return [tf.cast(t, "float64") for t in leaves if t.shape.rank and t.dtype != tf.string]
