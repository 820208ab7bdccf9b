"""The directory that keeps what XLA has compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist.cli import xla_cache
from tfdist.cli.xla_cache import make_key, remove_damaged, use_xla_cache
from tfdist.cluster import read_environment
from tfdist.errors import TfdistError

_TRAIN = (
    "--dataset=shapes",
    "--image_size=16,16",
    "--base_filters=4",
    "--depth=1",
    "--norm=group",
    "--train_examples=8",
    "--val_examples=4",
    "--global_batch_size=4",
    "--max_steps=3",
    "--sample_every=0",
    "--notensorboard",
    "--jit_compile",
    "--strategy=one_device",
)
_TASK = """
from tfdist.tasks.segmentation.task import Segmentation

class Own(Segmentation):
    pass
"""


def train(run_dir, *flags, **environ):
    """Returns the hash of the weights that a run ends with."""
    command = [sys.executable, "-m", "tfdist.train", *_TRAIN, f"--run_dir={run_dir}", *flags]
    # Without the cache of a test that has trained in this process.
    environ = {k: v for k, v in os.environ.items() if k != "TF_XLA_FLAGS"} | environ
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    return summary["weights_sha256"], done.stderr


def test_a_second_start_compiles_nothing_and_ends_with_the_same_bits(path_with_spaces):
    cache = path_with_spaces / "xla cache"
    log = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "xla_device_compiler_client=2"}
    flags = (f"--xla_cache={cache}", "--verbose_tensorflow")
    first, said = train(path_with_spaces / "first", *flags, **log)
    kept = {path: path.stat().st_mtime_ns for path in cache.glob("*/*.pb")}
    assert len(kept) == said.count("Compiling to xla::LocalExecutable") > 0
    # The smallest of them was not written to its end, and is compiled anew.
    damaged = min(kept, key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    # TensorFlow starts earlier where it is the user who defines the task.
    task = path_with_spaces / "own.py"
    task.write_text(_TASK)
    second, said = train(path_with_spaces / "second", f"--task={task}:Own", *flags, **log)
    assert said.count("Compiling to xla::LocalExecutable") == 1
    assert said.count("Loading xla::LocalExecutable") == len(kept) - 1
    assert kept.pop(damaged) != damaged.stat().st_mtime_ns
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert first == second


def test_files_that_end_early_are_removed(tmp_path):
    whole = b"\x0a\x03abc\x12\x81\x01" + b"x" * 129
    contents = {
        "whole": whole,
        "empty": b"",
        "short": whole[:-1],
        "long": whole + b"\x12",
        "other": b"\x08\x01",
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.pb").write_bytes(content)
    (tmp_path / "notes.txt").write_text("")
    remove_damaged(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"whole.pb", "notes.txt"}


def test_other_settings_have_another_subdirectory(monkeypatch):
    keys = [make_key({}, deterministic=False), make_key({}, deterministic=True)]
    keys += [make_key({name: "1"}, deterministic=False) for name in ("XLA_FLAGS", "TF_XLA_FLAGS")]
    for name in ("_list_packages", "_read_gpus"):
        with monkeypatch.context() as patch:
            patch.setattr(xla_cache, name, lambda: ["other"])
            keys.append(make_key({}, deterministic=False))
    monkeypatch.setattr(xla_cache, "_read_processor", lambda: "other")
    keys.append(make_key({}, deterministic=False))
    assert len(set(keys)) == len(keys) == 7
    assert keys[0] != make_key({"CUDA_VISIBLE_DEVICES": "1"}, deterministic=False)


def test_the_user_s_own_directory_is_kept(monkeypatch, tmp_path):
    own = "--tf_xla_persistent_cache_directory=/own --tf_xla_auto_jit=1"
    monkeypatch.setenv("TF_XLA_FLAGS", own)
    assert use_xla_cache(str(tmp_path / "cache")) is None
    assert read_environment()["TF_XLA_FLAGS"] == own
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=1")
    assert use_xla_cache("none") is None
    place = use_xla_cache(str(tmp_path / "cache"))
    flags = read_environment()["TF_XLA_FLAGS"]
    assert flags == f'--tf_xla_auto_jit=1 --tf_xla_persistent_cache_directory="{place}"'


def test_a_directory_that_cannot_be_written_costs_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_XLA_FLAGS", "")
    (tmp_path / "file").touch()
    for name in ("file/cache", 'a"b'):
        with pytest.raises(TfdistError, match="Cannot use `xla_cache="):
            use_xla_cache(str(tmp_path / name))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "file")
    assert use_xla_cache("auto") is None
    monkeypatch.setattr(xla_cache, "_ENOUGH_BYTES", 2**80)
    with pytest.raises(TfdistError, match="less than 1 GiB free"):
        use_xla_cache(str(tmp_path / "cache"))
    assert read_environment()["TF_XLA_FLAGS"] == ""
