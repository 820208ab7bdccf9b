"""The launcher with real processes. After each test none of them may be left."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from pathlib import Path

import pytest

from tfdist.cluster import parse_hosts
from tfdist.errors import TfdistError
from tfdist.launch import machine, run_local_cluster, run_task
from tfdist.launch.__main__ import main
from tfdist.launch.tasks import hold_ports

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the tests read /proc"),
]

TASK = """
import json, os, pathlib, signal, subprocess, sys, time
config = json.loads(os.environ["TF_CONFIG"])
role, index = config["task"]["type"], config["task"]["index"]
here = pathlib.Path(sys.argv[1])
def wait_for(name):
    until = time.monotonic() + 1000
    while not (here / name).exists():
        if time.monotonic() > until:
            sys.exit(99)
        time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def mark(monkeypatch, tmp_path):
    """Marks this test's processes by a variable, and checks that none is left."""
    name = f"TFDIST_TEST_{uuid.uuid4().hex}"
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield name
    until = time.monotonic() + 1000
    while left := find_marked(name):
        assert time.monotonic() < until, f"left behind: {left}"
        time.sleep(0.02)


def find_marked(name):
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            with contextlib.suppress(OSError):
                if name.encode() in (path / "environ").read_bytes():
                    found[int(path.name)] = (path / "cmdline").read_bytes()
    return found


def wait_until(condition):
    until = time.monotonic() + 1000
    while not condition():
        assert time.monotonic() < until, "timed out"
        time.sleep(0.01)


@pytest.fixture
def script(path_with_spaces):
    """Writes a task's script; returns its command, whose argument is the test's directory."""

    def write(code):
        path = path_with_spaces / "a task.py"
        path.write_text(TASK + textwrap.dedent(code))
        return [sys.executable, str(path), str(path_with_spaces)]

    return write


@contextlib.contextmanager
def start_cli(command, *flags, **kwargs):
    argv = [sys.executable, "-m", "tfdist.launch", *flags, f"--command={shlex.join(command)}"]
    with subprocess.Popen(argv, **kwargs) as process:
        try:
            yield process
        finally:
            process.kill()  # where the test has failed


def run_cli(*argv, timeout=1000, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "tfdist.launch", *argv],
        capture_output=True,
        text=True,
        timeout=timeout,
        **kwargs,
    )


def can_isolate():
    probe = ["unshare", "--net", "true"]
    return shutil.which("unshare") and subprocess.run(probe, capture_output=True).returncode == 0


# A run that goes well.


def test_every_task_has_its_tf_config_and_its_log(script, path_with_spaces, capfd):
    before = dict(os.environ)
    run_dir = path_with_spaces / "a run"
    result = run_local_cluster(
        workers=2,
        command=script("print(role, index, json.dumps(config['cluster']), sys.argv[2:])"),
        train_flags=["--epochs=3", f"--run_dir={run_dir}"],
        timeout_s=1000,
    )
    assert dict(os.environ) == before
    assert result.status == 0
    assert result.first_failed is None
    assert not result.timed_out
    assert [(task.name, task.status, task.ended) for task in result.tasks] == [
        ("worker-0", 0, False),
        ("worker-1", 0, False),
    ]
    clusters = set()
    for index, task in enumerate(result.tasks):
        assert task.log == run_dir / "logs" / f"worker-{index}.log"
        text = task.log.read_text()
        assert text.startswith(f"worker {index} ")
        assert text.rstrip().endswith(f"['--epochs=3', '--run_dir={run_dir}']")
        clusters.add(text[text.index("{") : text.rindex("}") + 1])
    assert len(clusters) == 1
    assert len(set(json.loads(clusters.pop())["worker"])) == 2
    out, err = capfd.readouterr()
    assert out == result.tasks[0].log.read_text()
    assert str(run_dir / "logs") in err


def test_parameter_servers_get_a_chief_and_are_ended_when_it_is_done(script):
    result = run_local_cluster(
        workers=2,
        ps=1,
        evaluator=True,
        command=script("time.sleep(0.5 if role == 'chief' else 60)"),
        timeout_s=1000,
    )
    assert result.status == 0
    assert {task.name: task.ended for task in result.tasks} == {
        "chief-0": False,
        "worker-0": True,
        "worker-1": True,
        "ps-0": True,
        "evaluator-0": True,
    }


