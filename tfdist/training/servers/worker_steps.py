"""The steps of workers with parameter servers: gradients, metrics and outputs."""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Batch
from tfdist.errors import TfdistError
from tfdist.placement.shards.divided import find_divided
from tfdist.placement.tables import Tables, add_lookups, check_unused, clip_rows
from tfdist.training.replicas.random_layers import RowDraws
from tfdist.training.servers.gradient_slots import GradientSlots
from tfdist.training.servers.vectors import Shard, make_shards
from tfdist.training.step.fused_layers import fusing_layers
from tfdist.training.step.gradient import compute_loss

Read = Callable[[tf.Tensor, Any], Any]
Values = list[tuple[keras.Variable, tf.Tensor]]


class WorkerSteps:
    """The steps that are sent to workers. They change nothing but the slot of a gradient.

    Args:
      counted: the variables of the metrics.

    Attributes:
      version: the number of updates of the weights, which a step reads before the weights.
      with_gradient: indices of the trainable weights that have a gradient; known once a training
        step is traced.
      counted: the shards of the metrics' variables, whose counts a step returns.
      updated: the shards of the other variables that a training step changes; likewise known once
        it is traced.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.ParameterServerStrategy,
        *,
        counted: Sequence[keras.Variable],
        slots: GradientSlots,
        tables: Tables,
        generators: Sequence[keras.random.SeedGenerator],
        check_trace: Callable[[Any], None],
        fused_layers: bool,
    ):
        self._model = model
        self._strategy = strategy
        self.counted = make_shards(counted)
        self._slots = slots
        self._tables = tables
        self._check_trace = check_trace
        self._fusing = fusing_layers(fused_layers)
        self._generators = generators
        self._trainable = list(model.trainable_variables)
        known = {id(v) for v in [*model.metrics_variables, *self._trainable, *tables.variables]}
        self._others = [v for v in model.variables if id(v) not in known]
        self._weights = make_shards([*self._trainable, *self._others])
        self.version: tf.Variable = None
        self.with_gradient: list[int] = []
        self.updated: list[Shard] = []

    def set_version(self, step: int) -> None:
        """Sets the number of updates of the weights."""
        if self.version is None:
            divided = find_divided(self._trainable[0])
            first = divided.parts[0] if divided else self._trainable[0].value
            with self._strategy.scope(), self._strategy.extended.colocate_vars_with(first):
                self.version = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.version.assign(step)

    def make_compute(self, read: Read) -> Any:
        """Returns the function that a worker runs at a training step.

        Like those of the other kinds, it is given the state of each generator before the step.
        """
        model = self._model
        counted = self.counted

        @tf.function(autograph=False, reduce_retracing=True)
        @self._fusing
        def compute(
            step: tf.Tensor,
            seeds: list[tf.Tensor],
            ticket: tf.Tensor,
            slots: list[tf.Tensor],
            batch: Batch,
        ) -> dict[str, Any]:
            batch = read(step, batch)
            version = self.version.read_value()
            with tf.control_dependencies([version]):
                mapping = self._read_weights(seeds)
            stand_ins = self._tables.make_stand_ins()
            mapping += stand_ins
            values = {id(variable): value for variable, value in mapping}
            weights = [values[id(variable)] for variable in self._trainable]
            olds = [(v, values[id(v)]) for v in self._others]
            with (
                _Alone(self._strategy, 0),
                tf.GradientTape(watch_accessed_variables=False) as tape,
                tf.GradientTape(persistent=True, watch_accessed_variables=False) as state_tape,
            ):
                tape.watch(weights)
                state_tape.watch([old for _, old in olds if old.dtype.is_floating])
                with (
                    _refusing_draws(but=self._generators),
                    self._tables.looking_up(tape=tape, after=[version]) as lookups,
                    keras.StatelessScope(
                        [*mapping, *_make_zeros(counted)], collect_losses=True
                    ) as scope,
                ):
                    x, y, sample_weight = data = keras.utils.unpack_x_y_sample_weight(batch)
                    loss, y_pred = compute_loss(model, data)
                    model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
            check_unused(stand_ins)
            gradients, by_rows = tape.gradient(loss, [weights, [found.rows for found in lookups]])
            gradients = [
                add_lookups(v, lookups, by_rows) if find_divided(v) else gradient
                for v, gradient in zip(self._trainable, gradients, strict=True)
            ]
            _refuse_updates("train", scope, zip(self._trainable, weights, strict=True))
            _refuse_untracked("train", scope, [*mapping, *_make_zeros(counted)])
            self.with_gradient[:] = [i for i, g in enumerate(gradients) if g is not None]
            # Slices of the same row are not added, as in Keras: an optimizer squares each one.
            clipped = clip_rows(
                model.optimizer,
                [gradients[i] for i in self.with_gradient],
                [self._trainable[i] for i in self.with_gradient],
            )
            found = list(zip(self.with_gradient, clipped, strict=True))
            sparse = {i: g for i, g in found if isinstance(g, tf.IndexedSlices)}
            by_variable = {id(self._trainable[i]): g for i, g in found if i not in sparse}
            self._slots.write(slots, ticket, by_variable)
            news = [(v, old, scope.get_current_value(v)) for v, old in olds]
            self._check_trace(tf.compat.v1.get_default_graph())
            changed = {id(v): (old, new) for v, old, new in news if new is not old}
            self.updated[:] = make_shards([v for v, _ in olds if id(v) in changed])
            updates = [_describe_update(old, new, state_tape) for old, new in changed.values()]
            rows = [dict(zip(changed, row, strict=True)) for row in zip(*updates, strict=True)]
            return {
                "loss": loss,
                "version": version,
                "sparse": {str(i): (g.values, g.indices) for i, g in sparse.items()},
                "states": [tf.stack([s.join(row) for row in rows]) for s in self.updated],
                "counts": [shard.join(_get_counts(scope, shard)) for shard in counted],
            }

        return compute

    def make_evaluate(self, read: Read) -> Any:
        """Returns the function that a worker runs at a step of an evaluation."""
        counted = self.counted

        @tf.function(autograph=False, reduce_retracing=True)
        @self._fusing
        def evaluate(step: tf.Tensor, seeds: list[tf.Tensor], batch: Batch) -> list[tf.Tensor]:
            batch = read(step, batch)
            weights = self._read_weights(seeds)
            with (
                _Alone(self._strategy, 0),
                self._tables.looking_up(),
                self._without_updates(weights, _make_zeros(counted)) as scope,
            ):
                self._model.test_step(batch)
            return [shard.join(_get_counts(scope, shard)) for shard in counted]

        return evaluate

    def make_predict(self, read: Read) -> Any:
        """Returns the function that a worker runs at a step of a prediction."""

        @tf.function(autograph=False, reduce_retracing=True)
        @self._fusing
        def predict(step: tf.Tensor, seeds: list[tf.Tensor], batch: Batch) -> Any:
            batch = read(step, batch)
            weights = self._read_weights(seeds)
            with (
                _Alone(self._strategy, 0),
                self._tables.looking_up(),
                self._without_updates(weights),
            ):
                return self._model.predict_step(batch)

        return predict

    def _read_weights(self, seeds: Sequence[tf.Tensor]) -> Values:
        states = {id(g.state): seed for g, seed in zip(self._generators, seeds, strict=True)}
        pairs = [pair for shard in self._weights for pair in shard.read()]
        return [(variable, states.get(id(variable), value)) for variable, value in pairs]

    @contextlib.contextmanager
    def _without_updates(
        self, weights: Values, others: Sequence[Any] = ()
    ) -> Iterator[keras.StatelessScope]:
        """Opens a scope with these values, for a step that must leave the weights as they are.

        Raises:
          TfdistError: it changes one of them; the chief only counts draws from generators.
        """
        with (
            _refusing_draws(but=self._generators),
            keras.StatelessScope([*weights, *others], collect_losses=True) as scope,
        ):
            yield scope
        generated = {id(generator.state) for generator in self._generators}
        kept = [pair for pair in weights if id(pair[0]) not in generated]
        _refuse_updates("evaluate or predict", scope, kept)
        _refuse_untracked("evaluate or predict", scope, [*weights, *others])


class _Alone(tf.distribute.ReplicaContext):
    """The context of a worker, which computes a whole batch, so that its sum is that of all."""

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        return value


def _refuse_updates(
    action: str, scope: keras.StatelessScope, weights: Iterable[tuple[keras.Variable, tf.Tensor]]
) -> None:
    """Refuses a step that changes weights that had given values."""
    for variable, value in weights:
        if scope.get_current_value(variable) is not value:
            raise TfdistError(
                f"Cannot {action} under ParameterServerStrategy: a layer assigns its own weight "
                f"{variable.path}, which a worker cannot do. Use another strategy."
            )


def _refuse_untracked(
    action: str, scope: keras.StatelessScope, given: Iterable[tuple[keras.Variable, Any]]
) -> None:
    """Refuses a step that changes variables that are not the model's, as it would change nothing.

    Those of a stateful recurrent layer are an example.
    """
    lost = scope.state_mapping.keys() - {id(variable) for variable, _ in given}
    if lost:
        paths = sorted(found.path for found in gc.get_objects() if id(found) in lost)
        raise TfdistError(
            f"Cannot {action} under ParameterServerStrategy: the variable {paths[0]} is assigned, "
            "but is none of the model's, and a worker cannot change it. Add it to a layer with "
            "add_weight, leave out stateful=True, or use another strategy."
        )


def _make_zeros(shards: Sequence[Shard]) -> Values:
    return [(v, tf.zeros(v.shape, v.dtype)) for shard in shards for v in shard.variables]


def _get_counts(scope: keras.StatelessScope, shard: Shard) -> dict[int, tf.Tensor]:
    return {id(variable): scope.get_current_value(variable) for variable in shard.variables}


def _describe_update(
    old: tf.Tensor, new: tf.Tensor, tape: tf.GradientTape
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns a layer's update of a value in a form that can be applied to a newer value.

    A moving mean becomes `momentum * old + rest`. Other steps have changed it by the time
    the update is applied: `new + slope * (current - old)`, with the momentum as the slope, is
    what the layer would have computed from the current value.
    """
    slope = tape.gradient(new, old) if old.dtype.is_floating else None
    return old, new, tf.zeros_like(old) if slope is None else slope


@contextlib.contextmanager
def _refusing_draws(*, but: Sequence[keras.random.SeedGenerator]) -> Iterator[None]:
    """Refuses a step that draws from generators whose state the chief does not advance."""
    draws = RowDraws()
    with draws.watch():
        yield
    known = {id(generator) for generator in but}
    if any(key not in known for key in draws.seen):
        raise TfdistError(
            "Cannot draw under ParameterServerStrategy from a SeedGenerator that no layer of the "
            "model holds: a worker cannot advance its state. Make the layer that draws a part of "
            "the model, or use another strategy."
        )
