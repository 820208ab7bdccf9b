"""The end of a process whose pipeline calls Python."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, time
import numpy as np
import tensorflow as tf
from tfdist.data.tf_data import call_python

def read(index):
    time.sleep(0.05)
    return np.int64(index)

def fail():
    dataset = tf.data.Dataset.range(10**6).map(lambda i: call_python(read, [i], tf.int64))
    iterator = iter(dataset.prefetch(4))
    assert int(next(iterator)) == 0
    raise ValueError("a fault")

try:
    fail()
except ValueError as error:
    if sys.argv[1] == "unforeseen":
        raise
    cycle = [error]
    cycle.append(cycle)
    del cycle
sys.exit(2)
"""


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("kind", "status"), [("handled", 2), ("unforeseen", 1)])
def test_a_failure_in_mid_read_ends_the_process(kind, status):
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind], capture_output=True, text=True, timeout=1000
    )
    assert process.returncode == status
    assert ("ValueError: a fault" in process.stderr) == (kind == "unforeseen")