def test_the_strategys_name_adds_the_chief(script):
    result = run_local_cluster(
        workers=1,
        ps=1,
        command=script("time.sleep(0 if role == 'chief' else 60)"),
        train_flags=["--strategy", "parameter_server"],
        timeout_s=1000,
    )
    assert result.status == 0
    assert [task.name for task in result.tasks] == ["chief-0", "worker-0", "ps-0"]


def test_without_parameter_servers_all_workers_are_waited_for(script, path_with_spaces):
    command = script("""
        if role == "worker":
            time.sleep(0.5)
            (here / "worker").touch()
    """)
    result = run_local_cluster(workers=1, chief=True, command=command, timeout_s=1000)
    assert result.status == 0
    assert (path_with_spaces / "worker").exists()
    assert not any(task.ended for task in result.tasks)


def test_a_second_run_adds_to_the_logs(script, path_with_spaces, capfd):
    for number in range(2):
        command = script(f"print('run {number}')")
        result = run_local_cluster(workers=1, command=command, run_dir=path_with_spaces)
        assert capfd.readouterr().out == f"run {number}\n"
    assert result.tasks[0].log.read_text() == "run 0\nrun 1\n"


def test_the_chiefs_output_comes_as_it_is_written(script, path_with_spaces):
    command = script("""
        print("\\r1/2", end="", flush=True)
        wait_for("go")
        print("\\r2/2")
    """)
    with start_cli(command, "--workers=2", stdout=subprocess.PIPE) as process:
        assert os.read(process.stdout.fileno(), 100) == b"\r1/2"
        (path_with_spaces / "go").touch()
        assert process.stdout.read() == b"\r2/2\n"
        assert process.wait(1000) == 0


def test_a_reader_that_goes_away_does_not_stop_the_run(script, path_with_spaces):
    command = script("""
        print("first", flush=True)
        wait_for("go")
        for _ in range(3):
            print("more", flush=True)
            time.sleep(0.1)
        (here / "done").touch()
    """)
    with start_cli(command, "--workers=1", stdout=subprocess.PIPE) as process:
        os.read(process.stdout.fileno(), 100)
        process.stdout.close()
        (path_with_spaces / "go").touch()
        assert process.wait(1000) == 0
    assert (path_with_spaces / "done").exists()


def test_output_goes_to_a_notebooks_stream(script, monkeypatch):
    class Stream:
        text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stdout", Stream())
    run_local_cluster(workers=1, command=script("print('\\u00e9t\\u00e9')"), timeout_s=1000)
    assert sys.stdout.text == "été\n"


def test_the_logs_of_a_run_in_a_bucket_stay_on_this_machine(script, monkeypatch, path_with_spaces):
    monkeypatch.chdir(path_with_spaces)
    result = run_local_cluster(
        workers=1, command=script("print(1)"), train_flags=["--run_dir=gs://bucket/run"]
    )
    assert result.tasks[0].log.read_text() == "1\n"
    assert not (path_with_spaces / "gs:").exists()


# Failures.


def test_the_task_that_failed_first_is_named(script, capfd):
    command = script("""
        def late(*_):
            time.sleep(0.3)
            sys.exit(5)
        if index == 0:
            signal.signal(signal.SIGTERM, late)
            (here / "ready").touch()
            time.sleep(30)
        wait_for("ready")
        print("\\rhalf\\rdone")
        print("what went wrong")
        sys.exit(3)
    """)
    result = run_local_cluster(workers=2, command=command, timeout_s=1000)
    assert result.status == 3
    assert result.first_failed == "worker-1"
    assert [(task.status, task.ended) for task in result.tasks] == [(5, True), (3, False)]
    err = capfd.readouterr().err
    assert "worker-1 failed first: it exited with status 3" in err
    assert "[worker-1] done\n[worker-1] what went wrong\n" in err
    assert "half" not in err


def test_a_task_killed_by_a_signal(script, capfd):
    command = script("""
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)
    """)
    result = run_local_cluster(workers=2, command=command, timeout_s=1000)
    assert result.status == 128 + 9
    assert result.tasks[1].status == -9
    assert "worker-1 failed first: it was ended by SIGKILL" in capfd.readouterr().err


