"""The share of the machine's peak: the machine is measured twice, and the larger speed counts."""

import keras
import numpy as np
import pytest

from tfdist.runs import flops
from tfdist.runs.flops import TRAINING_PASSES, count_flops
from tfdist.strategies import make_one_device
from tfdist.training.fit.trainer import Trainer


def build_model():
    model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("speeds", [(4e9, 1e9), (1e9, 4e9)], ids=["busy after", "busy before"])
def test_the_larger_of_two_measurements_counts(monkeypatch, speeds):
    asked = []

    def measure(model, *, batch_size, most):
        asked.append((trainer.step, batch_size))
        return speeds[len(asked) - 1], 0.0

    monkeypatch.setattr(flops, "measure_convolutions", measure)
    trainer = Trainer(build_model, strategy=make_one_device(devices=["CPU:0"]))
    callback = flops.Utilization(trainer, 5)
    x, y = np.zeros((20, 8, 8, 3), np.float32), np.zeros((20, 6, 6, 4), np.float32)
    trainer.fit(x, y, global_batch_size=5, callbacks=[callback], verbose=0)
    found = callback.summarize(examples_per_second=100.0)
    assert asked == [(1, 5), (4, 5)]
    operations = TRAINING_PASSES * count_flops(trainer.model) * 100
    assert found == {"flops_per_second": operations, "mfu": round(operations / 4e9, 4)}


def test_a_run_without_steps_measures_nothing(monkeypatch):
    monkeypatch.setattr(flops, "measure_convolutions", None)
    trainer = Trainer(build_model, strategy=make_one_device(devices=["CPU:0"]))
    found = flops.Utilization(trainer, 5).summarize(examples_per_second=0.0)
    assert found == {"flops_per_second": 0, "mfu": 0.0}
