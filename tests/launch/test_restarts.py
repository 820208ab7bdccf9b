"""Restarts with real processes that fail, are killed and are stopped."""

import os
import re
import signal
import sys
import threading

import pytest

from tests.launch.test_launch import wait_until
from tfdist.cluster import parse_hosts
from tfdist.launch import run_local_cluster, run_task
from tfdist.launch.__main__ import main
from tfdist.launch.progress import StepFile, summarize_record
from tfdist.launch.restarts import Failure, Restarts

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the tests read /proc"),
]

# A task of a toy run: what it calls a step is one more number in a file.
COUNT = """
    def starts():
        path = here / f"starts-{role}-{index}"
        path.write_text(path.read_text() + "x" if path.exists() else "x")
        return len(path.read_text())
    start = starts()
    def write_step(step):
        (pathlib.Path(os.environ["TFDIST_LAUNCH_DIR"]) / "step").write_text(str(step))
"""


def test_a_killed_worker_starts_the_cluster_again(script, tmp_path, capfd):
    command = script(
        COUNT
        + """
    if index == 0:
        wait_for("done")
        sys.exit(0)
    write_step(3 * start)
    if start <= 2:
        os.kill(os.getpid(), signal.SIGKILL)
    (here / "done").touch()
    """
    )
    run_dir = tmp_path / "run"
    result = run_local_cluster(
        workers=2, command=command, run_dir=run_dir, max_restarts=2, timeout_s=1000
    )
    assert (result.status, result.restarts, result.first_failed) == (0, 2, None)
    err = capfd.readouterr().err
    assert "worker-1 failed first: it was ended by SIGKILL" in err
    assert "starting the cluster again from the newest checkpoint (restart 2 of 2)" in err
    summary = summarize_record(run_dir / "logs")
    assert summary["restarts"] == 2
    assert [cause.partition(" ")[2] for cause in summary["restart_causes"]] == [
        "worker-1 was ended by SIGKILL after step 3, restarted",
        "worker-1 was ended by SIGKILL after step 6, restarted",
    ]


@pytest.mark.parametrize("code", ["sys.exit(2)", "sys.exit(143)", "os.kill(os.getpid(), 15)"])
def test_what_would_be_the_same_again_is_not_restarted(script, code):
    command = script(f"{code}")
    result = run_local_cluster(workers=1, command=command, max_restarts=3, timeout_s=1000)
    assert result.status
    assert result.restarts == 0


def test_when_no_restart_is_left_the_cluster_fails(script):
    result = run_local_cluster(
        workers=1, command=script("sys.exit(5)"), max_restarts=1, timeout_s=1000
    )
    assert (result.status, result.restarts) == (5, 1)


def test_a_worker_that_fails_again_and_again_is_left_out(script, capfd):
    """Its GPUs go with it: the place is lost, not the number."""
    command = script("""
        print(len(config["cluster"]["worker"]), os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
        if os.environ["CUDA_VISIBLE_DEVICES"] == "5":
            sys.exit(1)
        time.sleep(1)
    """)
    result = run_local_cluster(
        workers=3,
        min_workers=2,
        command=command,
        environ=dict(os.environ) | {"CUDA_VISIBLE_DEVICES": "4,5,6"},
        max_restarts=5,
        timeout_s=1000,
    )
    assert (result.status, result.restarts) == (0, 3)
    assert [task.name for task in result.tasks] == ["worker-0", "worker-1"]
    assert result.tasks[0].log.read_text().splitlines()[-1] == "2 4"
    assert result.tasks[1].log.read_text().splitlines()[-1] == "2 6"
    assert "without worker-1, which failed repeatedly" in capfd.readouterr().err


def test_a_worker_that_makes_progress_is_not_left_out(script):
    command = script(
        COUNT
        + """
    if index == 0:
        wait_for("done")
        sys.exit(0)
    write_step(start)
    if start <= 4:
        sys.exit(1)
    (here / "done").touch()
    """
    )
    result = run_local_cluster(
        workers=2, min_workers=1, command=command, max_restarts=4, timeout_s=1000
    )
    assert (result.status, len(result.tasks)) == (0, 2)


SERVED = (
    COUNT
    + """
    if role == "chief":
        (here / f"chief-{start}").touch()
        wait_for("done")
    elif role == "worker" and index == 0:
        time.sleep(60)
"""
)


def test_a_worker_of_parameter_servers_is_started_again_alone(script, path_with_spaces):
    command = script(
        SERVED
        + """
    elif role == "worker" and start <= 2:
        os.kill(os.getpid(), signal.SIGKILL)
    elif role == "worker":
        (here / "done").touch()
        time.sleep(60)
    else:
        time.sleep(60)
    """
    )
    result = run_local_cluster(workers=2, ps=1, command=command, max_restarts=2, timeout_s=1000)
    assert (result.status, result.restarts) == (0, 2)
    assert not (path_with_spaces / "chief-2").exists()


