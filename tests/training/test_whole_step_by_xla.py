"""A replica's whole step, compiled by XLA with fixed shapes, as TPUStrategy compiles it."""

from dataclasses import dataclass

import keras
import pytest
import tensorflow as tf

from tests import zoo
from tfdist.strategies import Strategy, Traits
from tfdist.training.step.steps import Steps

pytestmark = pytest.mark.optimized


class CompilingStrategy(tf.distribute.MirroredStrategy):
    def run(self, fn, args=(), kwargs=None, options=None):
        def run(args):
            return super(CompilingStrategy, self).run(fn, args=args)

        return tf.function(run, jit_compile=True, autograph=False)(args)


@dataclass(frozen=True, kw_only=True)
class Compiling(Strategy):
    name = "tests:Compiling"
    traits = Traits(copies_variables=True, fixes_shapes=True)

    def build(self, *, must_match=None):
        return CompilingStrategy(["CPU:0"])


def _train(name, strategy, **options):
    example = zoo.EXAMPLES[name]
    trainer = zoo.make_trainer(
        lambda: example.build(keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=1.0)),
        strategy=strategy,
        **options,
    )
    x, y = example.data
    weight = example.sample_weight
    history = trainer.fit(x, y, sample_weight=weight, batch_size=8, epochs=2, verbose=0)
    logs = trainer.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    return history.history | logs, [v.numpy() for v in trainer.model.variables]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("steps_per_loop", [1, 5])
@pytest.mark.parametrize("is_divided", [False, True], ids=["one core", "several cores"])
@pytest.mark.parametrize("name", sorted(zoo.EXAMPLES))
def test_ends_where_one_device_ends(monkeypatch, float64, name, is_divided, steps_per_loop):
    expected_logs, expected = _train(name, zoo.STRATEGIES["one_device"]())
    make = Steps.__init__

    def init(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.is_divided = is_divided  # as on several replicas, which one CPU cannot run

    monkeypatch.setattr(Steps, "__init__", init)
    logs, found = _train(name, Compiling(), steps_per_loop=steps_per_loop)
    assert zoo.largest_difference(found, expected) < 1e-12
    assert logs.keys() == expected_logs.keys()
    for key, value in expected_logs.items():
        assert logs[key] == pytest.approx(value, rel=1e-6), key
