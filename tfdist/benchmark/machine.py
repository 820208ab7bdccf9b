"""Describes the machine that a benchmark runs on."""

import platform
import sys
from pathlib import Path

from tfdist.launch.machine import count_cores


def describe_machine() -> str:
    """Returns the name of the processor and the number of cores that this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.processor())}, {count_cores()} cores"
