"""Trackers get the lines of metrics.jsonl, each once, wherever the run was stopped."""

import csv
import importlib.util
import json
import pathlib
import struct
import sys
import time

import keras
import numpy as np
import pytest

import tfdist
from tfdist.errors import TfdistError
from tfdist.records.run_directory import RunDirectory
from tfdist.runs.callbacks import MetricsLog, Throughput
from tfdist.runs.trackers import Trackers, check_trackers

X, Y = np.ones((16, 4), "f4"), np.ones((16, 1), "f4")
# Their own imports warn.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def run(path_with_spaces, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (path_with_spaces / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    yield RunDirectory(str(path_with_spaces / "my run"))
    if importlib.util.find_spec("wandb"):
        import wandb

        wandb.teardown()


def _build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.125), "mse")
    return model


def _train(run, names, *, epochs=3, on_epoch_end=lambda trainer: None):
    trainer = tfdist.Trainer(_build, checkpoint_dir=run.checkpoints)
    trackers = Trackers(names, run, {"units": 3, "name": "a b"}, quiet=True)
    act = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: on_epoch_end(trainer))
    log = MetricsLog(run, trainer, Throughput(trainer, 8), log_every=1, trackers=trackers)
    trainer.fit(
        X,
        Y,
        callbacks=[log, act],
        validation_data=(X, Y),
        batch_size=8,
        epochs=epochs,
        verbose=0,
    )


def _read_csv(run):
    lines = list(csv.DictReader(pathlib.Path(run.path, "metrics.csv").read_text().splitlines()))
    return [{name: float(value) for name, value in line.items()} for line in lines]


def _read_mlflow(run):
    import mlflow

    run_id = json.loads(pathlib.Path(run.path, "trackers.json").read_text())["mlflow"]["id"]
    client = mlflow.MlflowClient()
    assert len(client.search_runs(["0"])) == 1
    found = client.get_run(run_id)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "my run"
    assert found.data.params == {"units": "3", "name": "a b"}
    return [
        {"step": metric.step, name: metric.value}
        for name in found.data.metrics
        for metric in client.get_metric_history(run_id, name)
    ]


def _read_wandb(run):
    """Reads the offline files: blocks of 32 KiB with records of 7 bytes of header, as LevelDB's."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # ends the process that writes
    lines, runs = [], set()
    for path in sorted(pathlib.Path(run.path, "wandb").glob("offline-run-*/*.wandb")):
        data, at, part = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            part += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind not in (1, 4):  # the whole record, or its last part
                continue
            record, part = wandb_internal_pb2.Record.FromString(part), b""
            if record.HasField("run"):
                runs.add((record.run.run_id, record.run.display_name))
            if record.HasField("history"):
                items = record.history.item
                line = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                lines.append({key: line[key] for key in line if not key.startswith("_")})
    assert len(runs) == 1
    assert runs.pop()[1] == "my run"
    return lines


def _list_by_metric(lines):
    """Returns the steps and values of each metric: MLflow has no lines."""
    values = {}
    for line in lines:
        for name, value in line.items():
            values.setdefault(name, []).append((line["step"], value))
    values.pop("step")
    return values


READ = {"csv": _read_csv, "mlflow": _read_mlflow, "wandb": _read_wandb}


def _die(trainer):
    if trainer.step == 4:
        # As at the end of a process.
        if "mlflow" in sys.modules:
            sys.modules["mlflow"].end_run()
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish()
        raise InterruptedError


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", READ)
def test_gets_each_line_once(run, name):
    if name != "csv":
        pytest.importorskip(name, reason=f"pip install tfdist[{name}]")
    _train(run, [], epochs=1)  # without it: it gets these lines later
    with pytest.raises(InterruptedError):  # before its checkpoint
        _train(run, [name], on_epoch_end=_die)
    for stop_at in (4, 0):
        time.sleep(1.1 * (name == "wandb"))  # its offline files are named by the second
        _train(run, [name], on_epoch_end=lambda t, at=stop_at: t.step == at and t.request_stop())
    lines = [dict(line) for line in run.read_metrics()]
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    assert all(line["learning_rate"] == 0.125 for line in lines)
    if name == "csv":
        lines = [line for line in lines if "val_loss" in line]
    found, expected = _list_by_metric(READ[name](run)), _list_by_metric(lines)
    # The lines that were repeated have other ones.
    assert len(found.pop("examples_per_second")) == len(expected.pop("examples_per_second"))
    assert found == expected


def test_a_tracker_that_fails_gets_its_lines_from_the_next_start(run, capfd):
    pytest.importorskip("mlflow", reason="pip install tfdist[mlflow]")

    def break_the_store(trainer):
        if trainer.step == 2:
            (metrics,) = pathlib.Path(run.path).parent.glob("store/0/*/metrics")
            metrics.rename(metrics.parent / "away")
            metrics.touch()

    _train(run, ["mlflow"], epochs=2, on_epoch_end=break_the_store)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tfdist:")]
    assert line.startswith("tfdist: --track=mlflow failed and gets no more metrics of this start:")
    (metrics,) = pathlib.Path(run.path).parent.glob("store/0/*/metrics")
    metrics.unlink()
    (metrics.parent / "away").rename(metrics)
    _train(run, ["mlflow"])
    assert _list_by_metric(_read_mlflow(run)) == _list_by_metric(run.read_metrics())


def test_a_tracker_that_does_not_start_is_refused(run, monkeypatch):
    pytest.importorskip("mlflow", reason="pip install tfdist[mlflow]")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://at/all")
    with pytest.raises(TfdistError, match="^Cannot start --track=mlflow: .*or leave mlflow out.$"):
        _train(run, ["mlflow"])


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_trackers(["csv"])
    with pytest.raises(TfdistError, match="--track=wandb needs .*pip install 'tfdist.wandb.'"):
        check_trackers(["csv", "wandb"])
