"""Commands whose output cannot be written."""

import itertools
import json
import os
import socket
import subprocess
import sys

import pytest

# Command -> its status where it can print. `make test` runs each of the first four in every way:
# two texts, files and an error.
COMMANDS = {
    "--version": 0,
    "train --help": 0,
    "jobs --target=slurm --output=files -- --strategy=multi_worker_mirrored": 0,
    "report": 2,
    "train --print_config": 0,
    "launch": 2,
    "run": 2,
    "predict --nosuch": 2,
}
TEXTS = ("--version", "train --help", "train --print_config")
REDIRECTIONS = [">&-", ">&- 2>&-", "2>&-"]
# First each command in one way, and each way with several commands.
TURNS = list(zip(COMMANDS, itertools.cycle(REDIRECTIONS), strict=False))
CLOSED = [*TURNS, *sorted({*itertools.product(COMMANDS, REDIRECTIONS)} - {*TURNS})]
NO_DISK = "tfdist: cannot write to standard output: No space left on device. Going on."


def run(command, redirection, directory, **environ):
    text = f"{sys.executable} -m tfdist {command} {redirection}"
    return subprocess.run(
        ["bash", "-c", text],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=directory,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))} | environ,
        check=False,
    )


@pytest.mark.thorough(keep=len(TURNS))
@pytest.mark.parametrize(("command", "redirection"), CLOSED)
def test_a_command_ends_as_usual_without_output(tmp_path, command, redirection):
    done = run(command, redirection, tmp_path)
    assert done.returncode == COMMANDS[command]
    assert len(done.stderr.splitlines()) == (COMMANDS[command] == 2 and "2" not in redirection)


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_that_nobody_reads_is_no_error(tmp_path, command):
    done = run(command, "| true; exit ${PIPESTATUS[0]}", tmp_path)
    assert done.returncode == COMMANDS[command]
    assert len(done.stderr.splitlines()) == (COMMANDS[command] == 2)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="There is no /dev/full.")
@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_text_on_a_full_disk_is_a_failure(tmp_path, command):
    done = run(command, ">/dev/full", tmp_path)
    assert done.returncode == (1 if command in TEXTS else COMMANDS[command])
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert (done.stderr.strip() == NO_DISK) == (COMMANDS[command] == 0)
    assert run(command, ">/dev/full 2>/dev/full", tmp_path).returncode == done.returncode


def test_a_script_gets_its_own_output_and_errors(tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "print('seen', flush=True)\n"
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
        "try:\n"
        "    print('lost', flush=True)\n"
        "except OSError as error:\n"
        "    print('seen:', error.strerror, file=sys.stderr)\n"
        "    os.dup2(2, 1)\n"
    )
    done = run("run --quiet --strategy=one_device script.py", "", tmp_path)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "seen")
    assert done.stderr.splitlines()[0] == "seen: No space left on device"


SCRIPT = """
import sys
import keras
import numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=2)
with open("end", "w") as file:
    file.write(str(model.optimizer.iterations.numpy()))
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="There is no /dev/full.")
@pytest.mark.parametrize(
    "way", [">/dev/full", "2>/dev/full", ">&- 2>&-", "| true; exit ${PIPESTATUS[0]}"]
)
@pytest.mark.thorough(keep=2)
def test_the_output_of_fit_is_not_worth_a_script(tmp_path, way):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(f"run --strategy=one_device script.py {way}", "", tmp_path)
    assert (done.returncode, (tmp_path / "end").read_text()) == (0, "2"), done.stderr
    assert (NO_DISK in done.stderr) == (way == ">/dev/full")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="There is no /dev/full.")
def test_a_full_log_does_not_end_a_script_of_a_cluster(tmp_path):
    (tmp_path / "script.py").write_text("print('lost', flush=True)\nopen('end', 'w').close()\n")
    task = {"type": "worker", "index": 0}
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    config = json.dumps({"cluster": {"worker": [address]}, "task": task})
    done = run("run --quiet script.py", ">/dev/full 2>/dev/full", tmp_path, TF_CONFIG=config)
    assert (done.returncode, (tmp_path / "end").exists()) == (0, True)


def test_a_scripts_own_error_keeps_its_traceback(tmp_path):
    (tmp_path / "script.py").write_text("def read():\n    open('nowhere')\n\nread()\n")
    done = run("run --quiet --strategy=one_device script.py", "", tmp_path)
    assert done.returncode == 1
    assert 'script.py", line 2, in read' in done.stderr
    assert "No such file or directory: 'nowhere'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [1, 2])
def test_unbuffered_output_comes_at_once(tmp_path, number):
    code = (
        "import os; from tfdist.cli.output import lenient_output\n"
        "with lenient_output():\n"
        f"    import sys; stream = sys.{('stdout', 'stderr')[number - 1]}\n"
        "    stream.write('a bar without an end'); stream.buffer.write(b', bytes')\n"
        "    os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-u", "-c", code],
        capture_output=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        check=True,
    )
    assert (done.stdout, done.stderr)[number - 1] == b"a bar without an end, bytes"
