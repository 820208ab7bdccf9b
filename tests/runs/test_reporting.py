"""The report is kept current while a run trains, and never costs the run."""

import json
import uuid
from dataclasses import dataclass
from typing import ClassVar

import pytest
import tensorflow as tf

from tfdist.runs import callbacks
from tfdist.runs.about import find_commit
from tfdist.runs.callbacks import WriteReport
from tfdist.runs.options import TrainOptions
from tfdist.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class Own(Task):
    """A task that leaves a picture."""

    pictures: ClassVar[tuple[str, ...]] = ("samples/own.png",)


class Broken(Own):
    """A task whose part of the report fails."""

    def make_report(self, run):
        raise RuntimeError("no such\nthing")


@pytest.fixture
def run_in_memory():
    """A run directory on `ram://`, in its second epoch."""
    path = f"ram://{uuid.uuid4().hex} with spaces"
    png = tf.io.encode_png(tf.zeros((2, 2, 3), tf.uint8)).numpy()
    line = json.dumps({"step": 3, "epoch": 1, "loss": 0.125}).encode()
    options = json.dumps(TrainOptions().to_dict()).encode()
    for name, content in {
        "options.json": options,
        "metrics.jsonl": line + b"\n",
        "samples/own.png": png,
    }.items():
        tf.io.gfile.makedirs(f"{path}/{name}".rpartition("/")[0])
        with tf.io.gfile.GFile(f"{path}/{name}", "wb") as file:
            file.write(content)
    return path


def test_a_page_on_any_file_system_has_the_pictures_of_any_task(run_in_memory, capfd):
    WriteReport(run_in_memory, Own()).on_epoch_end(0)
    with tf.io.gfile.GFile(f"{run_in_memory}/report.html") as file:
        page = file.read()
    assert "0.125" in page
    assert page.count("data:image/png;base64,") == 1
    assert capfd.readouterr().err == ""


def test_a_report_that_cannot_be_drawn_costs_one_line(run_in_memory, capfd):
    callback = WriteReport(run_in_memory, Broken())
    callback.write()
    callback.write()
    assert capfd.readouterr().err == "tfdist: report.html was not written: no such\n"
    assert not tf.io.gfile.exists(f"{run_in_memory}/report.html")


def test_it_takes_at_most_a_hundredth_of_the_time(run_in_memory, monkeypatch):
    now, written = [0.0], []
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now[0])
    callback = WriteReport(run_in_memory, Own())

    def write():
        written.append(now[0])
        now[0] += 0.5

    monkeypatch.setattr(callback, "write", write)
    for epoch in range(20):
        callback.on_epoch_end(epoch)
        now[0] += 10.0
    assert written == [0.0, 50.5, 101.0, 151.5]


def test_the_commit_of_a_checkout(path_with_spaces, monkeypatch):
    monkeypatch.chdir(path_with_spaces)
    assert find_commit() is None
    monkeypatch.setenv("PATH", str(path_with_spaces))
    assert find_commit() is None  # no git
