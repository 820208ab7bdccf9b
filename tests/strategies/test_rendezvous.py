import contextlib
import secrets
import socket
import threading
import time

import pytest

from tfdist.cluster import messages, parse_hosts
from tfdist.cluster.messages import DistrustError, Peer, Visitors
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
        wait_for_peers(parse_hosts(hosts, f"worker:{index}"), timeout_s=1000)
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


def meet(hosts, *, timeout_s, must_match):
    """Lets several workers meet, each with its own `must_match`; returns what each raised."""
    raised = {}

    def wait(index):
        try:
            config = parse_hosts(hosts, f"worker:{index}")
            wait_for_peers(config, timeout_s=timeout_s, alike=must_match[index])
        except TfdistError as error:
            raised[index] = error

    threads = [threading.Thread(target=wait, args=(index,)) for index in must_match]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_refuses_a_worker_with_other_flags_or_versions(hosts):
    mine = {"--seed": "0", "TensorFlow": "2.21.0"}
    other = mine | {"--seed": "1", "TensorFlow": "2.20.0"}
    raised = meet(hosts, timeout_s=1000, must_match={0: mine, 1: mine, 2: other})
    assert {type(error) for error in raised.values()} == {TfdistError}
    assert sorted(raised) == [0, 1, 2]
    for error in raised.values():
        assert str(error).startswith("worker 2 was started with different flags or versions")
        assert "--seed 1 (worker 0: 0), TensorFlow 2.20.0 (worker 0: 2.21.0)" in str(error)


@contextlib.contextmanager
def _ignore_failure(*, is_last):
    """Ignores a check that has failed for lack of time."""
    try:
        yield
    except AssertionError:
        if is_last:
            raise


def check_with_more_time(check):
    """Runs a check that waits for some seconds in vain, for longer where the machine is busy."""
    succeeded = False
    for timeout_s in (0.5, 2, 10, 50):
        with _ignore_failure(is_last=timeout_s == 50):
            check(timeout_s)
            succeeded = True
        if succeeded:
            return


def test_all_hear_who_does_not_come(hosts):
    def check(timeout_s):
        raised = meet(hosts, timeout_s=timeout_s, must_match={0: {}, 1: {}})
        assert {type(error) for error in raised.values()} == {TrainingError}
        assert sorted(raised) == [0, 1]
        for error in raised.values():
            assert "waiting for worker 2 at" in str(error)

    check_with_more_time(check)


def test_a_server_of_an_earlier_start_is_no_peer(hosts):
    """Something listens at worker 0's address, and hangs up: worker 1 goes on waiting."""
    port = int(hosts.split(",")[0].split(":")[1])
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(0.1)

        def hang_up():
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(TrainingError, match="waiting for worker 0 at"):
            wait_for_peers(parse_hosts(hosts, "worker:1"), timeout_s=0.5)
        ended.set()
        thread.join()


def test_names_the_workers_that_do_not_come(hosts):
    with pytest.raises(TrainingError, match=r"0\.2 s waiting for worker 1 at .*refused.*worker 2"):
        wait_for_peers(parse_hosts(hosts, "worker:0"), timeout_s=0.2)


def test_says_so_when_the_port_is_taken(hosts):
    port = int(hosts.split(",")[0].split(":")[1])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(TfdistError, match=f"port {port} of this task's .*in use. End the"),
    ):
        wait_for_peers(parse_hosts(hosts, "worker:0"), timeout_s=1000)


def test_one_worker_waits_for_nobody():
    wait_for_peers(parse_hosts("a:1,ps=b:1", "worker:0"), timeout_s=0)


# Strangers: what they can do without being a task of the cluster.


def find_address(hosts, index):
    host, _, port = hosts.split(",")[index].partition(":")
    return host, int(port)


def connect(hosts, index=0):
    until = time.monotonic() + 1000
    while True:
        try:
            return socket.create_connection(find_address(hosts, index))
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.02)


def drip(connection, ended):
    with contextlib.suppress(OSError):
        while not ended.wait(0.02):
            connection.sendall(b"x")


NONSENSE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": b"\x00\xff" * 100_000,
    "no end": b"x" * 200_000,
    "number": b"5\n",
    "deep": b"[" * 60_000 + b"\n",
    "wrong kinds": b'{"name":"worker 1","must_match":[1]}\n',
    "in place of worker 1": b'{"name":"worker 1","must_match":{}}\n',
    "unsigned": b"tfdist " + b"0" * 32 + b'\n{"name":"worker 1","must_match":{}}\n',
    "signed by nobody": b"tfdist " + b"0" * 32 + b"\n" + b"0" * 64 + b" {}\n",
}


