"""`python -m tfdist.run`: a script, unchanged, ends under a strategy as it ends by itself."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tfdist.internals import find_untested

# Written as one would without tfdist: other files, arguments, callbacks, an exit status.
SCRIPT = """
import json
import sys

import keras
import numpy as np
import tensorflow as tf
from words import NAME

keras.utils.clear_session()
keras.utils.set_random_seed(3)
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
rng = np.random.default_rng(0)
x = rng.normal(size=(50, 4))
y = (x.sum(1, keepdims=True) > 0).astype("float64")
model = keras.Sequential(
    [
        keras.Input((4,)),
        keras.layers.Dense(8, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
history = model.fit(
    x,
    y,
    batch_size=16,
    epochs=2,
    shuffle=False,
    verbose=0,
    validation_split=0.2,
    callbacks=[
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True),
        keras.callbacks.BackupAndRestore("backup"),
    ],
)
found = {
    "history": history.history,
    "evaluation": model.evaluate(x, y, verbose=0),
    "batch": [float(value) for value in model.train_on_batch(x[:8], y[:8])],
    "predictions": model.predict(x[:5], verbose=0).tolist(),
    "name": NAME,
    "arguments": sys.argv[1:],
    "weights": [weight.numpy().tolist() for weight in model.weights],
}
model.save("model.keras")


@keras.saving.register_keras_serializable()
class Scale(keras.layers.Layer):
    def call(self, x):
        return keras.ops.cast(x, "float64") / 255


again = keras.saving.load_model("model.keras")
found["loaded"] = again.predict(x[:5], verbose=0).tolist()
found["hidden"] = keras.Model(again.inputs, again.layers[0].output).predict(x, verbose=0).tolist()
images = rng.integers(0, 256, (20, 3, 3)).astype("uint8")
second = keras.Sequential(
    [
        keras.Input((3, 3), dtype="uint8"),
        Scale(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1),
    ]
)
second.compile("adam", "mse")
data = tf.data.Dataset.from_tensor_slices((images, y[:20])).batch(8).filter(lambda *_: True)
found["second"] = second.fit(data, epochs=2, verbose=0).history["loss"]
print(json.dumps(found))
sys.exit(int(sys.argv[1]))
"""
FILES = {"script.py", "words.py", "log.csv", "best.keras", "model.keras"}


def _run(directory, *flags, arguments=("7", "--lr=2")):
    """Runs the script; returns what it printed.

    With `--quiet`, tfdist says nothing but that it knows the versions less well.
    """
    directory.mkdir()
    (directory / "script.py").write_text(SCRIPT)
    (directory / "words.py").write_text('NAME = "a word"\n')
    command = [sys.executable, *(("-m", "tfdist.run", *flags) if flags else ())]
    run = subprocess.run(
        [*command, "script.py", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert run.returncode == int(arguments[0]), run.stderr
    assert "--quiet" not in flags or "tfdist" not in run.stderr.replace(find_untested(), "")
    printed = [line for line in run.stdout.splitlines() if line.startswith("{")]
    return json.loads(printed[0])


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return _run(tmp_path_factory.mktemp("plain") / "here")


def _list_files(directory):
    return {path.name for path in directory.iterdir()} - {"__pycache__"}


def _compare(found, expected):
    assert found.keys() == expected.keys()
    for name in ("name", "arguments"):
        assert found[name] == expected[name]
    assert found["history"].keys() == expected["history"].keys()
    for name in ("evaluation", "batch", "predictions", "loaded", "hidden", "second"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12)
    for name, values in expected["history"].items():
        np.testing.assert_allclose(found["history"][name], values, rtol=1e-12)
    for ours, theirs in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "flags",
    [
        ["--strategy=mirrored", "--virtual_devices=2", "--quiet"],
        ["--strategy=one_device", "--quiet"],
    ],
    ids=lambda flags: flags[0],
)
def test_a_script_ends_as_by_itself(tmp_path, expected, flags):
    """Its exit status is the script's too."""
    _compare(_run(tmp_path / "here", *flags), expected)
    assert _list_files(tmp_path / "here") == FILES


@pytest.mark.cluster
@pytest.mark.parametrize(
    "flags",
    [["--workers=2"], ["--workers=1", "--ps=1", "--max_in_flight=1"]],
    ids=lambda flags: " ".join(flags),
)
def test_a_script_ends_in_a_cluster_as_by_itself_and_only_the_chief_writes(
    tmp_path, expected, flags
):
    found = _run(tmp_path / "here", *flags, f"--log_dir={tmp_path / 'logs'}")
    _compare(found, expected)
    assert _list_files(tmp_path / "here") == FILES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "No script is given."),
        (["nowhere.py"], "Cannot find the script 'nowhere.py'"),
        (["--strategy=miror", "script.py"], "Unknown --strategy 'miror'. Valid: mirrored"),
        (["--stratgy=mirrored", "script.py"], "Unknown flag '--stratgy'. Did you mean --strategy"),
    ],
)
def test_bad_input_costs_one_line(tmp_path, arguments, message):
    (tmp_path / "script.py").write_text("print('ran')\n")
    run = subprocess.run(
        [sys.executable, "-m", "tfdist.run", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert message in run.stderr
    assert run.stderr.count("\n") == 1
