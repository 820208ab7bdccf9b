"""A server process on the loopback interface, and a real HTTP client."""

import asyncio
import contextlib
import io
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib

import numpy as np
import pytest
import tensorflow as tf
import uvicorn
from PIL import Image

from tests.serve.running import PREDICT, encode, run_server
from tfdist.errors import TfdistError
from tfdist.serve.hosts import make_host_check
from tfdist.serve.http_protocol import make_protocol
from tfdist.serve.listener import drop_new_connections, listen
from tfdist.serve.options import ServerOptions
from tfdist.serve.server import GracefulServer
from tfdist.tasks.commands import run_task_command

IMAGES = [np.random.default_rng(i).integers(0, 256, (40, 30 + i, 3), np.uint8) for i in range(4)]
DEEP_PNG = tf.io.encode_png(np.full((4, 4, 3), 800, np.uint16)).numpy()
PNGS = [tf.io.encode_png(image).numpy() for image in IMAGES]


def make_bomb(width, height):
    """A small PNG that says it is large."""

    def chunk(kind, data):
        end = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + end

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(10**5)))


def make_animation():
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


@pytest.fixture(scope="module")
def servable(run_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("a servable") / "versions"
    assert run_task_command("export", [f"--run_dir={run_dir}", f"--output={path}", "--quiet"]) == 0
    return path


@pytest.fixture(scope="module")
def expected(servable):
    function = tf.saved_model.load(f"{servable}/1").signatures["serving_default"]
    return {name: value.numpy() for name, value in function(image_bytes=tf.constant(PNGS)).items()}


@pytest.fixture(scope="module")
def server(servable):
    flags = ("--max_body_mib=1", "--max_pixels=100000", "--max_instances=10")
    with run_server(
        f"--model={servable}", *flags, "--receive_timeout_s=2", "--max_connections=20"
    ) as running:
        yield running
        assert running.process.poll() is None
        assert len(running.lines) == 1, running.lines


def test_rows_and_columns_are_those_of_the_servable(server, expected):
    instances = [encode(png) for png in PNGS]
    status, answer = server.predict({"instances": instances})
    assert status == 200
    masks = np.array([row["mask"] for row in answer["predictions"]])
    np.testing.assert_array_equal(masks, expected["mask"])
    status, answer = server.predict({"inputs": {"image_bytes": instances}})
    found = np.array(answer["outputs"]["probabilities"])
    np.testing.assert_allclose(found, expected["probabilities"], atol=1e-6)
    body = {"instances": [{"image_bytes": instances[0]}], "output_filter": ["mask"]}
    status, answer = server.predict(body, "/v1/models/model/versions/1:predict")
    np.testing.assert_array_equal(answer["predictions"], expected["mask"][:1])
    body = {"signature_name": "tensors", "inputs": [IMAGES[1].tolist()]}
    status, answer = server.predict(body)
    np.testing.assert_array_equal(answer["outputs"]["mask"], expected["mask"][1:2])


def test_requests_at_the_same_time_share_batches(server, expected):
    before = server.read_metric("tfdist_batch_size_count")
    answers = [None] * 40

    def send(index):
        body = {"instances": [encode(PNGS[index % 4])], "output_filter": ["mask"]}
        answers[index] = server.predict(body)

    threads = [threading.Thread(target=send, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, (status, answer) in enumerate(answers[:16]):
        assert status == 200
        np.testing.assert_array_equal(answer["predictions"][0], expected["mask"][index % 4])
    assert server.read_metric("tfdist_batch_size_count") - before < 16


def test_status_metadata_health_and_metrics(server):
    _, answer = server.ask("GET", "/v1/models/model")
    assert answer["model_version_status"] == [
        {
            "version": "1",
            "state": "AVAILABLE",
            "status": {"error_code": "OK", "error_message": ""},
        }
    ]
    _, answer = server.ask("GET", "/v1/models/model/metadata")
    assert answer["model_spec"] == {"name": "model", "signature_name": "", "version": "1"}
    signature = answer["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["inputs"]["image_bytes"]["dtype"] == "DT_STRING"
    assert signature["method_name"] == "tensorflow/serving/predict"
    assert server.ask("GET", "/healthz") == (200, {"status": "ok"})
    for path in ("/metrics", "/monitoring/prometheus/metrics"):
        assert 'tfdist_requests_total{status="200"}' in server.ask("GET", path)[1]


TENSORS = {"signature_name": "tensors"}
BAD = {
    "no JSON": (b"{", 400, "The body is not JSON"),
    "a list": ([], 400, 'either "instances" or "inputs"'),
    "rows and columns": ({"instances": [1], "inputs": [1]}, 400, "either"),
    "another field": ({"instances": [1], "examples": []}, 400, "Unknown field 'examples'"),
    "another signature": ({"instances": [1], "signature_name": "x"}, 400, "Unknown signature 'x'"),
    "no instances": ({"instances": []}, 400, "at least one instance"),
    "another input": ({"instances": [{"image": "a"}]}, 400, r"instances\[0\] has image"),
    "another output": ({"instances": ["a"], "output_filter": ["x"]}, 400, "must list outputs"),
    "no image": ({"instances": ["abc"]}, 400, r"image_bytes\[0\] is not a JPEG"),
    "a number": ({"instances": [1]}, 400, "image_bytes is not string"),
    "no base64": ({"instances": [{"b64": "?"}]}, 400, "image_bytes is not string"),
    "deep lists": (b'{"instances": ' + b"[" * 900 + b"]" * 900 + b"}", 400, "image_bytes is not"),
    "a truncated image": ({"instances": [encode(PNGS[0][:-800])]}, 400, "cannot be read"),
    "16 bits": ({"instances": [encode(DEEP_PNG)]}, 400, "16 bits per channel"),
    "an animation": ({"instances": [encode(make_animation())]}, 400, "an animation"),
    "a bomb": ({"instances": [encode(make_bomb(50000, 50000))]}, 413, "too large"),
    "a large image": ({"instances": [encode(make_bomb(400, 400))]}, 413, "400x400 pixels"),
    "many instances": ({"instances": [encode(PNGS[0])] * 11}, 413, "has 11 instances"),
    "a large body": (b" " * (2**20 + 1), 413, "larger than 1048576 bytes"),
    "uneven rows": (TENSORS | {"instances": [[[[1, 2, 3]]], [[[1]]]]}, 400, "images is not float"),
    "two channels": (TENSORS | {"instances": [[[[1, 2]]]]}, 400, "the shape .*expects"),
    "words for numbers": (TENSORS | {"instances": [[[["a"] * 3]]]}, 400, "images is not float"),
    "no pixels": (TENSORS | {"instances": [[]]}, 400, "the shape"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_request_gets_one_line(server, what):
    body, expected_status, message = BAD[what]
    status, answer = server.predict(body)
    assert (status, list(answer)) == (expected_status, ["error"])
    assert "\n" not in answer["error"]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(answer["error"])


@pytest.mark.parametrize(
    ("method", "path", "expected_status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/model/versions/7", 404),
        ("POST", "/v1/models/model/versions/7:predict", 404),
        ("GET", f"/v1/models/model/versions/{'9' * 5000}", 404),
        ("POST", f"/v1/models/model/versions/{'9' * 5000}:predict", 404),
        ("GET", PREDICT, 405),
        ("DELETE", "/", 405),
    ],
)
def test_a_wrong_path_gets_one_line(server, method, path, expected_status):
    body = {"instances": [encode(PNGS[0])]} if method == "POST" else None
    status, answer = server.ask(method, path, body)
    assert (status, list(answer)) == (expected_status, ["error"])


@pytest.mark.parametrize("codings", [["gzip"], ["identity", "br"], ["identity, deflate"]])
def test_a_compressed_body_is_refused(server, codings):
    lines = b"".join(b"Content-Encoding: " + coding.encode() + b"\r\n" for coding in codings)
    assert talk(server, START + lines + LENGTH + b"{}").startswith(b"HTTP/1.1 415 ")


@pytest.mark.parametrize("codings", ["", "identity", "Identity,"])
def test_a_body_without_a_coding_is_read(server, codings):
    status, answer = server.ask("POST", PREDICT, b"{}", **{"Content-Encoding": codings})
    assert (status, "either" in answer["error"]) == (400, True)


START = b"POST /v1/models/model:predict HTTP/1.1\r\nHost: localhost\r\n"
LENGTH = b"Content-Length: 2\r\n\r\n"
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n"
CLOSE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def talk(server, *parts):
    """Returns all that the server answers until it closes the connection."""
    with server.connect() as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.05)
        return read_to_end(connection)


def read_to_end(connection):
    answer = b""
    while part := connection.recv(2**16):
        answer += part
    return answer


def test_slow_senders_are_refused(server):
    starts = (b"", b"POST / HT", START + LENGTH + b"1", START.replace(b"POST", b"HEAD") + CHUNKS)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in starts]
        for connection, start in zip(connections, starts, strict=True):
            connection.sendall(start)
        assert server.ask("GET", "/healthz")[0] == 200
        answers = [read_to_end(connection) for connection in connections]
    found = [answer[9:12] for answer in answers]
    assert found == [b"", b"408", b"408", b"405"]  # without a request there is no answer


@pytest.mark.parametrize("count", [1, 3])
def test_a_client_that_only_reads_gets_its_answers(server, expected, count):
    body = json.dumps({"instances": [encode(PNGS[0])]}).encode()
    head = START + b"Content-Length: %d\r\n\r\n" % len(body)
    with server.connect() as connection:
        connection.sendall((head + body) * count + START)  # and an incomplete request
        connection.shutdown(socket.SHUT_WR)
        answer = read_to_end(connection)
    assert answer.count(b"HTTP/1.1 200 ") == count == answer.count(b"HTTP/1.1 ")
    predicted = json.loads(answer.rpartition(b"\r\n\r\n")[2])["predictions"][0]
    np.testing.assert_array_equal(predicted["mask"], expected["mask"][0])


UNUSUAL = {
    "an absolute target": (START.replace(b" /", b" http://localhost/") + LENGTH + b"{}", b"400"),
    "HTTPS, capitals, a port": (
        START.replace(b" /", b" HTTPS://LOCALHOST:80/").replace(b"localhost", b"evil.example")
        + LENGTH
        + b"{}",
        b"400",
    ),
    "a target on another host": (CLOSE.replace(b" /", b" http://evil.example/"), b"403"),
    "a target without a path": (CLOSE.replace(b"/healthz", b"http://localhost"), b"200"),
    "a target without a host": (CLOSE.replace(b" /", b" http:///"), b"403"),
    "an absolute target in HTTP/1.0": (b"GET http://localhost/healthz HTTP/1.0\r\n\r\n", b"200"),
    "chunks with extensions and trailers": (
        START + CHUNKS + b'02;a="b;c"\r\n{}\r\n0\r\nX: a\r\n\r\n',
        b"400",
    ),
    "the server's options": (CLOSE.replace(b"GET /healthz", b"OPTIONS *"), b"204"),
    "an answer instead of a body": (
        START.replace(b":predict", b":no") + b"Expect: 100-continue\r\n" + LENGTH,
        b"404",
    ),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"505"),
    "another version": (CLOSE.replace(b"/1.1", b"/2.0"), b"505"),
    "a coding before chunks": (START + b"Transfer-Encoding: gzip, chunked\r\n\r\n", b"501"),
    "a method in lower case": (CLOSE.replace(b"GET", b"get"), b"405"),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_an_unusual_request_gets_its_status(server, what):
    request, status = UNUSUAL[what]
    answer = talk(server, request, CLOSE)
    assert answer.startswith(b"HTTP/1.1 " + status), answer
    ends = what == "an answer instead of a body" or b"close" in request or b"HTTP/1.0" in request
    assert answer.count(b"HTTP/1.1 ") == (1 if ends or status[:1] == b"5" else 2)


def test_connections_above_the_limit_get_503(server):
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(server.connect())
        status, answer = server.ask("GET", "/healthz")
        assert (status, answer) == (503, {"error": "Too many connections. Try again later."})
    time.sleep(0.2)
    assert server.ask("GET", "/healthz")[0] == 200


def test_the_page_knows_the_classes_and_the_models_own_name(server, servable):
    status, page = server.ask("GET", "/")
    assert status == 200
    assert "https://" not in page
    _, about = server.ask("GET", "/page.json")
    assert about["image_signature"] == "serving_default"
    assert (about["name"], about["title"]) == ("model", servable.name)
    assert len(about["classes"]) == len(about["colors"]) == 4


AMBIGUOUS = {
    "a length and chunks": START
    + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and a length": START
    + b"transfer-encoding: chunked\r\ncontent-length: 0\r\n\r\n0\r\n\r\n",
    "two lengths": START + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "two lengths in one line": START + b"Content-Length: 2, 3\r\n\r\n{}x",
    "a signed length": START + b"Content-Length: +2\r\n\r\n{}",
    "chunks twice": START
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an unknown coding": START + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a coding before chunks": START + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": START.replace(b"1.1", b"1.0")
    + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": START + b"Content-Length : 2\r\n\r\n{}",
    "a folded line": START + b"X: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
    "a folded length": START + b"Content-Length:\r\n 2\r\n\r\n{}",
    "a bare LF": START + b"X: a\nContent-Length: 2\r\n\r\n{}",
    "an end of bare LFs": START + b"Content-Length: 2\n\n{}",
    "a bare CR": START + b"X: a\rContent-Length: 2\r\n\r\n{}",
    "a bare LF after a chunk's size": START + b"Transfer-Encoding: chunked\r\n\r\n2\n{}0\r\n\r\n",
    "a bare LF in a trailer": START
    + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: a\n\r\n",
    "no number of a chunk": START + b"Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
    "a wrong size of a chunk": START + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n",
    "a wrong chunk after the answer": START.replace(b":predict", b":nothing")
    + b"Transfer-Encoding: chunked\r\n\r\n",
    "no host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("what", AMBIGUOUS)
def test_a_request_that_can_be_read_in_two_ways_ends_its_connection(server, what):
    with server.connect() as connection:
        connection.sendall(AMBIGUOUS[what])
        answer = b""
        if what == "a wrong chunk after the answer":
            answer = connection.recv(2**16)
            assert answer.startswith(b"HTTP/1.1 404")
            connection.sendall(b"x\r\n")
        while part := connection.recv(2**16):
            answer += part
    assert answer.count(b"HTTP/1.1 ") == 1
    if what != "a wrong chunk after the answer":
        status = b"501" if "coding" in what or what == "chunks twice" else b"400"
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert b"connection: close\r\n" in answer.lower()


def test_plain_requests_share_a_connection(server):
    chunked = START + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nTrailer: a\r\n\r\n"
    with server.connect() as connection:
        connection.sendall((START + b"Content-Length: 2\r\n\r\n{}" + chunked) * 2)
        found = b""
        while found.count(b"HTTP/1.1 400") < 4 or not found.endswith(b"}"):  # {} is no request
            found += connection.recv(2**16)
    assert found.count(b'either \\"instances') == 4


def test_a_request_to_another_host_is_refused(server):
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8501", "[::1]:8501", "a.localhost."):
        assert server.ask("GET", "/healthz", Host=host)[0] == 200, host
    for host in ("evil.example", "evil.example:8501", "localhost.evil.example", "10.0.0.1", "a b"):
        for method, path in (("GET", "/"), ("GET", "/metrics"), ("POST", PREDICT)):
            status, answer = server.ask(method, path, Host=host)
            assert (status, list(answer)) == (403, ["error"])
            advice = f"--allowed_hosts={host.removesuffix(':8501')}."
            assert answer["error"].endswith(
                "is not a name of this server." if " " in host else advice
            )


@pytest.mark.parametrize(
    ("host", "address", "allowed", "own", "others"),
    [
        ("0.0.0.0", "0.0.0.0", (), ["evil.example", "10.0.0.1:80", "a b"], []),
        ("::", "::", (), ["evil.example", "[fe80::1]:80"], []),
        ("0.0.0.0", "0.0.0.0", ("m.org",), ["M.org:80", "10.9.8.7", "localhost"], ["n.org", ""]),
        ("box", "10.0.0.1", (), ["box", "BOX:1", "10.0.0.1"], ["box.evil.org", "10.0.0.2"]),
        ("::1", "::1", ("*.m.org",), ["[::1]:1", "a.m.org"], ["m.org.evil.org", "[::2]", "::2"]),
        ("127.0.0.1", "127.0.0.1", ("*",), ["evil.example"], []),
    ],
)
def test_names_of_a_server(host, address, allowed, own, others):
    is_own = make_host_check(host, address, allowed)
    assert [is_own(name, "10.9.8.7") for name in own] == [True] * len(own)
    assert [is_own(name, "10.9.8.7") for name in others] == [False] * len(others)


@pytest.mark.parametrize("name", ["http://a", "a:80", "a b", ""])
def test_a_wrong_name_of_a_host_is_refused(name):
    with pytest.raises(TfdistError, match=r"allowed_hosts=.* is no name of a host"):
        ServerOptions(allowed_hosts=(name,))


@pytest.mark.skipif(sys.platform != "linux", reason="Only Linux sets limits of other processes.")
def test_a_server_without_descriptors_says_so_once_and_goes_on(server):
    process = server.process.pid
    before = resource.prlimit(process, resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir(f"/proc/{process}/fd"))
    resource.prlimit(process, resource.RLIMIT_NOFILE, (used + 2, before[1]))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(19):
                stack.enter_context(server.connect())
            time.sleep(2.5)  # asyncio tries again every second
    finally:
        resource.prlimit(process, resource.RLIMIT_NOFILE, before)
    assert server.ask("GET", "/healthz")[0] == 200
    assert len(server.lines) == 2, server.lines
    assert "cannot accept a connection: Too many open files" in server.lines.pop()


@pytest.mark.cluster
def test_a_new_version_and_sigterm_lose_no_request(servable, tmp_path):
    directory = tmp_path / "a directory of versions"
    shutil.copytree(servable / "1", directory / "1")
    body = {"instances": [encode(PNGS[0])], "output_filter": ["mask"]}
    statuses, refused, stop = [], [], threading.Event()

    def send():
        while not stop.is_set():
            try:
                statuses.append(server.predict(body)[0])
            except ConnectionRefusedError:
                refused.append(1)
                return

    with run_server(f"--model={directory}", "--poll_s=0.1") as server:
        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        (directory / "7").mkdir()  # incomplete
        (directory / "8").mkdir()
        (directory / "8" / "saved_model.pb").write_bytes(b"broken")
        shutil.copytree(servable / "1", tmp_path / "writing")
        os.rename(tmp_path / "writing", directory / "5")
        deadline = time.monotonic() + 1000
        while time.monotonic() < deadline:
            _, answer = server.ask("GET", "/v1/models/model")
            states = {s["version"]: s["state"] for s in answer["model_version_status"]}
            if states == {"5": "AVAILABLE", "8": "END"}:
                break
            time.sleep(0.1)
        assert states == {"5": "AVAILABLE", "8": "END"}
        assert server.predict(body, "/v1/models/model/versions/5:predict")[0] == 200
        assert server.predict(body, "/v1/models/model/versions/1:predict")[0] == 404
        assert server.stop() == 143
        stop.set()
        for thread in threads:
            thread.join()
    assert set(statuses) == {200}
    assert len(statuses) > 20
    assert "Version 5 is served.\n" in server.lines
    assert any(f"Cannot load {directory}/8" in line for line in server.lines)


@pytest.mark.cluster
def test_a_run_is_served_on_two_devices_until_ctrl_c(run_dir, expected):
    flags = ("--virtual_devices=2", "--drain_s=0", "--allowed_batch_sizes=1,8")
    with run_server(f"--run_dir={run_dir}", *flags) as server:
        _, answer = server.predict({"instances": [encode(png) for png in PNGS * 3]})
        masks = np.array([row["mask"] for row in answer["predictions"]])
        np.testing.assert_array_equal(masks, np.concatenate([expected["mask"]] * 3))
        assert server.stop(signal.SIGINT) == 130


@pytest.mark.cluster
def test_tuning_proposes_flags(servable):
    command = [sys.executable, "-m", "tfdist.serve", f"--model={servable}", "--port=0", "--tune"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("Proposed: --max_batch_size=")
    assert len(done.stdout.splitlines()) == 3 + 13


def test_answers_are_sent_without_waiting_for_acknowledgements():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
    with accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.skipif(sys.platform != "linux", reason="Only Linux has socket filters.")
def test_connections_that_wait_are_accepted_after_new_ones_are_dropped():
    with listen("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as waiting:
            drop_new_connections(listener)
            with pytest.raises(TimeoutError):
                socket.create_connection(address, timeout=0.2)
            waiting.sendall(b"request")
            accepted, _ = listener.accept()
        with accepted:
            assert accepted.recv(7) == b"request"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_connections_that_wait_at_the_end_are_answered():
    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    async def serve(listener):
        protocol = make_protocol(receive_timeout_s=9, answer_timeout_s=9, max_connections=99)
        config = uvicorn.Config(answer, http=protocol, lifespan="off", log_config=None)
        server = GracefulServer(config)
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0)
        # The event loop does not run between these lines, so it cannot accept.
        waiting = [socket.create_connection(listener.getsockname()) for _ in range(50)]
        for connection in waiting:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await server.shutdown([listener])
        server.should_exit = True
        await serving
        return waiting

    with listen("127.0.0.1", 0) as listener:
        for connection in asyncio.run(serve(listener)):
            with connection:
                assert connection.recv(1024).startswith(b"HTTP/1.1 204")
