"""The command, on run directories as they are left by runs."""

import json
import shutil

import pytest

from tfdist.report.__main__ import main


@pytest.fixture
def report(monkeypatch, capfd, path_with_spaces):
    """Runs the command; returns its status, its output and its errors."""
    monkeypatch.chdir(path_with_spaces)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["tfdist.report", *arguments])
        status = main()
        out, err = capfd.readouterr()
        return status, out, err

    return run


def test_a_run_gets_its_report_anew(report, run_dir, path_with_spaces):
    path = path_with_spaces / "a run"
    shutil.copytree(run_dir, path)
    (path / "report.html").unlink()
    assert report(f"{path}/") == (0, f"The report is in {path}/report.html.\n", "")
    page = (path / "report.html").read_text()
    for title in ("Samples of the validation data", "IoU of each class", "Confusion matrix"):
        assert title in page
    assert len(page) < 200_000
    assert report(str(path), "--output=elsewhere/a.html", "--quiet") == (0, "", "")
    assert (path_with_spaces / "elsewhere" / "a.html").read_text() == page


def test_several_runs_are_compared(report, write_run, path_with_spaces):
    lines = [{"step": 1, "epoch": 1, "loss": 0.5}]
    one = write_run("one", lines=lines, summary={"val_loss": 0.5}, task={"depth": 2})
    two = write_run("two", lines=lines, task={"depth": 3})
    status, out, _ = report(one, "--output=both.html", two)
    assert (status, out) == (0, "The report is in both.html.\n")
    page = (path_with_spaces / "both.html").read_text()
    assert "<tr><td>depth</td><td>2</td><td>3</td></tr>" in page
    assert "epochs</td>" not in page
    assert json.dumps(["one", "two"], separators=(",", ":")) in page


def test_paths_that_are_no_runs_cost_one_line_each(report, write_run, path_with_spaces):
    good = write_run()
    (path_with_spaces / "empty").mkdir()
    status, out, err = report("nothing", good, "empty")
    assert (status, out) == (2, "")
    assert [line.split(":")[1] for line in err.splitlines()] == [
        " Cannot find a run in nothing",
        " Cannot find a run in empty",
    ]
    assert not (path_with_spaces / "comparison.html").exists()


def test_a_run_whose_task_is_gone(report, write_run):
    status, _, err = report(write_run(task={"task": "gone.py:Task"}))
    assert status == 2
    assert "gone.py" in err
    assert err.count("\n") == 1


def test_no_run_costs_one_line(report):
    assert report("--quiet") == (
        2,
        "",
        "tfdist: No run is given. Run python -m tfdist.report RUN [RUN ...].\n",
    )
