"""Scripts under parameter servers: equal to what they do by themselves, or refused."""

import json
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.cluster

SCRIPT = """
import json, keras, numpy as np

keras.config.set_floatx("float64")

def fit(*layers, shape=(2,), **options):
    keras.utils.set_random_seed(1)
    layers = [keras.Input(batch_shape=(4, *shape)), *layers, keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse", **options)
    data = np.random.RandomState(0).normal(size=(16, *shape)), np.ones((16, 1))
    try:
        return model.fit(*data, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
    except Exception as error:
        return f"{type(error).__name__}: {error}"

found = {
    "XLA": fit(jit_compile=True),
    "synchronized": fit(keras.layers.BatchNormalization(synchronized=True)),
    "stateful": fit(keras.layers.LSTM(3, stateful=True), shape=(3, 2)),
}
print("FOUND", json.dumps(found), flush=True)
"""


def run(*command):
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if "FOUND" in line)
    return json.loads(line[line.index("{") :])


def test_steps_end_as_by_themselves_or_are_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("synchronized=True", "synchronized=False"))
    expected = run(str(script))
    script.write_text(SCRIPT)
    flags = ("--workers=2", "--ps=1", "--strategy=parameter_server", "--max_in_flight=1")
    found = run("-m", "tfdist.run", *flags, str(script))
    for name in ("XLA", "synchronized"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12)
    assert "lstm/rnn_state is assigned, but is none of the model's" in found["stateful"]
