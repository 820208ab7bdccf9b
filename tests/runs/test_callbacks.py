"""What a command's callbacks write has each epoch once, wherever the run was stopped."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.records.run_directory import WITHIN_EPOCHS, RunDirectory
from tfdist.runs.callbacks import CurvesLog, MetricsLog, TensorBoardLog, Throughput

X, Y = np.ones((16, 4), "f4"), np.ones((16, 1), "f4")


def _build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def _train(run, log_every, **events):
    """Trains three epochs of two steps; an event calls a function with the trainer."""
    trainer = tfdist.Trainer(_build, checkpoint_dir=run.checkpoints)
    callbacks = [
        MetricsLog(run, trainer, Throughput(trainer, 8), log_every=log_every),
        TensorBoardLog(run, trainer),
        CurvesLog(run, trainer, total_steps=6),
        keras.callbacks.LambdaCallback(
            **{name: lambda *_, act=act, **__: act(trainer) for name, act in events.items()}
        ),
    ]
    data = {"validation_data": (X, Y), "batch_size": 8, "epochs": 3}
    trainer.fit(X, Y, callbacks=callbacks, verbose=0, **data)


def _die(trainer):
    raise InterruptedError


def _read_steps(directory):
    return [
        event.step
        for name in sorted(tf.io.gfile.listdir(directory))
        for event in tf.compat.v1.train.summary_iterator(f"{directory}/{name}")
        for value in event.summary.value
        if value.tag == "loss"
    ]


@pytest.mark.parametrize(("log_every", "steps"), [(0, [2, 4, 6]), (2, [2, 2, 4, 4, 6, 6])])
def test_an_epoch_that_ends_once_more_has_one_line(path_with_spaces, log_every, steps):
    """Stopped while it is validated, continued, and killed before its checkpoint."""
    run = RunDirectory(str(path_with_spaces))

    _train(run, log_every, on_test_batch_end=tfdist.Trainer.request_stop)
    with pytest.raises(InterruptedError):
        _train(run, log_every, on_epoch_end=_die)
    _train(run, log_every)
    assert [line["step"] for line in run.read_metrics()] == steps
    assert [line["epoch"] for line in run.read_metrics()] == sorted([1, 2, 3] * (len(steps) // 3))
    assert [line["step"] for line in run.read_metrics(WITHIN_EPOCHS)] == [1, 2, 3, 4, 5, 6]
    for part in ("train", "validation"):
        assert _read_steps(f"{run.tensorboard}/{part}") == [2, 4, 6]


def test_a_long_run_has_at_most_200_points_within_its_epochs(path_with_spaces):
    class Clock:
        step = 0

    run, trainer = RunDirectory(str(path_with_spaces)), Clock()
    log = CurvesLog(run, trainer, total_steps=1001)
    log.on_train_begin()
    log.on_epoch_begin(0)
    for trainer.step in range(1, 1002):
        log.on_train_batch_end(0, {"loss": 1.0, "iou/a": 0.5, "array": np.ones(2)})
    assert not list(run.read_metrics(WITHIN_EPOCHS))  # not at every step
    log.on_train_end()
    lines = list(run.read_metrics(WITHIN_EPOCHS))
    assert len(lines) == 166
    assert lines[0] == {"step": 6, "epoch": 1, "loss": 1.0}
