"""The loss of the global batch, as shares that replicas can add up.

Keras normalises a loss over what one replica holds; the mean of such means is not the loss
of the global batch as soon as replicas hold different numbers of valid pixels, weights or
examples. Here every replica computes sums, the normalisers are summed over the replicas,
and a replica's share is its sum over the global normaliser.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf


class LossTerm(NamedTuple):
    """One output's loss on one replica, before normalisation.

    Attributes:
      total: float scalar, the weighted sum of the loss values.
      normalizer: float scalar, what the global sum of `total` is divided by, to be summed over
        the replicas as well; None for a loss that is a plain sum.
    """

    total: tf.Tensor
    normalizer: tf.Tensor | None


class RatioMetric(keras.metrics.Metric):
    """The quotient of two sums, exact over any split of the data.

    Args:
      name: the metric's name in the logs.
    """

    def __init__(self, name: str):
        super().__init__(name=name, dtype="float64")
        # Keras gives a metric's variables its floatx unless they say otherwise.
        self.numerator = self.add_variable((), "zeros", dtype=self.dtype, name="numerator")
        self.denominator = self.add_variable((), "zeros", dtype=self.dtype, name="denominator")

    def update_state(self, numerator: tf.Tensor, denominator: tf.Tensor) -> None:
        """Adds to both sums."""
        self.numerator.assign(self.numerator + tf.cast(numerator, self.dtype))
        self.denominator.assign(self.denominator + tf.cast(denominator, self.dtype))

    def result(self) -> tf.Tensor:
        """Returns the quotient; 0 before the first update."""
        return tf.math.divide_no_nan(
            tf.convert_to_tensor(self.numerator), tf.convert_to_tensor(self.denominator)
        )


class Objective:
    """A compiled model's losses, per output, with the trackers that show them.

    Built inside the strategy's scope, after the model's compiled loss.

    Args:
      model: a compiled model whose `CompileLoss` is built.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._terms: list[LossTerm] = []
        compiled = model._compile_loss
        # A user's own `compute_loss` is one opaque number; everything else is taken apart.
        self._opaque = compiled is None or type(model).compute_loss is not (
            keras.Model.compute_loss
        )
        if self._opaque:
            self._weights: list[Any] = [1.0]
            names = ["loss"]
        else:
            # CompileLoss resolves which output goes with which label and loss; a shallow copy
            # of it does so for us, with recorders in place of the losses.
            self._recorder = object.__new__(type(compiled))
            vars(self._recorder).update(vars(compiled))
            self._recorder._flat_losses = [
                flat._replace(loss=_Recorder(flat.loss, self._terms), loss_weights=None)
                for flat in compiled._flat_losses
            ]
            self._recorder._metrics = [None] * len(compiled._flat_losses)
            self._weights = [
                1.0 if flat.loss_weights is None else flat.loss_weights
                for flat in compiled._flat_losses
            ]
            names = [f"{flat.name}_loss" for flat in compiled._flat_losses]
        self.trackers = [RatioMetric(name) for name in names]
        self._penalty_tracker = RatioMetric("penalty")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """All trackers, in a fixed order."""
        return [*self.trackers, self._penalty_tracker]

    def measure(
        self,
        *,
        x: Any,
        y: Any,
        y_pred: Any,
        sample_weight: Any,
        num_rows: tf.Tensor,
        training: bool,
    ) -> "Measurement":
        """Returns this replica's loss terms and adds them to the trackers.

        Args:
          x, y, y_pred, sample_weight: one replica's batch, as Keras's `compute_loss` takes it.
          num_rows: int scalar, the replica's number of examples.
          training: as Keras's.
        """
        rows = tf.cast(num_rows, keras.config.floatx())
        if self._opaque:
            value = self._model._compute_loss(x, y, y_pred, sample_weight, training)
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            terms = [LossTerm(tf.cast(value, rows.dtype) * replicas * rows, rows)]
            penalty = None
        else:
            self._terms.clear()
            self._recorder(y, y_pred, sample_weight)
            terms = list(self._terms)
            losses = self._model.losses
            penalty = (
                tf.add_n([tf.reduce_sum(tf.cast(v, rows.dtype)) for v in losses])
                if losses
                else None
            )
        return Measurement(terms=terms, weights=self._weights, penalty=penalty, rows=rows)

    def track(self, measured: "Measurement", *, parts: int = 1) -> None:
        """Adds a measurement to the trackers; needs no communication.

        Args:
          measured: of one of the parts in which the replica computes its batch.
          parts: how many these are.
        """
        parts *= tf.distribute.get_strategy().num_replicas_in_sync
        for tracker, term in zip(self.trackers, measured.terms, strict=True):
            tracker.update_state(
                term.total, 1 / parts if term.normalizer is None else term.normalizer
            )
        if measured.penalty is not None:
            self._penalty_tracker.update_state(measured.penalty * measured.rows, measured.rows)

    def result(self) -> dict[str, tf.Tensor]:
        """Returns the tracked losses: `loss`, and one entry an output where there are several."""
        values = [tracker.result() for tracker in self.trackers]
        total = self._penalty_tracker.result()
        for weight, value in zip(self._weights, values, strict=True):
            total += tf.cast(weight, value.dtype) * value
        logs = {"loss": total}
        if len(values) > 1:
            logs |= {
                tracker.name: value for tracker, value in zip(self.trackers, values, strict=True)
            }
        return logs