def test_a_worker_of_parameter_servers_that_stays_away(script, capfd):
    command = script("""
    if role == "chief":
        time.sleep(1.5)
    elif role == "worker" and index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(60)
    """)
    result = run_local_cluster(workers=2, ps=1, command=command, timeout_s=1000)
    assert (result.status, result.restarts, result.first_failed) == (0, 0, None)
    assert "worker-1 was ended by SIGKILL. Continuing without it." in capfd.readouterr().err


def test_without_enough_workers_the_cluster_ends(script, capfd):
    command = script("sys.exit(3) if role == 'worker' else time.sleep(30)")
    result = run_local_cluster(workers=2, ps=1, command=command, timeout_s=1000)
    assert result.status == 3
    assert {task.name for task in result.tasks if task.ended} == {"chief-0", "ps-0"}
    err = capfd.readouterr().err
    assert "Continuing without it." in err
    assert "Ending the cluster." in err


def test_a_killed_parameter_server_starts_the_cluster_again(script, path_with_spaces):
    command = script(
        COUNT
        + """
    if start == 1 and role == "ps":
        wait_for("starts-chief-0")
        wait_for("starts-worker-0")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60 if start == 1 or role == "ps" else 0.5)
    """
    )
    result = run_local_cluster(workers=1, ps=1, command=command, max_restarts=1, timeout_s=1000)
    assert (result.status, result.restarts) == (0, 1)


def test_a_stopped_worker_is_reported_killed_and_replaced(script, path_with_spaces, capfd):
    command = script(
        COUNT
        + """
    (here / f"pid-{index}").write_text(str(os.getpid()))
    until = time.monotonic() + (30 if start == 1 else 0.5)
    while time.monotonic() < until:
        time.sleep(0.1)
    """
    )
    pid = path_with_spaces / "pid-1"

    def stop():
        wait_until(lambda: pid.exists() and pid.read_text())
        os.kill(int(pid.read_text()), signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    result = run_local_cluster(
        workers=2, command=command, max_restarts=1, stall_timeout_s=3, timeout_s=1000
    )
    thread.join()
    assert (result.status, result.restarts) == (0, 1)
    err = capfd.readouterr().err
    assert re.search(r"worker-1 has hung for [34] s: none of its threads has run", err)
    assert re.search(r"worker-1 failed first: it hung for [34] s", err)


@pytest.mark.thorough
def test_a_worker_that_hangs_is_blamed_for_the_failure_of_another(script, capfd):
    command = script("""
        if index == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        until = time.monotonic() + 7
        while time.monotonic() < until:
            time.sleep(0.1)
        sys.exit(1)
    """)
    result = run_local_cluster(workers=2, command=command, stall_timeout_s=30, timeout_s=1000)
    assert result.first_failed == "worker-1"
    assert "worker-1 failed first: it hung for" in capfd.readouterr().err


def test_one_task_of_several_machines_starts_again(script, path_with_spaces):
    command = script(COUNT + "    sys.exit(1 if start < 3 else 0)")
    config = parse_hosts("a:1,b:1", "worker:1")
    result = run_task(config, command=command, max_restarts=2, timeout_s=1000)
    assert (result.status, result.restarts) == (0, 2)


def test_a_worker_is_not_done_without_while_all_wait_for_it(tmp_path):
    restarts = Restarts(
        max_restarts=0, workers=2, min_workers=1, reports_steps=True, directory=tmp_path
    )
    failure = Failure("worker-1", -9, "was ended by SIGKILL")
    assert restarts.replace(failure) == "ended"
    StepFile(tmp_path).write(1)
    assert restarts.replace(failure) == "dropped"


def test_the_step_and_the_record_outlive_their_writers(tmp_path):
    steps = StepFile(tmp_path)
    assert steps.read() == 0
    steps.write(1234)
    steps.write(7)
    assert StepFile(tmp_path).read() == 7
    (tmp_path / "restarts.jsonl").write_text('{"continued_after": 4, "lost_steps": 3}\n{"cut')
    assert summarize_record(tmp_path)["lost_steps"] == 3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workers=1", "--max_restarts=-1"], "--max_restarts=-1 is negative"),
        (["--workers=1", "--stall_timeout_s=-1"], "--stall_timeout_s=-1 is negative"),
        (["--workers=2", "--min_workers=3"], "--min_workers=3 is not between 1 and --workers=2"),
        (["--hosts=a:1", "--task=worker:0", "--min_workers=1"], "cannot be used with --hosts"),
    ],
)
def test_bad_input(argv, message, capsys):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