@pytest.mark.parametrize("sent", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_costs_a_line_and_holds_up_nobody(hosts, sent, capfd):
    two = hosts.rpartition(",")[0]
    raised = {}
    chief = threading.Thread(
        target=lambda: raised.update(meet(two, timeout_s=1000, must_match={0: {}}))
    )
    chief.start()
    with connect(hosts) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(sent)
            while stranger.recv(4096):  # until the chief hangs up
                pass
        assert meet(two, timeout_s=1000, must_match={1: {}}) == {}
        chief.join()
    assert raised == {}
    said = capfd.readouterr().err
    assert said.startswith("tfdist: closed a connection from 127.0.0.1, which ")
    assert said.count("\n") == 1


def test_slow_and_silent_strangers_hold_up_nobody(hosts, monkeypatch):
    monkeypatch.setattr(messages, "_MAX_UNKNOWN", 8)
    ended = threading.Event()
    chief = threading.Thread(
        target=meet, args=(hosts,), kwargs={"timeout_s": 1, "must_match": {0: {}}}
    )
    chief.start()
    strangers = [connect(hosts) for _ in range(20)]
    dripping = [threading.Thread(target=drip, args=(one, ended)) for one in strangers[:10]]
    for thread in dripping:
        thread.start()
    chief.join(1000)  # the strangers stay
    assert not chief.is_alive()
    ended.set()
    for thread in dripping:
        thread.join()
    for stranger in strangers:
        stranger.close()


def test_a_chief_that_drips_holds_up_nobody(hosts):
    ended = threading.Event()
    with socket.create_server(find_address(hosts, 0)) as server:
        server.settimeout(0.1)

        def answer():
            with contextlib.ExitStack() as stack:
                while not ended.is_set():
                    with contextlib.suppress(TimeoutError):
                        one = stack.enter_context(server.accept()[0])
                        threading.Thread(target=drip, args=(one, ended)).start()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TrainingError, match="does not accept workers yet"):
            wait_for_peers(parse_hosts(hosts, "worker:1"), timeout_s=1)
        ended.set()
        thread.join()


def test_a_stranger_without_the_token_is_not_taken_for_a_worker(hosts, monkeypatch):
    monkeypatch.setenv("TFDIST_TOKEN", "the right one")
    check_with_more_time(lambda timeout_s: _check_strangers(hosts, timeout_s))


def _check_strangers(hosts, timeout_s):
    two = hosts.rpartition(",")[0]
    raised = {}
    chief = threading.Thread(
        target=lambda: raised.update(meet(two, timeout_s=timeout_s, must_match={0: {}}))
    )
    chief.start()
    connect(hosts).close()
    with pytest.raises(DistrustError, match="another TFDIST_TOKEN"):
        Peer(hosts.split(",")[0], "a wrong one", until=time.monotonic() + 1000)
    with connect(hosts) as bold:  # it goes on all the same
        bold.sendall(f"tfdist {secrets.token_hex(16)}\n".encode())
        nonce = bold.recv(4096).split()[1].decode()
        signatures = messages._Signatures("a wrong one", "0" * 32, nonce, "task")
        bold.sendall(signatures.sign({"name": "worker 1", "must_match": {}}))
        assert bold.recv(4096) == b""
    chief.join()
    assert "waiting for worker 1 at" in str(raised[0])
    assert "Something at 127.0.0.1 connected with another TFDIST_TOKEN" in str(raised[0])


def test_a_chief_without_the_token_is_not_believed(hosts, monkeypatch):
    monkeypatch.setenv("TFDIST_TOKEN", "the right one")
    ended = threading.Event()

    def lie():
        with (
            socket.create_server(find_address(hosts, 0)) as server,
            Visitors(server, "a wrong one") as visitors,
        ):
            while not ended.is_set():
                for visitor, _ in visitors.poll():
                    visitor.send({"go": True})

    def check(timeout_s):
        with pytest.raises(TrainingError, match="it answers, but has another TFDIST_TOKEN"):
            wait_for_peers(parse_hosts(hosts, "worker:1"), timeout_s=timeout_s)

    thread = threading.Thread(target=lie)
    thread.start()
    try:
        check_with_more_time(check)
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("kind", ["TFDIST_TOKEN", "TFDIST_TOKEN_FILE"])
def test_those_who_have_the_token_meet(hosts, kind, monkeypatch, path_with_spaces):
    (path_with_spaces / "token").write_text("the right one\n")
    monkeypatch.setenv(kind, {"TFDIST_TOKEN": "it"}.get(kind, str(path_with_spaces / "token")))
    assert meet(hosts, timeout_s=1000, must_match={0: {}, 1: {}, 2: {}}) == {}


@pytest.mark.parametrize("text", [None, " \n"])
def test_a_token_file_without_a_token(hosts, monkeypatch, tmp_path, text):
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("TFDIST_TOKEN_FILE", str(path))
    with pytest.raises(TfdistError, match=r"Cannot read the token .*openssl rand -hex 32"):
        wait_for_peers(parse_hosts(hosts, "worker:0"), timeout_s=1000)


def test_what_a_worker_sends_is_printed_escaped(hosts):
    evil = {"--seed": "\x1b[2J\x1b]0;owned\x07" + "x" * 5000 + "\ud800"}
    raised = meet(hosts, timeout_s=1000, must_match={0: {"--seed": "0"}, 1: evil, 2: evil})
    assert sorted(raised) == [0, 1, 2]
    for error in raised.values():
        assert r"--seed \x1b[2J\x1b]0;owned\x07xxx" in str(error)
        assert str(error).isprintable()
        assert len(str(error)) < 1000
