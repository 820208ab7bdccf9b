"""Real faults in real runs: each costs one line, and the same command then ends as if nothing was.

Faults of clusters are in test_worker_runs.py.
"""

import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.cluster

ROOT = pathlib.Path(__file__).parents[1]
RUN = [
    "--strategy=one_device",
    "--image_size=16,16",
    "--base_filters=4",
    "--depth=2",
    "--global_batch_size=8",
    "--max_steps=120",
    "--checkpoint_every=7",
    "--deterministic",
]
# As a user's: without what the tests say to TensorFlow.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
SHAPES = ["--dataset=shapes", "--train_examples=40", "--val_examples=10"]


def start(*arguments, env=ENVIRONMENT):
    return subprocess.Popen(
        [sys.executable, "-m", "tfdist.train", *RUN, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def finish(*arguments, env=ENVIRONMENT):
    process = start(*arguments, env=env)
    out, err = process.communicate(timeout=1000)
    return process.returncode, out, err


def read_summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def wait_for_checkpoint(process, run_dir, number=2):
    deadline = time.monotonic() + 1000
    while len(list(run_dir.glob("checkpoints/*/state.json"))) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """The summary of a run that nothing happened to."""
    run_dir = tmp_path_factory.mktemp("twin")
    status, _, err = finish(*SHAPES, f"--run_dir={run_dir}", "--quiet")
    assert (status, err.strip()) == (0, "")
    return read_summary(run_dir) | {"metrics": read_steps(run_dir)}


def read_steps(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_kill_9_and_sigterm_end_with_the_same_bits(path_with_spaces, twin):
    flags = [*SHAPES, f"--run_dir={path_with_spaces}"]
    process = start(*flags)
    wait_for_checkpoint(process, path_with_spaces)
    process.kill()
    process.communicate()
    process = start(*flags)
    wait_for_checkpoint(process, path_with_spaces, 3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=1000)
    assert process.returncode == 143
    assert "Stopped after step" in err
    status, out, _ = finish(*flags)
    assert status == 0
    assert "Continuing after step" in out
    found = read_summary(path_with_spaces)
    assert found["weights_sha256"] == twin["weights_sha256"]
    assert found["val_mean_iou"] == twin["val_mean_iou"]
    assert read_steps(path_with_spaces) == twin["metrics"]
    (directory,) = path_with_spaces.glob("tensorboard/validation")
    steps = [
        event.step
        for path in sorted(directory.iterdir())
        for event in tf.compat.v1.train.summary_iterator(str(path))
        if event.summary.value
    ]
    assert sorted(set(steps)) == twin["metrics"]
    assert len(steps) % len(set(steps)) == 0  # each tag once an epoch


def test_a_second_run_in_the_same_place_is_refused(tmp_path):
    flags = [*SHAPES, f"--run_dir={tmp_path}", "--epochs=100000", "--max_steps=100000"]
    first = start(*flags)
    try:
        wait_for_checkpoint(first, tmp_path)
        status, _, err = finish(*flags)
        assert status == 2
        assert f"is in use by process {first.pid} on" in err
        assert len(err.strip().splitlines()) == 1
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()


def in_mount(options, directory, *flags, command=("tfdist.train", *RUN), env=ENVIRONMENT):
    """Runs with a small tmpfs on the directory, which only this run sees."""
    mount = f"mount -t tmpfs -o {options} none {shlex.quote(str(directory))}"
    if subprocess.run(
        ["unshare", "-m", "sh", "-c", mount], check=False, capture_output=True
    ).returncode:
        pytest.skip("no right to mount a tmpfs")
    line = shlex.join([sys.executable, "-m", *command, *map(str, flags)])
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && exec {line}"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )


def test_a_read_only_directory(path_with_spaces):
    found = in_mount("ro", path_with_spaces, *SHAPES, f"--run_dir={path_with_spaces}")
    assert found.returncode == 2
    (line,) = found.stderr.strip().splitlines()
    assert f"Cannot write to --run_dir={path_with_spaces}: Read-only file system" in line


def test_a_full_disk(path_with_spaces):
    found = in_mount("size=400k", path_with_spaces, *SHAPES, f"--run_dir={path_with_spaces}")
    assert found.returncode == 1
    *others, line = found.stderr.strip().splitlines()
    assert all("report.html was not written" in other for other in others)
    assert line.startswith("tfdist: Cannot write")  # a checkpoint, or a picture before it
    assert "No space left on device" in line


@pytest.mark.parametrize("where", [">/dev/full 2>&1", ">&- 2>&- <&-", "2>&1 | head -n 1"])
def test_output_that_nobody_gets(path_with_spaces, twin, where):
    """The redirection is a shell's; `pipefail` makes its status that of the run."""
    flags = [*RUN, *SHAPES, f"--run_dir={path_with_spaces}", "--notensorboard"]
    line = shlex.join([sys.executable, "-m", "tfdist.train", *flags])
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{line} {where}"],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done
    assert read_summary(path_with_spaces)["weights_sha256"] == twin["weights_sha256"]


def test_a_full_directory_for_temporary_files(path_with_spaces):
    temporary, run_dir = path_with_spaces / "tmp", path_with_spaces / "run"
    temporary.mkdir()
    flags = [*SHAPES, f"--run_dir={run_dir}", "--max_steps=2", "--quiet"]
    environment = {**ENVIRONMENT, "TMPDIR": str(temporary)}
    found = in_mount("size=16k", temporary, *flags, env=environment)
    message = f"tfdist: Cannot write temporary files to {temporary}: No space left on device. Free"
    assert found.returncode == 1
    (line,) = found.stderr.strip().splitlines()
    assert line.startswith(message)
    assert finish(*flags)[0] == 0  # the same command continues
    export = ("tfdist.export", f"--run_dir={run_dir}", f"--output={path_with_spaces / 'out'}")
    found = in_mount("size=16k", temporary, command=export, env=environment)
    assert found.returncode == 1
    assert found.stderr.startswith(message)
    line = shlex.join([sys.executable, "-m", *export])
    lost = ["sh", "-c", f"{line} >/dev/full"]
    subprocess.run(lost, cwd=ROOT, env=ENVIRONMENT, capture_output=True, timeout=1000, check=True)
    assert list((path_with_spaces / "out").iterdir())
    full = path_with_spaces / "full"
    full.mkdir()
    export = (*export[:2], f"--output={full / 'a.tflite'}", "--format=litert", "--max_lost=1")
    found = in_mount("size=16k", full, command=export)
    assert found.returncode == 1
    line = found.stderr.strip().splitlines()[-1]
    assert line.startswith(f"tfdist: Cannot use {full / 'a.tflite'}")
    assert "No space left on device. Free space there" in line
    assert "Traceback" not in found.stderr


def write_folder(path, examples=12):
    rng = np.random.default_rng(0)
    for split, count in (("train", examples), ("val", 12)):
        for name in ("images", "masks"):
            (path / split / name).mkdir(parents=True)
        for index in range(count):
            image = rng.integers(0, 255, (16, 16, 3), np.uint8)
            mask = rng.integers(0, 3, (16, 16, 1), np.uint8)
            (path / split / "images" / f"{index}.png").write_bytes(tf.io.encode_png(image).numpy())
            (path / split / "masks" / f"{index}.png").write_bytes(tf.io.encode_png(mask).numpy())
    return ["--dataset=folder", f"--data_dir={path}", "--num_classes=3"]


def test_an_image_that_breaks_in_the_middle_of_an_epoch(path_with_spaces):
    data = path_with_spaces / "data"
    flags = [*write_folder(data, examples=64), "--cache=none", "--max_steps=200"]
    run_dir, twin_dir = path_with_spaces / "run", path_with_spaces / "twin"
    assert finish(*flags, f"--run_dir={twin_dir}")[0] == 0
    image = data / "train" / "images" / "7.png"
    whole = image.read_bytes()
    process = start(*flags, f"--run_dir={run_dir}")
    wait_for_checkpoint(process, run_dir, 1)
    (path_with_spaces / "broken.png").write_bytes(whole[:60])
    (path_with_spaces / "broken.png").replace(image)  # At no time is the image empty.
    _, err = process.communicate(timeout=1000)
    assert process.returncode == 2
    assert len(err.strip().splitlines()) == 1
    assert f"Cannot decode the image '{image}' (60 bytes)" in err
    image.write_bytes(whole)
    assert finish(*flags, f"--run_dir={run_dir}")[0] == 0
    found, twin = read_summary(run_dir), read_summary(twin_dir)
    assert found["weights_sha256"] == twin["weights_sha256"]
    assert found["resumed_from_step"]


def test_bad_examples_are_left_out_on_request(path_with_spaces):
    flags = [*write_folder(path_with_spaces / "data"), f"--run_dir={path_with_spaces / 'run'}"]
    (path_with_spaces / "data/train/images/3.png").write_bytes(b"no image")
    status, _, err = finish(*flags, "--max_steps=4")
    assert status == 2
    assert "3.png" in err
    status, _, err = finish(*flags, "--max_steps=4", "--on_bad_example=skip")
    assert status == 0
    assert "Left out: Cannot decode the image" in err
    assert read_summary(path_with_spaces / "run")["skipped_examples"] == 1


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long jump(void) { return access(getenv("JUMPED"), F_OK) ? 0 : -3600; }
int clock_gettime(clockid_t id, struct timespec *t) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, t);
    if (id == CLOCK_REALTIME) t->tv_sec += jump();
    return status;
}
int gettimeofday(struct timeval *t, void *zone) {
    int (*real)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
    int status = real(t, zone);
    t->tv_sec += jump();
    return status;
}
time_t time(time_t *t) {
    time_t (*real)(time_t *) = dlsym(RTLD_NEXT, "time");
    time_t now = real(0) + jump();
    if (t) *t = now;
    return now;
}
"""


def test_a_clock_that_jumps(tmp_path, twin):
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(textwrap.dedent(CLOCK))
    compiler = ["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"]
    try:
        subprocess.run(compiler, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no C compiler to make a clock with: {error}")
    jumped, run_dir = tmp_path / "jumped", tmp_path / "run"
    environment = {**ENVIRONMENT, "LD_PRELOAD": str(library), "JUMPED": str(jumped)}
    flags = [*SHAPES, f"--run_dir={run_dir}", "--checkpoint_every=1s", "--quiet"]
    process = start(*flags, env=environment)
    try:
        wait_for_checkpoint(process, run_dir)
        jumped.touch()
        asked = [sys.executable, "-c", "import time; print(time.time())"]
        moved = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True)
        assert float(moved.stdout) < time.time() - 3000
        _, err = process.communicate(timeout=1000)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, err.strip()) == (0, "")
    found = read_summary(run_dir)
    assert found["weights_sha256"] == twin["weights_sha256"]
    assert 0 < found["seconds"] < 3000  # the clock jumped by 3600
    assert found["examples_per_second"] > 0
