"""The order of arrays and of a `PyDataset`: Keras's, from its global seed, or the trainer's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tfdist.errors import TfdistError
from tfdist.training.inputs.example_order import draw_keras_order

X = np.arange(44, dtype=np.float32)[:, None]
Y = X**1.1


@pytest.fixture(autouse=True)
def _no_seed_is_left():
    yield
    tf.random.set_seed(None)


def _build():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    return model


class Pages(keras.utils.PyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return X[index * 8 :][:8], Y[index * 8 :][:8]


DATA = {
    "batch": lambda: {"x": X, "y": Y, "batch_size": 8, "shuffle": "batch"},
    "pages": lambda: {"x": Pages()},
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 8},
    "split": lambda: {"x": X, "y": Y, "batch_size": 8, "validation_split": 0.3},
    "steps": lambda: {"x": X[:40], "y": Y[:40], "batch_size": 8, "steps_per_epoch": 5},
    "threads": lambda: {"x": Pages(workers=2)},
}


class Losses(keras.callbacks.Callback):
    """The loss after each step, which shows the order."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(logs["loss"])


def _fit(model, data, *, epochs=3, **options):
    losses = Losses()
    model.fit(**DATA[data](), epochs=epochs, callbacks=[losses], verbose=0, **options)
    return losses.found


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("data", DATA)
def test_one_device_and_replicas_have_keras_s_order(data):
    def run(make):
        keras.utils.set_random_seed(5)
        return _fit(make(), data)

    expected = run(lambda: zoo.trace_once(_build()))
    assert run(lambda: tfdist.Trainer(_build)) == expected
    mirrored = run(lambda: tfdist.Trainer(_build, strategy=zoo.STRATEGIES["mirrored-2"]()))
    np.testing.assert_allclose(mirrored, expected, rtol=1e-5)


def test_a_second_fit_has_keras_s_order():
    def run(make):
        keras.utils.set_random_seed(5)
        model = make()
        return [_fit(model, data, epochs=2) for data in ("arrays", "pages", "arrays")]

    assert run(lambda: tfdist.Trainer(_build)) == run(lambda: zoo.trace_once(_build()))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("data", ["arrays", "pages"])
def test_the_order_follows_the_global_seed_with_checkpoints_too(data, tmp_path):
    def run(global_seed, name, **options):
        keras.utils.set_random_seed(global_seed)
        trainer = tfdist.Trainer(_build, checkpoint_dir=str(tmp_path / name), **options)
        return _fit(trainer, data)

    one, two = run(1, "one"), run(2, "two")
    assert one != two
    assert one == run(1, "again")
    mirrored = run(1, "mirrored", strategy=zoo.STRATEGIES["mirrored-2"]())
    np.testing.assert_allclose(mirrored, one, rtol=1e-5)
    assert run(1, "own", seed=3) == run(2, "own too", seed=3)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("data", ["pages", "batch", "arrays"])
def test_a_continued_run_keeps_the_order_that_it_began_with(data, tmp_path):
    def run(name, global_seed, epochs, **options):
        keras.utils.set_random_seed(global_seed)
        trainer = tfdist.Trainer(_build, checkpoint_dir=str(tmp_path / name), **options)
        return _fit(trainer, data, epochs=epochs)

    expected = run("whole", 1, 3)
    assert run("parts", 1, 1) + run("parts", 2, 3) == expected
    run("own", 1, 1, seed=4)
    assert len(run("own", 1, 2)) == 6
    with pytest.raises(TfdistError, match="order"):
        run("whole", 1, 4, seed=3)


def test_an_unknown_seed_gives_the_order_of_seed_0():
    assert _fit(tfdist.Trainer(_build), "arrays") == _fit(tfdist.Trainer(_build, seed=0), "arrays")


@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_drawing_an_order_leaves_the_global_seed(shuffle):
    keras.utils.set_random_seed(7)
    before = keras.random.normal((3,)), np.random.random()
    keras.utils.set_random_seed(7)
    order = draw_keras_order(20, 6, shuffle, 3).numpy()
    assert sorted(order) == list(range(20))
    after = keras.random.normal((3,)), np.random.random()
    np.testing.assert_array_equal(before[0], after[0])
    assert before[1] == after[1]
