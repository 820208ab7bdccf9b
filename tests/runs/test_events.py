import pathlib

import pytest
import tensorflow as tf

from tfdist.runs.events import Event, forget_events_after


def _write(directory, steps):
    with tf.summary.create_file_writer(directory).as_default():
        for step in steps:
            tf.summary.scalar("loss", 1 / step, step=step)


def _read_steps(directory):
    steps = []
    for name in sorted(tf.io.gfile.listdir(directory)):
        records = tf.data.TFRecordDataset(f"{directory}/{name}").as_numpy_iterator()
        events = [Event.FromString(record) for record in records]
        steps += [event.step for event in events if event.summary.value]
    return steps


@pytest.mark.parametrize("root", ["disk", "ram"])
def test_drops_the_later_steps(path_with_spaces, root):
    directory = str(path_with_spaces) if root == "disk" else f"ram://{path_with_spaces}"
    _write(directory, [1, 2, 3])
    forget_events_after(directory, 2)
    _write(directory, [3, 4])
    assert _read_steps(directory) == [1, 2, 3, 4]
    forget_events_after(directory, 0)
    assert tf.io.gfile.listdir(directory) == []


def test_a_record_cut_short_ends_a_file(path_with_spaces):
    directory = str(path_with_spaces)
    _write(directory, [1, 2, 3])
    (path,) = pathlib.Path(directory).iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    forget_events_after(directory, 1)
    assert _read_steps(directory) == [1]


def test_nothing_there_yet(tmp_path):
    forget_events_after(f"{tmp_path}/none", 5)
