"""Measures how much a run computes, and its MFU (model FLOPs utilization)."""

import keras

from tfdist.runs.flops import TRAINING_PASSES, count_flops, measure_convolutions
from tfdist.training.fit.trainer import Trainer

_LAYERS = 3  # the costliest, whose convolutions define the peak of the devices


class Utilization(keras.callbacks.Callback):
    """Measures the peak speed of this process's device, before and after the timed steps.

    Other programs may slow down either measurement, but none makes the device faster, so the larger
    one counts. The first one follows the first step, which is not timed.
    """

    def __init__(self, trainer: Trainer, global_batch_size: int):
        super().__init__()
        self._trainer = trainer
        self._batch_size = -(-global_batch_size // trainer.engine.workers.num_replicas)
        self._peak = 0.0
        self._is_measured = False

    @property
    def async_safe(self) -> bool:
        """Whether steps may run ahead: not while the device's peak is measured."""
        return self._is_measured

    def on_train_batch_end(self, batch, logs=None):
        if not self._is_measured:
            self._measure()

    def summarize(self, examples_per_second: float) -> dict[str, float]:
        """Returns the run's floating-point operations per second, and its MFU.

        All workers must call it, although only the chief gets a result: they must trace the same
        functions, or the numbers of their collectives differ.

        Args:
          examples_per_second: the measured speed; with 0, the device is not measured again.

        Returns:
          An empty dict on other workers, or if the operations of the model cannot be counted.
        """
        of_example = TRAINING_PASSES * count_flops(self._trainer.model)
        if not (self._trainer.is_chief and of_example):
            return {}
        flops = of_example * examples_per_second
        if flops:
            self._measure()
        # The virtual devices of a CPU share its cores.
        is_cpu = all(":CPU:" in name for name in self._trainer.strategy.extended.worker_devices)
        devices = (
            self._trainer.engine.workers.count
            if is_cpu
            else self._trainer.engine.workers.num_replicas
        )
        share = flops / (devices * self._peak) if self._peak else 0.0
        return {"flops_per_second": round(flops), "mfu": round(share, 4)}

    def _measure(self) -> None:
        model = self._trainer.model
        fastest, _ = measure_convolutions(model, batch_size=self._batch_size, most=_LAYERS)
        self._peak = max(self._peak, fastest)
        self._is_measured = True
