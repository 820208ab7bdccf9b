"""Around `fit`, a script under `python -m tfdist.run` is an ordinary Keras script.

`ordinary.py` prints a value for each of many things that scripts do with models and variables
outside of steps. Under every strategy, it must be the value that plain Keras gives.
"""

import functools
import gc
import json
import pathlib
import subprocess
import sys
import weakref

import keras
import numpy as np
import pytest

import tfdist
from tests import zoo
from tests.run.ordinary import snippets
from tfdist.internals import find_untested
from tfdist.run.routing import Routing
from tfdist.training.step_options import StepOptions

ROOT = pathlib.Path(__file__).parents[2]
# Those in which a worker may need the others, or must not.
OF_WORKERS = [
    "numbers_of_variables",
    "writes_reach_all_copies",
    "gradients_of_a_trained_model",
    "apply_adam",
    "metrics_by_hand",
    "own_metrics_by_hand",
    "own_metrics_read_in_a_callback",
    "metrics_of_the_chief",
    "restored_sums",
    "losses_by_hand",
    "own_training_loop",
]
# Of every kind of thing: reads, writes, gradients, metrics, callbacks, functions, files, loops.
IN_SHORT = [
    "numbers_of_variables",
    "writes_reach_all_copies",
    "gradients_of_a_trained_model",
    "apply_accumulated",
    "averages_by_hand",
    "learning_rates_in_a_callback",
    "own_metrics_by_hand",
    "restored_sums",
    "functions_are_remade",
    "copies_and_files",
    "own_loop_with_a_strategy",
]


def _run(*flags, names=()):
    command = [sys.executable, *(("-m", "tfdist.run", *flags) if flags else ())]
    run = subprocess.run(
        [*command, str(ROOT / "tests" / "run" / "ordinary.py"), *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = [line[line.index("{") :] for line in run.stdout.splitlines() if '{"' in line]
    return json.loads(lines[0]), run


@functools.cache
def _run_alone(*names):
    found, _ = _run(names=names)
    assert found.keys() == set(names)
    errors = {name: value for name, value in found.items() if isinstance(value, str)}
    assert not errors
    return found


def _is_same(found, expected):
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            _is_same(found[name], value) for name, value in expected.items()
        )
    if isinstance(expected, list):
        pairs = list(zip(found, expected, strict=False))
        return len(found) == len(expected) and all(_is_same(a, b) for a, b in pairs)
    if isinstance(expected, float):
        return bool(np.isclose(found, expected, rtol=2e-4, atol=2e-5, equal_nan=True))
    return found == expected


def _list_differences(found, expected):
    return {
        name: (value, expected[name])
        for name, value in found.items()
        if isinstance(value, str) or not _is_same(value, expected[name])
    }


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("strategy", "names"),
    [("mirrored", IN_SHORT), ("mirrored", snippets), ("central_storage", snippets)],
    ids=["in short", "mirrored", "central_storage"],
)
def test_a_script_does_with_variables_what_it_does_by_itself(strategy, names):
    expected = _run_alone(*names)
    found, run = _run(f"--strategy={strategy}", "--virtual_devices=2", names=names)
    assert not _list_differences(found, expected)
    assert found.keys() == expected.keys()
    assert run.stderr.count("the script's MirroredStrategy is the") == 1


@pytest.mark.cluster
def test_a_script_on_workers_does_with_variables_what_it_does_by_itself():
    found, _ = _run("--workers=2", names=OF_WORKERS)
    assert not _list_differences(found, _run_alone(*OF_WORKERS))


@pytest.mark.cluster
def test_workers_start_from_one_random_seed_and_seed_fixes_it(tmp_path):
    script = tmp_path / "draw.py"
    script.write_text(
        "import os, random, subprocess, sys, keras, numpy as np, tensorflow as tf\n"
        "drawn = [random.random(), np.random.rand(), float(tf.random.uniform([])),"
        " float(keras.random.uniform(()))]\n"
        # By another process: what a worker itself writes is only the chief's.
        "file = f'{sys.argv[1]}/{os.getpid()}'\n"
        "subprocess.run(['tee', file], input=str(drawn), text=True, check=True)\n"
    )

    def draw(name, *flags):
        directory = tmp_path / name
        directory.mkdir()
        command = [sys.executable, "-m", "tfdist.run", *flags, str(script), str(directory)]
        subprocess.run(command, capture_output=True, timeout=1000, check=True)
        return [file.read_text() for file in directory.iterdir()]

    first, second = draw("workers", "--workers=2")
    assert first == second
    fixed = draw("one", "--strategy=one_device", "--seed=3")
    assert draw("two", "--strategy=mirrored", "--seed=3") == fixed != [first]


def test_says_what_trains_the_script_what_it_waits_for_and_what_is_wrong(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import keras, numpy as np\n"
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\n"
        "data = np.ones((8, 2)), np.ones((8, 1))\n"
        "for verbose in (0, 2, 2):\n"
        "    model.fit(*data, batch_size=4, verbose=verbose)\n"
        "print(model.predict(data[0], verbose=2).shape, flush=True)\n"
        "import tensorflow as tf\n"
        "tf.distribute.OneDeviceStrategy('CPU:0')\n"
    )

    # Versions that tfdist knows less well are warned of, and everything is compared.
    known = ("--check=off",) if find_untested() else ()
    flags = "--strategy=mirrored", "--virtual_devices=2", *known
    command = [sys.executable, "-m", "tfdist.run", *flags, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (2, "(8, 1)")
    *said, error = done.stderr.splitlines()
    assert said == [
        "tfdist.run: MirroredStrategy over 2 x CPU: CPU:0, CPU:1.",
        # The training step was traced in silence.
        "tfdist.run: Tracing and compiling the prediction step of 2 replicas ...",
    ]
    assert "Cannot build OneDeviceStrategy in a script that runs under Mirrored" in error


def test_deleted_models_are_collected():
    strategy = zoo.STRATEGIES["mirrored-2"]()
    routing = Routing(strategy, StepOptions())
    models = []
    with strategy.scope(), routing.open():
        for _ in range(2):
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=4, verbose=0)
            model.predict(np.ones((8, 3)), verbose=0)
            models.append(weakref.ref(model))
            trainer = routing.find_trainer(model)
            assert routing.find_trainer(model) is trainer
            del model, trainer
            gc.collect()
    assert [model() for model in models] == [None, None]


def test_trainers_of_a_script_have_the_options_of_the_command():
    def build_model():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    strategy = zoo.STRATEGIES["mirrored-2"]()
    own = StepOptions(steps_per_loop=3)
    with strategy.scope(), Routing(strategy, StepOptions(steps_per_loop=2)).open():
        trainers = [tfdist.Trainer(build_model), tfdist.Trainer(build_model, step_options=own)]
    trainers.append(tfdist.Trainer(build_model))
    assert [trainer.engine.options.steps_per_loop for trainer in trainers] == [2, 3, 1]
