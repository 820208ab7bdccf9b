import json

import pytest
import tensorflow as tf

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
