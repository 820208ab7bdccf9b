"""The training loops of tutorials, under `python -m tfdist.run`: the numbers of one device."""

import json
import pathlib
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest

from tests.run import own_loops

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "run" / "own_loops.py"
WHOLE = {
    "guide_s_class_without_a_function": "applies gradients, but is no tf.function of a batch",
    "outputs_of_examples": "returns a tensor of shape",
    "loss_that_cannot_be_divided": "Cannot divide a batch over",
    "only_tensor_that_is_no_batch": "`limits` of shape [4] is no batch of which it can compute",
    "function_of_an_epoch": "applies gradients, but is no tf.function of a batch",
    "loop_in_the_open": "applies gradients, but is no tf.function of a batch",
}
DIVIDED = [
    "guide_s_class",
    "methods_with_the_decorator",
    "models_as_arguments",
    "dcgan",
    "accumulated_gradients",
    "learning_rate_finder",
    "after_a_fit",
]


def _run(*flags, names):
    command = [sys.executable, "-m", "tfdist.run", *flags, str(SCRIPT), *names]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1000, check=False
    )
    assert run.returncode == 0, run.stderr
    line = next(line for line in run.stdout.splitlines() if '{"' in line)
    return json.loads(line[line.index("{") :]), run.stdout + run.stderr  # a cluster mixes them


@pytest.fixture(scope="module")
def expected():
    """The numbers of all programs without tfdist."""
    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy("float64")  # a test before may have set another
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as scripts do, one fits a dataset without `shuffle`
            return own_loops.run(own_loops.PROGRAMS)
    finally:
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(policy)


def _check(found, names, expected):
    assert list(found) == list(names)
    for name, values in found.items():
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=1e-10, err_msg=name)


def _find_lines(errors):
    lines = [line for line in errors.splitlines() if "tfdist.run: " in line]
    return {
        what: [line for line in lines if text in line]
        for what, text in (("divided", "is divided over"), ("whole", "It is computed whole"))
    }


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "flags",
    [
        ("--strategy=mirrored", "--virtual_devices=2"),
        ("--strategy=mirrored", "--virtual_devices=3"),
        ("--strategy=central_storage", "--virtual_devices=2"),
    ],
    ids=["mirrored-2", "mirrored-3", "central_storage-2"],
)
def test_loops_end_as_without_tfdist_and_most_are_divided(flags, expected):
    names = tuple(DIVIDED + [name for name in WHOLE if name != "guide_s_class_without_a_function"])
    # Nothing is to be said of the first; the second is divided until its sizes differ.
    names += ("strategy_of_the_script", "parts_of_other_sizes")
    found, errors = _run(*flags, names=names)
    _check(found, names, expected)
    lines = _find_lines(errors)
    # Two functions each in `methods_with_the_decorator` and `accumulated_gradients`.
    assert len(lines["divided"]) == len(DIVIDED) + 2 + 1
    assert len(lines["whole"]) == len(WHOLE) - 1 + 1
    assert "different numbers of examples (4 and 8)" in errors
    assert WHOLE["only_tensor_that_is_no_batch"] in errors


@pytest.mark.parametrize("name", ["guide_s_class_without_a_function"])
def test_a_step_that_is_no_function_is_computed_whole(name, expected):
    found, errors = _run("--strategy=mirrored", "--virtual_devices=2", names=[name])
    _check(found, [name], expected)
    (line,) = _find_lines(errors)["whole"]
    assert WHOLE[name] in line
    assert "tfdist.run: train_step (" in line


@pytest.mark.cluster
def test_loops_on_two_workers_end_as_without_tfdist(expected):
    names = (*DIVIDED, "outputs_of_examples", "loss_that_cannot_be_divided", "loop_in_the_open")
    found, errors = _run("--workers=2", names=names)
    _check(found, names, expected)
    assert "is divided over 2 replicas" in errors


def test_one_device_leaves_functions_as_they_are(expected):
    names = ("guide_s_class",)
    found, errors = _run("--strategy=one_device", names=names)
    _check(found, names, expected)
    assert not _find_lines(errors)["divided"]
