"""Files that a run reads back, as crashes, full disks and other hands leave them."""

import json
import os
import shutil

import pytest

from tests import zoo
from tfdist.auto.cache import Cache
from tfdist.auto.choice import choose_strategy
from tfdist.cli.command import run_command
from tfdist.cli.flags import parse_flags
from tfdist.data.checked_files import RECORD, find_damage
from tfdist.errors import TfdistError
from tfdist.launch.progress import append_record, summarize_record
from tfdist.reading import parse_object, parse_options
from tfdist.records.recorded_run import read_recorded_run
from tfdist.records.run_directory import RunDirectory
from tfdist.runs.options import TrainOptions
from tfdist.runs.plan import make_plan
from tfdist.runs.trackers import Trackers
from tfdist.tasks.commands import run_task_command
from tfdist.train import run_training

NO_OBJECTS = {
    "nothing": b"",
    "cut short": b'{"loss": ',
    "not UTF-8": b'{"\xff": 1}',
    "null": b"null",
    "a list": b"[1]",
    "a text": b'"task"',
    "nested": b"[" * 100_000,
}


@pytest.fixture
def run(run_dir, path_with_spaces):
    """A finished run, which a test may damage."""
    return shutil.copytree(run_dir, path_with_spaces / "run")


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def check_one_line(capfd):
    def check(*messages):
        out, err = capfd.readouterr()
        assert out == ""
        assert len(err.strip().splitlines()) == 1, err
        assert err.startswith("tfdist: ")
        assert all(message in err for message in messages), err

    return check


@pytest.mark.parametrize("what", NO_OBJECTS)
def test_what_is_no_object_is_none(what):
    assert parse_object(NO_OBJECTS[what]) is None
    assert parse_options(NO_OBJECTS[what]) is None


@pytest.mark.parametrize("what", NO_OBJECTS)
@pytest.mark.parametrize("name", ["options.json", "summary.json"])
def test_a_damaged_run_costs_its_users_one_line(run, name, what, check_one_line):
    (run / name).write_bytes(NO_OBJECTS[what])
    assert run_task_command("evaluate", [f"--run_dir={run}"]) == 2
    check_one_line("Cannot read the run in --run_dir", f"{name} is incomplete or was changed")


CHANGES = {
    "a group that is no object": ("options.json", {"task": [1]}),
    "no options": ("options.json", {"strategy": 3, "result": {}}),
    "another type": ("options.json", {"result": {"image_size": {}}}),
    "no classes": ("summary.json", {"per_class_iou": None}),
    "classes that are no object": ("summary.json", {"per_class_iou": 3}),
    "no data": ("summary.json", {"info": "data"}),
    "a size that is none": ("summary.json", {"info": {"original_size": "16"}}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_run_costs_prediction_one_line(run, labelled_images, what, check_one_line):
    name, values = CHANGES[what]
    change(run / name, **values)
    flags = [f"--run_dir={run}", f"--images={labelled_images}/val/images", f"--output={run}/out"]
    assert run_task_command("predict", flags) == 2
    check_one_line(str(run))


def test_predictions_of_an_unknown_command_are_kept(run, labelled_images, capfd, check_one_line):
    flags = [f"--run_dir={run}", f"--images={labelled_images}/val/images", f"--output={run}/out"]
    assert run_task_command("predict", flags) == 0
    capfd.readouterr()
    for content in NO_OBJECTS.values():
        (run / "out" / "predictions.json").write_bytes(content)
        assert run_task_command("predict", flags) == 2
        check_one_line("holds predictions of an unknown command", "Give another --output")


def train(path, *flags):
    arguments = [*zoo.SMALL_RUN, f"--run_dir={path}", *flags]
    return run_command("tfdist.train", run_training, arguments, options_class=TrainOptions)


def test_a_finished_run_writes_a_summary_that_is_damaged_or_lost_anew(run):
    whole = json.loads((run / "summary.json").read_text())
    for content in (json.dumps(whole | {"val_mean_iou": "high"}), None):
        (run / "summary.json").unlink()
        if content is not None:
            (run / "summary.json").write_text(content)
        assert train(run) == 0
        found = json.loads((run / "summary.json").read_text())
        assert found["weights_sha256"] == whole["weights_sha256"]
        assert found["resumed_from_step"] == whole["steps"]
        assert found["per_class_iou"] == whole["per_class_iou"]


@pytest.mark.parametrize("what", [*NO_OBJECTS, "a changed group", "another type"])
def test_a_run_of_damaged_options_is_not_continued(run, what):
    options = json.loads((run / "options.json").read_text())
    if what == "a changed group":
        change(run / "options.json", versions=["3.15"])
    elif what == "another type":
        change(run / "options.json", result=options["result"] | {"epochs": "three"})
    else:
        (run / "options.json").write_bytes(NO_OBJECTS[what])
    with pytest.raises(TfdistError, match="run_dir="):
        RunDirectory(str(run)).check(options["result"] | {"epochs": 9}, may_increase=("epochs",))


@pytest.mark.parametrize("group", ["strategy", "placement"])
def test_a_choice_refuses_damaged_options(tmp_path, group):
    flags = [flag for flag in zoo.SMALL_RUN if "strategy" not in flag]
    plan = make_plan(parse_flags(TrainOptions, [*flags, f"--run_dir={tmp_path}"]))
    assert plan.is_open
    (tmp_path / "options.json").write_text(json.dumps({"result": {}, group: ["mirrored"]}))
    with pytest.raises(TfdistError, match="options.json is incomplete or was changed"):
        choose_strategy(plan)


def test_damaged_findings_are_none(tmp_path):
    cache = Cache(tmp_path / "found.json", {})
    found = ({}, {"rates": 3}, {"rates": {"one_device": "fast"}}, {"rates": {}}, {"more": 1}, [])
    contents = [json.dumps({"found": values}).encode() for values in found]
    for content in (*NO_OBJECTS.values(), *contents):
        cache.path.write_bytes(content)
        assert cache.read() is None


DAMAGED_STATES = {
    **NO_OBJECTS,
    "no states": b'{"csv": 3}',
    "a last line that is none": b'{"csv": {"last": "three"}}',
    "lines that are none": b'{"csv": {"last": ["three"]}}',
    "no name of a run": b'{"csv": {"id": 3, "last": [1]}}',
}


@pytest.mark.parametrize("what", DAMAGED_STATES)
def test_trackers_begin_anew_where_their_state_is_damaged(tmp_path, what):
    (tmp_path / "trackers.json").write_bytes(DAMAGED_STATES[what])
    trackers = Trackers(("csv",), RunDirectory(str(tmp_path)), {}, quiet=True)
    trackers.begin([{"step": 2, "epoch": 1, "loss": 0.5, "val_loss": 0.25}])
    trackers.end(is_finished=True)
    assert "0.25" in (tmp_path / "metrics.csv").read_text()


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "logs/restarts.jsonl"])
def test_a_report_does_without_damaged_records(run, name, monkeypatch, capfd):
    from tfdist.report.__main__ import main

    (run / "logs").mkdir(exist_ok=True)
    for content in NO_OBJECTS.values():
        (run / name).write_bytes(content)
        assert read_recorded_run(str(run)).options
        monkeypatch.setattr("sys.argv", ["tfdist.report", str(run)])
        assert main() == 0
    assert capfd.readouterr().err == ""


