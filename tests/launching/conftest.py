"""The tasks and the watch over processes of the launcher's own tests."""

from tests.test_launch import mark, script  # noqa: F401
