"""An optimizer's state that is divided over the replicas changes no weight."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.training.programs import INDIVISIBLE, OPTIMIZERS, PROGRAMS
from tfdist.devices import shorten
from tfdist.errors import TfdistError
from tfdist.placement import Layers
from tfdist.placement.optimizer.cutting import Weight, cut_weights

ADAM = lambda: keras.optimizers.Adam(1e-2)  # noqa: E731
ALL = {**PROGRAMS, **INDIVISIBLE}
NOT_DIVIDED = ("Adafactor", "LossScaleOptimizer")
SHARDED = tfdist.StepOptions(shard_optimizer=True)


def _train(name, make, strategy_name="mirrored-2", *, steps=4, **options):
    example = zoo.EXAMPLES[name]
    trainer = tfdist.Trainer(
        lambda: example.build(make()), strategy=zoo.STRATEGIES[strategy_name](), **options
    )
    trainer.fit(
        *example.data,
        sample_weight=example.sample_weight,
        batch_size=15,
        max_steps=steps,
        verbose=0,
    )
    return trainer, [variable.numpy() for variable in trainer.model.variables]


def _count_bytes(trainer):
    """Returns device -> bytes of the optimizer's state on it."""
    counts = collections.Counter()
    for variable in trainer.model.optimizer.variables:
        parts = getattr(variable.value, "parts", {0: variable.value}).values()
        for copy in [c for p in parts for c in trainer.strategy.experimental_local_results(p)]:
            counts[shorten(copy.device)] += copy.dtype.size * (copy.shape.num_elements() or 1)
    return counts


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", zoo.EXAMPLES)
@pytest.mark.parametrize("strategy_name", ["mirrored-2", "mirrored-3"])
def test_ends_with_the_same_weights_on_all_replicas(float64, name, strategy_name):
    make = lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.01, clipnorm=1.0)  # noqa: E731
    _, expected = _train(name, make, strategy_name)
    trainer, found = _train(name, make, strategy_name, step_options=SHARDED)
    assert zoo.largest_difference(found, expected) < 1e-14
    for variable in trainer.model.variables:
        first, *others = trainer.strategy.experimental_local_results(variable.value)
        for other in others:
            np.testing.assert_array_equal(first.numpy(), other.numpy())


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_updates_alike_or_is_refused(float64, name):
    make = OPTIMIZERS[name]
    try:
        _, expected = _train("dense", make)
    except TfdistError:
        pytest.skip("not supported on replicas")
    if name in NOT_DIVIDED:
        with pytest.raises(TfdistError, match="`shard_optimizer` does not support") as caught:
            _train("dense", make, step_options=SHARDED)
        assert "\n" not in str(caught.value)
        return
    _, found = _train("dense", make, step_options=SHARDED)
    assert zoo.largest_difference(found, expected) < 1e-13


@pytest.mark.thorough
@pytest.mark.parametrize("count", [2, 3])
def test_each_replica_keeps_its_part_of_the_state(count):
    whole, _ = _train("unet", keras.optimizers.Adam, f"mirrored-{count}")
    trainer, _ = _train("unet", keras.optimizers.Adam, f"mirrored-{count}", step_options=SHARDED)
    before, after = _count_bytes(whole), _count_bytes(trainer)
    assert max(after.values()) < 1.02 / count * max(before.values())
    said = trainer.engine.summarize_placement()["optimizer_bytes"]
    assert sum(said) == pytest.approx(max(before.values()), abs=100)  # without the counters


def test_gradients_of_tables_are_cut_in_rows_and_in_elements(float64):
    """A table of 60 rows is cut in whole rows over three replicas; one of 5 rows in elements."""
    rng = np.random.default_rng(0)
    for rows, shapes in ((600, [(200, 4)] * 3), (5, [(7,), (7,), (6,)])):
        table = keras.layers.Embedding(rows, 4, embeddings_initializer=zoo.seeded(1))

        def build(table=table):
            copy = keras.layers.Embedding.from_config(table.get_config())
            model = keras.Sequential([copy, keras.layers.Flatten()])
            model.compile(keras.optimizers.Adam(1e-2), "mse")
            return model

        x = rng.integers(0, rows, (12, 2))
        y = rng.normal(size=(12, 8))
        found = []
        for name, options in (("one_device", {}), ("mirrored-3", {"step_options": SHARDED})):
            trainer = tfdist.Trainer(build, strategy=zoo.STRATEGIES[name](), **options)
            trainer.fit(x, y, batch_size=12, epochs=5, verbose=0)
            found.append([variable.numpy() for variable in trainer.model.variables])
        assert zoo.largest_difference(*found) < 1e-12
        parts = trainer.model.optimizer._momentums[0].value.parts.values()
        assert [tuple(part.shape) for part in parts] == shapes


