"""The command, on run directories as they are left by runs."""

import io
import json
import shutil
import subprocess
import sys

import pytest
from PIL import Image

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


@pytest.mark.smoke
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


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("task", ["segmentation", "classification"])
def test_a_report_needs_no_tensorflow(write_run, path_with_spaces, task, count):
    png = io.BytesIO()
    Image.effect_noise((1200, 300), 90).save(png, "png")
    summary = {"val_loss": 0.5, "confusion": [[1]]}
    summary |= {"per_class_iou": {"a": 1.0}, "per_class_accuracy": {"a": 1.0}}
    task = {"task": task, "image_size": [16, 16]}
    paths = [write_run(str(index), summary=summary, task=task) for index in range(count)]
    samples = path_with_spaces / "0" / "samples"
    samples.mkdir()
    (samples / "predictions.png").write_bytes(png.getvalue())
    program = (
        "import sys\n"
        "from tfdist.report.__main__ import main\n"
        "sys.argv = ['tfdist.report', '--output=made.html', *sys.argv[1:]]\n"
        "assert main() == 0\n"
        "print(sorted({'tensorflow', 'keras', 'jax', 'torch'} & sys.modules.keys()))\n"
    )
    command = [sys.executable, "-c", program, *paths]
    done = subprocess.run(command, cwd=path_with_spaces, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert (path_with_spaces / "made.html").stat().st_size > 10_000


def test_the_records_of_a_run_need_nothing_else_of_training():
    modules = ("durable_files", "recorded_run", "run_directory", "run_lock")
    program = "import sys\n"
    program += "".join(f"import tfdist.records.{name}\n" for name in modules)
    program += "print([n for n in sys.modules if n.startswith(('tensorflow', 'tfdist.training'))])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


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
