"""What can be known without TensorFlow is said before it is imported."""

import os
import subprocess
import sys

import pytest

RUN = "tfdist: Cannot find a run in --run_dir=/nowhere"
ERRORS = {
    "train --strategy=nosuch": "Unknown --strategy",
    "predict": "Cannot predict without --images",
    "predict --nosuch": "Unknown flag",
    "predict --images=x --output=y --run_dir=/nowhere": RUN,
    "predict --images=x --output=y --overlap=2": "Cannot overlap windows by 2",
    "predict --images=x --output=y --zoom=large": "neither a number nor auto",
    "predict --images=x --output=y --label_map=x": "label_map",
    "evaluate --run_dir=/nowhere": RUN,
    "export": "Cannot export without --output",
    "export --output=x --format=onnx": "must end with .onnx",
    "export --output=x --run_dir=/nowhere": RUN,
    "serve": "Give either --run_dir or --model",
    "serve --run_dir=/nowhere": RUN,
    "serve --model=/nowhere --allowed_hosts=http://a": "no name of a host",
    "report": "No run is given",
    "plan --hardware=nosuch": "Unknown --hardware",
    "plan -- --nosuch": "Unknown flag",
    "verify --strategies=nosuch": "Unknown --strategies",
    "benchmark --strategies=nosuch": "Unknown --strategies",
    "jobs --target=nosuch": "Unknown --target",
    "launch": "Nothing to start",
    "run nosuch.py": "Cannot find the script",
    "doctor --nosuch": "Unknown flag",
}
PROGRAM = """
import atexit, runpy, sys
atexit.register(lambda: print("tensorflow" in sys.modules))
sys.argv = sys.argv[1:]
runpy.run_module(f"tfdist.{sys.argv[0]}", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("arguments", ERRORS)
def test_wrong_flags_cost_no_import(tmp_path, arguments):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments.split()],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, [*sys.path]))},
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert ERRORS[arguments] in done.stderr
    assert done.stdout == "False\n"


def test_a_run_that_is_not_finished_is_refused_at_once(tmp_path):
    (tmp_path / "options.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "evaluate", f"--run_dir={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "is not finished: it has no model.keras" in done.stderr


def test_a_strategy_of_no_module_costs_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.verify", "--strategies=mirrored,nosuch:Thing"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "nosuch:Thing: No module named 'nosuch'" in done.stderr
