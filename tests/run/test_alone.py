"""A worker that calls a method without the others is told what happened."""

import subprocess
import sys

import pytest

SCRIPT = """
import json, os, sys
import keras, numpy as np

is_chief = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((8, 4), "float32")

class Data(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2 and not is_chief:
            raise RuntimeError("no image 17")
        return x, x[:, :1]

if sys.argv[1] == "fails":
    try:
        model.fit(Data(), verbose=0)
    except Exception:
        if is_chief:
            raise
        sys.exit(0)  # a worker that fails itself would make the launcher end the chief
class Evaluates(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs):
        if is_chief:
            self.model.test_on_batch(x, x[:, :1])

if sys.argv[1] == "evaluates in a callback":
    model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[Evaluates()])
if sys.argv[1] == "trains less":
    for _ in range(4 if is_chief else 3):
        model.train_on_batch(x, x[:, :1])
    sys.exit()
model.fit(x, x[:, :1], verbose=0)
if is_chief:
    model.predict(x, verbose=0)
elif sys.argv[1] == "evaluates":
    model.evaluate(x, x[:, :1], verbose=0)
"""


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            "ends",
            "The program of worker 1 ended while worker 0 was in `predict`",
        ),
        (
            "fails",
            "The program of worker 1 failed while worker 0 was in `fit`: RuntimeError: no image 17",
        ),
        (
            "trains less",
            "The program of worker 1 ended while worker 0 was in `train_on_batch`, which all",
        ),
        # The first of them that says so ends the other one.
        ("evaluates in a callback", "Call the same on every worker, in the same order, also in"),
        ("evaluates", "Worker 1 calls `evaluate` while the chief calls `predict`. Call the same"),
    ],
)
def test_what_the_other_worker_did_is_named(tmp_path, other, message):
    (tmp_path / "script.py").write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, "-m", "tfdist.run", "--workers=2", "script.py", other],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert run.returncode
    assert message in run.stdout + run.stderr
