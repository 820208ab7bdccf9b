"""The web application: TensorFlow Serving's REST interface, health, metrics and a page."""

import asyncio
import dataclasses
import functools
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from tfdist.serve.batching import Batcher
from tfdist.serve.hosts import find_name
from tfdist.serve.images import IMAGE_INPUT, check_images
from tfdist.serve.options import LimitOptions
from tfdist.serve.rest_format import PredictRequest, format_response, parse_request
from tfdist.serve.servable import RequestError, Servable
from tfdist.serve.versions import Versions
from tfdist.tasks.segmentation.pictures import make_palette

_RETRY_AFTER_S = "1"
CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class _VersionConvertor(IntegerConvertor):
    """Reads a version from a path. Python reads no number of thousands of digits."""

    regex = "[0-9]{1,19}"  # those of an int64, as in TensorFlow Serving


register_url_convertor("version", _VersionConvertor())


class Metrics:
    """Counts requests and batches, and the instances that wait in the queue."""

    def __init__(self, count_waiting: Callable[[], int]):
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.requests = Counter(
            "tfdist_requests", "Predict requests.", ["status"], registry=self._registry
        )
        self.seconds = Histogram(
            "tfdist_request_seconds",
            "Time from the first byte of a body to the answer.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.batch_sizes = Histogram(
            "tfdist_batch_size", "Instances in a batch.", buckets=_SIZES, registry=self._registry
        )
        waiting = Gauge(
            "tfdist_waiting_instances", "Instances in the queue.", registry=self._registry
        )
        waiting.set_function(count_waiting)

    def format(self) -> bytes:
        """Returns the metrics in Prometheus's text format."""
        return generate_latest(self._registry)


@dataclass
class Service:
    """What the routes use.

    Attributes:
      is_own: whether a `Host` header, in a request that has reached an address, names this server.
      title: what the page calls the model; the name by default.
    """

    name: str
    versions: Versions
    batcher: Batcher
    metrics: Metrics
    limits: LimitOptions
    executor: Executor
    is_own: Callable[[str, str | None], bool]
    is_draining: bool = False
    count_connections: Callable[[], int] = field(default=lambda: 0)
    title: str = ""


def make_app(service: Service) -> Callable[..., Awaitable[None]]:
    """Returns the ASGI application of a service."""
    model = f"/v1/models/{service.name}"
    routes = [
        Route("/", functools.partial(_show_page, _read_page())),
        Route("/page.json", functools.partial(_describe_page, service)),
        Route("/healthz", functools.partial(_check_health, service)),
        Route("/metrics", functools.partial(_show_metrics, service)),
        Route("/monitoring/prometheus/metrics", functools.partial(_show_metrics, service)),
    ]
    for path in (model, f"{model}/versions/{{version:version}}"):
        routes += [
            Route(path, functools.partial(_show_status, service)),
            Route(f"{path}/metadata", functools.partial(_show_metadata, service)),
            Route(f"{path}:predict", functools.partial(_predict, service), methods=["POST"]),
        ]
    handlers: Any = {
        RequestError: _answer_request_error,
        HTTPException: _answer_http_error,
        Exception: _answer_failure,
    }
    return _with_limits(service, Starlette(routes=routes, exception_handlers=handlers))


