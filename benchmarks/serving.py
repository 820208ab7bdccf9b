"""Loads a server of a finished run with good and hostile requests.

    python -m benchmarks.serving --run_dir=DIR [--requests=2000] [--clients=16]

The exit status is 1 if a request was lost, if batching or the percentiles miss their goals, if
memory grows, or if a hostile request got another answer than 4xx.
"""

import argparse
import collections
import http.client
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

from tests.serve.running import PREDICT, Server, encode, run_server
from tests.serve.test_server import make_bomb
from tfdist.launch.machine import describe_machine
from tfdist.tasks.commands import run_task_command

SIZES = [(64, 64), (96, 128), (200, 150), (240, 320), (128, 128), (300, 200)]
ROUNDS = 3
MIN_SPEEDUP, MAX_TAIL, MAX_GROWTH = 1.5, 10, 1.05
MAX_ALONE_MS = 40  # less than what waiting for TCP's acknowledgements takes
NUM_HOSTILE, RECEIVE_TIMEOUT_S = 500, 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run_dir", required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=16)
    flags = parser.parse_args()
    print(f"{describe_machine()}, load {os.getloadavg()[0]:.1f}", flush=True)
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tfdist serving ") as directory:
        model = f"{directory}/versions"
        arguments = [f"--run_dir={flags.run_dir}", f"--output={model}", "--quiet"]
        if status := run_task_command("export", arguments):
            return status
        files = _write_bodies(Path(directory))
        _compare_batching(model, files, flags, problems)
        limits = (f"--receive_timeout_s={RECEIVE_TIMEOUT_S}", "--max_body_mib=2")
        with run_server(f"--model={model}", *limits) as server:
            _load_and_attack(server, files, flags, problems)
            _stop_under_load(server, files[0].read_bytes(), flags.clients, problems)
    print("\n".join(problems) or "All goals are met.")
    return int(bool(problems))


