"""Shared set-up of the tests: three logical CPUs, no accelerators' chatter."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
import tensorflow as tf

LOGICAL_CPUS = 3


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--write-docs", action="store_true", help="write the pages of docs/ that tests make"
    )


def pytest_configure() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS
    )


@pytest.fixture
def path_with_spaces(tmp_path):
    """An empty directory whose name has spaces in it."""
    path = tmp_path / "a folder with spaces"
    path.mkdir()
    return path