def test_a_parameter_server_that_fails_ends_the_cluster(script):
    command = script("sys.exit(4) if role == 'ps' else time.sleep(30)")
    result = run_local_cluster(workers=1, ps=1, command=command, timeout_s=1000)
    assert (result.first_failed, result.status) == ("ps-0", 4)


def test_a_task_that_ignores_sigterm_is_killed(script, capfd):
    command = script("""
        if index == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (here / "ready").touch()
            time.sleep(60)
        wait_for("ready")
        sys.exit(3)
    """)
    result = run_local_cluster(workers=2, command=command, grace_s=0.3, timeout_s=1000)
    assert not result.timed_out
    assert result.tasks[0].status == -9
    assert "worker-0 did not stop in time and had to be killed" in capfd.readouterr().err


def test_a_time_out_ends_all(script, capfd):
    result = run_local_cluster(workers=2, command=script("time.sleep(60)"), timeout_s=0.5)
    assert result.timed_out
    assert result.status == 1
    assert all(task.ended for task in result.tasks)
    assert "timed out after 0.5 s" in capfd.readouterr().err


def test_a_program_that_does_not_exist(path_with_spaces):
    result = run_local_cluster(workers=2, command=[str(path_with_spaces / "none")], timeout_s=1000)
    assert result.status == 127
    assert "Cannot start" in result.tasks[0].log.read_text()


def test_bad_input_costs_one_line_and_leaves_nothing(script, path_with_spaces, capfd):
    run_dir = path_with_spaces / "new" / "run"
    command = script("sys.exit(2) if print('No such dataset.', flush=True) is None else 0")
    result = run_local_cluster(workers=2, command=command, run_dir=run_dir, timeout_s=1000)
    assert result.status == 2
    assert not (path_with_spaces / "new").exists()
    out, err = capfd.readouterr()
    assert (out + err).count("No such dataset.") in (1, 2)  # 2 if worker 1 was the first
    assert "failed first: it exited with status 2" in err


@pytest.mark.parametrize("task_ends", [True, False])
def test_grandchildren_in_sessions_of_their_own_are_ended(script, path_with_spaces, task_ends):
    command = script(f"""
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        time.sleep(0.3)
        {"" if task_ends else "time.sleep(60)"}
    """)
    result = run_local_cluster(workers=1, command=command, timeout_s=2)
    assert result.timed_out is not task_ends


# Signals.


