"""What TensorBoard reads of a run: its own readers find each part."""

import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import (
    data_provider,
    event_accumulator,
    plugin_event_multiplexer,
)
from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import backend_context, list_session_groups
from tensorboard.plugins.hparams.api_pb2 import ListSessionGroupsRequest

from tfdist.cli.command import run_command
from tfdist.records.run_directory import RunDirectory
from tfdist.runs.options import TrainOptions
from tfdist.train import run_training

SMALL = [
    "--strategy=one_device",
    "--image_size=16,16",
    "--train_examples=64",
    "--val_examples=10",
    "--global_batch_size=16",
    "--learning_rate=1e-2",
    "--quiet",
]
# As the fixture `run_dir` has them.
SEGMENTATION = ["--base_filters=4", "--depth=2", "--epochs=4"]


def _train(run_dir, *flags):
    flags = [*SMALL, *flags, f"--run_dir={run_dir}"]
    assert run_command("tfdist.train", run_training, flags, options_class=TrainOptions) == 0
    return json.loads((run_dir / "summary.json").read_text())


def _read(directory):
    return event_accumulator.EventAccumulator(str(directory), {"tensors": 0}).Reload()


def _list_hparams(logdir):
    """Returns what the HParams plugin shows: the hyperparameters, and the names of metrics."""
    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(logdir)).Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(logdir))
    context = backend_context.Context(
        base_plugin.TBContext(data_provider=provider, logdir=str(logdir))
    )
    request = ListSessionGroupsRequest(start_index=0, slice_size=10, allowed_statuses=[0, 1, 2, 3])
    return list_session_groups.Handler(RequestContext(), context, "", request).run()


def test_a_run_has_curves_pictures_and_hyperparameters(tmp_path, run_dir, optimized_graphs):
    summary = _train(tmp_path / "run", *SEGMENTATION)
    before = json.loads(pathlib.Path(run_dir, "summary.json").read_text())
    assert summary["weights_sha256"] == before["weights_sha256"]  # the pictures change nothing

    events = tmp_path / "run" / "tensorboard"
    lines = list(RunDirectory(str(tmp_path / "run")).read_metrics())
    for part, prefix in (("train", ""), ("validation", "val_")):
        read = _read(events / part)
        for name in ("loss", "mean_iou", "learning_rate")[: None if part == "train" else 2]:
            values = [tf.make_ndarray(event.tensor_proto) for event in read.Tensors(name)]
            np.testing.assert_allclose(values, [line[prefix + name] for line in lines], rtol=1e-6)
    pictures = _read(events / "task").Tensors("predictions")
    assert [event.step for event in pictures] == [4, 8, 12, 16]
    _, _, png = tf.make_ndarray(pictures[-1].tensor_proto)
    shown = (tmp_path / "run" / "samples" / "predictions.png").read_bytes()
    assert tf.io.decode_png(png).shape == tf.io.decode_png(shown).shape

    (group,) = _list_hparams(tmp_path).session_groups
    assert group.hparams["learning_rate"].number_value == 0.01
    assert group.hparams["optimizer"].string_value == "adam"
    (session,) = group.sessions
    metrics = {(value.name.group, value.name.tag): value.value for value in session.metric_values}
    assert metrics["validation", "mean_iou"] == pytest.approx(lines[-1]["val_mean_iou"])


@pytest.mark.thorough
def test_a_confusion_matrix_is_a_table(tmp_path):
    summary = _train(tmp_path / "run", "--task=classification", "--epochs=1")
    read = _read(tmp_path / "run" / "tensorboard" / "confusion")
    (event,) = read.Tensors("confusion")
    assert event.step == 4
    table = tf.make_ndarray(event.tensor_proto).item().decode().splitlines()
    names = summary["info"]["class_names"]
    assert table[0].split(" | ")[1:] == [*names[:-1], f"{names[-1]} |"]
    counts = [[int(cell) for cell in row.split("|")[2:-1]] for row in table[2:]]
    assert counts == summary["confusion"]
