"""How a command starts TensorFlow."""

import gc

from tfdist.cli.quiet import start_tensorflow_quietly


def test_a_command_looks_for_garbage_less_often_than_python():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        start_tensorflow_quietly()
        assert gc.get_threshold() == (100_000, 10, 10)
    finally:
        gc.set_threshold(*before)
