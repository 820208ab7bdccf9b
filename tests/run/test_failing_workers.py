"""A call that fails on one of several workers wakes the others, also where the script goes on."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.cluster

# The second half of each first batch is the second worker's.
GOES_ON = """
import keras, numpy as np

def fit(x):
    embedding = keras.layers.Embedding(5, 2)
    model = keras.Sequential([keras.Input((1,)), embedding, keras.layers.Flatten()])
    model.compile("sgd", "mse")
    return model.fit(x, np.zeros((8, 2)), batch_size=8, shuffle=False, verbose=0).history["loss"]

x = np.arange(8)[:, None] % 5
for places in ((1, 6), (), (6,), ()):
    bad = x.copy()
    bad[list(places)] = 7
    try:
        print("trained", fit(bad), flush=True)
    except Exception as error:
        print("failed", error, flush=True)
"""

THREADS = """
import concurrent.futures, keras, numpy as np

def make_model(number):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

def fit(model):
    return model.fit(np.ones((8, 2)), np.ones((8, 1)), epochs=20, verbose=0)

models = [make_model(number) for number in range(2)]
for count in (1, 2):
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        print("trained", len(list(pool.map(fit, models))), flush=True)
"""


def run(tmp_path, text):
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "tfdist.run", "--workers=2", f"--log_dir={tmp_path}"]
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=240, check=False
    )
    logs = [(tmp_path / "logs" / f"worker-{worker}.log").read_text() for worker in range(2)]
    return done, [
        [line for line in log.splitlines() if line.startswith(("trained", "failed"))]
        for log in logs
    ]


def test_a_script_that_catches_one_worker_s_error_does_not_hang(tmp_path):
    done, logs = run(tmp_path, GOES_ON)
    assert done.returncode == 0, done.stdout + done.stderr
    for worker, (alike, trained, alone, after) in enumerate(logs):
        # What fails alike on all workers, a script may go on from.
        assert alike.startswith("failed Cannot look up the index 7")
        assert trained.startswith("trained")
        named = "failed The program of worker 1 failed"
        assert alone.startswith(named if worker == 0 else "failed Cannot look up the index 7")
        assert after.startswith(named)
        assert "index 7" in after


def test_threads_that_train_at_the_same_time_are_refused(tmp_path):
    done, logs = run(tmp_path, THREADS)
    assert done.returncode != 0
    assert "Two threads train, evaluate or predict on several workers" in done.stderr
    assert logs == [["trained 2"]] * 2


def test_local_sgd_needs_a_trainer(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    command = [sys.executable, "-m", "tfdist.run", "--workers=2", "--strategy=local_sgd"]
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 2
    assert "tfdist.run does not support --strategy=local_sgd" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
