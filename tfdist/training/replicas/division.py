"""Runs Keras's own code on one replica's examples of a global batch.

A training step is a program: Keras's `train_step`, or the user's own. On one device it runs as
written. On several replicas, each one runs it on its examples of the global batch, under one rule:
**the mean of the replicas' values, weighted by their numbers of examples, is the value of the
global batch.** A plain mean over examples obeys it. The rest is changed while the step is traced:

- a Keras loss that is normalized by a mask or by sample weights uses the global batch's count;
  a sum is scaled, so that the weighted mean of the replicas' sums is the total;
- an added loss with one value per example is summed over the global batch, and so is the penalty of
  an activity regularizer, if this Keras adds it up over the examples;
- other sums over examples are scaled likewise, where the guard found that this is right
  (`example_sums`);
- batch normalization uses the moments of the global batch;
- random layers draw the numbers that belong to the replica's examples (`random_layers`);
- `tf.nn.compute_average_loss`, for replicas whose losses are added, gives a mean for this rule, and
  the user's code, which would divide such a mean by the number of replicas, sees one replica;
- gradients are reduced before an optimizer sees them (`optimizers`);
- metrics count every example once (`metrics`).

A loss that is not a mean over examples is possible if the outputs of all replicas are gathered
(`gather_outputs`): each replica then computes the loss of the global batch.

If a global batch has fewer examples than there are replicas, each replica gets a copy of the whole
batch. The mean over the copies is the value of the batch again.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.internals import (
    TensorFlowTrainer,
    custom_gradient,
    get_keras_mask,
    loss_module,
    set_keras_mask,
)
from tfdist.models.batch_norm import Moments, Replicas, pool_moments
from tfdist.replacing import find_function, replaced
from tfdist.training.replicas.added_losses import losses_by_thread, penalties_of_global_batch
from tfdist.training.replicas.attributes import attributes_by_replica
from tfdist.training.replicas.batch_share import BatchShare
from tfdist.training.replicas.branches import Branches
from tfdist.training.replicas.example_sums import list_sum_replacements
from tfdist.training.replicas.global_norm import list_norm_replacements
from tfdist.training.replicas.random_layers import RowDraws, Rows
from tfdist.training.replicas.reduction import SUM

Function = Callable[..., Any]

# The packages that ask for the number of replicas to compute on all of them.
_COUNTING = {"keras", "tensorflow", "tfdist"}


class Division:
    """Replaces some of Keras's functions on replicas while a step is traced.

    Args:
      batch_norm: `global` uses the moments of the global batch; `per_replica` is as in Keras.
      gather_outputs: whether a loss sees the examples of all replicas.
      is_chief: whether this worker counts the examples when all workers have copies of them.

    Attributes:
      draws: decides what random layers draw.
      num_sums: the sums over examples on all replicas, since `intercept` was opened.
      branches: the branches that variables, losses, metrics and results depend on.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        *,
        batch_norm: str = "global",
        gather_outputs: bool = False,
        is_chief: bool = True,
        is_compiled: bool = False,
    ):
        self.draws = RowDraws(is_compiled=is_compiled)
        self.num_sums = 0
        self.branches = Branches()
        self._scales_sums: bool | tf.Tensor = False
        self._model = model
        self._replicas = strategy.num_replicas_in_sync
        self._batch_norm = batch_norm
        self._gather_outputs = gather_outputs
        self._is_chief = is_chief
        # MirroredStrategy traces each replica in its own thread; the threads take turns.
        self._of_thread = threading.local()

    @property
    def part(self) -> BatchShare | None:
        """This thread's part of the global batch; None outside of `of`."""
        return getattr(self._of_thread, "part", None)

    def pool(self, moments: Moments) -> Moments:
        """Returns the moments of the global batch, given those of this replica's part."""
        if self.part is None or self._batch_norm != "global":
            return moments
        return pool_moments(moments, Replicas(self.part.weight))

    @contextlib.contextmanager
    def of(self, part: BatchShare, *, draws_rows: bool) -> Iterator[None]:
        """Runs Keras's code on a part of the global batch here; layers may draw its numbers."""
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
        """Runs Keras's code on some of the examples that `of` was opened for.

        Args:
          first: int64 scalar, the index of the first one among the examples of `of`.
          parts: the number of micro-batches, one of which these examples are.
        """
        whole = self._of_thread.part
        self._of_thread.part, self._of_thread.is_narrow = whole.narrow(count, parts), True
        with self.draws.narrowed(first, count):
            yield
        self._of_thread.part, self._of_thread.is_narrow = whole, False

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[tf.Tensor]]:
        """Collects the normalizers of this replica's losses, without reducing them."""
        with self._using(_Normalizers(found=[])) as normalizers:
            yield normalizers.found

    @contextlib.contextmanager
    def knowing(self, normalizers: Sequence[tf.Tensor]) -> Iterator[None]:
        """Uses known normalizers of the global batch, in the order in which losses need them."""
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
    def intercept(
        self, *, scales_sums: bool | tf.Tensor = False, finds_branches: bool = False
    ) -> Iterator[None]:
        """Replaces Keras's functions. Must be opened once, around all replicas.

        Args:
          scales_sums: whether sums over examples are scaled; see `example_sums`. A boolean scalar
            decides it in each run of what is traced.
          finds_branches: whether `branches` are looked for.
        """
        places: list[tuple[Any, str, Any]] = [
            (loss_module, "scale_loss_for_distribution", lambda value: value),
            (loss_module, "unscale_loss_for_distribution", lambda value: value),
            (TensorFlowTrainer, "_aggregate_additional_loss", self._aggregate),
            # For each all-reduce, TensorFlow searches the graph for variables. A function's graph
            # has none, it captures them, and the search takes minutes in deep networks.
            (custom_gradient, "_get_dependent_variables", lambda *_, **__: []),
        ]
        wrapped: list[tuple[Any, str, Function]] = [
            (loss_module, "apply_mask", self._apply_mask),
            (loss_module, "reduce_values", self._reduce_values),
            (loss_module, "squeeze_or_expand_to_same_rank", self._align),
            (tf.nn, "compute_average_loss", self._compute_average_loss),
            (tf.nn, "scale_regularization_loss", self._scale_regularization_loss),
        ]
        if self._gather_outputs:
            owners = [c for c in type(self._model).__mro__ if "compute_loss" in vars(c)]
            wrapped += [(c, "compute_loss", self._compute_loss) for c in owners]
        for owner in (tf.distribute.Strategy, tf.distribute.ReplicaContext):
            count = find_function(owner, "num_replicas_in_sync")
            own = property(functools.partial(self._count_replicas, count))
            places.append((owner, "num_replicas_in_sync", own))
        for owner, name, method in wrapped:
            places.append((owner, name, functools.partial(method, find_function(owner, name))))
        if self._batch_norm == "global":
            places += list_norm_replacements(lambda: self.part)
        self.num_sums, self._scales_sums = 0, scales_sums
        places += list_sum_replacements(self._find_scale, functools.partial(self.look, "the loss"))
        with contextlib.ExitStack() as stack:
            for place in places:
                stack.enter_context(replaced(*place))
            if finds_branches:
                stack.enter_context(self.branches.watching())
            stack.enter_context(losses_by_thread(self._model))
            stack.enter_context(attributes_by_replica(self._model))
            stack.enter_context(penalties_of_global_batch(self._model, self._scale_penalty))
            stack.enter_context(self.draws.intercept())
            yield

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Leaves sums over examples as they are, for metrics, which count them otherwise."""
        self._of_thread.is_counting = True
        try:
            yield
        finally:
            self._of_thread.is_counting = False

    def gather(self, value: tf.Tensor) -> Any:
        """Returns a tensor with the examples of all replicas, in order.

        A floating-point scalar becomes the weighted mean; anything else is returned unchanged.
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
        mask = get_keras_mask(value)
        gathered = self._gather_rows(value)
        if mask is not None:
            set_keras_mask(gathered, self._gather_rows(mask))
        return gathered

    def agree(self, value: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
        """Returns the weighted mean of the replicas' values, which is exact if they are equal.

        A variable that gets the first replica's value, as integers do, gets it as it is.
        """
        part = self.part
        if part is None or self._replicas == 1:
            return value
        self.branches.look(variable.name.partition(":")[0], value)
        if variable._aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            return value
        context = tf.distribute.get_replica_context()
        zeros = tf.zeros_like(value)
        is_first = tf.equal(context.replica_id_in_sync_group, 0)
        first = context.all_reduce(SUM, tf.where(is_first, value, zeros))
        offset = tf.where(value == first, zeros, value - first)
        return first + context.all_reduce(SUM, offset * tf.cast(part.weight, value.dtype))

    def look(self, name: str, value: Any) -> None:
        """Looks for branches in the value of a part of the batch, which are averaged over all."""
        has_parts = self._replicas > 1 or getattr(self._of_thread, "is_narrow", False)
        if self.part is not None and has_parts and not self._gather_outputs:
            self.branches.look(name, value)

    def is_counted(self) -> tf.Tensor:
        """Returns whether this replica counts: if all have the same examples, the first does."""
        part = self._of_thread.part
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        is_first = tf.logical_and(tf.equal(replica, 0), self._is_chief)
        return tf.logical_or(tf.logical_not(part.is_copy), is_first)

    def _gather_rows(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the replicas' rows: the exact sum of tables in which each replica fills its own.

        Under the rule, every replica is assumed to differentiate the same function of the table.
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

    def _find_scale(self) -> Callable[[tf.Tensor], tf.Tensor] | None:
        if self.part is None or getattr(self._of_thread, "is_counting", False):
            return None
        return self._scale_sum

    def _scale_sum(self, total: tf.Tensor) -> tf.Tensor:
        self.num_sums += 1
        scale = self._of_thread.part.sum_scale
        if isinstance(self._scales_sums, tf.Tensor):
            scale = tf.where(self._scales_sums, scale, tf.ones_like(scale))
        elif not self._scales_sums:
            return total
        return total * tf.cast(scale, total.dtype)

    def _scale_penalty(self, penalty: tf.Tensor) -> Any:
        part = self.part
        return penalty if part is None else penalty * tf.cast(part.sum_scale, penalty.dtype)

    def _apply_mask(
        self,
        original: Function,
        sample_weight: tf.Tensor | None,
        mask: tf.Tensor | None,
        dtype: str | tf.DType,
        reduction: str | None,
    ) -> Any:
        part = self.part
        if part is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return original(sample_weight, mask, dtype, reduction)
        # In Keras, each valid entry weighs total / valid, and the mean divides by total.
        weights = original(sample_weight, mask, dtype, "sum")
        valid = self._normalize(tf.reduce_sum(tf.cast(mask, dtype)))
        factor = tf.math.divide_no_nan(tf.cast(tf.size(mask), dtype), valid)
        return weights * (factor * tf.cast(part.sum_scale, dtype))

    def _reduce_values(
        self,
        original: Function,
        values: tf.Tensor,
        sample_weight: tf.Tensor | None = None,
        reduction: str | None = "sum_over_batch_size",
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

    def _compute_average_loss(
        self,
        original: Function,
        per_example_loss: tf.Tensor,
        sample_weight: tf.Tensor | None = None,
        global_batch_size: int | None = None,
    ) -> Any:
        """Returns the loss of training loops that add up the replicas' losses."""
        part = self.part
        if part is None:
            return original(per_example_loss, sample_weight, global_batch_size)
        losses = tf.convert_to_tensor(per_example_loss)
        scale = tf.cast(part.sum_scale, losses.dtype)
        size = part.total if global_batch_size is None else global_batch_size
        # TensorFlow weights losses and their gradients in float32, so both are scaled outside of
        # that: otherwise, they would be rounded otherwise than on one device.
        loss = original(_scale(losses, 1, scale), sample_weight, 1)
        return _scale(loss / tf.cast(size, loss.dtype), scale, 1)

    def _scale_regularization_loss(self, original: Function, regularization_loss: tf.Tensor) -> Any:
        if self.part is None:
            return original(regularization_loss)
        return tf.reduce_sum(regularization_loss)

    def _count_replicas(self, original: property, owner: Any) -> int:
        """Returns one for the user's code, as on one device: its means are those of the batch."""
        is_users = self.part is not None and _find_calling_package() not in _COUNTING
        return 1 if is_users else original.__get__(owner)

    def _align(
        self, original: Function, values: tf.Tensor, weights: tf.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        values, weights = original(values, weights, *args, **kwargs)
        part = self.part
        if part is None or len(values.shape) == len(weights.shape):
            return values, weights
        # TensorFlow aligns the last axes. Where a part of the batch happens to have as many
        # examples as that axis has entries, it would weight other entries than Keras does.
        fewer, more = sorted((values.shape, weights.shape), key=len)
        if len(fewer) and fewer[0] in (None, part.static_rows):
            raise TfdistError(
                f"Cannot weight losses of shape {_describe(more)} by weights or masks of shape "
                f"{_describe(fewer)}: Keras aligns their last axes, which weights the "
                "examples of a part of a batch otherwise. Give weights an axis for each axis "
                "of the losses, such as [batch, 1]."
            )
        return values, weights

    def _aggregate(self, model: keras.Model, loss: Any) -> Any:
        total = keras.ops.cast(keras.ops.sum(loss), keras.config.floatx())
        # Layers add losses of this replica's examples, even where the loss covers all of them.
        if self.part is None or not loss.shape.rank:
            return total
        part = self._of_thread.own or self._of_thread.part
        is_by_row = loss.shape[0] is None or loss.shape[0] == part.static_rows
        return total * tf.cast(part.sum_scale, total.dtype) if is_by_row else total

    def _compute_loss(
        self, original: Function, model: keras.Model, *args: Any, **kwargs: Any
    ) -> Any:
        own = self.part
        if own is None or self._of_thread.own is not None:
            return original(model, *args, **kwargs)
        args, kwargs = keras.tree.map_structure(self.gather, (args, kwargs))
        self._of_thread.own, self._of_thread.part = own, own.unite(self._replicas)
        try:
            return original(model, *args, **kwargs)
        finally:
            self._of_thread.own, self._of_thread.part = None, own


def _scale(x: tf.Tensor, by: tf.Tensor | int, gradient_by: tf.Tensor | int) -> tf.Tensor:
    """Returns a tensor times a number; its gradient is multiplied by another one."""

    @tf.custom_gradient
    def scale(x: tf.Tensor) -> Any:
        return x * by, lambda gradient: gradient * gradient_by

    return scale(x)


def _find_calling_package() -> str:
    """Returns the package of the code that reads a replaced property."""
    frame = inspect.currentframe()
    modules = {__name__, replaced.__module__}
    while frame is not None and frame.f_globals.get("__name__") in modules:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).partition(".")[0] if frame else ""


def _describe(shape: tf.TensorShape) -> str:
    return f"[{', '.join(['batch', *map(str, shape[1:])])}]"


class _Normalizers:
    """The source of the losses' normalizers: reduced at once, collected, or already known."""

    def __init__(self, *, found: Any = None, known: Any = None):
        self.found: Any = found
        self.known: Any = known
