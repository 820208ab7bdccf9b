"""A script may begin with the settings of devices that it needs without tfdist."""

import pytest
import tensorflow as tf

from tfdist.run.device_settings import keeping_devices


def _set_late():
    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration()] * 9
    return [
        lambda: tf.config.set_logical_device_configuration(cpu, parts),
        lambda: tf.config.experimental.set_virtual_device_configuration(cpu, parts),
        lambda: tf.config.set_visible_devices([], "CPU"),
        lambda: tf.config.experimental.set_visible_devices([], "CPU"),
        lambda: tf.config.threading.set_intra_op_parallelism_threads(17),
        lambda: tf.config.threading.set_inter_op_parallelism_threads(17),
    ]


def test_settings_that_come_too_late_change_nothing_and_are_told_once():
    tf.config.list_logical_devices()  # which starts them
    told = []
    for setting in _set_late():
        with pytest.raises(RuntimeError):
            setting()
        with keeping_devices(told.append):
            setting()
            setting()
    assert len(told) == 6
    assert all("changes nothing: TensorFlow has started its devices" in line for line in told)


def test_memory_cannot_grow_on_virtual_devices():
    (cpu,) = tf.config.list_physical_devices("CPU")
    told = []
    with keeping_devices(told.append):
        if tf.config.get_logical_device_configuration(cpu):
            tf.config.experimental.set_memory_growth(cpu, True)
            assert told[0].startswith("set_memory_growth changes nothing")
        with pytest.raises(ValueError, match="Unrecognized device"):
            tf.config.experimental.set_memory_growth(None, True)
