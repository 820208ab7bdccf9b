"""Output that nobody can read, or no disk can hold, does not end a healthy cluster."""

import io
import os
import pty
import shlex
import signal
import subprocess
import sys
import time

import pytest

from tests.launch.test_launch import find_marked, run_cli, start_cli, wait_until
from tfdist.launch import run_local_cluster
from tfdist.launch.logs import Output

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the tests read /proc"),
]

TALKS = """
    for number in range(20):
        print("line", number, "x" * 1000)
        time.sleep(0.05)
    (here / f"done-{index}").touch()
"""


def open_pipe_without_reader():
    read, write = os.pipe()
    os.close(read)
    return write


def open_terminal_without_user():
    master, slave = pty.openpty()
    os.close(master)
    return slave


LOST = {
    "pipe": open_pipe_without_reader,
    "terminal": open_terminal_without_user,
    "full disk": lambda: os.open("/dev/full", os.O_WRONLY),
}


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
def test_a_cluster_goes_on_without_output(script, path_with_spaces, lost):
    stream = lost()
    try:
        with start_cli(script(TALKS), "--workers=2", stdout=stream, stderr=stream) as process:
            assert process.wait(1000) == 0
    finally:
        os.close(stream)
    assert (path_with_spaces / "done-0").exists()
    assert (path_with_spaces / "done-1").exists()


def test_a_cluster_goes_on_with_closed_descriptors(script, path_with_spaces):
    line = shlex.join(script(TALKS))
    command = [sys.executable, "-m", "tfdist.launch", "--workers=1", f"--command={line}"]
    closed = f"exec {shlex.join(command)} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", closed], timeout=1000, check=False).returncode == 0
    assert (path_with_spaces / "done-0").exists()


def test_the_status_is_that_of_the_tasks(script):
    stream = open_pipe_without_reader()
    command = script(TALKS + "    sys.exit(7)")
    try:
        with start_cli(command, "--workers=1", stdout=stream, stderr=stream) as process:
            assert process.wait(1000) == 7
    finally:
        os.close(stream)


def test_the_library_goes_on_without_output(script, monkeypatch):
    with os.fdopen(open_pipe_without_reader(), "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        result = run_local_cluster(workers=1, command=script(TALKS), timeout_s=1000)
    assert result.status == 0


def run_in_full_disk(directory, *argv):
    """Runs the launcher where a directory is a small tmpfs, which only this run sees."""
    mount = f"mount -t tmpfs -o size=64k none {shlex.quote(str(directory))}"
    probe = subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False, capture_output=True)
    if probe.returncode:
        pytest.skip("no right to mount a tmpfs")
    line = shlex.join([sys.executable, "-m", "tfdist.launch", *argv])
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && exec {line}"],
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )


def test_a_full_disk_of_logs_is_named(script, path_with_spaces):
    disk = path_with_spaces / "disk"
    disk.mkdir()
    command = script("print('x' * 200_000, flush=True)")
    flags = ["--workers=1", f"--command={shlex.join(command)}", "--", f"--run_dir={disk}"]
    found = run_in_full_disk(disk, *flags)
    assert found.returncode == 1
    assert f"the logs in {disk}/logs lack what was written last: No space left" in found.stderr


def test_a_log_that_cannot_be_opened_costs_a_line(script, path_with_spaces):
    run_dir = path_with_spaces / "run"
    logs = run_dir / "logs"
    command = script(f"""
        os.makedirs({str(logs)!r}, exist_ok=True)
        log = pathlib.Path({str(logs / "worker-0.log")!r})
        if not (here / "once").exists():
            (here / "once").touch()
            log.unlink()
            log.mkdir()
            sys.exit(1)
    """)
    flags = [f"--command={shlex.join(command)}", "--", f"--run_dir={run_dir}"]
    found = run_cli("--workers=1", "--max_restarts=1", *flags)
    assert found.returncode == 0
    assert f"cannot write {logs}/worker-0.log: Is a directory. The task runs" in found.stderr


def test_a_stopped_agent_does_not_outlive_two_interrupts(script, path_with_spaces, mark):
    command = script("(here / 'ready').touch(); time.sleep(60)")
    with start_cli(command, "--workers=1", stderr=subprocess.DEVNULL) as process:
        wait_until((path_with_spaces / "ready").exists)
        (agent,) = [pid for pid, line in find_marked(mark).items() if b"agent.py" in line]
        os.kill(agent, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(1000) == 130


def test_one_long_line_takes_little_memory(script):
    command = script("os.write(1, b'x' * 200_000_000)")
    # The kernel counts the process that starts another one in `ru_maxrss`, but not in this file.
    code = (
        "import sys; from tfdist.launch.__main__ import main; main(sys.argv[1:]);"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'));"
        "print(status['VmHWM'].split()[0], file=sys.stderr)"
    )
    flags = ["--workers=1", f"--command={shlex.join(command)}"]
    done = subprocess.run(
        [sys.executable, "-c", code, *flags], capture_output=True, timeout=1000, check=True
    )
    assert len(done.stdout) == 200_000_000
    assert int(done.stderr.split()[-1]) < 120_000


def show(*parts):
    stream = io.StringIO()
    output = Output(stream)
    for part in parts:
        output.write(part)
    output.write(b"", last=True)
    return stream.getvalue()


def test_terminals_obey_only_colors_and_bars():
    assert (
        show(b"\x1b[1mbold\x1b[0m 10%\r20%\b\b\tend\n") == "\x1b[1mbold\x1b[0m 10%\r20%\b\b\tend\n"
    )
    assert show(b"a\x1b[2Jb\x1b]0;owned\x07c") == r"a\x1b[2Jb\x1b]0;owned\x07c"
    assert show("caf\u00e9 \u009b2J".encode()) == "caf\u00e9 \\x9b2J"
    assert show(b"\x1b", b"[3", b"2mgreen", b"\x1b[") == "\x1b[32mgreen\\x1b["
    assert show(*[bytes([byte]) for byte in "größer".encode()]) == "größer"


def test_last_lines_are_escaped(script, capfd):
    command = script(r"print('a\x1b[2J\x1b[31mb'); sys.exit(3)")
    assert run_local_cluster(workers=2, command=command, timeout_s=1000).status == 3
    out, err = capfd.readouterr()
    assert "\x1b[2J" not in out + err
    assert r"a\x1b[2Jb" in err
