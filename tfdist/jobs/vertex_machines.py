"""Which accelerators a machine type of Vertex AI can have.

Source: https://cloud.google.com/vertex-ai/docs/training/configure-compute
"""

import re

from tfdist.errors import TfdistError

# Machine types that always have their accelerators: type -> kind, and how many.
BUILT_IN = {
    **{f"a2-highgpu-{n}g": ("NVIDIA_TESLA_A100", n) for n in (1, 2, 4, 8)},
    "a2-megagpu-16g": ("NVIDIA_TESLA_A100", 16),
    **{f"a2-ultragpu-{n}g": ("NVIDIA_A100_80GB", n) for n in (1, 2, 4, 8)},
    **{f"a3-highgpu-{n}g": ("NVIDIA_H100_80GB", n) for n in (1, 2, 4, 8)},
    "a3-megagpu-8g": ("NVIDIA_H100_MEGA_80GB", 8),
    "a3-ultragpu-8g": ("NVIDIA_H200_141GB", 8),
    "a4-highgpu-8g": ("NVIDIA_B200", 8),
    "a4x-highgpu-4g": ("NVIDIA_GB200", 4),
    **{f"g2-standard-{cpus}": ("NVIDIA_L4", 1) for cpus in (4, 8, 12, 16, 32)},
    "g2-standard-24": ("NVIDIA_L4", 2),
    "g2-standard-48": ("NVIDIA_L4", 4),
    "g2-standard-96": ("NVIDIA_L4", 8),
}
# Machine types with a TPU v5e on one host -> the topology of its chips.
TPU_TOPOLOGIES = {"ct5lp-hightpu-1t": "1x1", "ct5lp-hightpu-4t": "2x2", "ct5lp-hightpu-8t": "2x4"}
# Accelerators that machines of the series N1 can have -> how many, and the most CPUs for each.
_OF_N1 = {
    "NVIDIA_TESLA_P4": ((1, 2, 4), 24),
    "NVIDIA_TESLA_P100": ((1, 2, 4), 16),
    "NVIDIA_TESLA_T4": ((1, 2, 4), 24),
    "NVIDIA_TESLA_V100": ((1, 2, 4, 8), 12),
}
_WITHOUT = ("c2-", "c2d-", "c3-", "e2-", "m1-", "n2-", "n2d-")


def check_machine(machine: str, accelerator: str, count: int) -> None:
    """Checks that a machine type can have so many accelerators; unknown types are not checked."""
    if machine in TPU_TOPOLOGIES:
        if count:
            raise TfdistError(
                f"--machine={machine} has its TPU built in. Leave --accelerators_per_worker out."
            )
    elif machine in BUILT_IN:
        kind, number = BUILT_IN[machine]
        if (accelerator, count) != (kind, number):
            raise TfdistError(
                f"--machine={machine} has {number} x {kind}, not {count} x {accelerator}. Give "
                f"--accelerator={kind} --accelerators_per_worker={number}, or another machine."
            )
    elif count and machine.startswith(_WITHOUT):
        raise TfdistError(
            f"--machine={machine} cannot have accelerators. Give one that can, such as "
            "n1-standard-8, g2-standard-8 or a2-highgpu-1g."
        )
    elif count and machine.startswith("n1-"):
        _check_n1(machine, accelerator, count)


def _check_n1(machine: str, accelerator: str, count: int) -> None:
    if accelerator not in _OF_N1:
        able = [name for name, built_in in BUILT_IN.items() if built_in == (accelerator, count)]
        advice = f"Give --machine={able[0]}" if able else f"N1 has {', '.join(_OF_N1)}"
        raise TfdistError(f"--machine={machine} cannot have {accelerator}. {advice}.")
    counts, cpus_each = _OF_N1[accelerator]
    match = re.search(r"-(\d+)$", machine)
    cpus = int(match[1]) if match else 1
    valid = [number for number in counts if number * cpus_each >= cpus]
    if count not in valid:
        raise TfdistError(
            f"--machine={machine} cannot have {count} x {accelerator}, but "
            f"{' or '.join(map(str, valid)) or 'none'}. Change --accelerators_per_worker or "
            "--machine."
        )
