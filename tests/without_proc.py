"""Runs a module as on macOS: without /proc, and without what only Linux has in `os` and `time`.

python tests/without_proc.py tfdist.train --strategy=one_device ...
"""

import builtins
import io
import os
import runpy
import sys
import time


def hide(owner, name):
    """Lets a function find no file below /proc and /sys."""
    original = getattr(owner, name)

    def find_nothing(path=".", *args, **kwargs):
        if isinstance(path, str | os.PathLike) and str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return original(path, *args, **kwargs)

    setattr(owner, name, find_nothing)


if __name__ == "__main__":
    for owner, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "listdir")):
        hide(owner, name)
    for name in ("scandir", "stat", "lstat", "access", "readlink"):
        hide(os, name)
    del os.sched_getaffinity, os.sched_setaffinity, time.CLOCK_BOOTTIME
    sys.path[0] = os.getcwd()
    module, *sys.argv[1:] = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