class Measurement(NamedTuple):
    """What one replica measured on its part of a global batch.

    Attributes:
      terms: one `LossTerm` an output.
      weights: the outputs' loss weights.
      penalty: scalar, the sum of `model.losses`, or None.
      rows: float scalar, the replica's number of examples.
    """

    terms: Sequence[LossTerm]
    weights: Sequence[Any]
    penalty: tf.Tensor | None
    rows: tf.Tensor

    @property
    def normalizers(self) -> tf.Tensor:
        """The replica's number of examples and its terms' normalisers, one vector.

        Summed over the replicas it is what `make_share` takes.
        """
        local = [self.rows] + [
            tf.cast(tf.stop_gradient(term.normalizer), self.rows.dtype)
            for term in self.terms
            if term.normalizer is not None
        ]
        return tf.stack(local)

    def make_share(self, normalizers: tf.Tensor) -> tf.Tensor:
        """Returns this replica's share of the global loss: the shares add up to it.

        Args:
          normalizers: those of the global batch.
        """
        dtype = self.rows.dtype
        reduced = iter(tf.unstack(normalizers))
        global_rows = next(reduced)
        share = tf.zeros((), dtype)
        for term, weight in zip(self.terms, self.weights, strict=True):
            value = tf.cast(term.total, dtype)
            if term.normalizer is not None:
                value = tf.math.divide_no_nan(value, next(reduced))
            share += tf.cast(weight, dtype) * value
        if self.penalty is not None:
            # The penalty of the weights is the same everywhere, that of activities is a mean
            # over the replica's examples: weighted by its examples, both add up to the whole.
            share += self.penalty * self.rows / global_rows
        return share


class _Recorder:
    """Stands in for a Keras loss inside `CompileLoss` and keeps sums instead of means."""

    def __init__(self, loss: keras.losses.Loss, terms: list[LossTerm]):
        self._loss = loss
        self._terms = terms
        self.name = loss.name

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        term = measure_loss(self._loss, y_true, y_pred, sample_weight)
        self._terms.append(term)
        return term.total


def measure_loss(
    loss: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> LossTerm:
    """Returns a Keras loss as a sum and the count that normalises it.

    Follows `keras.losses.Loss.__call__` (Keras 3.15): masks count as absent values, sample
    weights scale the values and, except for `mean_with_sample_weight`, not the count.

    Args:
      loss: a Keras loss. One that overrides `__call__`, or whose `call` returns one number
        for the batch, is taken as a mean over its examples.
      y_true, y_pred: labels and predictions, [batch, ...].
      sample_weight: None, or weights of shape [batch] or of the loss values.
    """
    dtype = tf.as_dtype(loss.dtype)
    first = keras.tree.flatten(y_pred)[0]
    rows = tf.cast(tf.shape(first)[0], dtype)
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        value = tf.cast(loss(y_true, y_pred, sample_weight), dtype) * replicas
        return LossTerm(tf.reduce_mean(value) * rows, rows)
    mask = getattr(y_pred, "_keras_mask", None)
    y_pred = keras.tree.map_structure(lambda t: keras.ops.convert_to_tensor(t, dtype), y_pred)
    y_true = keras.tree.map_structure(lambda t: keras.ops.convert_to_tensor(t, dtype), y_true)
    values = loss.call(y_true, y_pred)
    values_mask = getattr(values, "_keras_mask", None)
    if values_mask is not None:
        mask = values_mask if mask is None else tf.logical_and(mask, values_mask)
    values = tf.cast(values, dtype)
    if values.shape.rank == 0:
        return LossTerm(values * rows, rows)
    weights = None
    if mask is not None:
        weights = tf.broadcast_to(_match(tf.cast(mask, dtype), values), tf.shape(values))
    count = tf.cast(tf.size(values), dtype) if weights is None else tf.reduce_sum(weights)
    if sample_weight is not None:
        sample_weight = _match(tf.cast(sample_weight, dtype), values)
        weights = sample_weight if weights is None else weights * sample_weight
        if loss.reduction == "mean_with_sample_weight":
            count = tf.reduce_sum(tf.broadcast_to(weights, tf.shape(values)))
    # A masked value may be infinite: it is left out, not multiplied by zero.
    if weights is not None:
        values = tf.math.multiply_no_nan(values, weights + tf.zeros_like(values))
    total = tf.reduce_sum(values)
    return LossTerm(total, None if loss.reduction == "sum" else count)


def _match(weights: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Gives weights the rank of the values: [batch] broadcasts over [batch, height, width]."""
    rank = values.shape.rank
    if weights.shape.rank == rank + 1 and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, -1)
    while weights.shape.rank < rank:
        weights = tf.expand_dims(weights, -1)
    return weights
