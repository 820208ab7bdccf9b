"""What can be known without TensorFlow is said before it is imported."""

import json
import os
import subprocess
import sys

import pytest

from tfdist import TfdistError
from tfdist.imports import check_named, import_named

RUN = "Cannot find a run in --run_dir=/nowhere"
ERRORS = {
    "train --strategy=nosuch": "Unknown --strategy",
    "train --strategy=mine:Absent": "module 'mine' has no attribute 'Absent'",
    "train --task=mine.py:Absent": "the file 'mine.py' has no 'Absent'",
    "train --task=absent.py:Task": "there is no file 'absent.py'",
    "train --task=inside.absent:Task": "No module named 'inside.absent'",
    "train --model=absent:build": "No module named 'absent'",
    "train --model=inside.lazy:absent --init_from=absent": "--init_from=absent: there is no",
    "train --task=classification --model=mine:absent": "has no attribute 'absent'",
    "train --dataset=nosuch": "Unknown --dataset 'nosuch'",
    "train --dataset=folder": "without --data_dir",
    "train --dataset=folder --data_dir=inside": "without --num_classes",
    "train --dataset=folder --data_dir=absent --num_classes=2": "--data_dir=absent: there is no",
    "train --task=classification --dataset=folder": "without --data_dir",
    "train --task=classification --dataset=folder --data_dir=absent": "--data_dir=absent: there is",
    "predict": "Cannot predict without --images",
    "predict --nosuch": "Unknown flag",
    "predict --run_dir=run --output=y --images=absent": "Cannot read --images=absent: no file",
    "predict --run_dir=run --output=y --images=absent/*.png": "--images=absent/*.png: no file",
    "predict --run_dir=run --output=y --images=inside --masks=absent": "--masks=absent: there is",
    "predict --run_dir=own --output=y --examples=absent.npy": "--examples=absent.npy: there is no",
    "predict --images=x --output=y --run_dir=/nowhere": RUN,
    "predict --images=x --output=y --overlap=2": "Cannot overlap windows by 2",
    "predict --images=x --output=y --zoom=large": "neither a number nor auto",
    "predict --images=x --output=y --label_map=x": "label_map",
    "evaluate --run_dir=/nowhere": RUN,
    "evaluate --run_dir=run --dataset=nosuch": "Unknown --dataset 'nosuch'",
    "evaluate --run_dir=run --dataset=folder --data_dir=absent": "--data_dir=absent: there is no",
    "evaluate --run_dir=moved": "--data_dir=/moved: there is no such directory",
    "export": "Cannot export without --output",
    "export --output=x --format=onnx": "must end with .onnx",
    "export --output=x --run_dir=/nowhere": RUN,
    "serve": "Give either --run_dir or --model",
    "serve --run_dir=/nowhere": RUN,
    "serve --model=/nowhere --allowed_hosts=http://a": "no name of a host",
    "serve --model=absent": "Cannot find a servable in --model=absent",
    "serve --model=inside": "Cannot find a servable in --model=inside",
    "serve --run_dir=run --tune --tune_request=absent": "--tune_request=absent: there is no such",
    "report absent": "Cannot find a run in absent",
    "report absent inside": "Cannot find a run in",
    "report": "No run is given",
    "plan --hardware=nosuch": "Unknown --hardware",
    "plan --hardware=absent.toml": "Cannot read --hardware=absent.toml",
    "plan -- --nosuch": "Unknown flag",
    "plan -- --task=mine.py:Absent": "the file 'mine.py' has no 'Absent'",
    "plan -- --dataset=folder --data_dir=absent --num_classes=2": "--data_dir=absent: there is no",
    "verify --strategies=nosuch": "Unknown --strategies",
    "verify --strategies=mirrored,absent:Thing": "absent:Thing: No module named 'absent'",
    "verify --model=absent:build": "No module named 'absent'",
    "verify --model=absent.py:build": "there is no file 'absent.py'",
    "verify --model=mine:absent": "module 'mine' has no attribute 'absent'",
    "verify --model=mine:build --make_data=mine:absent": "--make_data=mine:absent: module 'mine'",
    "verify --task=mine.py:Absent": "the file 'mine.py' has no 'Absent'",
    "benchmark --model=absent:build": "No module named 'absent'",
    "benchmark --task=mine:Absent": "module 'mine' has no attribute 'Absent'",
    "benchmark --strategies=nosuch": "Unknown --strategies",
    "jobs --target=nosuch": "Unknown --target",
    "jobs --target=slurm --patch=absent.yaml": "Cannot read --patch=absent.yaml",
    "jobs --target=slurm -- --task=absent.py:Task": "there is no file 'absent.py'",
    "launch --hosts=a:1,b:x --task=worker:0": "b:x",
    "launch": "Nothing to start",
    "run nosuch.py": "Cannot find the script",
    "run --strategy=mine:Absent mine.py": "module 'mine' has no attribute 'Absent'",
    "doctor --nosuch": "Unknown flag",
}
# Runs the commands whose arguments standard input holds. TensorFlow cannot be imported.
PROGRAM = """
import contextlib, io, json, runpy, sys

class NoTensorFlow:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "tensorflow":
            raise RuntimeError("TensorFlow is imported")

def run(arguments):
    sys.argv = arguments
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            runpy.run_module(f"tfdist.{sys.argv[0]}", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return end.code, printed.getvalue(), said.getvalue()
        except BaseException as error:
            return repr(error), printed.getvalue(), said.getvalue()

sys.meta_path.insert(0, NoTensorFlow)
json.dump([run(arguments) for arguments in json.load(sys.stdin)], sys.stdout)
"""
MINE = """
import tensorflow as tf

def build():
    return absent.something.absent
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """(status, standard output, standard error) of each command, from one process."""
    path = tmp_path_factory.mktemp("early errors")
    (path / "mine.py").write_text(MINE)
    (path / "inside").mkdir()
    (path / "inside" / "__init__.py").touch()
    (path / "inside" / "lazy.py").write_text("def __getattr__(name): ...")
    folder = {"dataset": "folder", "data_dir": "/moved"}
    runs = {
        "run": {"task": "segmentation"},
        "own": {"task": "classification"},
        "moved": {"task": "classification", **folder},
    }
    for run, task in runs.items():
        (path / run).mkdir()
        (path / run / "options.json").write_text(json.dumps({"task": task}))
        (path / run / "model.keras").touch()
        (path / run / "summary.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([arguments.split() for arguments in ERRORS]),
        capture_output=True,
        text=True,
        timeout=600,
        cwd=path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, [*sys.path]))},
        check=True,
    )
    return dict(zip(ERRORS, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("arguments", ERRORS)
def test_what_is_wrong_is_said_without_tensorflow(outcomes, arguments):
    status, printed, said = outcomes[arguments]
    assert (status, printed) == (2, ""), said
    assert ERRORS[arguments] in said
    lines = 2 if arguments == "report absent inside" else 1
    assert len(said.splitlines()) == lines, said


def test_a_run_that_is_not_finished_is_refused_at_once(tmp_path):
    (tmp_path / "options.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([["evaluate", f"--run_dir={tmp_path}"]]),
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    [(status, printed, said)] = json.loads(done.stdout)
    assert (status, printed) == (2, "")
    assert "is not finished: it has no model.keras" in said


def test_code_in_directories_without_init_is_left_to_the_import(tmp_path, monkeypatch):
    (tmp_path / "outer_dir" / "inner_dir").mkdir(parents=True)
    (tmp_path / "outer_dir" / "inner_dir" / "made.py").write_text("def build(): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    check_named("model", "outer_dir.inner_dir.made:build")
    assert import_named("model", "outer_dir.inner_dir.made:build").__name__ == "build"
    with pytest.raises(TfdistError, match="has no attribute 'nothing'"):
        import_named("model", "outer_dir.inner_dir.made:nothing")
    with pytest.raises(TfdistError, match="No module named 'outer_dir.inner_dir.absent'"):
        import_named("model", "outer_dir.inner_dir.absent:build")