def _with_limits(service: Service, app: Any) -> Callable[..., Awaitable[None]]:
    """Refuses requests on too many connections, and closes connections before the server stops."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        async def send_closing(message: Any) -> None:
            if message["type"] == "http.response.start" and service.is_draining:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        if service.count_connections() > service.limits.max_connections:
            response: Response = _make_error("Too many connections. Try again later.", 503)
            response.headers["connection"] = "close"
            await response(scope, receive, send)
        elif (scope["method"], scope["path"]) == ("OPTIONS", "*"):  # of the server as a whole
            response = Response(status_code=204, headers={"allow": "GET, HEAD, POST"})
            await response(scope, receive, send_closing)
        elif (host := _find_stranger(service, scope)) is not None:
            name = find_name(host)
            advice = f" Start it with --allowed_hosts={name}." if name else ""
            response = _make_error(f"{host!r} is not a name of this server.{advice}", 403)
            await response(scope, receive, send_closing)
        else:
            await app(scope, receive, send_closing)

    return call


def _find_stranger(service: Service, scope: Any) -> str | None:
    """Returns the `Host` of a request for another server; HTTP/1.0 need not say one."""
    address = scope["server"] and scope["server"][0]
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    return next((host for host in hosts if not service.is_own(host, address)), None)


async def _predict(service: Service, request: Request) -> Response:
    began = time.monotonic()
    status = 500
    try:
        async with asyncio.timeout(service.limits.request_timeout_s):
            content = await _compute(service, request)
        status = 200
        return Response(content, media_type="application/json")
    except RequestError as error:
        status = error.status
        raise
    except TimeoutError as error:
        status = 504
        raise RequestError("The request took too long. Send less.", status=504) from error
    except ClientDisconnect:
        status = 499
        return Response(status_code=400)
    finally:
        service.metrics.requests.labels(status).inc()
        service.metrics.seconds.observe(time.monotonic() - began)


async def _compute(service: Service, request: Request) -> bytes:
    body = await _read_body(request, service.limits.max_body_mib * 2**20)
    service.batcher.check_space(1)
    loop = asyncio.get_running_loop()
    with service.versions.use(request.path_params.get("version")) as servable:
        predict = await loop.run_in_executor(
            service.executor, _parse, body, servable, service.limits
        )
        del body
        outputs = await service.batcher.run(
            servable, predict.signature, predict.inputs, outputs=predict.outputs
        )
        return await loop.run_in_executor(service.executor, format_response, predict, outputs)


def _parse(body: bytes, servable: Servable, limits: LimitOptions) -> PredictRequest:
    request = parse_request(body, servable.signatures, max_instances=limits.max_instances)
    for name, array in request.inputs.items():
        if array.dtype == object:
            check_images(
                array.flat,
                name=name,
                max_pixels=limits.max_pixels,
                decode=not servable.is_divided(request.signature.name),
            )
    return dataclasses.replace(
        request, inputs=servable.read(request.signature.name, request.inputs)
    )


async def _read_body(request: Request, max_bytes: int) -> bytes:
    codings = ",".join(request.headers.getlist("content-encoding")).lower().split(",")
    if any(coding.strip() not in ("", "identity") for coding in codings):
        raise RequestError("A compressed body is not read. Send it as it is.", status=415)
    error = RequestError(f"The body is larger than {max_bytes} bytes.", status=413)
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise error
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise error
    return bytes(body)


async def _show_status(service: Service, request: Request) -> Response:
    states = service.versions.list_states()
    version = request.path_params.get("version")
    if version is not None:
        states = [state for state in states if state["version"] == str(version)]
        if not states:
            raise RequestError(f"There is no version {version}.", status=404)
    return JSONResponse({"model_version_status": states})


async def _show_metadata(service: Service, request: Request) -> Response:
    with service.versions.use(request.path_params.get("version")) as servable:
        signatures = await asyncio.to_thread(servable.describe)
        spec = {"name": service.name, "signature_name": "", "version": str(servable.version)}
    metadata = {"signature_def": {"signature_def": signatures}}
    return JSONResponse({"model_spec": spec, "metadata": metadata})


async def _check_health(service: Service, request: Request) -> Response:
    if service.is_draining:
        raise RequestError("The server is stopping.", status=503)
    return JSONResponse({"status": "ok"})


async def _show_metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.format(), media_type=CONTENT_TYPE)


def _read_page() -> str:
    return resources.files("tfdist.serve").joinpath("page.html").read_text()


async def _show_page(page: str, request: Request) -> Response:
    return HTMLResponse(page)


async def _describe_page(service: Service, request: Request) -> Response:
    """Answers with what the page must know about the model."""
    with service.versions.use() as servable:
        names, signatures = servable.class_names, servable.signatures
    images = [
        name
        for name, signature in signatures.items()
        if list(signature.inputs) == [IMAGE_INPUT] and "mask" in signature.outputs
    ]
    return JSONResponse(
        {
            "name": service.name,
            "title": service.title or service.name,
            "image_signature": images[0] if images else None,
            "inputs": {name: list(signature.inputs) for name, signature in signatures.items()},
            "classes": names,
            "colors": make_palette(len(names)).tolist() if names else [],
            "max_pixels": service.limits.max_pixels,
        }
    )


def _make_error(message: str, status: int) -> JSONResponse:
    headers = {"retry-after": _RETRY_AFTER_S} if status == 503 else None
    return JSONResponse({"error": " ".join(message.split())}, status_code=status, headers=headers)


async def _answer_request_error(request: Request, error: RequestError) -> Response:
    return _make_error(str(error), error.status)


async def _answer_http_error(request: Request, error: HTTPException) -> Response:
    response = _make_error(
        f"{request.method} {request.url.path}: {error.detail}.", error.status_code
    )
    response.headers.update(error.headers or {})
    return response


async def _answer_failure(request: Request, error: Exception) -> Response:
    traceback.print_exception(error, file=sys.stderr)
    return _make_error(f"The server failed: {type(error).__name__}.", 500)
