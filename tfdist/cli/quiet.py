"""Starts TensorFlow without its log messages, for a process that traces a lot."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

from tfdist import cluster
from tfdist.imports import import_lazily

# What Keras and TensorFlow import where it is installed, for functions that few programs call.
_SELDOM_USED = ("IPython", "matplotlib.patches", "matplotlib.pyplot")


def start_tensorflow_quietly() -> None:
    """Imports TensorFlow and opens its devices without output on standard error.

    TensorFlow 2.21 writes some lines before it reads `TF_CPP_MIN_LOG_LEVEL`, and some drivers
    ignore that variable. So the file descriptor itself is redirected meanwhile.
    """
    collect_garbage_less_often()
    cluster.quiet_environment()
    with hide_standard_error(), import_lazily(_SELDOM_USED):
        import tensorflow as tf

        tf.get_logger().setLevel("ERROR")
        tf.config.list_physical_devices()


@contextlib.contextmanager
def hide_standard_error() -> Iterator[None]:
    """Discards what is written to the file descriptor of standard error meanwhile."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def collect_garbage_less_often() -> None:
    """Lets Python look for cycles of garbage less often.

    Tracing makes many small objects that stay alive. With Python's own thresholds a quarter of a
    trace's time goes into looking for garbage among them.
    """
    gc.set_threshold(100_000, 10, 10)
