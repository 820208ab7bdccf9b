"""How much of a run's time became progress."""

import contextlib
import json

import pytest

from tfdist.cli.flags import parse_flags
from tfdist.records.run_directory import RunDirectory
from tfdist.runs.goodput import GOODPUT, read_goodput, summarize_goodput
from tfdist.runs.options import TrainOptions
from tfdist.train import run_training

LINE = {
    "step": 12,
    "first_step": 0,
    "measured_steps": 11,
    "start": 1000.0,
    "time": 1030.0,
    "prep_s": 4.0,
    "first_step_s": 3.0,
    "steps_s": 13.0,
    "input_s": 2.0,
    "save_s": 1.5,
    "restore_s": 0.0,
    "has_ended": True,
}


def test_a_run_of_one_start():
    found = summarize_goodput([LINE])
    seconds = found["goodput_seconds"]
    assert found["goodput"] == pytest.approx(12 / 30)  # 12 steps of (13 - 2) / 11 s in 30 s
    assert (seconds["total"], seconds["progress"]) == (30, 12)
    assert (seconds["training_prep"], seconds["program_startup"]) == (4, 2)
    assert seconds["data_loading_sync"] == 2
    assert seconds["unproductive_checkpoint_save_time"] == 1.5
    assert seconds["other"] == pytest.approx(30 - 12 - 4 - 2 - 2 - 1.5)
    assert summarize_goodput([]) == {}


def test_a_failure_costs_steps_and_the_time_until_the_next_start():
    failed = {**LINE, "has_ended": False}
    again = {**LINE, "start": 1050.0, "time": 1080.0, "first_step": 8, "step": 20, "restore_s": 0.5}
    seconds = summarize_goodput([failed, again])["goodput_seconds"]
    assert seconds["wasted_progress_from_disruption"] == pytest.approx(4)
    assert seconds["infrastructure_recovery_from_disruption"] == 20
    assert seconds["unproductive_checkpoint_restore_time"] == 0.5
    assert (seconds["total"], seconds["progress"]) == (80, 20)
    # Nobody loses anything if a run that has ended is made longer a day later.
    longer = {**again, "first_step": 12, "start": 90_000.0, "time": 90_030.0}
    seconds = summarize_goodput([LINE, longer])["goodput_seconds"]
    assert seconds["wasted_progress_from_disruption"] == 0
    assert seconds["infrastructure_recovery_from_disruption"] == 0
    assert seconds["total"] == 60


@pytest.mark.parametrize("measured", [0, 2])
def test_the_parts_add_up_to_the_whole(measured):
    lines = [
        {**LINE, "step": 8, "has_ended": False, "steps_s": 1.0, "measured_steps": 7},
        {**LINE, "start": 1040.0, "time": 1050.0, "first_step": 5, "measured_steps": measured},
    ]
    found = summarize_goodput(lines)
    seconds = dict(found["goodput_seconds"])
    total = seconds.pop("total")
    assert sum(seconds.values()) >= total - 0.05
    assert 0 <= found["goodput"] <= 1


def test_a_run_counts_the_steps_that_a_failure_lost(tmp_path, monkeypatch):
    flags = (
        "--dataset=shapes",
        "--image_size=16,16",
        "--base_filters=4",
        "--depth=1",
        "--train_examples=32",
        "--val_examples=4",
        "--global_batch_size=4",
        "--epochs=1",
        "--sample_every=0",
        "--notensorboard",
        "--strategy=one_device",
        "--checkpoint_every=4",
        "--quiet",
        f"--run_dir={tmp_path}",
    )
    from tfdist.runs import callbacks, goodput

    monkeypatch.setattr(goodput, "_EVERY_S", 0.0)
    ordinary = callbacks.CurvesLog.on_train_batch_end

    def fail(self, batch, logs=None):
        if self._trainer.step == 7:
            raise RuntimeError("lost")
        ordinary(self, batch, logs)

    with monkeypatch.context() as patch:
        patch.setattr(callbacks.CurvesLog, "on_train_batch_end", fail)
        with contextlib.suppress(RuntimeError):
            run_training(parse_flags(TrainOptions, flags))
    assert not (tmp_path / "summary.json").exists()
    assert run_training(parse_flags(TrainOptions, flags)) == 0
    lines = list(RunDirectory(str(tmp_path)).read_metrics(GOODPUT))
    assert [(x["first_step"], x["step"]) for x in lines] == [(0, 7), (4, 8)]
    assert [x["has_ended"] for x in lines] == [False, True]
    summary = json.loads((tmp_path / "summary.json").read_text())
    seconds = summary["goodput_seconds"]
    assert 0 < summary["goodput"] < 1
    assert seconds["wasted_progress_from_disruption"] > 0
    assert seconds["unproductive_checkpoint_save_time"] > 0
    assert seconds["unproductive_checkpoint_restore_time"] > 0
    assert "Goodput" in (tmp_path / "report.html").read_text()
    # What was changed by hand, or not written to its end, is left out.
    with (tmp_path / GOODPUT).open("a") as file:
        file.write('{"step": 9, "start": "yesterday"}\n{"step": 9, "sta')
    assert read_goodput(RunDirectory(str(tmp_path))) == lines
    # The same command again changes nothing.
    before = (tmp_path / GOODPUT).read_bytes()
    assert run_training(parse_flags(TrainOptions, flags)) == 0
    assert (tmp_path / GOODPUT).read_bytes() == before
