import socket
import threading
import time

import pytest

from tfdist.cluster import parse_hosts
from tfdist.errors import TfdistError, TrainingError
from tfdist.strategies.rendezvous import wait_for_peers


def find_free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture
def hosts():
    return ",".join(f"127.0.0.1:{port}" for port in find_free_ports(3))


def test_all_find_one_another_though_they_come_at_different_times(hosts):
    returned = []

    def wait(index):
        time.sleep(0.3 * index)
        wait_for_peers(parse_hosts(hosts, f"worker:{index}"), timeout_s=20)
        # TensorFlow's server listens from here on.
        with socket.create_server(("127.0.0.1", int(hosts.split(",")[index].split(":")[1]))):
            returned.append(index)
            time.sleep(1.5)

    threads = [threading.Thread(target=wait, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(returned) == [0, 1, 2]


def test_names_the_workers_that_do_not_come(hosts):
    with pytest.raises(TrainingError, match=r"0\.2 s in vain for worker 1 at .*refused.*worker 2"):
        wait_for_peers(parse_hosts(hosts, "worker:0"), timeout_s=0.2)


def test_says_so_when_the_port_is_taken(hosts):
    port = int(hosts.split(",")[0].split(":")[1])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(TfdistError, match=f"port {port} of this task's .*in use. End what"),
    ):
        wait_for_peers(parse_hosts(hosts, "worker:0"), timeout_s=5)


def test_one_worker_waits_for_nobody():
    wait_for_peers(parse_hosts("a:1,ps=b:1", "worker:0"), timeout_s=0)
