import pytest

from tfdist.errors import TfdistError
from tfdist.strategies import make_one_device


def test_computes_on_the_named_device():
    strategy = make_one_device(devices=["cpu:1"])
    assert strategy.extended.worker_devices[0].endswith("CPU:1")
    assert strategy.num_replicas_in_sync == 1


def test_refuses_two_devices():
    with pytest.raises(TfdistError, match=r"names 2 devices .* Name one, or use"):
        make_one_device(devices=["CPU:0", "CPU:1"])
