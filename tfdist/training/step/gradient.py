"""The gradient of one replica's loss: what Keras's `train_step` computes before the update."""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Batch, Nested
from tfdist.internals import get_keras_mask, set_keras_mask
from tfdist.placement.stages.call import StagedCall
from tfdist.placement.strips.call import StripedCall
from tfdist.training.replicas.division import Division
from tfdist.training.replicas.metrics import Logs, ReplicaMetrics
from tfdist.training.replicas.optimizers import scale_gradient
from tfdist.training.step.micro_batches import (
    add_gradients,
    check_enough,
    sum_over_micro_batches,
    take_micro_batch,
)
from tfdist.training.step_options import StepOptions


def compute_loss(model: keras.Model, batch: Batch) -> tuple[tf.Tensor, Any]:
    """Runs Keras's `train_step` on `(x, y, sample_weight)` up to and including the loss."""
    x, y, sample_weight = batch
    y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
    loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    rows = tf.shape(next(t for t in keras.tree.flatten(x) if t is not None))[0]
    model._loss_tracker.update_state(loss, sample_weight=rows)
    return loss, y_pred


class GradientStep:
    """A training step for options that change how the gradient is computed.

    Without such options, the step is the model's own `train_step`.

    Args:
      staged: computes the model by stages or strips, if it has any.
    """

    def __init__(
        self,
        model: keras.Model,
        options: StepOptions,
        *,
        division: Division,
        metrics: ReplicaMetrics,
        staged: StagedCall | StripedCall | None = None,
    ):
        self._model = model
        self._options = options
        self._division = division
        self._metrics = metrics
        self._staged = staged

    def train(self, data: Batch) -> Logs:
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

    def _find_normalizers(self, batch: Batch) -> list[tf.Tensor]:
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
            compute_loss(self._model, batch)
        return self._division.reduce_normalizers(found)

    def _differentiate(
        self, batch: Batch, known: Sequence[tf.Tensor] | None
    ) -> tuple[list[Any], dict[int, Any], Any]:
        """Returns the gradients of a replica's loss, the counts of metrics, and the outputs."""
        model = self._model
        variables = model.trainable_variables
        keys: list[int] = []

        def differentiate(batch: Batch) -> tuple[Any, ...]:
            with (
                self._metrics.counting() as counts,
                contextlib.nullcontext() if known is None else self._division.knowing(known),
                tf.GradientTape() as tape,
            ):
                loss, y_pred = compute_loss(self._model, batch)
                scaled = model.optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, [variable.value for variable in variables])
            for part, variable in zip(gradients, variables, strict=True):
                if isinstance(part, tf.Tensor):
                    part.set_shape(variable.shape)  # TensorFlow does not always infer it
            keys[:] = counts
            masks = [get_keras_mask(output) for output in keras.tree.flatten(y_pred)]
            return gradients, list(counts.values()), y_pred, masks

        if self._options.jit_compile:
            # Without the compiled metrics, because XLA does not support all operations.
            differentiate = tf.function(differentiate, jit_compile=True, autograph=False)
        gradients, counts, y_pred, masks = differentiate(batch)
        for output, mask in zip(keras.tree.flatten(y_pred), masks, strict=True):
            if mask is not None:
                set_keras_mask(output, mask)
        return gradients, dict(zip(keys, counts, strict=True)), y_pred

    def _differentiate_parts(
        self, batch: Batch, known: Sequence[tf.Tensor] | None
    ) -> tuple[list[Any], dict[int, tf.Tensor]]:
        keys: list[int] = []

        def compute(part: Nested[tf.Tensor], first: tf.Tensor, count: tf.Tensor) -> tuple[Any, ...]:
            x, y, sample_weight = part
            with self._division.narrowed(first, count, parts=self._options.micro_batches):
                gradients, counts, y_pred = self._differentiate(part, known)
                with self._metrics.counting() as more:
                    self._model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
            keys[:] = [*counts, *more]
            weighted = [scale_gradient(gradient, count) for gradient in gradients]
            return weighted, [*counts.values(), *more.values()]

        if self._staged and self._staged.is_pipelined:
            gradients, counts = self._pipeline(self._staged, batch, known, keys)
        else:
            gradients, counts = sum_over_micro_batches(
                compute, batch, micro_batches=self._options.micro_batches
            )
        part = self._division.part
        assert part is not None
        inverse = 1 / tf.cast(part.rows, tf.float64)
        return [scale_gradient(g, inverse) for g in gradients], dict(zip(keys, counts, strict=True))

    def _pipeline(
        self, staged: StagedCall, batch: Batch, known: Any, keys: list[int]
    ) -> tuple[list[Any], list[tf.Tensor]]:
        """Returns the sums over the micro-batches, computed by several devices at the same time.

        On each device, the forward passes of all micro-batches run first, and then their backward
        passes from the last one to the first.

        Args:
          known: the normalizers of the global batch.
          keys: is set to the keys of the counts that are returned.
        """
        model, count = self._model, self._options.micro_batches
        variables = model.trainable_variables
        last = staged.find_device(-1)
        draws = self._division.draws
        mark = draws.mark()
        forwards = []
        total: list[Any] = [None] * len(variables)
        counts: list[tf.Tensor] = []
        is_last = False
        with (
            tf.control_dependencies([check_enough(batch, count)]),
            staged.in_order(is_followed=lambda: is_last),
        ):
            for index in range(count):
                is_last = index == count - 1
                part, first, rows = take_micro_batch(batch, tf.constant(index, tf.int64), count)
                x, y, sample_weight = part
                with (
                    # All micro-batches draw from the same states, and advance them once.
                    draws.again(mark) if index else contextlib.nullcontext(),
                    self._division.narrowed(first, rows, parts=count),
                    self._metrics.counting() as found,
                    self._division.knowing(known),
                    tf.GradientTape() as tape,
                    tf.device(last),
                ):
                    loss, y_pred = compute_loss(model, part)
                    scaled = model.optimizer.scale_loss(loss)
                    with tape.stop_recording():
                        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
                forwards.append((tape, scaled, first, rows))
                keys[:] = list(found)
                new = list(found.values())
                counts = [a + b for a, b in zip(counts, new, strict=True)] if counts else new
            for tape, scaled, first, rows in reversed(forwards):
                with self._division.narrowed(first, rows, parts=count), tf.device(last):
                    found = tape.gradient(scaled, [variable.value for variable in variables])
                scaled_by_rows = [scale_gradient(gradient, rows) for gradient in found]
                total = [add_gradients(a, b) for a, b in zip(total, scaled_by_rows, strict=True)]
        return total, counts
