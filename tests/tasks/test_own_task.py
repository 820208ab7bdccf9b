"""A task that a stranger wrote, outside the repository, through every command."""

import importlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

WORDS = '''
from dataclasses import dataclass

import keras
import numpy as np

import tfdist


@dataclass(frozen=True, kw_only=True)
class Words(tfdist.Task):
    """Lines of text, good or bad."""

    monitor = "val_accuracy"

    vocabulary: int = tfdist.option(50, "words that are told apart", minimum=2)
    units: int = tfdist.option(8, "size of a word's vector", minimum=1)
    lines: int = tfdist.option(200, "training lines", minimum=1)

    def make_data(self, *, seed, quiet):
        rng = np.random.default_rng(seed)

        def make(count):
            y = rng.integers(0, 2, count)
            x = np.stack([rng.integers(0, self.vocabulary // 2, 6) * 2 + k for k in y])
            return x.astype("int32"), y.astype("int32")

        return tfdist.Data(make(self.lines), make(40), {"length": 6})

    def build_model(self, info, *, seed):
        inputs = keras.Input((info["length"],), dtype="int32")
        normal = keras.initializers.RandomNormal(seed=seed)
        x = keras.layers.Embedding(self.vocabulary, self.units, normal)(inputs)
        x = keras.layers.GlobalAveragePooling1D()(x)
        return keras.Model(inputs, keras.layers.Dense(2, kernel_initializer=normal)(x))

    def compile_model(self, model, optimizer, info):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
'''
FLAGS = ("--task=words.py:Words", "--units=4", "--run_dir=run", "--quiet")


