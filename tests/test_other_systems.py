"""Where there is no /proc, as on macOS, a command works or says so in one line."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def run_without_proc(*arguments):
    done = subprocess.run(
        [sys.executable, ROOT / "tests/without_proc.py", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "Traceback" not in done.stderr
    return done


def test_a_run_trains(tmp_path):
    done = run_without_proc(
        *("tfdist.train", "--strategy=mirrored", "--virtual_devices=2", "--dataset=shapes"),
        *("--image_size=16,16", "--train_examples=8", "--val_examples=4", "--base_filters=4"),
        *("--depth=1", "--global_batch_size=4", "--max_steps=1", "--sample_every=0"),
        *("--notensorboard", f"--run_dir={tmp_path / 'run'}"),
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/summary.json").exists()


def test_a_worker_writes_to_its_own_directory():
    test = "tests/run/test_saving.py::test_an_overlay_holds_what_is_written_and_the_rest_is_read"
    done = run_without_proc("pytest", "-p", "no:cacheprovider", "-p", "no:anyio", test)
    assert done.returncode == 0, done.stdout


def test_the_doctor_looks_at_what_there_is():
    done = run_without_proc("tfdist.doctor")
    assert done.returncode in (0, 1), done.stderr
    assert "ok    versions" in done.stdout


def test_what_needs_cores_is_refused_in_one_line(tmp_path):
    done = run_without_proc(
        *("tfdist.plan", f"--calibrate={tmp_path / 'here.toml'}", "--", "--dataset=shapes"),
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Run it on Linux" in done.stderr