def test_every_element_belongs_to_one_replica():
    rng = np.random.default_rng(0)
    for _ in range(50):
        shapes = [tuple(rng.integers(1, 40, rng.integers(0, 4))) for _ in range(rng.integers(1, 9))]
        weights = [Weight(shape, 4, bool(rng.integers(0, 4))) for shape in shapes]
        count = int(rng.integers(1, 6))
        loads = np.zeros(count)
        for weight, pieces in zip(weights, cut_weights(weights, count), strict=True):
            value = tf.reshape(tf.range(weight.size), weight.shape)
            whole = np.concatenate([np.reshape(piece.take(value), [-1]) for piece in pieces])
            np.testing.assert_array_equal(whole, np.arange(weight.size))
            assert weight.may_be_cut or len(pieces) == 1
            for piece in pieces:
                assert np.prod(piece.shape) == piece.stop - piece.start
                loads[piece.replica] += 4 * (piece.stop - piece.start)
        if all(weight.may_be_cut for weight in weights):
            assert max(loads) <= sum(loads) / count * (1 + 2 / 64) + 4


def test_together_with_stages(float64):
    _, expected = _train("convolutional", ADAM, "one_device")
    example = zoo.EXAMPLES["convolutional"]
    trainer = tfdist.Trainer(
        lambda: example.build(ADAM()),
        strategy=tfdist.strategies.Mirrored(devices=("CPU:0",)),
        step_options=SHARDED,
        placement=Layers(devices=2),
    )
    trainer.fit(*example.data, batch_size=15, max_steps=4, verbose=0)
    found = [variable.numpy() for variable in trainer.model.variables]
    assert zoo.largest_difference(found, expected) < 1e-12


@pytest.mark.thorough
def test_a_checkpoint_is_whole(tmp_path):
    def run(steps, strategy_name, **options):
        return _train(
            "unet",
            ADAM,
            strategy_name,
            steps=steps,
            checkpoint_dir=f"{tmp_path}/run",
            **options,
        )

    _, expected = _train("unet", ADAM, steps=6)
    run(2, "mirrored-3", step_options=SHARDED)
    run(4, "one_device")
    _, found = run(6, "mirrored-2", step_options=SHARDED)
    assert zoo.largest_difference(found, expected) < 1e-5


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("name", ALL)
def test_a_strangers_program_is_equal_or_refused(name):
    expected, weights = _fit(name, strategy="one_device")
    refusal = history = found = None
    try:
        history, found = _fit(name, strategy=zoo.STRATEGIES["mirrored-2"](), step_options=SHARDED)
    except TfdistError as error:
        refusal = str(error)
    if refusal is not None:
        assert "\n" not in refusal
        assert name in INDIVISIBLE or "shard_optimizer" in refusal, refusal
        return
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5, atol=1e-6, err_msg=key)
    for ours, theirs in zip(found, weights, strict=True):
        largest = max(1, np.abs(theirs).max())  # which sums over examples make large
        np.testing.assert_allclose(ours, theirs, atol=3e-5 * largest, rtol=3e-5)


def _fit(name, **options):
    keras.utils.set_random_seed(1)
    trainer = tfdist.Trainer(ALL[name].build, **options)
    history = trainer.fit(ALL[name].make_dataset(), epochs=2, verbose=0, shuffle=False)
    return history.history, [weight.numpy() for weight in trainer.model.weights]


def _make_net():
    inputs = keras.Input((12,))
    hidden = keras.layers.Dense(8, name="o")(inputs)
    return keras.Model(inputs, keras.layers.Dense(4, name="p")(hidden))


class Twins(keras.Model):
    """Two networks whose layers have the same names."""

    def __init__(self):
        super().__init__()
        self.nets = [_make_net() for _ in range(2)]

    def call(self, x):
        return self.nets[0](x) + self.nets[1](x)


@pytest.mark.parametrize("placement", [None, tfdist.placement.Shards()])
def test_weights_of_one_name_have_states_of_their_own(float64, placement):
    def build():
        model = Twins()
        model.compile(ADAM(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    found = []
    divided = {"strategy": zoo.STRATEGIES["mirrored-2"](), "step_options": SHARDED}
    if placement is not None:
        divided = {"strategy": "one_device", "placement": placement}
    for options in ({"strategy": "one_device"}, divided):
        keras.utils.set_random_seed(1)
        trainer = tfdist.Trainer(build, **options)
        trainer.fit(*zoo.EXAMPLES["dense"].data, batch_size=15, verbose=0, shuffle=False)
        paths = [weight.path for weight in trainer.model.trainable_variables]
        assert paths.count("o/kernel") == 2
        found.append([weight.numpy() for weight in trainer.model.weights])
    assert zoo.largest_difference(*found) < 1e-12


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("is_built", [False, True])
def test_further_optimizers_are_divided_also_if_the_step_builds_them(is_built):
    def build():
        gan = PROGRAMS["two optimizers"].build()
        if is_built:
            gan.of_judge.build(gan.judge.trainable_variables)
            gan.of_maker.build(gan.maker.trainable_variables)
        return gan

    found = []
    for options in ({}, {"step_options": SHARDED}):
        keras.utils.set_random_seed(1)
        trainer = tfdist.Trainer(build, strategy=zoo.STRATEGIES["mirrored-2"](), **options)
        dataset = PROGRAMS["two optimizers"].make_dataset()
        trainer.fit(dataset, epochs=2, verbose=0, shuffle=False)
        found.append([weight.numpy() for weight in trainer.model.weights])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy_name", ["one_device", "central_storage-2"])
def test_other_strategies_refuse(strategy_name):
    with pytest.raises(TfdistError, match="does not support `shard_optimizer`") as caught:
        _train("dense", keras.optimizers.Adam, strategy_name, step_options=SHARDED)
    assert "\n" not in str(caught.value)
