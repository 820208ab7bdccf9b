import socket

import pytest

from tests.strategies.test_rendezvous import find_free_ports
from tfdist.cluster import parse_hosts
from tfdist.errors import TfdistError, TrainingError
from tfdist.strategies import make_parameter_server, run_server


@pytest.mark.parametrize("start", [make_parameter_server, run_server])
def test_needs_a_cluster(monkeypatch, start):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(TfdistError, match=r"needs a cluster, .*tfdist\.launch --workers=2 --ps=1"):
        start()


@pytest.mark.parametrize("start", [make_parameter_server, run_server])
def test_says_so_when_the_port_is_taken(start):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        role = "chief" if start is make_parameter_server else "worker"
        tasks = {"chief": "127.0.0.1:1", "worker": "127.0.0.1:2", role: f"127.0.0.1:{port}"}
        hosts = f"chief={tasks['chief']},worker={tasks['worker']},ps=127.0.0.1:3"
        with pytest.raises(TfdistError, match=f"port {port} of this task's .*in use"):
            start(cluster=parse_hosts(hosts, f"{role}:0"))


def test_needs_a_parameter_server():
    cluster = parse_hosts("chief=a:1,worker=b:1", "chief:0")
    with pytest.raises(TfdistError, match="needs at least one ps"):
        make_parameter_server(cluster=cluster)


def test_names_the_tasks_that_do_not_come():
    (port,) = find_free_ports(1)
    hosts = f"chief=127.0.0.1:{port},worker=127.0.0.1:2,ps=127.0.0.1:3"
    cluster = parse_hosts(hosts, "chief:0")
    with pytest.raises(TrainingError, match=r"0 s waiting for worker 0 .*refused.*ps 0"):
        make_parameter_server(cluster=cluster, worker_timeout_s=0)
