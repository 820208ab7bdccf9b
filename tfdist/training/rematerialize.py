"""Recomputes activations in the backward pass instead of keeping them.

The model runs stage by stage. Once the gradient of a stage's outputs is available, the stage's
forward pass runs again, and then its backward pass. Until then, only the tensors between stages
stay in memory. The second forward pass repeats the first one exactly: it starts from the same
states and seeds, it uses the values that the first one reduced over the replicas instead of
reducing again, and it updates nothing.

TensorFlow's own `tf.recompute_grad`, which `keras.RematScope` puts around single layers, would
update moving statistics twice, draw different random numbers and reduce over the replicas again.

Source: Chen et al. 2016 (arXiv:1604.06174), section 4.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.internals import Functional, backend, record
from tfdist.models.stages import Stage, split_stages
from tfdist.training.randomness import RowDraws

# Operations with side effects that may run twice.
_HARMLESS = {"Assert", "PrintV2"}

AllReduce = Callable[..., Any]
"""`tf.distribute.ReplicaContext.all_reduce`."""


def make_call(model: keras.Model, draws: RowDraws) -> Callable[[Any], tf.Tensor]:
    """Returns a function equivalent to `model(x, training=True)`, which can be differentiated once.

    Must be called in replica context.

    Args:
      model: a built model that `check_stages` accepts.
      draws: decides what the model's random layers draw.
    """
    stages = split_stages(model)
    first, last = (t._keras_history.operation.name for t in (model.input, model.output))
    variables = list({id(v): v for stage in stages for v in stage.model.variables}.values())

    def call(x: Any) -> tf.Tensor:
        tensors = {first: keras.tree.flatten(x)[0]}
        olds = {id(v): tf.convert_to_tensor(v.value) for v in variables}
        values, penalties = dict(olds), []
        for stage in stages:
            # The backward pass begins with the last stage, right after its forward pass.
            is_kept = stage is stages[-1]
            penalties += _run_stage(stage, tensors, values, draws, is_kept=is_kept)
        for variable in variables:
            if values[id(variable)] is not olds[id(variable)]:
                variable.assign(values[id(variable)])
        model._clear_losses()
        stages[-1].model.layers[-1].add_loss(penalties)  # a functional model rejects add_loss
        return tensors[last]

    return call


def check_stages(model: keras.Model, x_spec: Any) -> None:
    """Checks that a model can be computed stage by stage, and each stage twice.

    Args:
      model: a built model.
      x_spec: structure of `tf.TensorSpec` for its inputs.

    Raises:
      TfdistError: the model is not functional with one input and one output; an operation belongs
        to no stage, is called twice or has several outputs; a stage uses an output of a later one;
        or an operation would not give the same result the second time.
    """
    is_functional = isinstance(model, Functional) and type(model).call is Functional.call
    ends = (model.input, model.output) if is_functional else ()
    if not ends or not all(isinstance(end, keras.KerasTensor) for end in ends):
        raise TfdistError(
            f"Cannot recompute the model {model.name!r} by stages: it is not a "
            "keras.Model(input, output) with one input and one output. Build such a model, with "
            "each layer's name starting with its stage's (tfdist.models.stages), or leave out "
            "`rematerialize`."
        )
    problem = _find_odd_operation(model)
    if problem is None:
        try:
            stages = split_stages(model)
        except ValueError as error:
            raise TfdistError(f"{error} Or leave out `rematerialize`.") from error
        problem = _find_late_input(model, stages) or _find_effect(model, x_spec)
    if problem is not None:
        raise TfdistError(
            f"Cannot recompute the model {model.name!r} by stages: {problem}. Leave out "
            "`rematerialize`."
        )


def count_kept(model: keras.Model, sizes: Mapping[str, int]) -> int:
    """Returns the largest total size of the layers' outputs that are in memory at a time.

    These are the outputs between stages, and those of the largest stage.

    Args:
      model: a model that `check_stages` accepts.
      sizes: the sizes of the layers' outputs, by name.
    """
    stages = split_stages(model)
    between = {name for stage in stages for name in (*stage.inputs, *stage.outputs)}
    inside = (
        sum(sizes.get(layer.name, 0) for layer in stage.model.layers if layer.name not in between)
        for stage in stages
    )
    return sum(sizes[name] for name in between) + max(inside)


def _run_stage(
    stage: Stage,
    tensors: dict[str, tf.Tensor],
    values: dict[int, tf.Tensor],
    draws: RowDraws,
    *,
    is_kept: bool,
) -> list[tf.Tensor]:
    """Runs a stage and returns its layers' activity penalties.

    Args:
      stage: the stage to run.
      tensors: tensors by name, to which the stage's outputs are added.
      values: the values of the model's variables, by id; the stage's updates are written to it.
      draws: decides what random layers draw.
      is_kept: whether the stage's activations stay in memory.
    """
    trainable = stage.model.trainable_variables
    others = stage.model.non_trainable_variables
    states = [(variable, values[id(variable)]) for variable in others]
    mark = draws.mark()
    reductions: list[Any] = []

    def compute(given: Sequence[tf.Tensor], all_reduce: AllReduce) -> tuple[list[Any], Any]:
        inputs = dict(zip(stage.inputs, given, strict=False))
        mapping = [*zip(trainable, given[len(inputs) :], strict=True), *states]
        with (
            keras.StatelessScope(mapping, collect_losses=True) as scope,
            _reducing_by(all_reduce),
        ):
            outputs = stage(inputs, training=True)
        return [*outputs.values(), *scope.losses], scope

    def run(*given: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        results, scope = compute(given, functools.partial(_reduce_and_keep, reductions))
        values.update({id(v): scope.get_current_value(v) for v in others})

        def differentiate(*upstream: tf.Tensor) -> list[Any]:
            again = functools.partial(_take_reduced, iter(reductions))
            with (
                # Otherwise TensorFlow would merge this with the first forward pass.
                tf.control_dependencies(upstream),
                tf.GradientTape(watch_accessed_variables=False) as tape,
                draws.again(mark),
            ):
                copies = [tf.identity(tensor) for tensor in given]
                sources = [tensor for tensor in copies if tensor.dtype.is_floating]
                tape.watch(sources)
                results, _ = compute(copies, again)
            gradients = iter(tape.gradient(results, sources, upstream))
            return [next(gradients) if t.dtype.is_floating else None for t in copies]

        return results, differentiate

    given = [tensors[name] for name in stage.inputs] + [values[id(v)] for v in trainable]
    results = run(*given)[0] if is_kept else tf.custom_gradient(run)(*given)
    tensors |= zip(stage.outputs, results, strict=False)  # the penalties come last
    return results[len(stage.outputs) :]


@contextlib.contextmanager
def _reducing_by(all_reduce: AllReduce) -> Iterator[None]:
    """Makes this replica's layers call another `all_reduce`, which is given the real one first."""
    context = tf.distribute.get_replica_context()
    context.all_reduce = functools.partial(all_reduce, context.all_reduce)
    try:
        yield
    finally:
        del context.all_reduce


