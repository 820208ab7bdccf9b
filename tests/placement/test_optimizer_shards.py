"""An optimizer's state that is divided over the replicas changes no weight."""

import collections

import keras
import numpy as np
import pytest

import tfdist
from tests import zoo
from tests.training.programs import OPTIMIZERS
from tfdist.devices import shorten
from tfdist.errors import TfdistError
from tfdist.placement import Layers

ADAM = lambda: keras.optimizers.Adam(1e-2)  # noqa: E731
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
        steps_per_epoch=2,
        verbose=0,
    )
    return trainer, [variable.numpy() for variable in trainer.model.variables]


def _count_bytes(trainer):
    """Returns device -> bytes of the optimizer's state on it."""
    counts = collections.Counter()
    for variable in trainer.model.optimizer.variables:
        for copy in trainer.strategy.experimental_local_results(variable.value):
            counts[shorten(copy.device)] += copy.dtype.size * (copy.shape.num_elements() or 1)
    return counts


@pytest.mark.thorough(keep=2)
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


@pytest.mark.thorough(keep=3)
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


def test_each_replica_keeps_its_part_of_the_state():
    whole, _ = _train("unet", keras.optimizers.Adam)
    trainer, _ = _train("unet", keras.optimizers.Adam, step_options=SHARDED)
    before, after = _count_bytes(whole), _count_bytes(trainer)
    assert sum(after.values()) < 0.51 * sum(before.values())
    assert max(after.values()) < 0.525 * max(before.values())


def test_together_with_stages(float64):
    _, expected = _train("unet", ADAM, "one_device")
    example = zoo.EXAMPLES["unet"]
    trainer = tfdist.Trainer(
        lambda: example.build(ADAM()),
        strategy=tfdist.strategies.Mirrored(devices=("CPU:0",)),
        step_options=SHARDED,
        placement=Layers(devices=2),
    )
    trainer.fit(*example.data, batch_size=15, max_steps=4, steps_per_epoch=2, verbose=0)
    found = [variable.numpy() for variable in trainer.model.variables]
    assert zoo.largest_difference(found, expected) < 1e-12


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


@pytest.mark.parametrize("strategy_name", ["one_device", "central_storage-2"])
def test_other_strategies_refuse(strategy_name):
    with pytest.raises(TfdistError, match="does not support `shard_optimizer`") as caught:
        _train("dense", keras.optimizers.Adam, strategy_name, step_options=SHARDED)
    assert "\n" not in str(caught.value)
