"""The guard: refuses a program that replicas cannot divide, before its first step.

Several replicas give the result of one device if the mean of their values is that of the global
batch. This holds for most programs, and the guard tests it: the step runs twice, without lasting
effects, once with a batch divided over the replicas and once with the whole batch on every
replica, which is what one device computes. Losses, metrics, gradients and states must agree, and
the outputs of a prediction likewise.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Batch
from tfdist.errors import TfdistError, TrainingError, shorten_error
from tfdist.graphs import list_operations
from tfdist.internals import context
from tfdist.placement.shards.divided import find_divided
from tfdist.replacing import replaced
from tfdist.strategies.registry import find_traits
from tfdist.training.guard.compare_steps import (
    FLOAT32_TOLERANCE,
    Outcome,
    find_clear_difference,
    find_difference,
    find_precision,
    is_finite,
    is_rounding,
    list_different_states,
)
from tfdist.training.guard.examples import choose_rows, count_rows, weigh
from tfdist.training.guard.indivisible_part import (
    Culprit,
    find_culprit,
    find_loss_of_batch,
)
from tfdist.training.inputs.data_adapter import is_on
from tfdist.training.inputs.data_errors import describe_value
from tfdist.training.kinds.synchronous import to_numbers
from tfdist.training.replicas.compilation import describe_layer, explain_step_errors, find_layer
from tfdist.training.replicas.optimizers import list_optimizers
from tfdist.training.step.steps import Steps
from tfdist.training.workers.last_words import LOST_PEER

# So many examples per replica show the same as all of them.
_ROWS = 8
# What an optimizer's number of steps is set to, and other counters, over which a step may loop, to
# show what comes later. They are not multiples of usual intervals.
_MANY_STEPS, _MANY = 1_000_003, 1009
# TensorFlow's stateful random operations; those of Keras's generators are stateless.
DRAWS = {
    *("Multinomial", "ParameterizedTruncatedNormal", "RandomGammaV2", "RandomGamma"),
    *("RandomPoissonV2", "RandomShuffle", "RandomStandardNormal", "RandomUniform"),
    *("RandomUniformInt", "SampleDistortedBoundingBoxV2", "TruncatedNormal"),
}
_STATELESS_DRAWS = "StatelessRandomNormal", "StatelessRandomUniform", "StatelessTruncatedNormal"
_OF_SUMS = 1e-3  # the tolerance for scaled sums in 16 bits
# In float64, gradients of weights in float32 are still rounded on each replica, and losses are in
# float32. It is a part of the effect of slightly moved weights, too.
_IN_FLOAT64, _MOVES_IN_FLOAT64 = 1e-4, 0.1
# What may be rounding in a program in float32 that cannot compute in float64.
_UNSURE, _UNSURE_IN_TF32 = 1e-4, 1e-3


def can_be_checked(batch: Batch, strategy: tf.distribute.Strategy, steps: Steps) -> bool:
    """Returns whether a global batch has an example for each micro-batch of each replica.

    If it has fewer than replicas, each of them gets all examples, and there is nothing to check.
    """
    return count_rows(batch) >= strategy.num_replicas_in_sync * steps.options.micro_batches


def check_draws(nodes: Iterable[Any], model: keras.Model, *, with_xla: bool = False) -> None:
    """Checks that a traced step draws the random numbers that Keras draws on one device.

    Args:
      nodes: the step's operations, as `tf.compat.v1.NodeDef`.
      with_xla: whether Keras would compile the step with XLA, which draws its own.

    Raises:
      TfdistError: replicas or workers would draw different numbers, or XLA would.
    """
    for node in nodes:
        if node.op in DRAWS:
            text = (
                f"draws with TensorFlow's {node.op}, which differs on each part of a batch. Draw "
            )
            text += "with keras.random and a SeedGenerator"
        elif with_xla and node.op.startswith(_STATELESS_DRAWS):
            text = "draws random numbers, and XLA draws others than TensorFlow. Give `compile` "
            text += "jit_compile=False"
        else:
            continue
        layer = find_layer(model, node.name)
        name = f"The layer {describe_layer(layer)}" if layer else type(model).__name__
        raise TfdistError(
            f'{name} {text}, train on one device, or give check="off" to train anyway.'
        )


# The difference of two outcomes, None if there is none; and the paths of the states that differ.
_Difference = tuple[str | None, list[str]]
_SAME: _Difference = None, []


_Switches = dict[int, tuple[str, int]]


class _Trace(NamedTuple):
    """A step that was traced once, for any number of examples.

    Attributes:
      run: the step, as `Steps.show` returns it.
      run_whole: the step without micro-batches.
      handles: those of the variables that it uses.
      names: names of the states to compare, by the places of their handles.
      switches: groups of numbers that the program may change: id of the handle -> name, value.
      operations: the types of its operations; none if it runs eagerly.
    """

    run: Any
    run_whole: Any
    handles: list[Any]
    names: dict[int, str]
    switches: list[_Switches]
    operations: list[str]


class Guard:
    """Checks that replicas and micro-batches give the result of one device and one batch.

    Args:
      batch: a global batch that can be checked, the same on all workers.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        steps: Steps,
        batch: Batch,
        *,
        kind: str,
        generators: Sequence[keras.random.SeedGenerator],
    ):
        self._model = model
        self._strategy = strategy
        self._steps = steps
        self._kind = kind
        self._generators = generators
        self._scales_sums = steps.scales_sums(kind)
        self._micro_batches = steps.options.micro_batches if kind == "train" else 1
        self._switched: dict[int, int] = {}
        self._is_first = True
        replicas = strategy.num_replicas_in_sync
        own = min(count_rows(batch) // replicas, max(_ROWS, 2 * self._micro_batches))
        # Parts of different sizes show more, for example whether a state is the mean over examples.
        self._rows = rows = own * replicas - (own > self._micro_batches)
        self._batch = weigh(choose_rows(batch, rows))
        self._whole = [(0, rows)] * replicas
        self._parts = [(r * own, min((r + 1) * own, rows)) for r in range(replicas)]

    def check(self) -> None:
        """Runs the step with the divided and with the whole batch. All workers must call it.

        If the results differ, it scales sums (`example_sums`), and the step does so from then on
        if that is right. The same trace serves both, because tracing takes most of the time.

        Raises:
          TfdistError: the results differ; the message names what depends on which examples are
            together.
        """
        if self._kind != "predict" and not self._steps.options.gather_outputs:
            culprit = find_loss_of_batch(self._model)
            if culprit is not None:
                raise self._refuse("the loss", culprit)
        self._step = self._trace()
        self._compare()
        if self._steps.is_eager:
            self._trace_eager()
        if self._steps.branches:
            raise self._refuse_branches()

    def check_again(self, batch: Batch) -> None:
        """Runs the step with another batch, which may show what the first one did not.

        Raises:
          TrainingError: the results differ, so those of the steps before may be wrong.
        """
        if count_rows(batch) < self._rows:
            return
        self._batch = weigh(choose_rows(batch, self._rows))
        self._is_first = False
        self._compare()

    def _compare(self) -> None:
        text, states = self._find_difference()
        for switches in self._step.switches:
            if text is None:
                text, states = self._find_difference_once_switched(switches)
        if text is not None:
            raise self._refuse(text, find_culprit(self._model, self._batch, states))

    def _find_difference_once_switched(self, switches: _Switches) -> _Difference:
        """Compares again with other values of numbers that are still 0.

        A term of the loss whose factor is still 0 shows nothing, and one that begins after some
        steps.
        """
        zeros = [h for h in self._step.handles if id(h) in switches and not np.any(_read(h))]
        if not zeros:
            return _SAME
        self._switched = {id(handle): switches[id(handle)][1] for handle in zeros}
        try:
            if not is_finite(self._compute(self._whole)):
                return _SAME
            text, states = self._find_difference()
        except TfdistError:
            return _SAME  # a state that the program never has, such as a place beyond a table
        finally:
            self._switched = {}
        return f"once {switches[id(zeros[0])][0]} is not 0, {text}" if text else None, states

    def _find_difference(self) -> _Difference:
        """Compares the divided with the whole batch, and scales sums if this makes them equal."""
        tolerance, rounding = find_precision(self._model, self._step.operations)
        is_short = tolerance > FLOAT32_TOLERANCE
        if is_short:  # 16 bits hide errors
            exact = self._compare_in_float64()
            if exact is not None:
                return exact
        divided, whole = self._compute(self._parts), self._compute(self._whole)
        if find_difference(divided, whole, tolerance) is None:
            return _SAME
        moved = self._compute(self._whole, moved_by=rounding)
        sum_tolerance = min(tolerance, _OF_SUMS)
        if tolerance == FLOAT32_TOLERANCE:
            if is_rounding(divided, whole, moved) or self._is_right_with_scaled_sums(
                lambda scaled: is_rounding(scaled, whole, moved)
            ):
                return _SAME
            clear = None if self._uses_tf32() else find_clear_difference(divided, whole, moved)
            if clear is not None:
                return clear, list_different_states(divided, whole, tolerance, moved)
            exact = self._compare_in_float64(moved)
            if exact is not None:
                return exact
            tolerance = _UNSURE_IN_TF32 if self._uses_tf32() else _UNSURE
        text = find_difference(divided, whole, tolerance, moved)
        if text is None or self._is_right_with_scaled_sums(
            lambda scaled: find_difference(scaled, whole, sum_tolerance, moved) is None
        ):
            return _SAME
        return text, list_different_states(divided, whole, tolerance, moved)

    def _compare_in_float64(self, moved: Outcome | None = None) -> _Difference | None:
        """Compares the results in float64, whose rounding no network amplifies that much.

        Args:
          moved: the whole batch computed in float32 with slightly moved weights.

        Returns:
          The difference; None if the program cannot compute in float64.
        """
        # The user's code may be unable to.
        with contextlib.suppress(Exception), self._in_float64():
            self._step = self._trace()
            divided, whole = self._compute(self._parts), self._compute(self._whole)
            share: Any = {
                "moved": moved,
                "moves": _MOVES_IN_FLOAT64,
                "log_tolerance": FLOAT32_TOLERANCE,
            }
            text = find_difference(divided, whole, _IN_FLOAT64, **share)
            if text is None or self._is_right_with_scaled_sums(
                lambda scaled: find_difference(scaled, whole, _IN_FLOAT64, **share) is None
            ):
                return _SAME
            return text, list_different_states(divided, whole, _IN_FLOAT64)
        return None

    def _is_right_with_scaled_sums(self, is_right: Callable[[Outcome], bool]) -> bool:
        """Returns whether scaled sums make both equal; if so, all later traces scale them.

        Sums over the whole batch need no scale. Scaled counts of similar parts are almost right,
        so only rounding may remain.

        Args:
          is_right: whether the divided batch with scaled sums has the whole batch's outcome.
        """
        steps, kind = self._steps, self._kind
        is_late = not self._is_first  # The steps before were without scales.
        if kind == "predict" or steps.scales_sums(kind) or not steps.can_scale_sums or is_late:
            return False
        self._scales_sums, scales = True, False
        try:
            scales = is_right(self._compute(self._parts))
        except TfdistError:
            pass  # the first difference says more
        finally:
            self._scales_sums = scales
        steps.scale_sums(kind, scales=scales)
        return scales

    def _uses_tf32(self) -> bool:
        """Returns whether products in float32 may be rounded to 10 bits, on some paths only."""
        return tf.config.experimental.tensor_float_32_execution_enabled() and is_on(
            self._strategy, "GPU"
        )

    @contextlib.contextmanager
    def _in_float64(self) -> Iterator[None]:
        """Computes the layers in float64. The weights, the losses and metrics keep their dtypes."""
        with contextlib.ExitStack() as stack:
            for layer in self._model._flatten_layers():
                if tf.as_dtype(layer.compute_dtype).is_floating:
                    stack.enter_context(replaced(layer, "_dtype_policy", _Float64()))
            for name in ("_batch", "_step"):
                stack.callback(setattr, self, name, getattr(self, name))
            self._batch = keras.tree.map_structure(_to_float64, self._batch)
            yield

    def _trace(self) -> _Trace:
        """Traces the step, unless it runs eagerly."""
        run = run_whole = self._steps.show(self._kind)
        if self._micro_batches > 1:
            run_whole = self._steps.show(self._kind, is_plain=True)
        graphs: list[Any] = []
        nodes: list[Any] = []
        if hasattr(run, "get_concrete_function"):
            # One trace for any number of examples. It also creates what only tracing creates.
            spec, bounds = self._describe_arguments()
            with self._explaining():
                # The divided one is the last, as `steps` knows what the last trace has.
                functions, scales = dict.fromkeys((run_whole, run)), tf.constant(False)
                graphs = [f.get_concrete_function(spec, bounds, scales).graph for f in functions]
            if self._steps.metrics.reduce_used_results():
                return self._trace()
            nodes = [node for graph in graphs for node in list_operations(graph)]
            check_draws(nodes, self._model)
        of_model, of_metrics, of_generators = (
            self._find_handles(variables)
            for variables in (
                self._model.variables,
                self._steps.metrics.list_variables(),
                [generator.state for generator in [*self._generators, *self._steps.generators]],
            )
        )
        known = of_model | of_metrics | of_generators
        handles = _list_handles(graphs) if graphs else [h for h, _ in known.values()]
        others = of_metrics | of_generators
        names = {
            place: f"{of_model.get(id(handle), (None, 'of the step'))[1]}#{place}"
            for place, handle in enumerate(handles)
            if id(handle) not in others and _get_dtype(handle) != tf.string
        }
        switches = self._find_switches(handles, names)
        return _Trace(run, run_whole, handles, names, switches, [node.op for node in nodes])

    def _find_switches(self, handles: list[Any], names: dict[int, str]) -> list[_Switches]:
        """Returns the numbers, flags and counters that are not trained.

        On several workers, counters are left out: one may be a place in a table, and the error of
        a worker that looks beyond it would end the others' sums.
        """
        trained = self._find_handles(self._model.trainable_variables)
        steps = self._find_handles([each.iterations for each in list_optimizers(self._model)])
        numbers: _Switches = {}
        counters: _Switches = {}
        for place, name in names.items():
            key, dtype = id(handles[place]), _get_dtype(handles[place])
            if key in trained or _get_shape(handles[place]).rank != 0:
                continue
            own = "a counter" if dtype.is_integer else "a number"
            path = own if name.startswith("of the step#") else repr(name.partition("#")[0])
            if key in steps:
                counters[key] = "the number of steps", _MANY_STEPS
            elif dtype.is_integer:
                counters[key] = path, min(_MANY, dtype.max)
            else:
                numbers[key] = path, 1
        return [numbers] if find_traits(self._strategy).has_workers else [numbers, counters]

    def _describe_arguments(self) -> tuple[Any, Any]:
        spec = keras.tree.map_structure(_hide_rows, self._batch)
        return spec, self._to_bounds(self._parts)

    def _trace_eager(self) -> None:
        """Traces a step that runs eagerly, which looks for branches."""
        step = tf.function(self._step.run, autograph=False)
        try:
            step.get_concrete_function(*self._describe_arguments(), tf.constant(False))
        except Exception as error:  # the user's code
            raise TfdistError(
                f"Cannot divide a batch {self._describe()}: {type(self._model).__name__} runs "
                "eagerly and may choose in Python by a replica's own numbers "
                f"({shorten_error(error)[:200].rstrip('.')}). Compute with tensors only, train on "
                'one device, or give check="off" to train anyway.'
            ) from error

    def _compute(self, bounds: list[tuple[int, int]], *, moved_by: float = 0.0) -> Outcome:
        """Returns what the step computes if each replica has the examples within its bounds.

        Args:
          bounds: for each replica, its first example and the one after its last.
          moved_by: the fraction of its value by which each weight and input is moved before.
        """
        step, batch = self._step, self._batch
        run = step.run_whole if bounds is self._whole else step.run
        with self._without_effect(), _without_graph_optimizers():
            if moved_by:
                move_weights(self._model, self._strategy, moved_by)
                batch = tf.nest.map_structure(lambda leaf: _move_fractions(leaf, moved_by), batch)
            for handle in step.handles:
                if id(handle) in self._switched:
                    _write(handle, tf.cast(self._switched[id(handle)], _get_dtype(handle)))
            if self._kind != "predict":  # which uses none, so that they would not be restored
                self._steps.reset_metrics()
            with self._explaining():
                scales = tf.constant(self._scales_sums)
                logs, gradients = run(batch, self._to_bounds(bounds), scales)
            states = {
                name: np.asarray(_read(step.handles[place]), "float64")
                for place, name in step.names.items()
            }
        named = {str(place): np.asarray(g, "float64") for place, g in enumerate(gradients)}
        return Outcome(to_numbers(logs), named, states)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        with explain_step_errors(self._model):
            try:
                yield
            except (TfdistError, *LOST_PEER):
                raise
            except (tf.errors.OpError, LookupError, TypeError, ValueError) as error:
                name = type(self._model).__name__
                if self._steps.branches:
                    raise self._refuse_branches() from error
                raise TfdistError(
                    describe_value(str(error))
                    or f"Cannot divide a batch {self._describe()}: {name} fails on a "
                    f"part of it: {shorten_error(error)[:300].rstrip('.')}. Make it accept batches "
                    "of any size, or train on one device."
                ) from error

    @contextlib.contextmanager
    def _without_effect(self) -> Iterator[None]:
        """Restores the values of all variables of the step on exit."""
        handles = self._step.handles
        before = [_read(handle) for handle in handles]
        try:
            yield
        finally:
            for handle, value in zip(handles, before, strict=True):
                _write(handle, value)

    def _find_handles(self, variables: Sequence[keras.Variable]) -> dict[int, tuple[Any, str]]:
        """Returns the handles of the replicas' copies of variables, and their paths, by id."""
        return {
            id(copy.handle): (copy.handle, variable.path)
            for variable in variables
            for part in getattr(find_divided(variable), "parts", [variable.value])
            for copy in self._strategy.experimental_local_results(part)
        }

    def _refuse(self, found: str, culprit: Culprit) -> TfdistError:
        gather = "gather the outputs with gather_outputs=True, " if culprit.is_loss else ""
        instead = f"{gather}train on one device"
        if self._steps.options.micro_batches > 1:
            instead = "leave out `micro_batches`"
        text = (
            f"Cannot divide a batch {self._describe()}: {found} depends on which examples are "
            f"together ({culprit.text}). Make it a mean over the examples, {instead}, or give "
            'check="off" to train anyway.'
        )
        if self._is_first:
            return TfdistError(text)
        return TrainingError(f"{text} The batches before did not show it.")

    def _refuse_branches(self) -> TfdistError:
        name, operation = next(iter(self._steps.branches.items()))
        part = "replica" if self._strategy.num_replicas_in_sync > 1 else "micro-batch"
        clip = "Let the optimizer clip gradients, as with `global_clipnorm`, t"
        advice = f"{clip if name == 'the gradient' else 'T'}rain on one device"
        return TfdistError(
            f"Cannot divide a batch {self._describe()}: {name} is what {operation} makes of a "
            f"{part}'s own numbers, which may be on another side of a limit than the batch's. "
            f'{advice}, or give check="off" to train anyway.'
        )

    def _describe(self) -> str:
        """Describes into which parts a batch is divided."""
        replicas = self._strategy.num_replicas_in_sync
        micro_batches = self._steps.options.micro_batches
        parts = [f"over {replicas} replicas"] if replicas > 1 else []
        parts += [f"into {micro_batches} micro-batches"] if micro_batches > 1 else []
        return " and ".join(parts)

    def _to_bounds(self, bounds: list[tuple[int, int]]) -> Any:
        """Returns the bounds as a tensor unless sizes must be static."""
        if find_traits(self._strategy).fixes_shapes:
            return tuple(bounds)
        return tf.constant(bounds, tf.int64)


@contextlib.contextmanager
def _without_graph_optimizers() -> Iterator[None]:
    """Calls functions without Grappler in this thread: it takes longer than a few runs."""
    eager = context.context()
    before = eager.function_call_options
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(eager.config)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    eager.function_call_options = type(before)(config_proto=config)
    try:
        yield
    finally:
        eager.function_call_options = before


def move_weights(
    model: keras.Model, strategy: tf.distribute.Strategy, share: float, seed: int = 0
) -> None:
    """Changes every weight by a fraction of its value, up or down."""
    with strategy.scope():
        for number, variable in enumerate(model.trainable_variables):
            variable.assign(_move(tf.convert_to_tensor(variable.numpy()), share, [seed, number]))


def _move(leaf: tf.Tensor, share: float, seed: tf.Tensor | int = 0) -> Any:
    """Changes every number of a floating-point tensor by a fraction of its value, up or down."""
    if not (isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating):
        return leaf
    signs = np.random.default_rng(seed).choice([-1, 1], leaf.shape)
    return leaf * tf.cast(1 + share * signs, leaf.dtype)


def _move_fractions(leaf: tf.Tensor, share: float) -> Any:
    """Moves the numbers of a batch, except those that may stand for a class, a mask or a place."""
    moved = _move(leaf, share)
    return moved if moved is leaf else tf.where(leaf == tf.round(leaf), leaf, moved)


class _Float64(keras.DTypePolicy):
    """Computes in float64 from weights in float32."""

    def __init__(self) -> None:
        super().__init__("float32")

    @property
    def compute_dtype(self) -> str:
        return "float64"


def _to_float64(leaf: tf.Tensor) -> Any:
    is_floating = isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating
    return tf.cast(leaf, tf.float64) if is_floating else leaf


def _hide_rows(leaf: tf.Tensor) -> Any:
    if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
        return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)
    return leaf


def _list_handles(graphs: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the handles of all variables that graphs use, however they were created."""
    captured = {id(outer): outer for graph in graphs for outer, _ in graph.captures}
    handles = [outer for outer in captured.values() if outer.dtype == tf.resource]
    return [handle for handle in handles if getattr(handle, "_handle_data", None) is not None]


def _get_dtype(handle: tf.Tensor) -> tf.DType:
    return tf.as_dtype(handle._handle_data.shape_and_type[0].dtype)


def _get_shape(handle: tf.Tensor) -> tf.TensorShape:
    return tf.TensorShape(handle._handle_data.shape_and_type[0].shape)


def _read(handle: tf.Tensor) -> tf.Tensor:
    with tf.device(handle.device):
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=_get_dtype(handle))


def _write(handle: tf.Tensor, value: tf.Tensor) -> None:
    with tf.device(handle.device):
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)
