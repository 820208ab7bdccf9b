"""A model under a strategy: its variables, its compiled steps, and the checks of both."""

import collections
import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdist.aliases import BatchIterator, KerasData
from tfdist.announcing import announce
from tfdist.distributed_variables import make_variables_ordinary, spread_raw_writes
from tfdist.errors import TfdistError
from tfdist.graphs import list_operations
from tfdist.internals import find_untested
from tfdist.placement.groups import find_groups
from tfdist.placement.optimizer.shards import OptimizerShards
from tfdist.placement.options import Placement, Shards, Strips
from tfdist.placement.shards.model import UnitShards
from tfdist.placement.stages.plan import Plan, make_plan
from tfdist.placement.strips.call import StripPlan, make_strip_plan
from tfdist.placement.variables import place_variables
from tfdist.strategies.logical_replicas import read_numerics
from tfdist.strategies.registry import find_traits
from tfdist.training.guard.guard import Guard, can_be_checked, check_draws
from tfdist.training.inputs.data_adapter import DataAdapter
from tfdist.training.inputs.data_errors import explain_data_errors
from tfdist.training.inputs.make_adapter import make_data_adapter
from tfdist.training.kinds.base import TrainingSteps
from tfdist.training.kinds.local_sgd import LocalSteps
from tfdist.training.kinds.own_functions import OwnFunctionSteps
from tfdist.training.kinds.synchronous import SynchronousSteps
from tfdist.training.replicas.compilation import compiling_as_alone
from tfdist.training.replicas.divisible import is_known, predicts_by_known_layers
from tfdist.training.replicas.optimizers import list_optimizers
from tfdist.training.replicas.random_layers import (
    lend_global_generator,
    list_seed_generators,
    moved_global_generator,
)
from tfdist.training.replicas.reduction import measure_all_reduce
from tfdist.training.replicas.step_checks import (
    FUNCTION_METHODS,
    check_model,
    check_names,
    check_program,
    check_strategy,
    overrides,
)
from tfdist.training.servers.asynchronous import AsynchronousSteps
from tfdist.training.step.model_variables import (
    aggregate_variables,
    build_model,
    build_outputs,
    check_scope,
    make_creator,
)
from tfdist.training.step_options import StepOptions
from tfdist.training.workers.agreement import compare_weights
from tfdist.training.workers.communication import Workers

_SECOND_CHECK = 16  # the batch that is checked after the first one that can be
_STEP_NAMES = {"train": "training step", "test": "evaluation step", "predict": "prediction step"}