def _write_bodies(directory: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    files = []
    for index, size in enumerate(SIZES):
        image = tf.image.resize(rng.integers(0, 256, (8, 8, 3)), size).numpy().astype(np.uint8)
        data = (tf.io.encode_png if index % 2 else tf.io.encode_jpeg)(image).numpy()
        body = {"instances": [encode(data)], "output_filter": ["mask"]}
        files.append(directory / f"{index}.json")
        files[-1].write_text(json.dumps(body))
    return files


def _send(server: Server, files: list[Path], clients: int, requests: int) -> dict:
    arguments = [server.port, PREDICT, clients, requests, *files]
    command = [sys.executable, "-m", "tfdist.serve.load", *map(str, arguments)]
    return json.loads(subprocess.check_output(command, text=True))


def _compare_batching(
    model: str, files: list[Path], flags: argparse.Namespace, problems: list[str]
) -> None:
    """Measures the same requests with and without batching, in turns."""
    rates: dict[str, list[float]] = {"1": [], "8": []}
    for _ in range(ROUNDS):
        for size, found in rates.items():
            # A queue of as many instances, whatever the size of the batches.
            queue = f"--max_enqueued_batches={128 // int(size)}"
            with run_server(f"--model={model}", f"--max_batch_size={size}", queue) as server:
                result = _send(server, files, flags.clients, flags.requests // 4)
            found.append(result["per_second"])
            print(f"max_batch_size={size}: {_format(result)}", flush=True)
    ratios = sorted(b / a for a, b in zip(rates["1"], rates["8"], strict=True))
    speedup = ratios[len(ratios) // 2]
    print(f"batched relative to unbatched, median of {ROUNDS}: {speedup:.2f}", flush=True)
    if speedup < MIN_SPEEDUP:
        problems.append(f"Batching makes it {speedup:.2f} times as fast, not {MIN_SPEEDUP}.")


def _load_and_attack(
    server: Server, files: list[Path], flags: argparse.Namespace, problems: list[str]
) -> None:
    alone = _send(server, files, 1, flags.requests // 8)
    print(f"1 client: {_format(alone)}", flush=True)
    if alone["p50_ms"] > MAX_ALONE_MS:
        problems.append(f"One client waits {alone['p50_ms']:.0f} ms for an answer.")
    _send(server, files, flags.clients, flags.requests // 4)
    before = _read_memory(server)
    result = _send(server, files, flags.clients, flags.requests)
    print(f"{flags.clients} clients, {flags.requests} requests: {_format(result)}", flush=True)
    if result["statuses"] != {"200": flags.requests}:
        problems.append(f"Requests were lost: {result['statuses']}.")
    if result["p99_ms"] > MAX_TAIL * result["p50_ms"]:
        problems.append(f"p99 is {result['p99_ms'] / result['p50_ms']:.1f} times p50.")
    attack = threading.Thread(target=_attack, args=(server, problems))
    attack.start()
    good: collections.Counter[str] = collections.Counter()
    while attack.is_alive():
        good.update(_send(server, files, 4, 40)["statuses"])
    print(f"good requests meanwhile: {dict(good)}", flush=True)
    if set(good) != {"200"}:
        problems.append(f"Good requests failed beside hostile ones: {dict(good)}.")
    growth = _read_memory(server) / before
    print(f"memory: {before / 2**20:.0f} MiB, then times {growth:.3f}", flush=True)
    if growth > MAX_GROWTH:
        problems.append(f"Memory grew to {growth:.2f} times what it was.")


def _attack(server: Server, problems: list[str]) -> None:
    """Sends hostile requests from several threads, and counts what becomes of them."""
    png = tf.io.encode_png(np.zeros((64, 64, 3), np.uint8)).numpy()
    bodies = [
        encode(png[:-30]),
        encode(make_bomb(60000, 60000)),
        encode(make_bomb(20000, 2000)),
        encode(random.Random(0).randbytes(5000)),
        3.5,
        {"b64": "*"},
        [[1, 2], [3]],
        None,
    ]
    texts = [json.dumps({"instances": [body]}).encode() for body in bodies]
    texts += [b"", b"[" * 10**5, b"{", b'{"instances": {}}', b" " * (2 * 2**20 + 1)]
    outcomes: collections.Counter[str] = collections.Counter()
    kinds = [*((PREDICT, text) for text in texts), ("/v1/models/none:predict", b"{}")]
    slow = [
        b"",
        b"POST / HT",
        b"GET / HTTP/1.1\r\n",
        b"POST " + PREDICT.encode() + b" HTTP/1.1\r\n",
    ]
    slow += [
        slow[-1] + b"Host: localhost\r\nContent-Length: 1000\r\n\r\n{",
        b"\x16\x03\x01\r\n\r\n",
    ]
    work = [*kinds, *slow] * (NUM_HOSTILE // (len(kinds) + len(slow)) + 1)
    pending = iter(work[:NUM_HOSTILE])
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                item = next(pending, None)
            if item is None:
                return
            outcome = (
                _send_slowly(server, item) if isinstance(item, bytes) else _post(server, *item)
            )
            with lock:
                outcomes[outcome] += 1

    threads = [threading.Thread(target=run) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{sum(outcomes.values())} hostile requests: {dict(outcomes)}", flush=True)
    for outcome, number in outcomes.items():
        if not re.fullmatch(r"4\d\d|cut off", outcome):
            problems.append(f"{number} hostile requests: {outcome}.")


def _post(server: Server, path: str, body: bytes) -> str:
    try:
        return str(server.ask("POST", path, body)[0])
    except (ConnectionError, http.client.HTTPException):
        return "cut off"


def _send_slowly(server: Server, start: bytes) -> str:
    with server.connect(timeout_s=10 * RECEIVE_TIMEOUT_S) as connection:
        connection.sendall(start)
        try:
            answer = connection.recv(1000)
        except ConnectionError:
            return "cut off"
        except TimeoutError:
            return "still connected"
    return answer[9:12].decode() if answer else "cut off"


def _stop_under_load(server: Server, body: bytes, clients: int, problems: list[str]) -> None:
    outcomes: collections.Counter[str] = collections.Counter()
    lock = threading.Lock()

    def send() -> None:
        outcome = ""
        while outcome != "refused":
            try:
                outcome = str(server.ask("POST", PREDICT, body)[0])
            except ConnectionRefusedError:
                outcome = "refused"
            except (OSError, http.client.HTTPException) as error:
                outcome = f"lost: {type(error).__name__}"
            with lock:
                outcomes[outcome] += 1

    threads = [threading.Thread(target=send) for _ in range(clients)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    status = server.stop()
    for thread in threads:
        thread.join()
    print(f"SIGTERM under load: exit status {status}, requests {dict(outcomes)}", flush=True)
    if status != 143 or set(outcomes) != {"200", "refused"}:
        problems.append(f"SIGTERM: exit status {status}, {dict(outcomes)}.")


def _read_memory(server: Server) -> float:
    return server.read_metric("process_resident_memory_bytes")


def _format(result: dict) -> str:
    return (
        f"{result['per_second']:.1f} requests/s, p50 {result['p50_ms']:.0f} ms, "
        f"p99 {result['p99_ms']:.0f} ms, {result['statuses']}"
    )


if __name__ == "__main__":
    sys.exit(main())
