import json
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import tfdist
from tfdist import strategies, train
from tfdist.errors import TfdistError
from tfdist.strategies import registry


def test_builds_each_single_machine_strategy_by_name():
    kinds = {
        "one_device": tf.distribute.OneDeviceStrategy,
        "mirrored": tf.distribute.MirroredStrategy,
        "central_storage": tf.distribute.experimental.CentralStorageStrategy,
    }
    for name, kind in kinds.items():
        assert isinstance(registry.make_strategy(name, devices=["CPU:0"]), kind)


def test_auto_takes_one_device_without_accelerators():
    strategy = registry.make_strategy("auto")
    assert isinstance(strategy, tf.distribute.OneDeviceStrategy)


def test_unknown_name_lists_the_closest_first():
    with pytest.raises(TfdistError, match=r"Unknown `strategy` 'miror'\. Valid: mirrored, "):
        registry.make_strategy("miror")


def test_refuses_an_argument_that_the_strategy_does_not_take():
    with pytest.raises(TfdistError, match="one_device` does not take `all_reduce` .*mirrored"):
        registry.make_strategy("one_device", all_reduce="hierarchical_copy")


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        ({"worker": ["a:1", "b:1"]}, "multi_worker_mirrored"),
        ({"chief": ["a:1"], "worker": ["b:1"]}, "multi_worker_mirrored"),
        ({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}, "parameter_server"),
        ({"worker": ["a:1"]}, "one_device"),
    ],
)
def test_auto_takes_what_the_cluster_is_for(monkeypatch, cluster, name):
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    monkeypatch.setattr("tfdist.devices.list_devices", lambda: ("CPU:0",))
    assert registry.choose_strategy() == name


def test_takes_a_strategy_by_its_name_its_options_or_itself():
    def build():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    options = strategies.Mirrored(devices=["CPU:0", "CPU:1"])
    for given, replicas in (("one_device", 1), (options, 2), (options.build(), 2)):
        assert tfdist.Trainer(build, strategy=given).engine.workers.num_replicas == replicas
    with pytest.raises(TfdistError, match="`strategy` is a list. Give a name"):
        tfdist.Trainer(build, strategy=["CPU:0"])


SMALL = ("--image_size=16,16", "--base_filters=2", "--depth=1")
STRANGER = """
from dataclasses import dataclass

import tensorflow as tf
import tfdist
from tfdist.strategies import Strategy, Traits


@dataclass(frozen=True, kw_only=True)
class Backwards(Strategy):
    name = "strangers:Backwards"
    traits = Traits(copies_variables=True)
    replicas: int = tfdist.option(2, "how many", minimum=1)

    def build(self, *, must_match=None):
        devices = [f"CPU:{index}" for index in range(self.replicas)]
        return tf.distribute.MirroredStrategy(
            devices[::-1], tf.distribute.ReductionToOneDevice()
        )


def plain():
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()
    )
"""


def _run(directory, *arguments):
    (directory / "strangers.py").write_text(STRANGER)
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )


@pytest.mark.thorough
def test_a_strategy_of_another_package_trains_with_its_own_flags(path_with_spaces):
    run = _run(
        path_with_spaces,
        "tfdist.train",
        "--strategy=strangers:Backwards",
        "--replicas=3",
        "--virtual_devices=3",
        "--train_examples=12",
        "--val_examples=6",
        *SMALL,
        "--max_steps=1",
        "--run_dir=run",
    )
    assert run.returncode == 0, run.stderr
    summary = json.loads((path_with_spaces / "run" / "summary.json").read_text())
    assert (summary["strategy"], summary["replicas"]) == ("strangers:Backwards", 3)


def test_flags_that_a_strategy_of_another_package_does_not_take(tmp_path, monkeypatch, capfd):
    (tmp_path / "strangers.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tfdist.train", "--strategy=strangers:Backwards", "--tpu=x"])
    assert train.main() == 2
    assert "--strategy=strangers:Backwards does not take --tpu" in capfd.readouterr().err
    monkeypatch.setattr(sys, "argv", ["tfdist.train", "--strategy=strangers:Forwards"])
    assert train.main() == 2
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.thorough
def test_a_strategy_of_another_package_is_verified(path_with_spaces):
    names = "strangers:Backwards,strangers:plain"
    run = _run(path_with_spaces, "tfdist.verify", f"--strategies={names}", "--steps=2", *SMALL)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("equal") >= 2
