"""Starts `python -m tfdist.serve` in a process of its own, and talks to it."""

import base64
import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PREDICT = "/v1/models/model:predict"
_START_S, _STOP_S = 90, 60


@dataclass
class Server:
    """A server process.

    Attributes:
      process: the process.
      port: its port.
      lines: what it has printed on both streams.
    """

    process: subprocess.Popen
    port: int
    lines: list[str]

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Returns the status and the JSON of the answer, or its text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1000)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            text = response.read().decode()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(text) if is_json else text

    def predict(self, body: Any, path: str = PREDICT) -> tuple[int, Any]:
        return self.ask("POST", path, body)

    def connect(self, timeout_s: float = 300) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(_STOP_S)

    def read_metric(self, name: str) -> float:
        _, text = self.ask("GET", "/metrics")
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0


@contextlib.contextmanager
def run_server(*flags: str) -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tfdist.serve", "--port=0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    timer = threading.Timer(_START_S, process.kill)
    timer.start()
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
    try:
        first = process.stdout.readline()
        timer.cancel()
        port = re.search(r"http://127\.0\.0\.1:(\d+)/", first)
        assert port, first + process.stdout.read()
        lines.append(first)
        reader.start()
        yield Server(process, int(port[1]), lines)
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        if reader.is_alive():
            reader.join()
        process.stdout.close()


def encode(data: bytes) -> dict[str, str]:
    """The form of bytes in JSON."""
    return {"b64": base64.b64encode(data).decode()}
