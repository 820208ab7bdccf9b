"""The server's metrics, for Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


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