class Engine:
    """Builds a model in a strategy's scope, and its compiled steps once the data are known.

    Args:
      make_model: a function that builds and compiles the model, or a model built in the scope.

    Attributes:
      check_s: seconds spent in the guard.
      num_resets: how often the metrics were reset.

    Raises:
      TfdistError: the model or an option does not fit the strategy.
    """

    def __init__(
        self,
        make_model: Callable[[], keras.Model] | keras.Model,
        *,
        strategy: tf.distribute.Strategy,
        workers: Workers,
        options: StepOptions,
        placement: Placement | None = None,
    ):
        self._strategy, self.workers, self.options = strategy, workers, options
        self._untested = find_untested()
        if self._untested and options.check == "auto":
            _warn_once(self._untested)
        self._placement = placement
        self._traits = find_traits(strategy)
        check_strategy(options, strategy, num_workers=workers.count, placement=placement)
        make_variables_ordinary()
        self._create_variable = make_creator(strategy, options)
        with self.scope():
            self.model = make_model if isinstance(make_model, keras.Model) else make_model()
        # A model that was passed in need not be compiled: it may be used for prediction only.
        is_ready = getattr(self.model, "compiled", False) or self.model is make_model
        if not (isinstance(self.model, keras.Model) and is_ready):
            raise TfdistError(
                f"build_model returned {type(self.model).__name__}, not a compiled keras.Model. "
                "Call model.compile(optimizer=..., loss=...) in it and return the model."
            )
        if self.model.compiled:
            self.check_program()
        check_scope(self.model, strategy)
        self.check_s = 0.0
        self.num_resets = 0
        self._steps: Any = None
        self._prediction: Any = None
        self._next_checks: dict[str, float] = {}
        self._guards: dict[str, Guard] = {}
        self._announced: set[tuple[str, str]] = set()
        self._num_batches: collections.Counter[str] = collections.Counter()
        self._compiled: tuple[Any, ...] = ()
        self._not_built: Any = None  # the compiled metrics, until the first reset of new ones
        self._functions: dict[str, Any] = {}
        self._plan: Plan | StripPlan | None = None
        self._shards: OptimizerShards | UnitShards | None = None

    @property
    def numerics(self) -> dict[str, Any]:
        """What the bits of logical replicas depend on, besides the program; else empty."""
        return read_numerics(self._strategy)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Opens the scope in which the model's variables are created, and it is compiled."""
        with opening_scope(self._strategy, self._create_variable):
            yield

    @contextlib.contextmanager
    def drawing_alike(self) -> Iterator[None]:
        """Makes workers draw from one global generator, which cannot be created within a step."""
        with moved_global_generator(self._strategy), contextlib.ExitStack() as stack:
            if self.workers.count > 1:
                with self.scope():
                    stack.enter_context(lend_global_generator())
            yield

    @property
    def local_updates(self) -> bool:
        """Whether the workers train independently and only sync from time to time."""
        return self.workers.count > 1 and self._traits.local_updates

    @property
    def is_divided(self) -> bool:
        """Whether several replicas or workers compute the steps."""
        return self.workers.num_replicas > 1 or self._traits.has_servers

    @property
    def is_one_process(self) -> bool:
        """Whether a single process reads the data."""
        return self.workers.count == 1 and not self._traits.has_servers

    @property
    def seconds_of_input(self) -> float | None:
        """The seconds that training steps waited for this process's part of their batches.

        None under `ParameterServerStrategy`, where the workers read the batches; on GPUs, where
        reading the clock would delay each step; and where kernels must be deterministic.
        """
        seconds = self._steps.input_s if self._steps else 0.0
        return None if seconds is None or math.isnan(seconds) else seconds

    @property
    def steps(self) -> Any:
        """The compiled steps, once `build` has made them."""
        return self._steps

    def count_traces(self) -> dict[str, int]:
        """Returns how often each step was traced: more than once if an input's shape changed."""
        return self._steps.count_traces() if self._steps else {}

    def reset_metrics(self) -> None:
        """Resets the metrics, as Keras does where its methods begin.

        Compiled metrics that Keras has not built at that time keep what they have counted, for
        another model or before `compile`. Here, they may be built already.
        """
        self.num_resets += 1
        metrics, self._not_built = self._not_built, None
        if metrics is None or metrics is not self.model._compile_metrics or not metrics.built:
            self._steps.reset_metrics()
            return
        metrics.built = False
        try:
            self._steps.reset_metrics()
        finally:
            metrics.built = True

    def may_have_other_metrics(self, num_resets: int, *, late: bool) -> bool:
        """Returns whether callbacks may have changed the metrics; all workers must call this.

        Args:
          num_resets: the number of resets before.
          late: whether all callbacks allow the next step to run before they are called.
        """
        return self.workers.any(self.num_resets != num_resets or not late)[0]

    def read_metrics(self) -> list[Any]:
        """Returns the values of the metrics' variables, over all workers; all must call this."""
        return self._steps.read_metrics()

    def compare_weights(self) -> None:
        """Checks that the workers, which are in sync, have the same weights; all must call this."""
        steps = self._steps or self._prediction
        compare_weights(self.workers, steps.shared)

    def summarize(self) -> dict[str, Any]:
        """Returns the entries of a summary that only this strategy has, such as the staleness."""
        return self._steps.summarize() if self._steps else {}

    def summarize_placement(self) -> dict[str, Any]:
        """Returns the entries of a summary that say where the model's parts are; see `Plan`."""
        found = self._shards.summarize() if self._shards else {}
        micro_batches = self.options.micro_batches
        return found | (self._plan.summarize(micro_batches=micro_batches) if self._plan else {})

    def measure_all_reduce(self) -> float | None:
        """Returns the seconds that a step's all-reduce takes when nothing else runs.

        All workers must call it. Returns None if they do not sum gradients at each step.
        """
        if type(self._steps) is not SynchronousSteps:
            return None
        if self.workers.num_replicas == 1:
            return 0.0
        is_compressed = self.options.compress_gradients
        return measure_all_reduce(self.model, self._strategy, is_compressed=is_compressed)

    def check_program(self) -> None:
        """Checks that the strategy can train the compiled model as one device does."""
        check_program(
            self.options,
            self.model,
            self._strategy,
            num_workers=self.workers.count,
            is_placed=self._is_placed,
        )

    def prepare(self, x: KerasData, y: KerasData = None, *, global_batch_size: int = 32) -> None:
        """Checks that the data fit the model and the strategy, and creates all variables.

        `fit` and `evaluate` do so themselves; a command calls this before it writes anything.
        """
        self.build(
            make_data_adapter(
                x,
                y,
                global_batch_size=global_batch_size,
                num_replicas=self.workers.num_replicas,
                micro_batches=self.options.micro_batches,
            )
        )

    def build(self, adapter: DataAdapter, *, kind: str = "train") -> TrainingSteps:
        """Creates the missing variables, and returns the compiled steps."""
        if not self.model.compiled:
            raise TfdistError(
                f"The model {self.model.name!r} is not compiled. Call model.compile(optimizer=..., "
                "loss=...) in the strategy's scope before it is trained or evaluated."
            )
        compiled = self._list_compiled()
        is_same = self._is_same(compiled)
        is_remade = self._is_remade(kind)
        if self._steps is not None and is_same and not is_remade:
            return self._steps
        check_names(self.model)
        self.check_program()
        check_scope(self.model, self._strategy)
        metrics = self.model._compile_metrics
        if metrics is not None and not metrics.built:
            self._not_built = metrics
        with self.scope():
            must_be_built = (
                self._traits.has_servers
                or self.options.changes_gradient
                or self._is_placed
                or self.options.shard_optimizer
                or overrides(self.model, *FUNCTION_METHODS)
            )
            can_wait = self.workers.num_replicas == 1 and not must_be_built
            with explain_data_errors(adapter.batch_spec):
                if all(layer.built for layer in self.model._flatten_layers()):
                    self._divide_model()
                with self._shards.building() if self._shards else contextlib.nullcontext():
                    build_model(self.model, adapter.batch_spec, can_wait=can_wait)
        self._divide_model()
        check_scope(self.model, self._strategy)
        aggregate_variables(self.model, self._strategy)
        if self.options.shard_optimizer:
            self._shards = OptimizerShards(
                self.model.trainable_variables,
                list_optimizers(self.model),
                self._strategy,
                worker=self.workers.index,
                gather=self.workers.gather if self.workers.count > 1 else None,
            )
        x_spec, _, _ = keras.utils.unpack_x_y_sample_weight(adapter.batch_spec)
        is_mirrored = self._traits.copies_variables
        check_model(
            self.options,
            self.model,
            x_spec,
            is_mirrored=is_mirrored,
            num_replicas=self.workers.num_replicas,
            has_parts=self._has_parts,
        )
        self._compiled = compiled
        if self._steps is None or not is_same or not self._remake(self._steps, kind):
            last, self._steps = self._steps or self._prediction, self._make_steps()
            if last is not None:
                self._steps.keep_prediction(last)
            self._next_checks.clear()
            self._guards.clear()
        return self._steps

    def _is_remade(self, kind: str) -> bool:
        """Returns whether Keras would use a new function for a kind of step.

        Keras keeps its compiled functions until something resets them, such as
        `model.quantize` or `model.make_predict_function(force=True)`. They are made here, but not
        used, to learn that.
        """
        if overrides(self.model, *FUNCTION_METHODS):
            return False
        function = self._find_function(kind)
        last, self._functions[kind] = self._functions.get(kind, function), function
        return last is not function

    def _find_function(self, kind: str) -> Any:
        getattr(self.model, f"make_{kind}_function")()
        return getattr(self.model, f"{kind}_function")

    def _list_compiled(self) -> tuple[Any, ...]:
        model = self.model
        found = model._compile_loss, model._compile_metrics, model._loss_tracker
        return *found, *list_optimizers(model), tf.config.functions_run_eagerly()

    def _is_same(self, compiled: tuple[Any, ...]) -> bool:
        return all(a is b for a, b in itertools.zip_longest(compiled, self._compiled))

    def find_steps(self, kind: str) -> TrainingSteps | None:
        """Returns the steps that `build` has made, or for predictions `build_prediction`.

        None if it would make others, as the model has changed.
        """
        if overrides(self.model, *FUNCTION_METHODS):
            return None
        if self._find_function(kind) is not self._functions.get(kind):
            return None
        if kind == "predict":
            return self._steps or self._prediction
        return self._steps if self._is_same(self._list_compiled()) else None

    def _remake(self, steps: TrainingSteps, kind: str) -> bool:
        self._next_checks.pop(kind, None)
        self._guards.pop(kind, None)
        self._announced = {found for found in self._announced if found[0] != kind}
        return not self.options.shard_optimizer and steps.remake(kind)

    def build_prediction(self, adapter: DataAdapter) -> TrainingSteps:
        """Returns the steps for prediction, which needs neither labels nor losses."""
        is_remade = self._is_remade("predict")
        steps = self._steps or self._prediction
        if steps is not None and not (is_remade and not self._remake(steps, "predict")):
            return steps
        self._steps = self._prediction = None
        check_names(self.model)
        if not all(layer.built for layer in self.model._flatten_layers()):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(adapter.batch_spec)
            with self.scope():
                build_outputs(self.model, x)
        self._divide_model()
        self._prediction = self._make_steps()
        return self._prediction

    def check_division(self, kind: str, iterator: BatchIterator, adapter: DataAdapter) -> Any:
        """Checks that a divided batch has the same result as a whole one on one device.

        Call it before each batch. It makes the copies of each variable equal, and checks the first
        batch that can be divided, of the batches 1, 2, 3, 5, 9 and so on, and then fewer and fewer
        others, which may show what the first one does not.

        Returns:
          An iterator that continues like the given one.
        """
        if self.is_checked(kind):
            return iterator
        is_in_parts = kind == "train" and self.options.micro_batches > 1 and not self.local_updates
        is_divided = self._strategy.num_replicas_in_sync > 1 and not self._traits.has_servers
        if not ((is_divided or is_in_parts) and self._must_check(kind)):
            self._next_checks[kind] = math.inf
            return iterator
        # Looking ahead is slow.
        count = self._num_batches[kind]
        self._next_checks[kind] = max(count + 1, 2 * count - 1)
        steps = self._steps or self._prediction
        batch, iterator = steps.look_ahead(iterator, adapter, of_training=kind == "train")
        if batch is None or not can_be_checked(batch, self._strategy, steps.steps):
            return iterator
        self._next_checks[kind] = max(_SECOND_CHECK, 4 * count)
        began = time.perf_counter()
        try:
            if guard := self._guards.get(kind):
                guard.check_again(batch)
                return iterator
            name = _STEP_NAMES[kind]
            announce(f"Comparing the {name} {self._describe_replicas()} with one device")
            options: Any = {"kind": kind, "generators": list_seed_generators(self.model)}
            guard = Guard(self.model, self._strategy, steps.steps, batch, **options)
            guard.check()
            self._guards[kind] = guard
            if steps.steps.scales_sums(kind):
                steps.remake(kind)
        finally:
            self.check_s += time.perf_counter() - began
        return iterator

    def is_checked(self, kind: str) -> bool:
        """Returns whether `check_division` has nothing to check in the next batch.

        Call it before each batch, as it makes the copies of each variable equal.
        """
        spread_raw_writes()
        self._num_batches[kind] += 1
        return self._num_batches[kind] < self._next_checks.get(kind, 0)

    def announce_first(self, kind: str, what: str) -> None:
        """Announces work such as "Tracing" before the first step of a kind, once for each trace."""
        if (kind, what) not in self._announced:
            self._announced.add((kind, what))
            announce(f"{what} the {_STEP_NAMES[kind]} {self._describe_replicas()}")

    def _describe_replicas(self) -> str:
        count = self.workers.num_replicas
        return f"of {count} replicas" if count > 1 else "of one replica"

    @property
    def _is_whole(self) -> bool:
        """Whether each step computes its whole batch at once, as on one device."""
        is_one = self.workers.num_replicas == self.options.micro_batches == 1
        return is_one and not self._traits.has_servers

    def _must_check(self, kind: str) -> bool:
        if self._is_whole:
            return False
        is_sure = predicts_by_known_layers if kind == "predict" else is_known
        check = self.options.check
        is_guarded = bool(self._untested) or not is_sure(self.model)
        return check == "on" or (check == "auto" and is_guarded)

    def _check_trace(self, graph: tf.Graph) -> None:
        steps = self._steps or self._prediction
        is_divided = self._traits.has_servers or steps.steps.is_divided
        is_jitted = self.model.jit_compile and is_divided
        # Of known programs, too: their regularizers, schedules and the like are the user's code.
        if self.options.check != "off" and (is_jitted or not self._is_whole):
            check_draws(list_operations(graph), self.model, with_xla=is_jitted)

    def list_state(self) -> list[keras.Variable]:
        """Returns the variables that belong in a checkpoint."""
        extra = self._steps.state if self._steps else []
        optimizer = self.model.optimizer
        own = optimizer.variables if optimizer is not None else []
        return [*self.model.variables, *own, *extra]

    @property
    def _has_parts(self) -> bool:
        has_parts = self._placement is not None and self._placement.has_parts
        return has_parts or self.options.rematerialize

    @property
    def _is_placed(self) -> bool:
        return self._placement is not None or self.options.rematerialize

    def _divide_model(self) -> None:
        """Divides the model, and puts its variables where they are used."""
        if isinstance(self._placement, Shards) and self._shards is None:
            self._shards = UnitShards(
                self.model,
                self._placement,
                self._strategy,
                find_groups(self._strategy, self._placement.devices),
                find_optimizers=functools.partial(list_optimizers, self.model),
            )
        if self._plan is not None or not self._has_parts:
            return
        if isinstance(self._placement, Strips):
            groups = find_groups(self._strategy, self._placement.devices)
            self._plan = make_strip_plan(self.model, groups, self._placement.grid)
            return
        self._plan = make_plan(
            self.model, self._placement, self._strategy, recomputes=self.options.rematerialize
        )
        if self._plan.groups:
            built = [optimizer for optimizer in list_optimizers(self.model) if optimizer.built]
            place_variables(self._plan.stages, self._strategy, self._plan.groups, optimizers=built)

    def _make_steps(self) -> TrainingSteps:
        self._announced.clear()
        if self._traits.has_servers:
            return AsynchronousSteps(
                self.model,
                self._strategy,
                shard_tables_bytes=self.options.shard_tables_bytes,
                max_in_flight=self.options.max_in_flight,
                check_trace=self._check_trace,
                fused_layers=self.options.fused_layers,
            )
        kind: Any = LocalSteps if self.local_updates else SynchronousSteps
        if overrides(self.model, *FUNCTION_METHODS):
            kind = OwnFunctionSteps
        return kind(
            self.model,
            self._strategy,
            self.workers,
            self.options,
            create_variable=self._create_variable,
            plan=self._plan,
            shards=self._shards,
            check_trace=self._check_trace,
        )


@contextlib.contextmanager
def opening_scope(
    strategy: tf.distribute.Strategy, create_variable: Callable[..., Any]
) -> Iterator[None]:
    """Opens the scope in which variables are created for an `Engine`, by a `make_creator`."""
    creator_scope = tf.variable_creator_scope(create_variable)
    with strategy.scope(), creator_scope, compiling_as_alone(strategy):
        yield


@functools.cache
def _warn_once(text: str) -> None:
    logging.warning("%s", text)
