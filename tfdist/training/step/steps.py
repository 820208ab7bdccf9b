"""The compiled steps of a model: for training, evaluation and prediction.

On one device they are the model's own `train_step`, `test_step` and `predict_step`, as Keras runs
them. On several replicas, each one runs them on its examples of the global batch (`division`),
inside `strategy.run`. A training step has the same result in both cases.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.aliases import Batch, BatchIterator
from tfdist.errors import TfdistError
from tfdist.internals import STEP_TAKES_BATCH, DistributedVariable, is_op_determinism_enabled
from tfdist.placement.optimizer.shards import OptimizerShards
from tfdist.placement.shards.model import UnitShards
from tfdist.placement.stages.plan import Plan
from tfdist.placement.strips.call import StripPlan
from tfdist.placement.variables import updating_in_place
from tfdist.strategies.collectives import packing_known_shapes
from tfdist.strategies.registry import find_traits
from tfdist.training.inputs.data_adapter import is_on, take_next
from tfdist.training.replicas.added_losses import penalties_in_floatx
from tfdist.training.replicas.aggregation import aggregating
from tfdist.training.replicas.batch_share import make_part
from tfdist.training.replicas.compilation import compile_with_xla
from tfdist.training.replicas.divisible import may_draw_in_predictions
from tfdist.training.replicas.division import Division
from tfdist.training.replicas.metrics import (
    Logs,
    ReplicaMetrics,
    add_parts,
    flatten_logs,
    updating_metrics_after,
)
from tfdist.training.replicas.optimizers import Record, reducing_optimizers
from tfdist.training.replicas.random_layers import hide_rows, list_seed_generators
from tfdist.training.replicas.step_checks import overrides
from tfdist.training.step.fused_layers import fusing_layers
from tfdist.training.step.fused_update import fusing_updates
from tfdist.training.step.gradient import GradientStep
from tfdist.training.step.loops import Program, run_steps
from tfdist.training.step.model_variables import make_known
from tfdist.training.step.outputs import Pack, is_composite, make_predict_step, summarize_rows
from tfdist.training.step_options import StepOptions


class StepResult(NamedTuple):
    """The results of a step for its global batch.

    Attributes:
      logs: name -> tensor, as Keras's steps return them.
      vector: float64 [sums], the metrics' state, from which `Steps.logs_of` computes logs; empty on
        one device.
      rows: float64 scalar, the number of examples in the global batch; 0 on one device.
      waited_s: float64 scalar, the seconds that the step waited for this worker's part of the
        batch; NaN if `_read_clock` has none.
    """

    logs: Logs
    vector: tf.Tensor
    rows: tf.Tensor
    waited_s: tf.Tensor


class Steps:
    """A model's steps under a strategy.

    Args:
      shards: divides the optimizer's state, or units of layers, if they are divided.
      is_apart: whether this worker trains independently of the others.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        options: StepOptions,
        *,
        create_variable: Callable[..., Any],
        plan: Plan | StripPlan | None = None,
        shards: OptimizerShards | UnitShards | None = None,
        is_apart: bool = False,
        is_chief: bool = True,
    ):
        self._model = model
        self._strategy = strategy
        self.options = options
        self._create_variable = create_variable
        self._is_apart = is_apart
        self._is_chief = is_chief
        self.is_divided = (
            strategy.num_replicas_in_sync > 1
            or is_apart
            or options.changes_gradient
            or plan is not None
            or shards is not None
        )
        self._fixes_shapes = find_traits(strategy).fixes_shapes
        self._is_compiled = options.jit_compile or self._fixes_shapes
        self._division = Division(
            model,
            strategy,
            batch_norm=options.batch_norm,
            gather_outputs=options.gather_outputs,
            is_chief=is_chief,
            is_compiled=self._is_compiled,
        )
        self._shards = shards
        division = self._division
        self._staged = plan.make_call(draws=division.draws, pool=division.pool) if plan else None
        self.metrics = ReplicaMetrics(model, strategy, self._division)
        # Kind of step -> the keys of its logs; the value of a key may be a dictionary.
        self.log_names: dict[str, set[str]] = {}
        # XLA requires static sizes, so there they are hidden only if a layer draws.
        self._draws_rows = not self._is_compiled or bool(list_seed_generators(model))
        # By the kind of step, whether sums over examples are scaled, and how many by which step.
        self._scales_sums = {"train": False, "test": False, "predict": False}
        self._num_sums: dict[Any, int] = {}
        self._train = model.train_step
        if options.changes_gradient:
            own = GradientStep(
                model, options, division=self._division, metrics=self.metrics, staged=self._staged
            )
            self._train = own.train
        self.train: Any = None
        self.test: Any = None
        self.remake("train")
        self.remake("test")
        self.read = self._compile(functools.partial(self._read, self.metrics.read))
        self._read_states = self._compile(functools.partial(self._read, self.metrics.read_states))
        self.logs_of = {
            kind: self._compile(functools.partial(self.metrics.compute_logs, kind))
            for kind in ("train", "test")
        }
        self._write = self._compile(self._write_states)
        self._reset = self._compile(self.metrics.reset)

    def remake(self, kind: str) -> None:
        """Makes the compiled step of a kind, `train` or `test`; others have none here."""
        model = self._model
        if kind == "train":
            self.train = self._compile(self._make_step("train", model.train_step, self._train))
        elif kind == "test":
            self.test = self._compile(self._make_step("test", model.test_step, model.test_step))

    @property
    def is_eager(self) -> bool:
        """Whether steps run without a trace: `compile` says so, or TensorFlow for all functions."""
        return bool(self._model.run_eagerly) or tf.config.functions_run_eagerly()

    @property
    def _is_jitted(self) -> bool:
        return self._model.jit_compile and not (self.is_divided or self.is_eager)

    @property
    def generators(self) -> list[keras.random.SeedGenerator]:
        """The generators that a traced step has drawn from, those of layers included."""
        return list(self._division.draws.seen.values())

    def make_train_loop(self, size: int) -> Callable[[Any, tf.Tensor], StepResult]:
        """Returns a compiled function: (iterator, number of steps) -> the results of these steps.

        Every tensor of `StepResult` is stacked, [steps, ...].

        Args:
          size: the number of steps of most calls.
        """

        def train_loop(iterator: BatchIterator, num_steps: tf.Tensor) -> StepResult:
            spec = tf.function(self.train.python_function, autograph=False)
            results = spec.get_concrete_function(iterator).structured_outputs
            return run_steps(lambda _: self.train.python_function(iterator), num_steps, results)

        def train_by_xla(iterator: BatchIterator, num_steps: tf.Tensor) -> StepResult:
            batch: Batch = None

            def take() -> tuple[list[tf.Tensor], tf.Tensor]:
                nonlocal batch
                data, _, waited_s = self._take(iterator)
                batch = _drop_optionals(data)
                return _list_tensors(batch), waited_s

            def step(*tensors: tf.Tensor) -> Logs:
                given = iter(tensors)
                leaves = tf.nest.flatten(batch, expand_composites=True)
                leaves = [next(given) if tf.is_tensor(leaf) else leaf for leaf in leaves]
                data = tf.nest.pack_sequence_as(batch, leaves, expand_composites=True)
                return self._run_alone("train", self._model.train_step, data)

            logs, waited_s = program.run(step, take, num_steps)
            none = tf.zeros([num_steps, 0], tf.float64)
            return StepResult(logs, none, tf.zeros([num_steps], tf.float64), waited_s)

        if not self._is_jitted or is_on(self._strategy, "GPU"):  # on which it was not measured
            return self._compile(train_loop)
        program = Program(size)
        return self._compile(train_by_xla)

    def make_predict(self) -> tuple[Callable[[Any], Any], Pack]:
        """Returns the step of a prediction; see `make_predict_step`."""
        return make_predict_step(
            self._model,
            self._strategy,
            compile_step=self._compile,
            placing=self._with_placement,
            draws=self._division.draws if self._predicts_draws() else None,
            is_apart=self._is_apart,
            is_chief=self._is_chief,
            is_jitted=self._is_jitted,
        )

    def _predicts_draws(self) -> bool:
        """Returns whether the replicas of a prediction draw the numbers of their examples."""
        return not self._is_compiled and may_draw_in_predictions(self._model)

    def show(self, kind: str, *, is_plain: bool = False) -> Any:
        """Returns a compiled function that shows what a `train`, `test` or `predict` step would do.

        It takes a global batch, int64 [replicas, 2], the bounds of each replica's examples, and
        whether to scale sums over examples, a boolean scalar. It returns the logs, or the outputs
        for these examples, and the reduced gradients of every update that each replica makes, in
        order; no optimizer updates anything.

        Args:
          is_plain: whether a training step is the model's own, without micro-batches and the like.
        """
        if kind == "predict":
            return self._compile(self._show_outputs)
        gradients: list[Any] = []

        def record(reduced: Sequence[Any], variables: Sequence[keras.Variable]) -> None:
            gradients.extend(tf.convert_to_tensor(g) for g in reduced if g is not None)

        step = self._model.test_step
        if kind == "train":
            step = self._model.train_step if is_plain else self._train

        def run(
            data: Batch, bounds: tf.Tensor, scales: tf.Tensor | None = None
        ) -> tuple[Logs, list[tf.Tensor]]:
            del gradients[:]
            logs, *_ = self._run(
                kind, step, data, bounds, take=_take, record=record, scales_sums=scales
            )
            return logs, list(gradients)

        return self._compile(run)

    @property
    def can_scale_sums(self) -> bool:
        """Whether the last trace has sums over examples, and may be made again with other ones."""
        return self._draws_rows and self._division.num_sums > 0

    @property
    def branches(self) -> dict[str, str]:
        """What the last trace takes from a branch of a replica's own numbers: name -> operation."""
        return self._division.branches.found

    def scales_sums(self, kind: str) -> bool:
        """Returns whether a kind of step scales sums over examples; see `example_sums`."""
        return self._scales_sums[kind]

    def scale_sums(self, kind: str, *, scales: bool) -> None:
        """Begins or stops to scale sums over examples in what is traced from now on."""
        self._scales_sums[kind] = scales

    def _check_sums(self, kind: str, divided: Callable[..., Any]) -> None:
        """Checks that a trace of a step scales as many sums as the one that the guard has seen.

        Sizes that are unknown in one of them only, other than the number of examples, may be taken
        for it.
        """
        found = self._division.num_sums
        if self._num_sums.setdefault((kind, divided), found) != found:
            raise TfdistError(
                f"Cannot tell which sums of {type(self._model).__name__} are over the examples of "
                "a batch, because other sizes vary as well. Use tf.reduce_mean or "
                "tf.nn.compute_average_loss, train on one device, or make all batches of one shape."
            )

    def _show_outputs(
        self, data: Batch, bounds: tf.Tensor, scales: tf.Tensor | None = None
    ) -> tuple[Logs, list[tf.Tensor]]:
        del scales  # a prediction has no losses
        draws_rows = self._predicts_draws()

        def predict(data: Batch, bounds: tf.Tensor) -> list[tf.Tensor]:
            data, place = _take(data, bounds)
            part = make_part(data, None if isinstance(place, tuple) else place)
            with self._division.of(part, draws_rows=draws_rows):
                leaves = keras.tree.flatten(self._model.predict_step(hide_rows(data)))
                leaves = [summarize_rows(t) if is_composite(t) else t for t in leaves]
                dense = [t for t in leaves if t is not None and t.dtype != tf.string]
                for place, leaf in enumerate(dense):
                    self._division.look(f"output {place}", leaf)
                return [self._division.gather(_to_real(t)) for t in dense]

        drawing = self._division.draws.intercept() if draws_rows else contextlib.nullcontext()
        with self._with_placement(), drawing, self._division.branches.watching():
            found = self._strategy.run(predict, args=(data, bounds))
        local = self._strategy.experimental_local_results
        return {f"output {place}": local(leaf)[0] for place, leaf in enumerate(found)}, []

    def read_states(self) -> list[tf.Tensor]:
        """Returns each replica's part of the metrics' variables, [replicas, ...]; they add up."""
        if not self.is_divided:
            return [tf.convert_to_tensor(v.value)[None] for v in self.metrics.list_variables()]
        return self._read_states()

    def write_states(self, states: Sequence[Any]) -> None:
        """Sets the metrics' variables to parts that were read before, on any number of replicas."""
        variables = self.metrics.list_variables()
        values = [tf.constant(s, v.dtype) for s, v in zip(states, variables, strict=False)]
        if self.is_divided:
            self._write(values)
            return
        for variable, value in zip(variables, values, strict=False):
            variable.assign(add_parts(value))

    def reset_metrics(self) -> None:
        """Resets the metrics, except for compiled ones that are said not to be built."""
        metrics = self._model._compile_metrics
        if not self.is_divided:
            self._model.reset_metrics()
        elif metrics is None or metrics.built:
            self._reset()
        else:
            self._compile(self.metrics.reset)()

    def _compile(self, function: Callable[..., Any]) -> Any:
        is_compiled = self._is_compiled or self._model.jit_compile
        function = fusing_layers(self.options.fused_layers, is_compiled=is_compiled)(function)
        if self.is_eager:
            return function
        if not (self._is_jitted or self._fixes_shapes):
            function = fusing_updates()(function)
        function = _leaving_no_variables(function)
        # As Keras, unless each shape is to have a trace of its own: what a step computes does then
        # not depend on the shapes before it.
        is_relaxed = not getattr(self._model, "keeps_shapes", False)
        return tf.function(function, autograph=False, reduce_retracing=is_relaxed)

    def _make_step(
        self, kind: str, own: Callable[..., Any], divided: Callable[..., Any]
    ) -> Callable[[Any], StepResult]:
        def step(iterator: BatchIterator) -> StepResult:
            data, place, waited_s = self._take(iterator)
            if self.is_divided:
                # Every operation waits for the data, so that none runs when the data have ended.
                found = self._run(kind, divided, data, place, after=_list_tensors(data))
            else:
                logs = self._run_alone(kind, own, data)
                found = logs, tf.zeros([0], tf.float64), tf.zeros([], tf.float64)
            return StepResult(*found, waited_s)

        return step

    def _take(self, iterator: BatchIterator) -> tuple[Batch, Any, tf.Tensor]:
        """Returns the next batch, its place, and the seconds that it was waited for."""
        asked = _read_clock(self._strategy)
        with tf.control_dependencies([asked]):
            data, place = take_next(self._strategy, iterator)
        with tf.control_dependencies(_list_tensors(data)):
            came = _read_clock(self._strategy)
        return data, place, came - asked

    def _run_alone(self, kind: str, own: Callable[..., Any], data: Batch) -> Logs:
        if self._is_jitted:
            own = compile_with_xla(own)
        draws = self._division.draws
        with contextlib.ExitStack() as stack:
            stack.enter_context(draws.intercept() if self._is_compiled else draws.watch())
            stack.enter_context(penalties_in_floatx())
            stack.enter_context(tf.variable_creator_scope(_create_at_once))
            if self._model.steps_per_execution > 1 or not STEP_TAKES_BATCH:
                # Keras looks for data first, then.
                stack.enter_context(tf.control_dependencies(_list_tensors(data)))
            elif overrides(self._model, "train_step", "test_step"):
                # Keras counts the step that finds no data in the mean of the epoch's losses.
                stack.enter_context(updating_metrics_after(_list_tensors(data)))
            logs = self._strategy.run(own, args=(_drop_optionals(data),))
        self.log_names[kind] = set(logs)
        return {
            name: self._strategy.experimental_local_results(value)[0]
            for name, value in flatten_logs(logs).items()
        }

    def _run(
        self,
        kind: str,
        divided: Callable[..., Any],
        data: Batch,
        place: tf.Tensor | tuple[()],
        *,
        take: Callable[..., Any] | None = None,
        record: Record | None = None,
        after: Sequence[tf.Tensor] = (),
        scales_sums: tf.Tensor | None = None,
    ) -> tuple[Logs, tf.Tensor, tf.Tensor]:
        def replica_step(data: Batch, place: tf.Tensor | tuple[()]) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.control_dependencies(list(after)):
                return compute(data, place)

        def compute(data: Batch, place: tf.Tensor | tuple[()]) -> tuple[tf.Tensor, tf.Tensor]:
            if take is not None:
                data, place = take(data, place)
            data = hide_rows(data) if self._draws_rows else data
            known = None if isinstance(place, tuple) else place
            part = make_part(data, known, is_apart=self._is_apart)
            with self._division.of(part, draws_rows=self._draws_rows):
                logs = divided(data)
                self.log_names[kind] = set(logs)
                total = tf.cast(part.rows, tf.float64) * part.sum_scale
                return self.metrics.read(kind, logs, total), total

        with contextlib.ExitStack() as stack:
            stack.enter_context(aggregating(self._division.agree, self._model))
            scales = self._scales_sums[kind] if scales_sums is None else scales_sums
            for_guard = take is not None
            dividing = self._division.intercept(scales_sums=scales, finds_branches=for_guard)
            stack.enter_context(dividing)
            stack.enter_context(self.metrics.intercept())
            stack.enter_context(packing_known_shapes())
            stack.enter_context(self._with_placement())
            stack.enter_context(
                reducing_optimizers(
                    self._division,
                    is_compressed=self.options.compress_gradients,
                    create_variable=self._create_variable,
                    record=record,
                )
            )
            results = self._strategy.run(replica_step, args=(data, place))
        if self._scales_sums[kind]:
            self._check_sums(kind, divided)
        elif scales_sums is not None:
            self._num_sums[kind, divided] = self._division.num_sums
        vector, rows = (self._strategy.experimental_local_results(r)[0] for r in results)
        return self.metrics.compute_logs(kind, vector), vector, rows

    @contextlib.contextmanager
    def _with_placement(self) -> Iterator[None]:
        """Computes the model by stages, and updates by shards, while a step is traced."""
        with contextlib.ExitStack() as stack:
            if self._staged is not None:
                stack.enter_context(self._staged.intercept())
                stack.enter_context(updating_in_place(self._strategy))
            if self._shards is not None:
                stack.enter_context(self._shards.intercept())
            yield

    def _read(self, read: Callable[[], Any]) -> Any:
        found, local = self._strategy.run(read), self._strategy.experimental_local_results
        return tf.nest.map_structure(lambda values: local(values)[0], found)

    def _write_states(self, states: list[tf.Tensor]) -> None:
        self._strategy.run(self.metrics.write, args=(states,))


