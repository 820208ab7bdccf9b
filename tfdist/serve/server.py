"""Runs the server until it is told to stop."""

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import uvicorn

from tfdist.serve.app import Metrics, Service, make_app
from tfdist.serve.batching import Batcher
from tfdist.serve.hosts import make_host_check
from tfdist.serve.http_protocol import LAST_LOOK_S, make_protocol
from tfdist.serve.listener import (
    ACCEPTS_AT_ONCE,
    BACKLOG,
    drop_new_connections,
    listen,
    make_lack_handler,
)
from tfdist.serve.options import BatchingOptions, ServedModelOptions, ServeOptions
from tfdist.serve.servable import Servable
from tfdist.serve.versions import Versions
from tfdist.stopping import EXIT_INTERRUPTED, EXIT_TERMINATED

Work = Callable[["RunningServer"], Awaitable[int]]


class RunningServer:
    """A server that answers requests."""

    def __init__(
        self, service: Service, port: int, make_batcher: Callable[[BatchingOptions], Batcher]
    ):
        self.service = service
        self.port = port
        self._make_batcher = make_batcher

    def set_batching(self, options: BatchingOptions) -> None:
        """Changes sizes and timeouts; no request may be waiting."""
        self.service.batcher = self._make_batcher(options)


def run_server(
    options: ServeOptions, path: str, devices: tuple[str, ...], work: Work | None = None
) -> int:
    """Serves the highest version in a directory until SIGTERM, Ctrl-C or the end of the work.

    Returns:
      What `work` returns; 143 after SIGTERM, 130 after Ctrl-C.

    Raises:
      TfdistError: there is no servable, or the address is in use.
    """
    num_calls = max(options.batching.num_batch_threads, len(devices))

    def load(directory: str, version: int) -> Servable:
        servable = Servable(directory, version=version, devices=devices, num_calls=num_calls)
        servable.warm_up()
        return servable

    listener = listen(options.run.host, options.run.port)
    with listener:
        versions = Versions(path, load)
        servable = versions.load_first()
        port = listener.getsockname()[1]
        if not options.run.quiet:
            host = f"[{options.run.host}]" if ":" in options.run.host else options.run.host
            print(
                f"Version {servable.version} of {options.model.name} is served at "
                f"http://{host}:{port}/v1/models/{options.model.name}: signatures "
                f"{', '.join(servable.signatures)}. The page is http://{host}:{port}/.",
                flush=True,
            )
        return asyncio.run(_serve(options, versions, listener, num_calls, work))


async def _serve(
    options: ServeOptions,
    versions: Versions,
    listener: socket.socket,
    num_calls: int,
    work: Work | None,
) -> int:
    limits, run = options.limits, options.run
    asyncio.get_running_loop().set_exception_handler(make_lack_handler(_say))
    address, port = listener.getsockname()[:2]
    with (
        ThreadPoolExecutor(num_calls, "batch") as batches,
        ThreadPoolExecutor(os.cpu_count(), "request") as requests,
    ):
        metrics = Metrics(lambda: service.batcher.num_waiting)
        make_batcher = functools.partial(
            Batcher, executor=batches, num_threads=num_calls, observe=metrics.batch_sizes.observe
        )
        service = Service(
            options.model.name,
            versions,
            make_batcher(options.batching),
            metrics,
            limits,
            requests,
            make_host_check(run.host, address, run.allowed_hosts),
            title=_find_title(options.model),
        )
        config = uvicorn.Config(
            make_app(service),
            http=make_protocol(
                receive_timeout_s=limits.receive_timeout_s,
                answer_timeout_s=limits.request_timeout_s + limits.receive_timeout_s,
                # Those between one and two times the limit get status 503.
                max_connections=2 * limits.max_connections,
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            backlog=ACCEPTS_AT_ONCE,
            timeout_graceful_shutdown=run.grace_period_s,  # type: ignore[arg-type]
        )
        server = GracefulServer(config)
        service.count_connections = lambda: len(server.server_state.connections)
        stop = _Stop(server, service, drain_s=run.drain_s)
        watching = asyncio.create_task(
            versions.watch(options.model.poll_s, _say if not run.quiet else _ignore)
        )
        working = work and asyncio.ensure_future(work(RunningServer(service, port, make_batcher)))
        if working:
            working.add_done_callback(lambda _: stop.stop_now())
        await server.serve(sockets=[listener])
        watching.cancel()
        if working and stop.status is None:
            return await working
        if working:
            working.cancel()
        return stop.status or 0


class GracefulServer(uvicorn.Server):
    """A server that loses no connection at its end, and whose signals are handled elsewhere."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)  # asyncio has set it to the number of accepts at once

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or []:
            drop_new_connections(listener)
        await asyncio.sleep(LAST_LOOK_S)
        await super().shutdown(sockets)


class _Stop:
    """Stops a server at SIGTERM or Ctrl-C, after the time for draining; at once at a second one."""

    def __init__(self, server: uvicorn.Server, service: Service, *, drain_s: float):
        self._server = server
        self._service = service
        self._drain_s = drain_s
        self.status: int | None = None
        self._loop = asyncio.get_running_loop()
        for number, status in (
            (signal.SIGINT, EXIT_INTERRUPTED),
            (signal.SIGTERM, EXIT_TERMINATED),
        ):
            self._loop.add_signal_handler(number, self._handle, status)

    def stop_now(self) -> None:
        """Stops accepting connections and finishes the accepted requests."""
        self._server.should_exit = True

    def _handle(self, status: int) -> None:
        if self.status is not None:
            self._server.force_exit = True
            self.stop_now()
            return
        self.status = status
        self._service.is_draining = True
        self._loop.call_later(self._drain_s, self.stop_now)


def _say(text: str) -> None:
    print(text, file=sys.stderr if text.startswith("tfdist") else sys.stdout, flush=True)


def _ignore(text: str) -> None:
    del text


def _find_title(options: ServedModelOptions) -> str:
    """Returns the name that the user has given the model: in URLs, or else its directory's."""
    if options.name != ServedModelOptions().name:
        return options.name
    return (options.run_dir or options.model).rstrip("/").rpartition("/")[2] or options.name