@pytest.mark.parametrize(
    ("number", "status", "ignored"),
    [
        (signal.SIGINT, 130, False),
        (signal.SIGINT, 130, True),  # as a shell starts what it runs in the background
        (signal.SIGTERM, 143, False),
        (signal.SIGHUP, 129, False),
    ],
)
def test_signals_are_passed_on(script, path_with_spaces, number, status, ignored):
    command = script(f"""
        def stop(*_):
            time.sleep(0.3)
            (here / f"stopped-{{index}}").touch()
            sys.exit(0)
        if signal.getsignal(signal.SIGINT) != signal.default_int_handler:
            sys.exit("SIGINT is ignored")
        signal.signal({int(number)}, stop)
        (here / f"ready-{{index}}").touch()
        time.sleep(60)
    """)
    names = [path_with_spaces / f"ready-{index}" for index in range(2)]
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL

    def set_handlers():
        signal.signal(signal.SIGINT, handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests

    with start_cli(command, "--workers=2", preexec_fn=set_handlers) as process:
        wait_until(lambda: all(name.exists() for name in names))
        process.send_signal(number)
        assert process.wait(1000) == status
    assert (path_with_spaces / "stopped-0").exists()
    assert (path_with_spaces / "stopped-1").exists()


def test_a_second_ctrl_c_kills(script, path_with_spaces):
    command = script("""
        signal.signal(signal.SIGINT, lambda *_: (here / "first").touch())
        (here / "ready").touch()
        while True:
            time.sleep(0.1)
    """)
    with start_cli(command, "--workers=1", "--grace_s=60") as process:
        wait_until((path_with_spaces / "ready").exists)
        process.send_signal(signal.SIGINT)
        wait_until((path_with_spaces / "first").exists)
        process.send_signal(signal.SIGINT)
        assert process.wait(1000) == 130


@pytest.fixture
def ctrl_c():
    """Ctrl-C as in a terminal: a shell without job control ignores it in what runs behind it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_the_library_passes_a_keyboard_interrupt_on(script, path_with_spaces):
    command = script("""
        try:
            (here / "ready").touch()
            time.sleep(60)
        except KeyboardInterrupt:
            (here / "stopped").touch()
    """)

    def interrupt():
        wait_until((path_with_spaces / "ready").exists)
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_local_cluster(workers=1, command=command, timeout_s=1000)
    thread.join()
    assert (path_with_spaces / "stopped").exists()
    assert signal.getsignal(signal.SIGINT) == handler


STUBBORN = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    (here / f"ready-{index}").touch()
    time.sleep(60)
"""


def test_a_killed_launcher_leaves_nothing(script, path_with_spaces, mark):
    with start_cli(script(STUBBORN), "--workers=2") as process:
        wait_until((path_with_spaces / "ready-0").exists)
        wait_until((path_with_spaces / "ready-1").exists)
        assert len(find_marked(mark)) >= 5
        process.kill()
    wait_until(lambda: not find_marked(mark))


def test_a_killed_agent_takes_its_tasks_with_it(script, path_with_spaces, mark):
    command = script("(here / f'ready-{index}').touch(); time.sleep(60)")
    with start_cli(command, "--workers=2", stderr=subprocess.DEVNULL) as process:
        wait_until((path_with_spaces / "ready-0").exists)
        wait_until((path_with_spaces / "ready-1").exists)
        (agent,) = [pid for pid, line in find_marked(mark).items() if b"agent.py" in line]
        os.kill(agent, signal.SIGKILL)
        assert process.wait(1000) == 1


# Ports and the network.


def test_ports_of_clusters_started_at_once_differ(script):
    command = script("print(config['cluster']['worker']); time.sleep(0.5)")
    results = []

    def start():
        results.append(
            run_local_cluster(
                workers=3, command=command, isolate="never", stream=False, timeout_s=1000
            )
        )

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = (set(eval(result.tasks[0].log.read_text())) for result in results)
    assert len(first | second) == 6


def test_a_held_port_is_given_to_nobody_but_can_be_listened_on():
    with hold_ports(2) as ports:
        held = set(ports)
        taken = []
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                other = stack.enter_context(socket.socket())
                other.bind(("127.0.0.1", 0))
                taken.append(other.getsockname()[1])
        assert not held & set(taken)
        with socket.create_server(("127.0.0.1", ports[0])):
            socket.create_connection(("127.0.0.1", ports[0]), 2).close()


def test_a_taken_port_is_tried_again(script, capfd):
    command = script("""
        print(config["cluster"])
        if not (here / "once").exists():
            (here / "once").touch()
            sys.exit("bind: Address already in use")
    """)
    result = run_local_cluster(workers=1, command=command, isolate="never", timeout_s=1000)
    assert result.status == 0
    assert "Starting again on other ports" in capfd.readouterr().err
    first, _, second = result.tasks[0].log.read_text().splitlines()
    assert first != second


LISTENER = """
    import socket
    port = int(config["cluster"]["worker"][index].rpartition(":")[2])
    server = socket.create_server(("0.0.0.0", port))
    socket.create_connection(("127.0.0.1", port), 5).close()
    (here / "address").write_text(str(port))
    wait_for("go")
"""


@pytest.mark.parametrize("isolate", ["always", "never"])
def test_an_isolated_cluster_cannot_be_reached(script, path_with_spaces, isolate):
    if isolate == "always" and not can_isolate():
        pytest.skip("network namespaces cannot be made here")
    command = script(LISTENER)
    with start_cli(command, "--workers=1", f"--isolate={isolate}") as process:
        path = path_with_spaces / "address"
        wait_until(lambda: path.exists() and path.read_text())
        address = ("127.0.0.1", int(path.read_text()))
        if isolate == "always":
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, 2)
        else:
            socket.create_connection(address, 2).close()
        (path_with_spaces / "go").touch()
        assert process.wait(1000) == 0


def run_without_namespaces(*argv):
    """Runs the launcher where the kernel makes no more network namespaces."""
    forbid = "echo 0 > /proc/sys/user/max_net_namespaces && "
    probe = ["unshare", "-Ur", "sh", "-c", forbid + "true"]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("user namespaces cannot be made here")
    line = shlex.join([sys.executable, "-m", "tfdist.launch", *argv])
    return subprocess.run(
        ["unshare", "-Ur", "sh", "-c", forbid + "exec " + line],
        capture_output=True,
        text=True,
        timeout=1000,
    )


