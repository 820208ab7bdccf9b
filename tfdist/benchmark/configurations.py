"""The configurations that a benchmark measures."""

from collections.abc import Iterator
from dataclasses import dataclass

from tfdist.benchmark.options import BenchmarkOptions
from tfdist.launch.machine import count_cores
from tfdist.strategies.registry import STRATEGIES

_NAMES = {
    "ceiling": "convolutions alone",
    "loop": "loop by hand",
    "keras_fit": "Keras fit, tfdist's layers",
    "keras_layers_fit": "Keras fit, Keras's layers",
}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One configuration to measure.

    Attributes:
      kind: `trainer`, one of `BASELINES`, `ceiling` for the convolutions alone, or a kind that
        another benchmark defines.
      workers: the number of processes that train, without parameter servers.
      cores: the number of cores that the process may use; 0 for all.
    """

    kind: str = "trainer"
    strategy: str = "one_device"
    precision: str = "float32"
    replicas: int = 1
    workers: int = 1
    cores: int = 0

    @property
    def name(self) -> str:
        """The name in tables, without the precision."""
        name = self.strategy if self.kind == "trainer" else _NAMES.get(self.kind, self.kind)
        if self.cores:
            return f"{name}, {self.cores} core{'s' * (self.cores > 1)}"
        if self.workers > 1:
            return f"{name}, {self.workers} workers"
        return f"{name}, {self.replicas} replicas" if self.replicas > 1 else name


def list_configurations(options: BenchmarkOptions) -> list[Configuration]:
    """Returns the configurations that the options ask for, each once.

    For several workers on one machine, a configuration to compare them with is added: one process
    on as many cores as each worker has.
    """
    found = [
        configuration
        for precision in options.contest.precisions
        for configuration in _list_of_precision(options, precision)
    ]
    return list(dict.fromkeys(found))


def find_lone_worker(configuration: Configuration) -> Configuration | None:
    """Returns one process on as many cores as a worker has; None if a worker has no core."""
    cores = count_cores() // configuration.workers
    return Configuration(precision=configuration.precision, cores=cores) if cores else None


def _list_of_precision(options: BenchmarkOptions, precision: str) -> Iterator[Configuration]:
    chosen = options.contest
    yield Configuration(kind="ceiling", precision=precision)
    for kind in chosen.baselines:
        yield Configuration(kind=kind, precision=precision)
    for strategy in chosen.strategies:
        traits = STRATEGIES[strategy].traits
        if traits.is_local and not traits.is_single:
            for count in chosen.replicas:
                yield Configuration(strategy=strategy, precision=precision, replicas=count)
        elif traits.has_processes:
            for count in chosen.workers:
                worker = Configuration(strategy=strategy, precision=precision, workers=count)
                yield from filter(None, [find_lone_worker(worker)])
                yield worker
        else:
            yield Configuration(strategy=strategy, precision=precision)
