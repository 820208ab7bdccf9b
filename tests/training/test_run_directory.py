import json

import pytest

from tfdist.errors import TfdistError
from tfdist.training.run_directory import RunDirectory

RESULT = {"seed": 0, "dataset": "shapes"}


@pytest.fixture(params=["disk", "ram"])
def run(request, path_with_spaces):
    root = str(path_with_spaces) if request.param == "disk" else f"ram://{path_with_spaces}"
    return RunDirectory(f"{root}/run")


def test_the_same_command_continues(run):
    run.open({"versions": {}}, result=RESULT)
    run.open({"versions": {}}, result=RESULT)


def test_another_command_is_refused_and_nothing_is_written(run):
    run.open({"versions": {"tfdist": 1}}, result=RESULT)
    with pytest.raises(TfdistError, match=r"another command: --seed=1 \(there: 0\)\. Give the"):
        run.open({"versions": {"tfdist": 2}}, result={**RESULT, "seed": 1})
    run.open({}, result=RESULT)


def test_metrics_continue_without_gap_or_duplicate(run):
    run.open({}, result=RESULT)
    assert list(run.read_metrics()) == []
    for step in (10, 20, 30):
        run.append_metrics({"step": step, "loss": 1 / step})
    run.forget_metrics_after(20)
    run.append_metrics({"step": 30, "loss": 0.0})
    assert [line["step"] for line in run.read_metrics()] == [10, 20, 30]


def test_a_line_cut_short_is_left_out(tmp_path):
    run = RunDirectory(str(tmp_path))
    run.append_metrics({"step": 1})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    assert list(run.read_metrics()) == [{"step": 1}]
    run.forget_metrics_after(5)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_place_that_cannot_be_written_costs_one_line():
    with pytest.raises(TfdistError, match="Cannot write to --run_dir=/proc/run.*permissions"):
        RunDirectory("/proc/run").open({}, result=RESULT)


def test_writes_the_summary_and_pictures(tmp_path):
    run = RunDirectory(str(tmp_path))
    run.write_summary({"loss": 1.5})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": 1.5}
    assert run.write_sample("a", b"png") == f"{tmp_path}/samples/a.png"
