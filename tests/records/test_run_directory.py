import json
import os
import subprocess
import sys

import pytest
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.records.run_directory import DEFAULT_RUN_DIR, RunDirectory, find_run_directory
from tfdist.training.options import RunOptions

RESULT = {"seed": 0, "dataset": "shapes"}


@pytest.fixture(params=["disk", "ram"])
def run(request, path_with_spaces):
    root = str(path_with_spaces) if request.param == "disk" else f"ram://{path_with_spaces}"
    return RunDirectory(f"{root}/run")


def claim(run, options=None, result=RESULT):
    with run.claim(options or {}, result=result):
        pass


def test_the_same_command_continues(run):
    for _ in range(2):
        claim(run, {"versions": {}})


def test_another_command_is_refused_and_nothing_is_written(run):
    claim(run, {"versions": {"tfdist": 1}})
    with pytest.raises(TfdistError, match=r"another command: --seed=1 \(there: 0\)\. Give the"):
        claim(run, {"versions": {"tfdist": 2}}, result={**RESULT, "seed": 1})
    claim(run)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "is empty"),
        ('{"result": {"se', "is incomplete or was changed"),
        ("[]", "is incomplete or was changed"),
        ("\0\0\0", "is incomplete or was changed"),
    ],
)
def test_options_that_were_cut_short_cost_one_line(tmp_path, content, what):
    run = RunDirectory(str(tmp_path))
    claim(run)
    (tmp_path / "options.json").write_text(content)
    with pytest.raises(TfdistError, match=f"Cannot continue .* options.json {what}. Remove that"):
        claim(run)
    (tmp_path / "options.json").unlink()
    claim(run)


def test_metrics_continue_without_gap_or_duplicate(run):
    claim(run)
    assert list(run.read_metrics()) == []
    for step in (10, 20, 30):
        run.append_metrics({"step": step, "loss": 1 / step})
    run.forget_metrics_after(20)
    run.append_metrics({"step": 30, "loss": 0.0})
    assert [line["step"] for line in run.read_metrics()] == [10, 20, 30]


@pytest.mark.parametrize(
    "line",
    [b'{"step": 2, "lo', b"7\n", b"null\n", b"{}\n", b'{"step": "2"}\n', b"\xff\n", b"[" * 10**5],
)
def test_a_line_cut_short_or_changed_is_left_out(tmp_path, line):
    run = RunDirectory(str(tmp_path))
    run.append_metrics({"step": 1})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(line)
    assert list(run.read_metrics()) == [{"step": 1}]
    run.forget_metrics_after(5)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_place_that_cannot_be_written_costs_one_line():
    with pytest.raises(TfdistError, match="Cannot write to `run_dir=/proc/run.*permissions"):
        claim(RunDirectory("/proc/run"))


def test_writes_the_summary_and_pictures(tmp_path):
    run = RunDirectory(str(tmp_path))
    run.write_summary({"loss": 1.5})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": 1.5}
    assert run.write_picture("samples/a.png", b"png") == f"{tmp_path}/samples/a.png"


def test_a_finished_run_has_its_model_on_the_disk(tmp_path, monkeypatch):
    run = RunDirectory(str(tmp_path))
    (tmp_path / "model.keras").write_bytes(b"a model")
    seen = []
    fsync = os.fsync

    def note(descriptor):
        seen.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    run.write_summary({})
    assert seen == ["model.keras", "summary.json.writing", tmp_path.name]


def test_the_lock_dies_with_its_owner(path_with_spaces):
    run = RunDirectory(str(path_with_spaces / "run"))
    code = (
        "import sys, time\n"
        "from tfdist.records.run_lock import hold_run_lock\n"
        "with hold_run_lock(sys.argv[1]): print('held', flush=True); time.sleep(60)"
    )
    claim(run)
    owner = subprocess.Popen([sys.executable, "-c", code, run.path], stdout=subprocess.PIPE)
    try:
        assert owner.stdout.readline() == b"held\n"
        with pytest.raises(TfdistError, match=f"is in use by process {owner.pid} on "):
            claim(run)
    finally:
        owner.kill()
        owner.communicate()
    claim(run)


def test_vertex_ais_directories_stand_in_for_a_run_dir_that_is_not_given(run):
    base = run.path
    environ = {
        "AIP_MODEL_DIR": f"{base}/model/",
        "AIP_CHECKPOINT_DIR": f"{base}/checkpoints/",
        "AIP_TENSORBOARD_LOG_DIR": f"{base}/logs/",
    }
    found = find_run_directory("runs/default", environ=environ)
    assert (found.path, found.checkpoints) == (base, f"{base}/checkpoints")
    assert found.tensorboard == f"{base}/logs"
    claim(found)
    with tf.io.gfile.GFile(found.model, "w") as file:
        file.write("a model")
    found.copy_model()
    with tf.io.gfile.GFile(f"{base}/model/model.keras") as file:
        assert file.read() == "a model"
    assert find_run_directory("runs/mine", environ=environ) == RunDirectory("runs/mine")
    assert RunOptions().run_dir == DEFAULT_RUN_DIR
    assert find_run_directory("runs/default", environ={}) == RunDirectory("runs/default")
