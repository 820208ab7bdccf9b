"""The process's environment; the only module that touches `os.environ`."""

import os


def silence_tensorflow() -> None:
    """Hides TensorFlow's start-up messages; before TensorFlow is imported."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
