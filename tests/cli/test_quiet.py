"""How a command starts TensorFlow."""

import gc
import subprocess
import sys
from pathlib import Path

from tfdist.cli.quiet import start_tensorflow_quietly

DRAW = """
import sys
from tfdist.cli.quiet import start_tensorflow_quietly

start_tensorflow_quietly()
assert "keras" in sys.modules
loaded = {"IPython.core", "matplotlib.figure"} & set(sys.modules)
assert not loaded, loaded

import keras
import numpy as np

pictures = np.zeros([4, 8, 8, 3])
keras.visualization.plot_image_gallery(
    pictures, value_range=(0, 255), rows=2, cols=2, path=sys.argv[1]
)
assert "matplotlib.figure" in sys.modules
"""


def test_a_command_looks_for_garbage_less_often_than_python():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        start_tensorflow_quietly()
        assert gc.get_threshold() == (100_000, 10, 10)
    finally:
        gc.set_threshold(*before)


def test_what_draws_figures_loads_when_it_draws(tmp_path: Path):
    command = [sys.executable, "-c", DRAW, str(tmp_path / "drawn.png")]
    subprocess.run(command, check=True, timeout=1000)
    assert (tmp_path / "drawn.png").stat().st_size > 0
