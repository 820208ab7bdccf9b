"""The name of this machine's processor."""

import contextlib
import platform
from pathlib import Path


def name_processor() -> str:
    """Returns the name of this machine's processor, or its kind if the system does not say."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        name = next(names, name)
    return name
