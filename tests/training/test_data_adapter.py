import keras
import numpy as np
import pytest

import tfdist
from tests import zoo
from tfdist.training.inputs import data_adapter
from tfdist.training.inputs.make_adapter import make_data_adapter

X = np.arange(22, dtype=np.float32).reshape(11, 2)
Y = X.sum(axis=1, keepdims=True)


@pytest.fixture(params=["direct", "copied"])
def is_copied(request, monkeypatch):
    """Whether batches reach the replicas as on GPUs, through TensorFlow's copying iterators."""
    if request.param == "copied":
        monkeypatch.setattr(data_adapter, "is_on", lambda strategy, kind: kind == "GPU")
    return request.param == "copied"


@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-2"])
def test_no_pipeline_of_a_strategy_leaves_a_thread_that_tunes_it(strategy_name, is_copied):
    strategy = zoo.STRATEGIES[strategy_name]()
    adapter = make_data_adapter(
        X, Y, global_batch_size=4, num_replicas=strategy.num_replicas_in_sync, shuffle=False
    )
    for iterator in (adapter.iterate_train(strategy, start_step=0), adapter.iterate_eval(strategy)):
        iterators = [iterator]
        if is_copied and strategy_name != "one_device":  # which has an iterator of its own
            iterators = iterator._iterators[0]._iterator._device_iterators
            assert len(iterators) == strategy.num_replicas_in_sync
        for of_device in iterators:
            assert of_device._dataset.options().autotune.enabled is False


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-3", "central_storage-2"])
def test_replicas_equal_keras_however_batches_reach_them(strategy_name, is_copied, float64):
    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-4), "mse", metrics=["mae"])
        return model

    data = {"x": X, "y": Y, "batch_size": 4, "shuffle": False, "verbose": 0}
    expected = build().fit(**data, epochs=2, validation_data=(X[:5], Y[:5]))
    trainer = tfdist.Trainer(build, strategy=zoo.STRATEGIES[strategy_name]())
    found = trainer.fit(**data, epochs=2, validation_data=(X[:5], Y[:5]))
    for name, values in expected.history.items():
        np.testing.assert_allclose(found.history[name], values, rtol=1e-12)
    predicted = trainer.predict(X, batch_size=4, verbose=0)
    np.testing.assert_allclose(predicted, trainer.model(X), rtol=1e-12)
