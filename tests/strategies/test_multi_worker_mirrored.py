import json

import pytest
import tensorflow as tf

from tfdist import strategies
from tfdist.errors import TfdistError

# What it builds is tested in processes of its own: tests/training/test_workers.py.


@pytest.fixture
def undivided_cpu(monkeypatch):
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda device: None)


def test_refuses_an_unknown_collective():
    with pytest.raises(TfdistError, match=r"Unknown `collective` 'rings'. Valid: ring, "):
        strategies.make_multi_worker_mirrored(collective="rings")


@pytest.mark.skipif(tf.config.list_physical_devices("GPU") != [], reason="there are GPUs")
def test_refuses_nccl_without_gpus():
    with pytest.raises(TfdistError, match="nccl` needs GPUs, but this worker sees none. Use auto"):
        strategies.make_multi_worker_mirrored(collective="nccl")


@pytest.mark.skipif(tf.config.list_physical_devices("GPU") != [], reason="there are GPUs")
def test_refuses_a_divided_cpu():
    with pytest.raises(TfdistError, match="one replica, but `virtual_devices` splits"):
        strategies.make_multi_worker_mirrored()


def test_refuses_a_cluster_with_parameter_servers(monkeypatch, undivided_cpu):
    monkeypatch.setenv(
        "TF_CONFIG",
        '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "worker", "index": 0}}',
    )
    with pytest.raises(TfdistError, match="has no parameter servers, but TF_CONFIG describes 1"):
        strategies.make_multi_worker_mirrored()


def test_says_so_when_devices_are_in_use(monkeypatch, undivided_cpu):
    tf.constant(0) + 1
    monkeypatch.setenv(
        "TF_CONFIG",
        '{"cluster": {"worker": ["127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}',
    )
    with pytest.raises(TfdistError, match="devices are already in use. Create the strategy first"):
        strategies.make_multi_worker_mirrored()


def test_refuses_an_evaluator_s_process(monkeypatch, undivided_cpu):
    config = {"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(TfdistError, match="makes this process an evaluator"):
        strategies.make_multi_worker_mirrored()
