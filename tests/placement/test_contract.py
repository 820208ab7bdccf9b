"""What holds for every placement: the result is that of one device, or the program is refused."""

import functools
import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.placement.training import make_adam, train, train_whole
from tfdist.errors import TfdistError
from tfdist.placement.options import PLACEMENTS

pytestmark = pytest.mark.optimized
each_placement = pytest.mark.parametrize("kind", PLACEMENTS.values(), ids=PLACEMENTS)
WITH_PICTURES = ("convolutional", "unet")
WITH_BATCH_NORM = ("convolutional", "unet")
OPTIONS = {
    "two": {"devices": 2},
    "three": {},
    "loop": {"steps_per_loop": 2},
    "micro-batches": {"micro_batches": 3},
    "guarded": {"micro_batches": 3, "check": "on"},
    "recomputed": {"rematerialize": True},
    "all": {"micro_batches": 3, "rematerialize": True, "steps_per_loop": 2},
}


def _find_refusal(kind, name, options):
    """Returns the message of the refusal that is due; None if the result must be equal."""
    if "rematerialize" in options and kind.name != "layers":
        return f"`placement={kind.name}` cannot be combined with `rematerialize`"
    if "micro_batches" in options and name in WITH_BATCH_NORM:
        return "Cannot split a batch into 3 micro-batches"
    if kind.name == "strips" and name not in WITH_PICTURES:
        return "`placement=strips` has nothing to divide"
    return None


# Each option, model and placement comes first once or more, and then all that is left.
FIRST = [
    ("two", "transformer", "layers"),
    ("three", "convolutional", "strips"),
    ("loop", "two_inputs", "shards"),
    ("recomputed", "random", "layers"),
    ("guarded", "dense", "shards"),
    ("all", "two_inputs", "layers"),
    ("loop", "unet", "strips"),
]
ALL = itertools.product(OPTIONS, zoo.EXAMPLES, PLACEMENTS)


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize(
    ("options", "name", "placement"), [*FIRST, *(case for case in ALL if case not in FIRST)]
)
def test_ends_where_one_device_ends(float64, placement, options, name):
    kind, steps = PLACEMENTS[placement], {**OPTIONS[options]}
    placement = kind(devices=steps.pop("devices", 0))
    refusal = _find_refusal(kind, name, steps)
    if refusal:
        with pytest.raises(TfdistError, match=re.escape(refusal)) as caught:
            train(name, placement=placement, **steps)
        assert "\n" not in str(caught.value)
        return
    _, expected, weights = train_whole(name)
    trainer, history, found = train(name, placement=placement, **steps)
    assert zoo.largest_difference(found, weights) < 1e-12
    assert history.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-12, err_msg=key)
    x, _ = zoo.EXAMPLES[name].data
    whole = keras.tree.flatten(train_whole(name)[0].predict(x, verbose=0))
    for ours, theirs in zip(keras.tree.flatten(trainer.predict(x, verbose=0)), whole, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@each_placement
def test_half_precision(kind, policy):
    keras.config.set_dtype_policy(policy)
    try:
        expected, found = (train("convolutional", **o)[1] for o in ({}, {"placement": kind()}))
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-2)


def _run(path, steps, placement=None):
    example = zoo.EXAMPLES["unet"]
    trainer = tfdist.Trainer(
        lambda: example.build(make_adam()),
        strategy=zoo.STRATEGIES["one_device"](),
        checkpoint_dir=str(path),
        placement=placement,
    )
    trainer.fit(*example.data, batch_size=8, max_steps=steps, steps_per_epoch=2, verbose=0)
    return trainer, [v.numpy() for v in trainer.model.variables]


@pytest.mark.thorough
@each_placement
def test_killed_and_continued_to_the_same_bits(tmp_path, kind):
    _, whole = _run(tmp_path / "whole", 6, kind(devices=2))
    _run(tmp_path / "parts", 3, kind(devices=2))
    _, found = _run(tmp_path / "parts", 6, kind(devices=2))
    for ours, theirs in zip(found, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.thorough
def test_a_checkpoint_goes_from_one_placement_to_another(tmp_path, float64):
    placements = [None, *(kind(devices=n) for n in (2, 3) for kind in PLACEMENTS.values())]
    _, expected = _run(tmp_path / "whole", 2 * len(placements))
    for number, placement in enumerate(placements, 1):
        _, found = _run(tmp_path / "run", 2 * number, placement)
    assert zoo.largest_difference(found, expected) < 1e-12


@pytest.mark.thorough(keep=1)
@each_placement
def test_a_model_is_saved_whole(tmp_path, kind):
    trainer, _, _ = train("convolutional", placement=kind(devices=2))
    trainer.save(f"{tmp_path}/model.keras")
    loaded = keras.saving.load_model(f"{tmp_path}/model.keras", compile=False)
    for ours, theirs in zip(loaded.variables, trainer.model.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


class GradientPenalty(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)
                total = tf.reduce_sum(outputs)
            slope = inner.gradient(total, x)
            loss = tf.reduce_mean((outputs - y) ** 2) + tf.reduce_mean(slope**2)
        gradients = outer.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def _build_penalty():
    given = keras.Input((6, 5, 2))
    x = keras.layers.Conv2D(4, 3, activation="tanh", kernel_initializer=zoo.seeded(1))(given)
    x = keras.layers.Conv2D(4, 2, activation="tanh", kernel_initializer=zoo.seeded(2))(x)
    x = keras.layers.Flatten()(x)
    model = GradientPenalty(given, keras.layers.Dense(2, kernel_initializer=zoo.seeded(3))(x))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@functools.cache
def _fit_penalty(placement=None, **options):
    if placement is not None:
        options["placement"] = PLACEMENTS[placement]()
    strategy = zoo.STRATEGIES["one_device"]()
    trainer = zoo.make_trainer(_build_penalty, strategy=strategy, **options)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 6, 5, 2)), rng.normal(size=(32, 2))
    trainer.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return [weight.numpy() for weight in trainer.model.weights]


@pytest.mark.smoke
@pytest.mark.parametrize(
    "options",
    [{"rematerialize": True}, *({"placement": kind} for kind in PLACEMENTS)],
    ids=["rematerialize", *PLACEMENTS],
)
def test_gradients_of_gradients(float64, options):
    assert zoo.largest_difference(_fit_penalty(**options), _fit_penalty()) < 1e-13


@each_placement
def test_what_no_placement_supports_costs_one_line(kind):
    with pytest.raises(TfdistError, match="cannot be combined with `jit_compile`: [^\n]*$"):
        train("unet", placement=kind(), jit_compile=True)
    with pytest.raises(TfdistError, match="CentralStorageStrategy does not support `placement`"):
        train("unet", strategy=zoo.STRATEGIES["central_storage-2"](), placement=kind())
    with pytest.raises(TfdistError, match=r"needs 4 devices for each of 1 replicas.*3 \(CPU:0"):
        train("unet", placement=kind(devices=4))
