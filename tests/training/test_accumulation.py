"""Optimizers that accumulate gradients do so on replicas, where Keras cannot run them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import zoo
from tests.training.programs import X, Y, dense
from tfdist.errors import TfdistError
from tfdist.placement import Layers, Shards

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    "clipped": lambda: keras.optimizers.AdamW(
        0.01, weight_decay=0.1, clipnorm=0.5, gradient_accumulation_steps=3
    ),
    "averaged": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5),
        global_clipnorm=0.5,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=2,
        gradient_accumulation_steps=2,
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
        initial_scale=8.0,
        dynamic_growth_steps=3,
    ),
}
WAYS = {
    "mirrored-2": {},
    "one_device": {"micro_batches": 2},
    "mirrored-3": {"micro_batches": 2},
    "central_storage-2": {},
}


def _read(unknown):
    """Returns three batches; if their number is unknown, an epoch ends with a step without data."""
    data = tf.data.Dataset.from_tensor_slices((X[:30], Y[:30])).batch(10)
    return data.filter(lambda *_: True) if unknown else data


def _compare(optimizer, strategy, unknown, **options):
    def build():
        model = dense()
        model.compile(OPTIMIZERS[optimizer](), "mse")
        return model

    trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES[strategy](), **options)
    found = trainer.fit(_read(unknown), epochs=3, shuffle=False, verbose=0).history["loss"]
    model = build()
    expected = model.fit(_read(unknown), epochs=3, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    weights = zip(trainer.model.get_weights(), model.get_weights(), strict=True)
    for one, other in weights:
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.thorough(keep=4)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("unknown", [True, False], ids=["unknown", "known"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", WAYS)
def test_gradients_of_several_steps_update_once(float64, strategy, optimizer, unknown):
    _compare(optimizer, strategy, unknown, **WAYS[strategy])


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("mirrored-2", {"rematerialize": True}),
        ("mirrored-2", {"jit_compile": True}),
        ("one_device", {"placement": Layers()}),
        ("one_device", {"placement": Shards()}),
    ],
    ids=["rematerialize", "jit_compile", "layers", "shards"],
)
def test_so_they_do_if_the_gradient_is_computed_otherwise(float64, strategy, options):
    _compare("momentum", strategy, False, **options)


def test_a_divided_state_is_refused():
    with pytest.raises(TfdistError, match="shard_optimizer.*SGD with gradient_accumulation_steps"):
        _compare("momentum", "mirrored-2", False, shard_optimizer=True)
