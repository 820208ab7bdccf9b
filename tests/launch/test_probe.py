import socket
import subprocess
import sys

import pytest

from tfdist.cluster import parse_hosts
from tfdist.launch.__main__ import main
from tfdist.launch.probe import check_cluster


@pytest.fixture
def free_ports():
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


def check(hosts, task, wait_s=0.3):
    config = parse_hosts(hosts, task)
    return check_cluster(config, own=(config.role, config.index), wait_s=wait_s)


def test_checks_on_all_machines_at_once_find_one_another(free_ports):
    first, second = free_ports
    hosts = f"--hosts=127.0.0.1:{first},127.0.0.1:{second}"
    argv = [sys.executable, "-m", "tfdist.launch", "--check", hosts, "--wait_s=3"]
    processes = [
        subprocess.Popen([*argv, f"--task=worker:{index}"], stdout=subprocess.PIPE, text=True)
        for index in range(2)
    ]
    for process in processes:
        out, _ = process.communicate(timeout=1000)
        assert process.returncode == 0, out
        assert "127.0.0.1 answers" in out
        assert "this machine; the port is free" in out


def test_a_task_that_is_not_started(free_ports):
    first, second = free_ports
    own, other = check(f"127.0.0.1:{first},127.0.0.1:{second}", "worker:0")
    assert own.ok
    assert not other.ok
    assert "nothing listens on the port. Start that task" in other.found


def test_a_name_that_does_not_resolve(free_ports):
    _, other = check(f"127.0.0.1:{free_ports[0]},nowhere.invalid:2222", "worker:0")
    assert not other.ok
    assert "cannot resolve nowhere.invalid" in other.found


def test_a_port_that_is_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        (own,) = check(f"127.0.0.1:{server.getsockname()[1]}", "worker:0")
    assert not own.ok
    assert "the port is in use. End" in own.found


def test_an_address_of_another_machine():
    (own,) = check("192.0.2.1:2222", "worker:0")
    assert not own.ok
    assert "192.0.2.1 is not an address of this machine. Check --task" in own.found


def test_a_loopback_among_other_addresses():
    own, _ = check("localhost:2222,192.0.2.1:2222", "worker:0")
    assert not own.ok
    assert "a loopback address, which other machines cannot reach" in own.found


def test_a_running_cluster_is_probed_without_a_task(capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        hosts = f"--hosts=127.0.0.1:{server.getsockname()[1]}"
        assert main(["--check", hosts]) == 0
    out = capsys.readouterr().out
    assert "127.0.0.1 answers" in out
    assert "this process" not in out


def test_the_exit_status_says_that_something_is_wrong(free_ports, capsys):
    hosts = f"--hosts=127.0.0.1:{free_ports[0]},127.0.0.1:{free_ports[1]}"
    assert main(["--check", hosts, "--task=worker:1", "--wait_s=0.3"]) == 1
    assert "WRONG worker 0" in capsys.readouterr().out


def test_the_environments_cluster_is_checked(monkeypatch, capsys):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a"]}, "task": {"type": "worker"}}')
    assert main(["--check"]) == 2
    assert "TF_CONFIG: worker 0: 'a' has no port" in capsys.readouterr().err


def test_no_cluster(monkeypatch, capsys):
    for name in ("TF_CONFIG", "CLUSTER_SPEC", "SLURM_PROCID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    assert main(["--check"]) == 0
    assert "a single process" in capsys.readouterr().out
