"""Sends predict requests from several clients at once and measures the answers.

    python -m tfdist.serve.load PORT PATH CLIENTS REQUESTS BODY_FILE...

Prints a `LoadResult` as JSON. It is a process of its own so that it does not wait for the server's
interpreter.
"""

import dataclasses
import http.client
import itertools
import json
import pathlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_TIMEOUT_S = 120.0
_LOST = "lost"


@dataclass(frozen=True)
class LoadResult:
    """What the clients saw.

    Attributes:
      statuses: HTTP status, or "lost" if there was no answer -> number of requests.
      p50_ms, p99_ms: percentiles of their latency.
    """

    statuses: dict[str, int]
    per_second: float
    p50_ms: float
    p99_ms: float


def send_requests(
    port: int, path: str, bodies: Sequence[bytes], *, num_clients: int, num_requests: int
) -> LoadResult:
    """Sends requests to this machine; each client waits for its answer before its next request."""
    numbers = itertools.count()  # `next` is atomic.
    seconds: list[float] = []
    statuses: Counter[str] = Counter()

    def send() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
        while (number := next(numbers)) < num_requests:
            began = time.monotonic()
            try:
                connection.request("POST", path, bodies[number % len(bodies)])
                response = connection.getresponse()
                response.read()
                status = str(response.status)
            except (OSError, http.client.HTTPException):
                connection.close()
                status = _LOST
            statuses[status] += 1
            if status == "200":
                seconds.append(time.monotonic() - began)
        connection.close()

    began = time.monotonic()
    clients = [threading.Thread(target=send) for _ in range(num_clients)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    ordered = sorted(seconds) or [0.0]
    return LoadResult(
        dict(statuses),
        len(seconds) / (time.monotonic() - began),
        1000 * ordered[len(ordered) // 2],
        1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    )


def main() -> int:
    """Runs the command line and returns the exit status."""
    port, path, clients, requests, *files = sys.argv[1:]
    bodies = [pathlib.Path(file).read_bytes() for file in files]
    num_clients = int(clients)
    # The first requests warm up.
    send_requests(int(port), path, bodies, num_clients=num_clients, num_requests=num_clients)
    result = send_requests(
        int(port), path, bodies, num_clients=num_clients, num_requests=int(requests)
    )
    print(json.dumps(dataclasses.asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
