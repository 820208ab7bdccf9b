"""Signals and a cloud's notice, in processes of their own."""

import http.server
import signal
import subprocess
import sys
import threading
import time

import pytest

from tfdist import stopping

SCRIPT = """
import sys, time
from tfdist import stopping
asked = []
with stopping.StopSignals(
    lambda: asked.append(1), grace_period_s=float(sys.argv[1])
) as signals:
    stopping.watch_for_maintenance()
    print("ready", flush=True)
    deadline = time.monotonic() + 1000
    while not asked and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(float(sys.argv[2]))
sys.exit(signals.exit_status if asked else 9)
"""


def start(grace_period_s, work_s, **options):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(grace_period_s), str(work_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def set_hangup(handler):
    return lambda: signal.signal(signal.SIGHUP, handler)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_the_first_signal_asks(number, status):
    process = start(1000, 0, preexec_fn=set_hangup(signal.SIG_DFL))
    process.send_signal(number)
    _, err = process.communicate(timeout=1000)
    assert process.returncode == status
    assert "Stopping" in err


def test_nohup_keeps_a_run_from_the_end_of_its_terminal():
    process = start(1000, 0, preexec_fn=set_hangup(signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=1000)
    assert process.returncode == 143


def test_a_stop_needs_nobody_who_reads_about_it():
    process = start(0.5, 10_000)
    process.stderr.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(1000) == 143
    process.stdout.close()


def test_a_second_ctrl_c_interrupts_at_once():
    process = start(10_000, 10_000)
    process.send_signal(signal.SIGINT)
    assert "Stopping" in process.stderr.readline() + process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=1000)[1]


def test_the_grace_period_ends_the_process_whatever_it_does():
    process = start(0.2, 10_000)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # again, as some schedulers do: changes nothing
    _, err = process.communicate(timeout=1000)
    assert process.returncode == 143
    assert "The grace period of 0.2 s ended" in err


def test_gives_the_handlers_back():
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with stopping.StopSignals(lambda: None, grace_period_s=1):
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("key", "value", "status"),
    [
        ("preempted", "TRUE", 143),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", 143),
        ("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE", None),
    ],
)
def test_honours_the_cloud_s_notice(monkeypatch, key, value, status):
    """A real server on loopback answers as the documentation says that the cloud's does."""
    asked = []

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            assert self.headers["Metadata-Flavor"] == "Google"
            name = self.path.removeprefix("/computeMetadata/v1/instance/")
            text = value if name == key else {"preempted": "FALSE"}.get(name, "NONE")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"{text}\n".encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        process = start(1000, 0)
        try:
            if status is None:
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(stopping._ASK_EVERY_S + 3)
            else:
                assert process.wait(1000) == status
        finally:
            process.kill()
            process.communicate()
            server.shutdown()
    assert f"/computeMetadata/v1/instance/{key}" in asked