def _start(directory, module, *flags):
    """Runs a command in the directory, in a process of its own; returns its output."""
    run = subprocess.run(
        [sys.executable, "-m", f"tfdist.{module}", *flags],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def _run_here(directory, module, *flags):
    """Runs a command in a directory, in this process; returns its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "argv", [f"tfdist.{module}", *flags])
        command = importlib.import_module(f"tfdist.{module}")
        if not hasattr(command, "main"):
            command = importlib.import_module(f"tfdist.{module}.__main__")
        return command.main()


@pytest.fixture
def run(capfd):
    """Runs a command in a directory, in this process; returns its output and its errors."""

    def run_here(directory, module, *flags, status=0):
        capfd.readouterr()
        found = _run_here(directory, module, *flags)
        out, err = capfd.readouterr()
        assert found == status, err
        return out, err

    return run_here


def _train(run, directory, *flags, launch=()):
    directory.mkdir(exist_ok=True)
    (directory / "words.py").write_text(WORDS)
    module = ("launch", *launch, "--") if launch else ("train",)
    run(directory, *module, *FLAGS, "--epochs=3", "--learning_rate=0.03", *flags)
    return json.loads((directory / "run" / "summary.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stranger") / "own"
    return directory, _train(_run_here, directory, "--strategy=one_device")


def test_it_learns_and_leaves_a_run(trained):
    directory, summary = trained
    assert summary["task"] == "words.py:Words"
    assert summary["val_accuracy"] > 0.9
    assert {path.name for path in (directory / "run").glob("[!.]*")} == {
        "checkpoints",
        "goodput.jsonl",
        "metrics.jsonl",
        "model.keras",
        "options.json",
        "report.html",
        "steps.jsonl",
        "summary.json",
        "tensorboard",
    }


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
def test_replicas_train_it_to_the_same_end(trained, tmp_path, run, name):
    summary = _train(run, tmp_path, f"--strategy={name}", "--devices=CPU:0,CPU:1")
    assert summary["loss"] == pytest.approx(trained[1]["loss"], rel=1e-5)


@pytest.mark.cluster
@pytest.mark.parametrize("launch", [("--workers=2",), ("--workers=1", "--ps=1")], ids=" ".join)
def test_clusters_train_it_to_the_same_end(trained, tmp_path, launch):
    flags = ("--max_in_flight=1",) if "--ps=1" in launch else ()
    summary = _train(_start, tmp_path, *flags, launch=launch)
    assert summary["loss"] == pytest.approx(trained[1]["loss"], rel=1e-5)


@pytest.mark.thorough
def test_a_larger_batch_is_found_by_its_own_examples(tmp_path, run):
    flags = ("--strategy=one_device", "--global_batch_size=auto", "--lines=20")
    summary = _train(run, tmp_path, *flags)
    assert summary["global_batch_size"] == 20


def test_a_finished_run_is_evaluated_used_and_exported(trained, run):
    directory, summary = trained
    out, _ = run(directory, "evaluate", "--run_dir=run")
    assert f"accuracy {summary['val_accuracy']:.4f}" in out
    found = json.loads((directory / "run" / "evaluation" / "val.json").read_text())
    assert found["accuracy"] == pytest.approx(summary["val_accuracy"])
    x = np.arange(30, dtype="int32").reshape(5, 6)
    np.save(directory / "x.npy", x)
    run(directory, "predict", "--run_dir=run", "--examples=x.npy", "--output=y.npy")
    run(directory, "export", "--run_dir=run", "--output=servable")
    servable = tf.saved_model.load(str(directory / "servable" / "1"))
    found = np.load(directory / "y.npy")
    np.testing.assert_allclose(found, servable.serve(x).numpy(), rtol=1e-5, atol=1e-6)
    flags = ("--format=litert", "--output=words.tflite")
    out, _ = run(directory, "export", "--run_dir=run", *flags)
    assert "words.tflite loses 0.0000 of accuracy" in out


@pytest.mark.parametrize("option", ["task", "strategy"])
def test_a_strangers_run_executes_nothing(trained, tmp_path, run, monkeypatch, option):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # where no command has named anything
    shutil.copytree(trained[0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "run" / "options.json"
    options = json.loads(path.read_text())
    if option == "strategy":
        options["task"]["task"] = options["result"]["task"] = "segmentation"
    name = options[option][option] = options["result"][option] = "strangers.py:Words"
    path.write_text(json.dumps(options))
    mark = f"import pathlib\npathlib.Path({str(tmp_path / 'executed')!r}).touch()\n"
    (tmp_path / "strangers.py").write_text(mark + WORDS)
    use = ("--run_dir=run", "--quiet")
    (tmp_path / "a.png").touch()
    examples = "--images=a.png" if option == "strategy" else "--examples=a.png"
    commands = [
        ("report", "run"),
        ("evaluate", *use),
        ("predict", *use, examples, "--output=y"),
        ("export", *use, "--output=servable"),
        ("export", *use, "--output=words.tflite", "--format=litert"),
        ("serve", *use),
        ("train", "--config=run/options.json", "--run_dir=other"),
    ]
    for module, *flags in commands:
        _, err = run(tmp_path, module, *flags, status=2)
        assert f"names code that would be executed, {option}={name}" in err
        assert ("--trust_task" in err) == (module != "train")
        assert not (tmp_path / "executed").exists(), module
    if option == "task":
        run(tmp_path, "evaluate", *use, "--trust_task")
        assert (tmp_path / "executed").exists()


def test_the_strategies_are_verified_on_it(trained):
    flags = ("--task=words.py:Words", "--units=4", "--strategies=mirrored", "--steps=4")
    assert " equal\n" in _start(trained[0], "verify", *flags)


@pytest.mark.thorough
def test_it_is_measured_beside_keras(trained, run):
    flags = ("--task=words.py:Words", "--units=4", "--strategies=one_device", "--rounds=1")
    flags += ("--precisions=float32", "--baselines=loop,keras_fit", "--steps=2", "--warmup_steps=1")
    out, _ = run(trained[0], "benchmark", *flags, "--output=benchmark")
    assert "words.py:Words, batches of 16" in out
    found = json.loads((trained[0] / "benchmark" / "results.json").read_text())
    assert {row["name"]: row["error"] for row in found["rows"]} == {
        "one_device": "",
        "loop by hand": "",
        "Keras fit, tfdist's layers": "",
    }


def test_a_job_runs_it(trained, run):
    run(trained[0], "jobs", "--target=slurm", "--workers=2", "--", *FLAGS)
    text = (trained[0] / "jobs" / "train.sbatch").read_text()
    assert "--task=words.py:Words" in text
    flags = ("--task=words.py:Words", "--base_filters=4")
    _, err = run(trained[0], "jobs", "--target=slurm", "--", *flags, status=2)
    assert err.startswith("tfdist: Unknown flag '--base_filters'")


SUBCLASS = (
    WORDS.replace(
        "import tfdist\n",
        """import tfdist


class Counts(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        return self.dense(keras.ops.cast(inputs["line"], "float32"))
""",
    )
    .replace(
        '        return tfdist.Data(make(self.lines), make(40), {"length": 6})',
        """        (x, y), (x_val, y_val) = make(self.lines), make(40)
        return tfdist.Data(({"line": x}, y), ({"line": x_val}, y_val))

    def build_model(self, info, *, seed):
        return Counts()
""",
    )
    .replace(
        "    def build_model(self, info, *, seed):\n        inputs",
        "    def unused(self, info, *, seed):\n        inputs",
    )
)


def test_a_model_may_be_a_subclass_of_named_inputs(tmp_path, run):
    (tmp_path / "words.py").write_text(SUBCLASS)
    flags = ("--task=words.py:Words", "--epochs=1", "--run_dir=run", "--strategy=one_device")
    out, _ = run(tmp_path, "train", *flags, "--dry_run")
    assert "Words, 14 parameters" in out
    assert "activations come on top" in out
    out, _ = run(tmp_path, "train", *flags)
    assert "GFLOP/s" not in out
    assert "steps" in json.loads((tmp_path / "run" / "summary.json").read_text())


def test_it_is_described_without_a_run(trained, run):
    out, _ = run(trained[0], "train", *FLAGS[:2], "--dry_run")
    assert "200 training and 40 validation examples" in out
    assert "Words, 210 parameters" in out
    help_text, _ = run(trained[0], "train", FLAGS[0], "--help")
    assert "--vocabulary=N" in help_text
    assert "--image_size" not in help_text


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("segmentatoin", "Unknown --task 'segmentatoin'"),
        ("nowhere.py:Words", "--task=nowhere.py:Words: "),
        ("words.py:np", "--task=words.py:np is a module, not a subclass of tfdist.Task"),
    ],
)
def test_refuses_what_is_no_task(trained, run, task, message):
    _, err = run(trained[0], "train", f"--task={task}", status=2)
    assert message in err.splitlines()[-1]
