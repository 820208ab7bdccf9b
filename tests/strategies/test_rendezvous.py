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


def meet(hosts, *, timeout_s, alike):
    """Lets several workers meet, each with its own `alike`; returns what each raised."""
    raised = {}

    def wait(index):
        try:
            config = parse_hosts(hosts, f"worker:{index}")
            wait_for_peers(config, timeout_s=timeout_s, alike=alike[index])
        except TfdistError as error:
            raised[index] = error

    threads = [threading.Thread(target=wait, args=(index,)) for index in alike]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_refuses_a_worker_with_other_flags_or_versions(hosts):
    mine = {"--seed": "0", "TensorFlow": "2.21.0"}
    other = mine | {"--seed": "1", "TensorFlow": "2.20.0"}
    raised = meet(hosts, timeout_s=20, alike={0: mine, 1: mine, 2: other})
    assert {type(error) for error in raised.values()} == {TfdistError}
    assert sorted(raised) == [0, 1, 2]
    for error in raised.values():
        assert str(error).startswith("worker 2 was started with different flags or versions")
        assert "--seed 1 (worker 0: 0), TensorFlow 2.20.0 (worker 0: 2.21.0)" in str(error)


def test_all_hear_who_does_not_come(hosts):
    raised = meet(hosts, timeout_s=0.5, alike={0: {}, 1: {}})
    assert {type(error) for error in raised.values()} == {TrainingError}
    assert sorted(raised) == [0, 1]
    for error in raised.values():
        assert "waiting for worker 2 at" in str(error)


def test_a_server_of_an_earlier_start_is_no_peer(hosts):
    """Something listens at worker 0's address, and hangs up: worker 1 goes on waiting."""
    port = int(hosts.split(",")[0].split(":")[1])
    with socket.create_server(("127.0.0.1", port)) as server:
        hang_up = threading.Thread(target=lambda: [server.accept()[0].close() for _ in range(2)])
        hang_up.start()
        with pytest.raises(TrainingError, match="waiting for worker 0 at"):
            wait_for_peers(parse_hosts(hosts, "worker:1"), timeout_s=0.5)
        hang_up.join()


def test_names_the_workers_that_do_not_come(hosts):
    with pytest.raises(TrainingError, match=r"0\.2 s waiting for worker 1 at .*refused.*worker 2"):
        wait_for_peers(parse_hosts(hosts, "worker:0"), timeout_s=0.2)


def test_says_so_when_the_port_is_taken(hosts):
    port = int(hosts.split(",")[0].split(":")[1])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(TfdistError, match=f"port {port} of this task's .*in use. End the"),
    ):
        wait_for_peers(parse_hosts(hosts, "worker:0"), timeout_s=5)


def test_one_worker_waits_for_nobody():
    wait_for_peers(parse_hosts("a:1,ps=b:1", "worker:0"), timeout_s=0)
