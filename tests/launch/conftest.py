"""The tasks and the watch over processes of the launcher's own tests."""

from tests.launch.test_launch import mark, script  # noqa: F401