def _take(data: Batch, bounds: tf.Tensor) -> tuple[Any, tf.Tensor]:
    """Returns a replica's examples of a batch, and their place in it."""
    own = bounds[tf.distribute.get_replica_context().replica_id_in_sync_group]
    first, last = own[0], own[1]
    rows = tf.shape(next(t for t in keras.tree.flatten(data) if _has_rows(t)), tf.int64)[0]
    place = tf.stack([tf.cast(first, tf.int64), rows])
    return keras.tree.map_structure(lambda t: t[first:last] if _has_rows(t) else t, data), place


def _leaving_no_variables(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose trace leaves no variable in the collections of the default graph.

    TensorFlow 2.21 adds to them each distributed variable that a trace creates, which would be kept
    for the rest of the process.
    """
    keys = tf.compat.v1.GraphKeys

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        for name in (keys.GLOBAL_VARIABLES, keys.TRAINABLE_VARIABLES):
            kept = tf.compat.v1.get_default_graph().get_collection_ref(name)
            kept[:] = [v for v in kept if not isinstance(v, DistributedVariable)]
        return found

    return call


def _create_at_once(next_creator: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
    """Creates a variable in a step that waits for its data, on which no initial value depends."""
    make_known(arguments)  # a constant that was made in the step waits, too
    with tf.control_dependencies(None):
        return next_creator(**arguments)


def _drop_optionals(data: Batch) -> Any:
    """Replaces the absent parts of a batch by None, as Keras does."""
    return keras.tree.map_structure(
        lambda t: None if isinstance(t, tf.experimental.Optional) else t, data
    )


def _has_rows(leaf: tf.Tensor | None) -> bool:
    return leaf is not None and leaf.shape.rank != 0


def _list_tensors(data: Batch) -> list[tf.Tensor]:
    return [t for t in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(t)]


def _read_clock(strategy: tf.distribute.Strategy) -> tf.Tensor:
    # It is no deterministic kernel, and on a GPU, the step would wait for the end of the last one.
    if is_op_determinism_enabled() or is_on(strategy, "GPU"):
        return tf.constant(math.nan, tf.float64)
    return tf.timestamp()


def _to_real(value: tf.Tensor) -> tf.Tensor:
    """Returns the parts of complex numbers side by side: workers can add up real ones only."""
    if not value.dtype.is_complex:
        return value
    return tf.stack([tf.math.real(value), tf.math.imag(value)], -1)
