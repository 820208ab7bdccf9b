import pytest
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.strategies import make_central_storage


def test_keeps_variables_on_the_parameter_device():
    strategy = make_central_storage(devices=["CPU:1", "CPU:2"], parameter_device="CPU:0")
    with strategy.scope():
        variable = tf.Variable(1.0)
    assert variable.device.endswith("CPU:0")
    assert strategy.num_replicas_in_sync == 2


def test_refuses_a_parameter_device_that_is_not_there():
    with pytest.raises(TfdistError, match="names GPU:0, but 0 GPUs"):
        make_central_storage(parameter_device="GPU:0")
