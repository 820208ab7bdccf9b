"""Runs a module as on macOS: without /proc, and without what only Linux has in Python's library.

python tests/without_proc.py tfdist.train --strategy=one_device ...
"""

import builtins
import functools
import io
import os
import runpy
import select
import signal
import socket
import sys
import time

# What Python's type stubs (typeshed) have for Linux and not for macOS, without numbers that nothing
# in Python's library looks up by name.
LINUX_ONLY = {
    os: "copy_file_range eventfd eventfd_read eventfd_write fdatasync getrandom getresgid "
    "getresuid getxattr listxattr memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate "
    "removexattr sched_getaffinity sched_getparam sched_getscheduler sched_rr_get_interval "
    "sched_setaffinity sched_setparam sched_setscheduler setresgid setresuid setxattr splice "
    "waitid O_DIRECT O_NOATIME O_PATH O_TMPFILE",
    signal: "SIGCLD SIGPOLL SIGPWR SIGRTMAX SIGRTMIN pidfd_send_signal sigtimedwait sigwaitinfo",
    socket: "SO_BINDTODEVICE SO_MARK SO_PEERCRED SO_PRIORITY TCP_QUICKACK TCP_USER_TIMEOUT",
    select: "epoll",
    time: "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
}


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
    for owner, names in LINUX_ONLY.items():
        for name in filter(functools.partial(hasattr, owner), names.split()):
            delattr(owner, name)
    sys.path[0] = os.getcwd()
    module, *sys.argv[1:] = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
