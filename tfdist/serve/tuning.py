"""Measures latency and throughput over batch sizes and timeouts, and proposes the best."""

import asyncio
import base64
import dataclasses
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.reading import read_text
from tfdist.serve.images import IMAGE_INPUT
from tfdist.serve.load import LoadResult
from tfdist.serve.options import BatchingOptions, ServeOptions
from tfdist.serve.rest_format import DEFAULT_SIGNATURE
from tfdist.serve.servable import Servable, make_example
from tfdist.serve.server import RunningServer

SIZES = (1, 2, 4, 8, 16)
TIMEOUTS_US = (0, 2000, 10000)
NUM_CLIENTS = 2 * max(SIZES)
_IMAGE_SIZE = (256, 256)
_REQUESTS_PER_CLIENT = 8
_NEARLY = 0.95  # of the highest throughput


@dataclass(frozen=True)
class Measurement:
    """What was measured with one setting."""

    max_batch_size: int
    batch_timeout_micros: int
    result: LoadResult


def make_tuning(options: ServeOptions) -> Callable[[RunningServer], Any]:
    """Returns the work of a server that tunes itself; its result is the exit status."""
    given, max_bytes = options.run.tune_request, options.limits.max_body_mib * 2**20
    try:
        body = read_text(given, max_bytes=max_bytes).encode() if given else None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TfdistError(f"Cannot read `tune_request={given}`: {reason}.") from error

    async def tune(server: RunningServer) -> int:
        with server.service.versions.use() as servable:
            request = body or make_request(servable)
        found = []
        settings = list(itertools.product(SIZES, TIMEOUTS_US))
        for number, (size, timeout_us) in enumerate(settings, 1):
            if size == 1 and timeout_us:
                continue  # A batch of one waits for nothing.
            server.set_batching(_make_setting(options.batching, size, timeout_us))
            result = await _measure(server, request)
            found.append(Measurement(size, timeout_us, result))
            if not options.run.quiet:
                print(f"[{number}/{len(settings)}] {_format_row(found[-1])}", file=sys.stderr)
        print(format_measurements(found))
        return 0

    return tune


def make_request(servable: Servable) -> bytes:
    """Returns a request with one instance for the default signature, whose sizes must be known."""
    signature = servable.signatures.get(DEFAULT_SIGNATURE) or next(
        iter(servable.signatures.values())
    )
    inputs: dict[str, Any] = {}
    for name, spec in signature.inputs.items():
        if name == IMAGE_INPUT:
            pixels = np.random.default_rng(0).integers(0, 256, (*_IMAGE_SIZE, 3), np.uint8)
            data = tf.io.encode_jpeg(pixels).numpy()
            inputs[name] = [{"b64": base64.b64encode(data).decode()}]
        elif spec.dtype == tf.string or spec.shape.rank is None or None in spec.shape[1:]:
            raise TfdistError(
                f"Cannot make up a request for the input {name}: {spec.dtype.name} {spec.shape}. "
                "Give one with `tune_request`."
            )
        else:
            inputs[name] = make_example(spec, name).tolist()
    return json.dumps({"signature_name": signature.name, "inputs": inputs}).encode()


def choose_setting(found: Sequence[Measurement]) -> Measurement:
    """Returns the setting of the lowest median latency among those of nearly the best throughput.

    >>> def measure(size, per_second, p50_ms):
    ...     return Measurement(size, 0, LoadResult({}, per_second, p50_ms, 2 * p50_ms))
    >>> choose_setting([measure(1, 50, 5), measure(4, 97, 9), measure(8, 100, 12)]).max_batch_size
    4
    """
    best = max(row.result.per_second for row in found)
    good = [row for row in found if row.result.per_second >= _NEARLY * best]
    return min(good, key=lambda row: row.result.p50_ms)


def format_measurements(found: Sequence[Measurement]) -> str:
    """Returns a table of the settings and the proposal, unless requests failed."""
    failed = sum(n for row in found for s, n in row.result.statuses.items() if s != "200")
    if failed:
        raise TfdistError(
            f"Cannot tune: {failed} requests were not answered with status 200. Give a request "
            "that the model can compute with `tune_request`."
        )
    best = choose_setting(found)
    head = f"{'max_batch_size':>14} {'batch_timeout_micros':>20} {'requests/s':>10} "
    return "\n".join(
        [
            f"{head}{'p50 ms':>9} {'p99 ms':>9}",
            *map(_format_row, found),
            f"Proposed: --max_batch_size={best.max_batch_size} "
            f"--batch_timeout_micros={best.batch_timeout_micros}",
        ]
    )


def _format_row(row: Measurement) -> str:
    result = row.result
    return (
        f"{row.max_batch_size:>14} {row.batch_timeout_micros:>20} {result.per_second:>10.1f} "
        f"{result.p50_ms:>9.1f} {result.p99_ms:>9.1f}"
    )


def _make_setting(options: BatchingOptions, size: int, timeout_us: int) -> BatchingOptions:
    allowed = tuple(s for s in options.allowed_batch_sizes if s < size)
    return dataclasses.replace(
        options,
        max_batch_size=size,
        batch_timeout_micros=timeout_us,
        allowed_batch_sizes=(*allowed, size) if options.allowed_batch_sizes else (),
        # More requests are sent at a time than wait by default with small batches.
        max_enqueued_batches=max(options.max_enqueued_batches, NUM_CLIENTS),
    )


async def _measure(server: RunningServer, body: bytes) -> LoadResult:
    with tempfile.NamedTemporaryFile(prefix="tfdist-tune-") as file:
        file.write(body)
        file.flush()
        path = f"/v1/models/{server.service.name}:predict"
        numbers = (NUM_CLIENTS, NUM_CLIENTS * _REQUESTS_PER_CLIENT)
        command = ("-m", "tfdist.serve.load", server.port, path, *numbers, file.name)
        process = await asyncio.create_subprocess_exec(
            sys.executable, *map(str, command), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
    return LoadResult(**json.loads(output))
