"""Divides this machine's cores and GPUs among tasks, without TensorFlow."""

import contextlib
import itertools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.cluster import ClusterConfig
from tfdist.errors import TfdistError
from tfdist.launch.report import say
from tfdist.launch.tasks import computes
from tfdist.processor import name_processor

Environment = tuple[dict[str, str], list[int] | None]

MIN_INTEROP_THREADS = 2
"""With one inter-op thread, an operation that waits for a peer would block all others."""


def divide_machine(
    configs: Sequence[ClusterConfig], environ: Mapping[str, str]
) -> list[Environment]:
    """Returns each task's environment and cores (None: all)."""
    cores = divide_cores(list_cores(), len(configs))
    computing = [config for config in configs if computes(config)]
    gpus = find_gpus(environ)
    shares = divide_gpus(gpus, len(computing))
    if 0 < len(gpus) < len(computing):
        say(
            f"{len(computing)} workers share {len(gpus)} GPU(s), but NCCL requires one per worker. "
            "Use --collective=ring, or fewer workers."
        )
    environments: list[Environment] = []
    for config, own_cores in zip(configs, cores, strict=True):
        environment = dict(environ)
        threads = max(1, len(own_cores))
        defaults = {
            "TF_NUM_INTRAOP_THREADS": str(threads),
            "TF_NUM_INTEROP_THREADS": str(max(MIN_INTEROP_THREADS, threads)),
            "OMP_NUM_THREADS": str(threads),
        }
        if gpus:
            share = shares[computing.index(config)] if config in computing else ["-1"]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(share)
            if len(gpus) < len(computing):
                defaults["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        environment = defaults | environment
        # Loopback traffic must not go through a proxy.
        without = environment.get("no_grpc_proxy") or environment.get("no_proxy")
        environment["no_grpc_proxy"] = f"{without},127.0.0.1" if without else "127.0.0.1"
        environments.append((complete_environment(environment, config), own_cores or None))
    return environments


def complete_environment(environ: Mapping[str, str], config: ClusterConfig) -> dict[str, str]:
    """Returns an environment in which a task knows its cluster and can import tfdist."""
    return {
        **find_sources(environ),
        "TF_CONFIG": config.to_tf_config_json(),
        "PYTHONUNBUFFERED": "1",
    }


def list_cores() -> list[int]:
    """Returns the cores that this process may use; none if the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def keep_on_cores(cores: Sequence[int]) -> None:
    """Keeps this thread, and the processes that it starts, on some of the cores, if it can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(list_cores()) or os.cpu_count() or 1


def check_core_choice() -> None:
    """Checks that processes can be kept on some of the cores."""
    if not list_cores():
        raise TfdistError(
            f"{platform.system()} does not keep a process on some of the cores, which this "
            "measurement needs. Run it on Linux."
        )


def add_interop_thread(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which a task on a single core has two inter-op threads."""
    threads = {"TF_NUM_INTEROP_THREADS": str(MIN_INTEROP_THREADS)}
    return (threads if len(list_cores()) == 1 else {}) | dict(environ)


def find_sources(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which a process can import tfdist."""
    environment = dict(environ)
    # A process started elsewhere does not find a source tree that is not installed.
    sources = Path(__file__).resolve().parents[2]
    if not {"site-packages", "dist-packages"} & set(sources.parts):
        paths = [path for path in (environment.get("PYTHONPATH"), str(sources)) if path]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def without_gpus_of(
    task: str,
    configs: Sequence[ClusterConfig],
    environments: Sequence[Environment],
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Returns an environment without the GPUs of one task, for the next start."""
    shares = {
        config.task_name: environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        for config, (environment, _) in zip(configs, environments, strict=True)
        if computes(config)
    }
    lost = set(shares.pop(task, ()))
    kept = [gpu for gpu in find_gpus(environ) if gpu not in lost]
    return {**environ, "CUDA_VISIBLE_DEVICES": ",".join(kept)} if kept else dict(environ)


def divide_cores(cores: Sequence[int], num_tasks: int) -> list[list[int]]:
    """Returns each task's cores, which are contiguous; the first tasks get the remainder.

    >>> divide_cores([0, 1, 2, 3, 4], 2)
    [[0, 1, 2], [3, 4]]
    >>> divide_cores([0], 2)
    [[], []]
    """
    share, extra = divmod(len(cores), num_tasks)
    if not share:
        return [[] for _ in range(num_tasks)]
    starts = [task * share + min(task, extra) for task in range(num_tasks + 1)]
    return [list(cores[first:last]) for first, last in itertools.pairwise(starts)]


def divide_gpus(gpus: Sequence[str], num_workers: int) -> list[list[str]]:
    """Returns each worker's GPUs: the same number for all, or shared ones if there are too few.

    >>> divide_gpus(["0", "1", "2", "3", "4"], 2)
    [['0', '1'], ['2', '3']]
    >>> divide_gpus(["0"], 2)
    [['0'], ['0']]
    """
    share = len(gpus) // num_workers
    if not share:
        return [[gpus[worker % len(gpus)]] if gpus else [] for worker in range(num_workers)]
    return [list(gpus[worker * share : (worker + 1) * share]) for worker in range(num_workers)]


def find_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of the visible GPUs, as CUDA_VISIBLE_DEVICES accepts them."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        names = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",")]
        # CUDA ignores all names from the first invalid one on.
        valid = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
        return names[:valid]
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found = subprocess.run(
                [program, "-L"], capture_output=True, text=True, timeout=20, check=True
            )
            return parse_nvidia_smi(found.stdout)
    with contextlib.suppress(OSError):
        names = sorted(name[6:] for name in os.listdir("/dev") if re.match(r"nvidia\d+$", name))
        return sorted(names, key=int)
    return []


def parse_nvidia_smi(text: str) -> list[str]:
    """Returns the GPUs in the output of `nvidia-smi -L`; a MIG GPU is listed by its instances.

    >>> parse_nvidia_smi("GPU 0: A (UUID: GPU-1)\\nGPU 1: B (UUID: GPU-2)\\n")
    ['0', '1']
    >>> parse_nvidia_smi("GPU 0: A (UUID: GPU-1)\\n  MIG 1g.5gb Device 0: (UUID: MIG-3)\\n")
    ['MIG-3']
    """
    gpus: dict[str, list[str]] = {}
    gpu = ""
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            gpu = match[1]
            gpus[gpu] = []
        elif match := re.match(r"\s+MIG .*UUID: (MIG-[^)\s]+)", line):
            gpus.setdefault(gpu, []).append(match[1])
    return [name for gpu, parts in gpus.items() for name in (parts or [gpu])]


def describe_machine() -> str:
    """Returns the name of the processor and the number of cores that this process may use."""
    return f"{name_processor()}, {count_cores()} cores"