def _reduce_and_keep(
    kept: list[Any], all_reduce: AllReduce, reduce_op: Any, value: Any, options: Any = None
) -> Any:
    kept.append(all_reduce(reduce_op, value, options))
    return kept[-1]


def _take_reduced(
    kept: Iterator[Any], all_reduce: AllReduce, reduce_op: Any, value: Any, options: Any = None
) -> Any:
    """Returns the earlier result of reducing a value; the gradient is reduced as usual.

    Only the tape links the two, so operations that only led to the value are not computed.
    """
    reduced = [tf.identity(tensor) for tensor in tf.nest.flatten(next(kept))]

    def differentiate(*upstream: tf.Tensor) -> list[tf.Tensor]:
        return all_reduce(reduce_op, list(upstream), options)

    record.record_operation("AllReduce", reduced, tf.nest.flatten(value), differentiate)
    return tf.nest.pack_sequence_as(value, reduced)


def _find_odd_operation(model: keras.Model) -> str | None:
    nodes = [node for nodes in model._nodes_by_depth.values() for node in nodes]
    operations = [node.operation for node in nodes]
    for node in nodes:
        name = repr(node.operation.name)
        if not isinstance(node.operation, keras.Layer):
            return f"the operation {name} is not a layer, so it belongs to no stage"
        if operations.count(node.operation) > 1 or len(node.outputs) > 1:
            return f"the layer {name} is called twice or has several outputs"
    return None


def _find_late_input(model: keras.Model, stages: Sequence[Stage]) -> str | None:
    known = {model.input._keras_history.operation.name}
    for stage in stages:
        for name in stage.inputs:
            if name not in known:
                return f"the stage {stage.name!r} uses {name!r}, which a later stage computes"
        known |= set(stage.outputs)
    return None


def _find_effect(model: keras.Model, x_spec: Any) -> str | None:
    """Describes what a second call in training would do differently; None if nothing."""
    masks = []

    @tf.function(autograph=False)
    def call(x: Any) -> None:
        zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in model.variables]
        with keras.StatelessScope(zeros, collect_losses=True):
            masks.append(backend.get_keras_mask(model(x, training=True)))

    for operation in call.get_concrete_function(x_spec).graph.get_operations():
        if operation.op_def.is_stateful and operation.type not in _HARMLESS:
            return (
                f"its operation {operation.name!r} ({operation.type}) has a side effect, or a "
                "state outside the layers' weights, so it cannot run a second time"
            )
    return None if masks[0] is None else "masks are not passed from stage to stage"
