"""Each replica's model is on the replica's own devices, and the result is that of one device."""

import subprocess
import sys
import textwrap

import pytest

from tfdist.placement.options import PLACEMENTS

_PROGRAM = """
    import sys
    import tfdist
    tfdist.set_virtual_devices(4)
    import keras, numpy as np
    from tests.placement.training import find_graph
    from tfdist.devices import shorten
    from tfdist.placement.options import PLACEMENTS
    from tfdist.strategies import Mirrored

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    k = keras.layers

    def build():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([
            keras.Input((8, 6, 3)), k.Conv2D(4, 3, use_bias=False), k.BatchNormalization(),
            k.Conv2D(4, 3, activation="relu"), k.GlobalAveragePooling2D(), k.Dense(2),
        ])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    def train(**options):
        trainer = tfdist.Trainer(build, **options)
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(40, 8, 6, 3)), rng.normal(size=(40, 2))
        trainer.fit(x, y, batch_size=10, epochs=2, verbose=0)
        return trainer, np.concatenate([w.ravel() for w in trainer.model.get_weights()])

    _, expected = train(strategy="one_device")
    placement = PLACEMENTS[sys.argv[1]](devices=2)
    trainer, found = train(strategy=Mirrored(devices=("CPU:0", "CPU:2")), placement=placement)
    assert np.abs(found - expected).max() < 1e-12, np.abs(found - expected).max()
    places = {False: set(), True: set()}
    for operation in find_graph(trainer).get_operations():
        if operation.type in ("Conv2D", "Conv2DBackpropInput", "ConcatV2", "Mean", "MatMul"):
            places["replica_1/" in operation.name].add(shorten(operation.device))
    assert places == {False: {"CPU:0", "CPU:1"}, True: {"CPU:2", "CPU:3"}}, places
    print("equal")
"""


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_two_replicas_of_two_devices(name):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM), name],
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
