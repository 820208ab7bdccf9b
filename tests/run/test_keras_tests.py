"""`benchmarks.keras_tests`: how it counts the tests of Keras."""

import pathlib
import subprocess
import sys

import keras
import pytest

from benchmarks.keras_tests.__main__ import KNOWN

KERAS = pathlib.Path(keras.__file__).parent / "src"
TESTS = """
import os

import keras
import numpy as np
import tensorflow as tf


def train(loss):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", loss)
    model.fit(np.ones((8, 2)), np.arange(8.0), batch_size=4, verbose=0)


def is_plain():
    return not tf.distribute.has_strategy()


def test_passes():
    train("mse")


def test_is_refused():
    train(lambda y, p: keras.ops.max(y - p))


def test_ends_its_process():
    if not is_plain():
        os._exit(3)


def test_fails():
    assert is_plain()


def test_fails_in_keras():
    assert False
"""


def _run(tmp_path, *flags):
    (tmp_path / "some_test.py").write_text(TESTS)
    return subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.keras_tests", "--files=*_test.py"),
            *("--ways=mirrored-2", f"--below={tmp_path}", *flags),
        ],
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )


@pytest.mark.cluster
def test_what_passes_what_is_refused_and_what_nobody_expects(tmp_path):
    run = _run(tmp_path)
    assert run.returncode == 1, run.stderr
    lines = run.stdout.splitlines()
    assert "| mirrored-2 | 1 | 1 | 0 | 2 |" in lines
    assert "1 fail with plain Keras as well, and do not count." in lines
    for name in ("some_test.py::test_fails: AssertionError", "some_test.py::test_ends_its_process"):
        assert any(line.startswith(f"mirrored-2: unexpected: {name}") for line in lines)


@pytest.mark.cluster
def test_what_is_refused_is_a_success(tmp_path):
    run = _run(tmp_path, "-k", "test_passes or test_is_refused")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "refused: some_test.py::test_is_refused: TfdistError: Cannot divide" in run.stdout


@pytest.mark.skipif(not list(KERAS.rglob("*_test.py")), reason="this Keras has no tests with it")
def test_every_known_fault_is_a_test_of_keras_and_has_a_reason():
    for line in KNOWN.read_text().splitlines():
        if line and not line.startswith("#"):
            names, _, reason = line.partition(": ")
            path, *_, test = names.split()[-1].split("::")
            text = KERAS.joinpath(path).read_text()
            # The names of parameterized tests are longer than those in the file.
            assert any(test.startswith(name) for name in _list_tests(text)), line
            assert reason


def _list_tests(text):
    return [part.partition("(")[0] for part in text.split("def ")[1:]]
