"""Keras's own code on one replica's rows of a global batch.

A training step is a program: Keras's `train_step`, or a user's own. On one device it runs as it is
written. On several replicas each runs it on its rows of the global batch, under one rule: **the
mean of the replicas' values, weighted by their rows, is the value of the global batch.** A plain
mean over rows obeys it as it stands. What does not is changed while the step is traced:

- a Keras loss that is normalized by a mask or by sample weights takes the global batch's count;
  a sum is scaled, so that the weighted mean of the replicas' sums is the sum;
- an additional loss of one value an example is a sum over the global batch;
- batch normalization takes the moments of the global batch;
- random numbers are those of the replica's rows (`randomness`);
- gradients are reduced before an optimizer sees them (`replica_optimizers`);
- metrics count every row once (`replica_metrics`).

A loss that is no mean over rows can still be computed, where all replicas' rows are gathered for it
(`gather_outputs`): each replica then computes the loss of the global batch.

A global batch of fewer rows than there are replicas goes to all of them whole, as copies, whose
mean is the batch's value again.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.internals import TensorFlowTrainer, backend, loss_module
from tfdist.training.added_losses import losses_by_thread
from tfdist.training.part import Part
from tfdist.training.randomness import RowDraws, Rows
from tfdist.training.reduction import SUM
from tfdist.training.replacing import replaced


class Division:
    """What replicas do in place of some of Keras's functions, while a step is traced.

    Args:
      model: a built model.
      strategy: the strategy it was built under.
      batch_norm: `global`, by the moments of the global batch; `per_replica`, as Keras does.
      gather_outputs: whether a loss sees the rows of all replicas.
      is_chief: whether this worker counts the copies that workers that train apart have.

    Attributes:
      draws: what random layers draw.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        *,
        batch_norm: str = "global",
        gather_outputs: bool = False,
        is_chief: bool = True,
    ):
        self.draws = RowDraws()
        self._model = model
        self._replicas = strategy.num_replicas_in_sync
        self._batch_norm = batch_norm
        self._gather_outputs = gather_outputs
        self._is_chief = is_chief
        # MirroredStrategy traces each replica in a thread of its own, by turns.
        self._of_thread = threading.local()

    @property
    def part(self) -> Part | None:
        """This thread's rows; None outside of `of`."""
        return getattr(self._of_thread, "part", None)

    @contextlib.contextmanager
    def of(self, part: Part, *, draws_rows: bool) -> Iterator[None]:
        """Runs Keras's code on these rows, in this thread.

        Args:
          part: the rows.
          draws_rows: whether random layers draw what these rows of the global batch would.
        """
        rows = Rows(part.first, part.rows) if draws_rows else None
        self._of_thread.part, self._of_thread.normalizers = part, _Normalizers()
        self._of_thread.own = None
        try:
            with self.draws.of(rows):
                yield
        finally:
            self._of_thread.part = None

    @contextlib.contextmanager
    def narrowed(self, first: tf.Tensor, count: tf.Tensor, *, parts: int) -> Iterator[None]:
        """Runs Keras's code on some of the rows that `of` was opened for.

        Args:
          first: int64 scalar, the place of the first among these rows.
          count: int64 scalar, how many there are.
          parts: the micro-batches of which they are one.
        """
        whole = self._of_thread.part
        self._of_thread.part = whole.narrow(count, parts)
        with self.draws.narrowed(first, count):
            yield
        self._of_thread.part = whole

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[tf.Tensor]]:
        """Collects the normalizers of this replica's rows, reducing none."""
        with self._using(_Normalizers(found=[])) as normalizers:
            yield normalizers.found

    @contextlib.contextmanager
    def knowing(self, normalizers: Sequence[tf.Tensor]) -> Iterator[None]:
        """Takes normalizers of the global batch, in the order in which they are asked for."""
        with self._using(_Normalizers(known=iter(normalizers))):
            yield

    def reduce_normalizers(self, found: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the global batch's normalizers, given this replica's."""
        if not found:
            return []
        part = self._of_thread.part
        context = tf.distribute.get_replica_context()
        stacked = tf.stack([tf.cast(number, tf.float64) for number in found])
        total = context.all_reduce(SUM, tf.stop_gradient(stacked))
        total = tf.where(part.is_copy, total / self._replicas, total)
        return [tf.cast(t, n.dtype) for t, n in zip(tf.unstack(total), found, strict=True)]

    @contextlib.contextmanager
    def intercept(self) -> Iterator[None]:
        """Stands in for Keras's functions. Opened around all replicas."""
        norm = keras.layers.BatchNormalization
        places = [
            (loss_module, "scale_loss_for_distribution", lambda value: value),
            (loss_module, "unscale_loss_for_distribution", lambda value: value),
            (loss_module, "apply_mask", self._make_apply_mask(loss_module.apply_mask)),
            (loss_module, "reduce_values", self._make_reduce_values(loss_module.reduce_values)),
            (TensorFlowTrainer, "_aggregate_additional_loss", self._make_aggregate()),
        ]
        if self._batch_norm == "global":
            places.append((norm, "_moments", self._make_moments(norm._moments)))
        if self._gather_outputs:
            owners = [c for c in type(self._model).__mro__ if "compute_loss" in vars(c)]
            wrap = self._make_compute_loss
            places += [(c, "compute_loss", wrap(vars(c)["compute_loss"])) for c in owners]
        with contextlib.ExitStack() as stack:
            for place in places:
                stack.enter_context(replaced(*place))
            stack.enter_context(losses_by_thread(self._model))
            stack.enter_context(self.draws.intercept())
            yield

    def gather(self, value: Any) -> Any:
        """Returns the rows of all replicas, in order, of a tensor that has rows.

        Of one number, the weighted mean; what is no tensor stays what it is.
        """
        part = self._of_thread.part
        if not tf.is_tensor(value) or isinstance(value, keras.Variable):
            return value
        context = tf.distribute.get_replica_context()
        if not value.shape.rank:
            if not value.dtype.is_floating:
                return value
            return context.all_reduce(SUM, value * tf.cast(part.weight, value.dtype))
        if value.shape[0] is not None and value.shape[0] != part.static_rows:
            return value
        mask = backend.get_keras_mask(value)
        gathered = self._gather_rows(value)
        if mask is not None:
            backend.set_keras_mask(gathered, self._gather_rows(mask))
        return gathered

    def is_counted(self) -> tf.Tensor:
        """Returns whether this replica's rows count: of copies, those of the first do."""
        part = self._of_thread.part
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        is_first = tf.logical_and(tf.equal(replica, 0), self._is_chief)
        return tf.logical_or(tf.logical_not(part.is_copy), is_first)

    def _gather_rows(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the replicas' rows: each fills its own of a table, whose sum is exact.

        Every replica is taken to differentiate the same function of the table, under the rule.
        """
        part = self._of_thread.part
        context = tf.distribute.get_replica_context()
        is_counted = self.is_counted()

        @tf.custom_gradient
        def gather(value: tf.Tensor) -> Any:
            is_exact = value.dtype == tf.bool or value.dtype.is_integer
            rows = tf.cast(value, tf.int64) if is_exact else value
            rows = tf.where(is_counted, rows, tf.zeros_like(rows))
            own = tf.shape(rows, tf.int64)[0]
            factor = own // part.rows
            before = part.first * factor
            after = (part.total - part.first - part.rows) * factor
            pads = tf.concat([[[before, after]], tf.zeros([value.shape.rank - 1, 2], tf.int64)], 0)
            table = tf.cast(context.all_reduce(SUM, tf.pad(rows, pads)), value.dtype)

            def differentiate(upstream: tf.Tensor) -> tf.Tensor:
                return upstream[before : before + own] * tf.cast(part.sum_scale, upstream.dtype)

            return tf.ensure_shape(table, [None, *value.shape[1:]]), differentiate

        return gather(value)

    @contextlib.contextmanager
    def _using(self, normalizers: "_Normalizers") -> Iterator["_Normalizers"]:
        before = self._of_thread.normalizers
        self._of_thread.normalizers = normalizers
        try:
            yield normalizers
        finally:
            self._of_thread.normalizers = before

    def _normalize(self, number: tf.Tensor) -> tf.Tensor:
        normalizers = self._of_thread.normalizers
        if normalizers.known is not None:
            return next(normalizers.known)
        if normalizers.found is not None:
            normalizers.found.append(number)
            return number
        return self.reduce_normalizers([number])[0]

    def _make_apply_mask(self, original: Any) -> Any:
        def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
            part = self.part
            if part is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
                return original(sample_weight, mask, dtype, reduction)
            # Keras: each valid entry weighs total / valid, of which the mean divides by total.
            weights = original(sample_weight, mask, dtype, "sum")
            valid = self._normalize(tf.reduce_sum(tf.cast(mask, dtype)))
            factor = tf.math.divide_no_nan(tf.cast(tf.size(mask), dtype), valid)
            return weights * (factor * tf.cast(part.sum_scale, dtype))

        return apply_mask

    def _make_reduce_values(self, original: Any) -> Any:
        def reduce_values(
            values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size"
        ) -> Any:
            part = self.part
            is_weighted = reduction == "mean_with_sample_weight" and sample_weight is not None
            if part is None or not (is_weighted or reduction == "sum") or not values.shape.rank:
                return original(values, sample_weight, reduction)
            total = tf.reduce_sum(values) * tf.cast(part.sum_scale, values.dtype)
            if reduction == "sum":
                return total
            weight = self._normalize(tf.cast(tf.reduce_sum(sample_weight), values.dtype))
            return tf.math.divide_no_nan(total, weight)

        return reduce_values

    def _make_aggregate(self) -> Any:
        def aggregate(model: keras.Model, loss: Any) -> Any:
            total = keras.ops.cast(keras.ops.sum(loss), keras.config.floatx())
            # What layers add is of this replica's rows, also where the loss is of all.
            if self.part is None or not loss.shape.rank:
                return total
            part = self._of_thread.own or self._of_thread.part
            is_by_row = loss.shape[0] is None or loss.shape[0] == part.static_rows
            return total * tf.cast(part.sum_scale, total.dtype) if is_by_row else total

        return aggregate

    def _make_compute_loss(self, original: Any) -> Any:
        def compute_loss(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            own = self.part
            if own is None or self._of_thread.own is not None:
                return original(model, *args, **kwargs)
            args, kwargs = keras.tree.map_structure(self.gather, (args, kwargs))
            self._of_thread.own, self._of_thread.part = own, own.unite(self._replicas)
            try:
                return original(model, *args, **kwargs)
            finally:
                self._of_thread.own, self._of_thread.part = None, own

        return compute_loss

    def _make_moments(self, original: Any) -> Any:
        def moments(layer: keras.layers.BatchNormalization, inputs: Any, mask: Any) -> Any:
            if self.part is None:
                return original(layer, inputs, mask)
            axes = layer._reduction_axes
            if mask is None:
                return self._pool_moments(inputs, axes)
            weights = tf.cast(tf.expand_dims(tf.cast(mask, tf.bool), -1), inputs.dtype)
            weights = tf.broadcast_to(weights, tf.shape(inputs))
            count = self._sum(tf.reduce_sum(weights, axes)) + keras.backend.epsilon()
            present = tf.where(weights > 0, inputs, 0)
            mean = self._sum(tf.reduce_sum(present, axes)) / count
            shape = [1] * inputs.shape.rank
            shape[layer.axis] = -1
            squares = tf.where(weights > 0, tf.square(inputs - tf.reshape(mean, shape)), 0)
            return mean, self._sum(tf.reduce_sum(squares, axes)) / count

        return moments

    def _pool_moments(self, inputs: tf.Tensor, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the moments of all replicas' inputs; see `tfdist.models.layers`."""
        mean, variance = tf.nn.moments(inputs, axes)
        context = tf.distribute.get_replica_context()
        place = tf.one_hot(context.replica_id_in_sync_group, self._replicas, dtype=mean.dtype)
        count = tf.cast(tf.size(inputs) / tf.size(mean), mean.dtype)
        row = tf.concat([count[None], mean, variance], 0)
        table = self._sum(place[:, None] * row)
        channels = tf.size(mean)
        counts, means, variances = tf.split(table, [1, channels, channels], axis=1)
        shares = tf.stop_gradient(counts / tf.reduce_sum(counts))
        offsets = means - means[0]
        offset = tf.reduce_sum(shares * offsets, 0)
        pooled = tf.reduce_sum(shares * (variances + tf.square(offsets - offset)), 0)
        return tf.ensure_shape(means[0] + offset, mean.shape), tf.ensure_shape(pooled, mean.shape)

    def _sum(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the replicas' values, to be differentiated under the rule.

        A replica differentiates its own value of the loss, whose weight in the global batch's is
        its part's.
        """
        weight = tf.cast(self._of_thread.part.weight, value.dtype)
        context = tf.distribute.get_replica_context()

        @tf.custom_gradient
        def reduce(value: tf.Tensor) -> Any:
            def differentiate(upstream: tf.Tensor) -> tf.Tensor:
                return context.all_reduce(SUM, upstream * weight) / weight

            return context.all_reduce(SUM, value), differentiate

        return reduce(value)


class _Normalizers:
    """Where the normalizers of losses come from: reduced at once, collected, or known."""

    def __init__(self, *, found: Any = None, known: Any = None):
        self.found: Any = found
        self.known: Any = known
