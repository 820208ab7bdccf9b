import keras
import pytest

from tfdist.training.optimizers import make_optimizer, make_schedule
from tfdist.training.options import TrainingOptions


def test_the_cosine_rises_then_falls_to_zero():
    schedule = make_schedule(TrainingOptions(learning_rate=0.1, warmup_steps=10), total_steps=200)
    rates = [float(schedule(step)) for step in range(201)]
    assert rates[0] == 0
    assert rates[5] == pytest.approx(0.05)
    assert max(rates) == pytest.approx(rates[10]) == pytest.approx(0.1)
    assert rates[105] == pytest.approx(0.05, rel=1e-3)
    assert rates[200] == pytest.approx(0, abs=1e-9)


def test_a_short_run_warms_up_for_a_tenth_of_it():
    schedule = make_schedule(TrainingOptions(learning_rate=0.1, warmup_steps=50), total_steps=20)
    assert float(schedule(2)) == pytest.approx(0.1)
    single = make_schedule(TrainingOptions(learning_rate=0.1), total_steps=1)
    assert float(single(0)) == pytest.approx(0.1)


def test_a_constant_is_a_number():
    options = TrainingOptions(schedule="constant", learning_rate=0.25)
    assert make_schedule(options, total_steps=9) == 0.25


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adam", keras.optimizers.Adam),
        ("adamw", keras.optimizers.AdamW),
        ("sgd", keras.optimizers.SGD),
    ],
)
def test_builds_keras_optimizers(name, kind):
    optimizer = make_optimizer(TrainingOptions(optimizer=name, clip_norm=0.5), total_steps=10)
    assert type(optimizer) is kind
    assert optimizer.global_clipnorm == 0.5
    assert (
        make_optimizer(TrainingOptions(optimizer=name, clip_norm=0), total_steps=10).global_clipnorm
        is None
    )


def test_averages_the_weights_if_told_to():
    assert not make_optimizer(TrainingOptions(), total_steps=10).use_ema
    optimizer = make_optimizer(TrainingOptions(ema_momentum=0.9), total_steps=10)
    assert (optimizer.use_ema, optimizer.ema_momentum) == (True, 0.9)
