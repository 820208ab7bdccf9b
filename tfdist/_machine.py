"""This machine's cores and GPUs, and how tasks share them; found without TensorFlow."""

import contextlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence


def divide_cores(cores: Sequence[int], num_tasks: int) -> list[list[int]]:
    """Returns each task's cores, neighbours together; the first tasks get what is left over.

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
    """Returns each worker's GPUs: equally many, as collectives need; shared where there are fewer.

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
    """Returns the GPUs that CUDA_VISIBLE_DEVICES may name, found without TensorFlow."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        names = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",")]
        # As CUDA reads it: what follows an invalid name is invisible.
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
    """Returns the GPUs in the output of `nvidia-smi -L`, a divided one (MIG) by its parts.

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