SHOWN = {
    "classes": ("summary.json", {"per_class_iou": 3}),
    "memory": ("summary.json", {"peak_memory_bytes_per_device": [1]}),
    "seconds": ("summary.json", {"seconds": "long"}),
    "options": ("options.json", {"task": {"task": "segmentation", "image_size": {}}}),
}


@pytest.mark.parametrize("what", SHOWN)
def test_a_report_of_changed_values_costs_one_line(run, what, monkeypatch, check_one_line):
    from tfdist.report.__main__ import main

    name, values = SHOWN[what]
    change(run / name, **values)
    monkeypatch.setattr("sys.argv", ["tfdist.report", str(run)])
    assert main() == 2
    check_one_line("`image_size={}` is not a list" if what == "options" else "was changed")


def test_a_record_of_restarts_is_read_as_far_as_it_is_whole(tmp_path):
    whole = {"time": "12:00", "task": "worker 1", "cause": "exited", "step": 3, "then": "restarted"}
    append_record(tmp_path, whole)
    with (tmp_path / "restarts.jsonl").open("ab") as file:
        file.write(b'3\n["cause"]\nnull\n{"cause": "lost"}\n{"lost_steps": "many"}\n\xff\n{"cau')
    append_record(tmp_path, whole)
    found = summarize_record(tmp_path)
    assert (found["restarts"], found["lost_steps"]) == (1, 0)
    assert found["restart_causes"][0] == "12:00 worker 1 exited after step 3, restarted"


def test_checksums_that_cannot_be_read_are_damage(tmp_path):
    (tmp_path / "data").write_bytes(b"1234")
    for content in (*NO_OBJECTS.values(), b'{"data": 3}', b'{"data": {"size_bytes": 4}}'):
        (tmp_path / RECORD).write_bytes(content)
        assert find_damage(tmp_path, {"data": 4}) == f"{RECORD} cannot be read"


@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "not UTF-8", "nested", "missing"])
def test_a_file_of_flags_is_text(path_with_spaces, kind):
    path = path_with_spaces / "flags"
    if kind in ("fifo", "nested"):
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "not UTF-8":
        path.write_bytes(b"--epochs=\xff")
    if kind == "nested":
        (path_with_spaces / "outer").write_text(f"--epochs=3\n--flagfile={path}\n")
        path = path_with_spaces / "outer"
    flag = "--flagfile=/dev/zero" if kind == "device" else f"--flagfile={path}"
    with pytest.raises(TfdistError, match=r"Cannot read --flagfile=.*: .*\.$"):
        parse_flags(TrainOptions, [flag])


def test_files_of_flags_may_be_nested(path_with_spaces):
    (path_with_spaces / "inner").write_text("# a comment\n--epochs=3\n")
    (path_with_spaces / "outer").write_text(f"--flagfile={path_with_spaces}/inner\n--depth=2\n")
    options = parse_flags(TrainOptions, [f"--flagfile={path_with_spaces}/outer"])
    assert (options.training.epochs, options.task.depth) == (3, 2)