def test_isolation_that_is_demanded_and_impossible(path_with_spaces):
    run_dir = path_with_spaces / "run"
    done = run_without_namespaces(
        "--workers=1", "--isolate=always", "--command=true", "--", f"--run_dir={run_dir}"
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--isolate=always: cannot give the cluster its own network (unshare: " in done.stderr
    assert not run_dir.exists()


def test_isolation_that_is_impossible_is_said():
    done = run_without_namespaces("--workers=1", "--command=true")
    assert done.returncode == 0
    assert done.stderr.count("cannot give the cluster its own network (unshare: ") == 1


def test_a_download_from_an_isolated_cluster_is_explained(script, capfd):
    if not can_isolate():
        pytest.skip("network namespaces cannot be made here")
    command = script("import socket; socket.create_connection(('192.0.2.1', 80))")
    assert run_local_cluster(workers=1, command=command, timeout_s=1000).status == 1
    err = capfd.readouterr().err
    assert "Network is unreachable" in err
    assert "use --isolate=never" in err


# The machine's cores and GPUs.


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_cores_are_divided(script):
    command = script("print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])")
    result = run_local_cluster(workers=2, command=command, stream=False, timeout_s=1000)
    cores = [set(json.loads(task.log.read_text().rpartition(" ")[0])) for task in result.tasks]
    assert not cores[0] & cores[1]
    assert cores[0] | cores[1] == os.sched_getaffinity(0)


def test_gpus_are_divided_among_those_that_compute(script):
    command = script("""
        print(os.environ["CUDA_VISIBLE_DEVICES"])
        wait_for("never") if role == "ps" else time.sleep(0.5)
    """)
    result = run_local_cluster(
        workers=2,
        ps=1,
        command=command,
        environ=dict(os.environ) | {"CUDA_VISIBLE_DEVICES": "3,4,5,6"},
        stream=False,
        timeout_s=1000,
    )
    logs = {task.name: task.log.read_text().strip() for task in result.tasks}
    assert logs == {"chief-0": "-1", "worker-0": "3,4", "worker-1": "5,6", "ps-0": "-1"}


@pytest.mark.parametrize(
    ("value", "gpus"), [("", []), ("-1", []), ("0, 2", ["0", "2"]), ("1,-1,2", ["1"])]
)
def test_visible_gpus(value, gpus):
    assert machine.find_gpus({"CUDA_VISIBLE_DEVICES": value}) == gpus


def test_the_users_threads_stay(script):
    result = run_local_cluster(
        workers=1,
        command=script("print(os.environ['OMP_NUM_THREADS'])"),
        environ=dict(os.environ) | {"OMP_NUM_THREADS": "7"},
        timeout_s=1000,
    )
    assert result.tasks[0].log.read_text() == "7\n"


def test_logs_are_below_the_home_directory(script, path_with_spaces, monkeypatch):
    monkeypatch.setenv("HOME", str(path_with_spaces))
    result = run_local_cluster(
        workers=1, command=script(""), train_flags=["--run_dir=~/run"], timeout_s=1000
    )
    assert result.tasks[0].log == path_with_spaces / "run" / "logs" / "worker-0.log"


def test_the_tasks_share_a_token_of_their_own(script):
    command = script("print(os.environ.get('TFDIST_TOKEN'))")
    found = []
    for _ in range(2):
        result = run_local_cluster(workers=2, command=command, stream=False, timeout_s=1000)
        first, second = (task.log.read_text().strip() for task in result.tasks)
        assert first == second
        assert len(bytes.fromhex(first)) == 32
        found.append(first)
    assert found[0] != found[1]


@pytest.mark.parametrize("kind", ["TFDIST_TOKEN", "TFDIST_TOKEN_FILE"])
def test_a_token_of_the_users_is_kept(script, kind):
    result = run_local_cluster(
        workers=1,
        command=script("print({k: v for k, v in os.environ.items() if 'TFDIST_TOKEN' in k})"),
        environ=dict(os.environ) | {kind: "mine"},
        timeout_s=1000,
    )
    assert result.tasks[0].log.read_text() == f"{ ({kind: 'mine'}) }\n"


# Joining by hand, and bad input.


def test_one_task_of_a_cluster_of_several_machines(script, capfd):
    config = parse_hosts("a:1,b:1", "worker:1")
    result = run_task(config, command=script("print(config); sys.exit(index)"), timeout_s=1000)
    assert result.status == 1
    assert capfd.readouterr().out == f"{config.to_tf_config()}\n"


def test_flags_in_a_file_are_seen(path_with_spaces, capfd):
    config = path_with_spaces / "a.toml"
    config.write_text('strategy = "mirrored"')
    assert main(["--workers=2", "--", f"--config={config}"]) == 2
    assert "--strategy=mirrored runs in one process" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "Nothing to start. Give --workers=2"),
        (["--workers"], "Missing value for flag --workers"),
        (["--workers=two"], "--workers=two is not a whole number"),
        (["--workers=0"], "a cluster needs a worker"),
        (["--workers=1", "--ps=-1"], "is negative"),
        (["--workrs=2"], "Unknown flag '--workrs'. Valid: --workers"),
        (["--worker=2"], "Unknown flag '--worker'. Valid: --workers"),
        (["--strategy=mirrored"], "tfdist.train's flags go after --."),
        (["train"], "Cannot find the script 'train'"),
        (["--workers=1", "--isolate=maybe"], "Unknown --isolate 'maybe'"),
        (["--workers=1", "--timeout_s=0"], "--timeout_s=0 is not positive"),
        (["--workers=1", "--grace_s=-1"], "--grace_s=-1 is negative"),
        (["--workers=1", "--evaluator"], "--evaluator: tfdist.train has no evaluator"),
        (["--hosts=a:1,evaluator=b:1", "--task=evaluator:0"], "but tfdist has none"),
        (["--hosts=a:1"], "--task is empty"),
        (["--hosts=a:1", "--task=worker:1"], "has only worker 0"),
        (["--hosts=a:1", "--task=worker:0", "--workers=1"], "lists the whole cluster"),
        (["--workers=1", "--", "--strategy=parameter_server"], "needs at least one ps"),
        (["--workers=2", "--", "--strategy=mirrored"], "runs in one process"),
        (["--workers=2", "--ps=1", "--", "--strategy=local_sgd"], "has no parameter servers"),
        (["--workers=1", "--command=true", "--", "--run_dir=/proc/x"], "Choose another --run_dir"),
    ],
)
def test_bad_input(argv, message, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("tfdist.launch: ")
    assert err.count("\n") == 1


def test_the_library_refuses_bad_arguments():
    with pytest.raises(TfdistError, match="a cluster needs a worker"):
        run_local_cluster(workers=0)


def test_help_does_not_load_tensorflow():
    done = run_cli("--help")
    assert done.returncode == 0
    assert "--isolate" in done.stdout
    code = "import sys, tfdist.launch, tfdist.launch.probe; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1000)


# TensorFlow itself.

ALL_REDUCE = """
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

    @tf.function
    def add():
        def replica():
            return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(10.0**index))
        return strategy.run(replica)

    print("sum", float(strategy.experimental_local_results(add())[0]))
"""


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("isolate", ["auto", "never"])
def test_an_all_reduce_of_tensorflow(script, isolate):
    command = script(ALL_REDUCE)
    result = run_local_cluster(workers=2, command=command, isolate=isolate, timeout_s=1000)
    assert result.status == 0
    for task in result.tasks:
        assert "sum 11.0" in task.log.read_text()


def test_a_task_alone_on_one_core_has_two_inter_op_threads(script, tmp_path):
    """With one, parameter servers hang: an operation that waits for a peer blocks all others."""
    command = script('(here / "threads").write_text(os.environ["TF_NUM_INTEROP_THREADS"])')
    flags = ["--hosts=127.0.0.1:2222", "--task=worker:0", f"--command={shlex.join(command)}"]
    launcher = [sys.executable, "-m", "tfdist.launch", *flags]
    core = str(min(os.sched_getaffinity(0)))
    environ = {k: v for k, v in os.environ.items() if k != "TF_NUM_INTEROP_THREADS"}
    subprocess.run(["taskset", "-c", core, *launcher], env=environ, check=True, timeout=1000)
    assert (tmp_path / "a folder with spaces" / "threads").read_text() == "2"
