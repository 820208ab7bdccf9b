"""The gradient of one replica's loss: what Keras's `train_step` computes before the update."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.internals import backend
from tfdist.training.division import Division
from tfdist.training.micro_batches import sum_over_micro_batches
from tfdist.training.rematerialize import make_call
from tfdist.training.replica_metrics import Logs, ReplicaMetrics
from tfdist.training.replica_optimizers import scale_gradient
from tfdist.training.step_options import StepOptions


def compute_loss(
    model: keras.Model, batch: Any, *, call: Callable[[Any], Any] | None = None
) -> tuple[tf.Tensor, Any]:
    """Runs Keras's `train_step` up to and including the loss.

    Args:
      model: a compiled model.
      batch: `(x, y, sample_weight)`.
      call: computes the outputs from `x` instead of the model.

    Returns:
      (loss, outputs).
    """
    x, y, sample_weight = batch
    if call is not None:
        y_pred = call(x)
    else:
        y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
    loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    rows = tf.shape(keras.tree.flatten(x)[0])[0]
    model._loss_tracker.update_state(loss, sample_weight=rows)
    return loss, y_pred


class OwnStep:
    """A training step for options that change how the gradient is computed.

    Without such options, the step is the model's own `train_step`.

    Args:
      model: a compiled and built model.
      options: how the gradient is computed.
      division: divides the global batch over the replicas.
      metrics: the replicas' metrics.
    """

    def __init__(
        self,
        model: keras.Model,
        options: StepOptions,
        *,
        division: Division,
        metrics: ReplicaMetrics,
    ):
        self._model = model
        self._options = options
        self._division = division
        self._metrics = metrics
        self._call = make_call(model, division.draws) if options.rematerialize else None

    def train(self, data: Any) -> Logs:
        """Updates the model with a replica's examples; returns the logs."""
        model = self._model
        x, y, sample_weight = batch = keras.utils.unpack_x_y_sample_weight(data)
        known = None
        if self._options.micro_batches > 1 or self._options.jit_compile:
            known = self._find_normalizers(batch)
        if self._options.micro_batches > 1:
            gradients, counts = self._differentiate_parts(batch, known)
            self._metrics.add(counts)
            logs = model.get_metrics_result
        else:
            gradients, counts, y_pred = self._differentiate(batch, known)
            self._metrics.add(counts)

            def logs() -> Logs:
                return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return logs()

    def _find_normalizers(self, batch: Any) -> list[tf.Tensor]:
        """Returns the losses' normalizers for the global batch, before its parts are computed.

        Of this forward pass, TensorFlow runs only what the normalizers need: labels, weights and
        masks, and hardly ever a layer.
        """
        values = [(v, tf.convert_to_tensor(v.value)) for v in self._model.variables]
        with (
            keras.StatelessScope(values, collect_losses=True),
            self._metrics.counting(),
            self._division.draws.again({}),
            self._division.recording() as found,
        ):
            compute_loss(self._model, batch, call=self._call)
        return self._division.reduce_normalizers(found)

    def _differentiate(self, batch: Any, known: Any) -> tuple[list[Any], dict[int, Any], Any]:
        """Returns the gradients of a replica's loss, the counts of metrics, and the outputs."""
        model = self._model
        variables = model.trainable_variables
        keys: list[int] = []

        def differentiate(batch: Any) -> tuple[Any, ...]:
            with (
                self._metrics.counting() as counts,
                contextlib.nullcontext() if known is None else self._division.knowing(known),
                tf.GradientTape() as tape,
            ):
                loss, y_pred = compute_loss(self._model, batch, call=self._call)
                scaled = model.optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, [variable.value for variable in variables])
            for part, variable in zip(gradients, variables, strict=True):
                if isinstance(part, tf.Tensor):
                    part.set_shape(variable.shape)  # TensorFlow does not always infer it
            keys[:] = counts
            masks = [backend.get_keras_mask(output) for output in keras.tree.flatten(y_pred)]
            return gradients, list(counts.values()), y_pred, masks

        if self._options.jit_compile:
            # Without the compiled metrics, because XLA does not support all operations.
            differentiate = tf.function(differentiate, jit_compile=True, autograph=False)
        gradients, counts, y_pred, masks = differentiate(batch)
        for output, mask in zip(keras.tree.flatten(y_pred), masks, strict=True):
            if mask is not None:
                backend.set_keras_mask(output, mask)
        return gradients, dict(zip(keys, counts, strict=True)), y_pred

    def _differentiate_parts(
        self, batch: Any, known: Any
    ) -> tuple[list[Any], dict[int, tf.Tensor]]:
        keys: list[int] = []

        def compute(part: Any, first: tf.Tensor, count: tf.Tensor) -> tuple[Any, ...]:
            x, y, sample_weight = part
            with self._division.narrowed(first, count, parts=self._options.micro_batches):
                gradients, counts, y_pred = self._differentiate(part, known)
                with self._metrics.counting() as more:
                    self._model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
            keys[:] = [*counts, *more]
            weighted = [scale_gradient(gradient, count) for gradient in gradients]
            return weighted, [*counts.values(), *more.values()]

        gradients, counts = sum_over_micro_batches(
            compute, batch, micro_batches=self._options.micro_batches
        )
        part = self._division.part
        assert part is not None
        inverse = 1 / tf.cast(part.rows, tf.float64)
        return [scale_gradient(g, inverse) for g in gradients], dict(zip(keys, counts, strict=True))
