"""A model divided over devices is trained to the weights of one device."""

import functools
import subprocess
import sys
import textwrap

import keras
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.placement.training import find_devices, make_adam, train
from tfdist.devices import shorten
from tfdist.errors import TfdistError
from tfdist.placement import Layers


@functools.cache
def train_over_two():
    return train("unet", placement=Layers(devices=2))[0]


def test_half_precision_to_the_bit():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        weights, found = (train("convolutional", **o)[2] for o in ({}, {"placement": Layers()}))
    finally:
        keras.config.set_dtype_policy("float32")
    assert zoo.largest_difference(found, weights) < 1e-6


def test_weights_and_slots_live_where_their_stage_runs():
    trainer = train_over_two()
    by_device = {"CPU:0": 0, "CPU:1": 0}
    where = {v.path: shorten(v.value.device) for v in trainer.model.variables}
    for device in where.values():
        by_device[device] += 1
    assert min(by_device.values()) > 5
    for variable in trainer.model.trainable_variables:
        prefix = variable.path.replace("/", "_")
        for slot in trainer.model.optimizer.variables:
            if slot.name in (f"{prefix}_momentum", f"{prefix}_velocity"):
                assert shorten(slot.value.device) == where[variable.path]


def test_forward_backward_and_updates_run_on_the_devices_of_the_stages():
    trainer = train_over_two()
    kinds = find_devices(trainer)
    # The first of these passes the results of a stage on, by way of where it is.
    for kind in (
        "IdentityN",
        "Conv2D",
        "Conv2DBackpropFilter",
        "Conv2DBackpropInput",
        "AssignSubVariableOp",
    ):
        assert kinds[kind] == {"CPU:0", "CPU:1"}, kind


def test_the_summary_says_what_lies_where():
    trainer = train_over_two()
    found = trainer.engine.summarize_placement()
    assert [stage["device"] for stage in found["placement"]] == ["CPU:0", "CPU:1"]
    assert sum(stage["work_share"] for stage in found["placement"]) == pytest.approx(1, abs=1e-3)
    weights = sum(stage["weight_bytes"] for stage in found["placement"])
    assert weights == 4 * trainer.model.count_params()
    total = sum(stage["activation_bytes"] for stage in found["placement"])
    assert max(stage["activation_bytes"] for stage in found["placement"]) <= 0.6 * total
    assert found["bubble_share"] == pytest.approx(0.5)  # without micro-batches, one waits


def test_micro_batches_make_the_bubble_smaller():
    shares = [
        train("dense", placement=Layers(devices=2), micro_batches=count)[
            0
        ].engine.summarize_placement()["bubble_share"]
        for count in (1, 3)
    ]
    assert shares[1] < shares[0]


def test_a_built_optimizer_moves_along():
    with zoo.STRATEGIES["one_device"]().scope():
        model = zoo.EXAMPLES["dense"].build(make_adam())
        model.optimizer.build(model.trainable_variables)
    trainer = tfdist.Trainer(model, placement=Layers(devices=2))
    trainer.fit(*zoo.EXAMPLES["dense"].data, batch_size=8, max_steps=1, verbose=0)
    slots = {shorten(v.value.device) for v in model.optimizer.variables}
    assert slots == {"CPU:0", "CPU:1"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": Layers(stages=("absent",))}, "`stages`"),
        ({"placement": Layers(branches=("dense*:7",))}, "names the device 7, but a replica has 3"),
    ],
)
def test_what_does_not_fit_costs_one_line(options, message):
    with pytest.raises(TfdistError, match=message) as caught:
        train("dense", **options)
    assert "\n" not in str(caught.value)


# The examples of the field's guides, which need more devices than the other tests.
_GUIDES = """
    import tfdist
    tfdist.set_virtual_devices(5)
    import keras, numpy as np
    from tfdist.placement import Layers

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    Dense = keras.layers.Dense
    rng = np.random.default_rng(0)

    def sequential(*sizes):
        def build():
            names = ("first", "second", "third", "fourth", "fifth")
            layers = [Dense(n, "tanh", name=name) for n, name in zip(sizes, names)]
            return keras.Sequential([keras.Input((6,)), *layers])
        return build

    def inception():
        given = keras.Input((8, 8, 4))
        convolve = lambda n, k, name: keras.layers.Conv2D(n, k, padding="same", name=name)
        pooled = keras.layers.MaxPooling2D(3, 1, "same", name="pool_1")(given)
        branches = [
            convolve(3, 1, "one_1")(given),
            convolve(3, 3, "three_2")(convolve(2, 1, "three_1")(given)),
            convolve(3, 5, "five_2")(convolve(2, 1, "five_1")(given)),
            convolve(3, 1, "pool_2")(pooled),
        ]
        joined = keras.layers.Concatenate()(branches)
        return keras.Model(given, keras.layers.GlobalAveragePooling2D()(joined))

    def autoencoder():
        given = keras.Input((6,))
        code = Dense(2, name="encoder_out")(Dense(4, "tanh", name="encoder_in")(given))
        out = Dense(6, name="decoder_out")(Dense(4, "tanh", name="decoder_in")(code))
        return keras.Model(given, out)

    def train(build, **options):
        def compiled():
            keras.utils.set_random_seed(3)
            model = build()
            model.compile(keras.optimizers.Adam(0.01), "mse")
            return model
        trainer = tfdist.Trainer(compiled, **{"strategy": "one_device", **options})
        x = rng.normal(size=(40, *trainer.model.input_shape[1:]))
        y = rng.normal(size=(40, *trainer.model.output_shape[1:]))
        trainer.fit(x * 0 + np.sin(np.arange(x.size)).reshape(x.shape), y * 0 + 0.5,
                    batch_size=8, epochs=4, verbose=0)
        return trainer, np.concatenate([w.ravel() for w in trainer.model.get_weights()])

    branches = ("one_*:0", "three_*:1", "five_*:2", "pool_*:3")
    cases = {
        "dense layers of 8 and 4": (sequential(8, 4), Layers(devices=2, stages=("second",)), 2),
        "five layers": (sequential(5, 5, 5, 5, 5), Layers(devices=5), 5),
        "an Inception block": (inception, Layers(devices=4, branches=branches), 4),
        "encoder and decoder": (autoencoder, Layers(devices=2, stages=("decoder",)), 2),
    }
    for name, (build, placement, devices) in cases.items():
        _, expected = train(build)
        trainer, found = train(build, placement=placement)
        used = {v.value.device for v in trainer.model.variables}
        assert len(used) == devices, (name, used)
        assert np.abs(found - expected).max() < 1e-12, name
    mesh = tfdist.strategies.Mirrored(devices=("CPU:0", "CPU:2"))
    for build in (sequential(8, 4), inception):
        _, expected = train(build)
        _, found = train(build, strategy=mesh, placement=Layers(devices=2))
        assert np.abs(found - expected).max() < 1e-10
    print("all equal")
"""


@pytest.mark.thorough
def test_the_examples_of_the_guides_and_a_mesh():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_GUIDES)],
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.stdout.strip().endswith("all equal"), done.stderr[-3000:]


def test_the_default_strategy_will_do():
    example = zoo.EXAMPLES["dense"]
    assert isinstance(tf.distribute.get_strategy(), tf.distribute.Strategy)
    trainer = tfdist.Trainer(lambda: example.build(make_adam()), placement=Layers())
    trainer.fit(*example.data, batch_size=8, max_steps=2, verbose=0)
    assert {shorten(v.value.device) for v in trainer.model.variables} == {"CPU:0", "CPU:1"}
