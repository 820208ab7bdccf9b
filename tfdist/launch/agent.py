"""The process that owns a launcher's tasks, so that none outlives it.

`tfdist.launch` runs this file as a separate program, the agent. It enters a network namespace
(which a notebook's process must not do) and starts the tasks. It ends them when one fails, when
the essential ones are done, when the time is up, or when the launcher is gone, even by `kill -9`,
because the pipe between them then breaks. It only reports the failure of a replaceable task. It
adopts the orphans among its descendants, so that it finds every process that a task leaves
behind. If the agent itself is killed, the kernel kills the tasks.

The protocol is JSON, one message per line. Input: `{"isolate": "auto"}`; then `{"tasks": [...],
"grace_s": 20, "timeout_s": null}`; then, at any time, `{"signal": 2}` to pass a signal on, `{"end":
true}` to end all tasks as after a failure, `{"kill": true}`, `{"kill_task": "worker-0"}`, or
`{"start": {...}}` with a task. Output: events such as `{"event": "exited", "task": "worker-0",
"status": 0, "ended": false}`. The agent needs only the standard library.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import IO, Any

_END_GRACE_S = 5.0  # for the other tasks, once the cluster is done or the time is up
_FAILED_GRACE_S = 2.0  # for the other tasks, once one has failed: they would hang forever
_ORPHAN_GRACE_S = 2.0  # for all tasks, once the launcher is gone
_LEFTOVER_GRACE_S = 1.0  # for processes that finished tasks have left behind
_TICK_S = 0.5

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def main() -> None:
    """Runs the protocol on standard input and output until every task is gone."""
    launcher = os.getppid()
    on_linux = sys.platform.startswith("linux")
    if on_linux:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    messages = _Messages()
    request = messages.wait()
    if request is None:
        return
    problem = "not asked for"
    if request["isolate"] != "never":
        problem = _isolate() if on_linux else "only Linux has network namespaces"
    _report(event="ready", isolated=not problem, problem=problem)
    request = messages.wait()
    if request is not None:
        _Agent(messages, launcher).run(request)


class _Messages:
    """Reads the launcher's messages; SIGCHLD interrupts its waits."""

    def __init__(self) -> None:
        self.closed = False
        self._buffer = b""
        self._pending: list[dict[str, Any]] = []
        self._selector = selectors.DefaultSelector()
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ)
        self._wakeup, wakeup_write = socket.socketpair()
        self._wakeup.setblocking(False)
        wakeup_write.setblocking(False)
        self._wakeup_write = wakeup_write
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_write.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def poll(self, timeout_s: float) -> list[dict[str, Any]]:
        """Waits for a message, a child's end or the timeout; returns the pending messages."""
        self._read(0 if self._pending else timeout_s)
        messages, self._pending = self._pending, []
        return messages

    def wait(self) -> dict[str, Any] | None:
        """Returns the next message, or None if the launcher is gone."""
        while not self._pending and not self.closed:
            self._read(_TICK_S)
        return self._pending.pop(0) if self._pending else None

    def _read(self, timeout_s: float) -> None:
        self._selector.select(max(timeout_s, 0))
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(4096)
        while not self.closed:
            try:
                data = os.read(0, 1 << 16)
            except BlockingIOError:
                break
            self._buffer += data
            if not data:
                self.closed = True
                self._selector.unregister(0)
        *lines, self._buffer = self._buffer.split(b"\n")
        self._pending += [json.loads(line) for line in lines]


class _Agent:
    """Runs the tasks until the last of their descendants has ended."""

    def __init__(self, messages: _Messages, launcher: int) -> None:
        self._messages = messages
        self._launcher = launcher
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._essential: set[str] = set()
        self._replaceable: set[str] = set()
        self._ending = False
        self._kill_at = float("inf")

    def run(self, request: dict[str, Any]) -> None:
        """Starts the tasks and returns once none of their processes is left."""
        grace_s = request["grace_s"]
        end_grace_s = min(grace_s, _END_GRACE_S)
        failed_grace_s = min(grace_s, _FAILED_GRACE_S)
        timeout_s = request["timeout_s"]
        timeout_at = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        self._essential = {task["name"] for task in request["tasks"] if task["essential"]}
        self._replaceable = {task["name"] for task in request["tasks"] if task["replaceable"]}
        for task in request["tasks"]:
            if not self._start(task):
                self._end(signal.SIGTERM, failed_grace_s)
                break
        launcher_gone = False
        while self._running:
            now = time.monotonic()
            wait_s = min(_TICK_S, self._kill_at - now, timeout_at - now)
            for message in self._messages.poll(wait_s):
                if "kill" in message or (self._ending and "signal" in message):
                    self._kill_at = 0.0
                if "signal" in message:
                    self._end(message["signal"], grace_s)
                if "end" in message:
                    self._end(signal.SIGTERM, failed_grace_s)
                if "kill_task" in message:
                    self._kill_task(message["kill_task"])
                if "start" in message and not self._ending and not self._start(message["start"]):
                    self._end(signal.SIGTERM, failed_grace_s)
            if not launcher_gone and (self._messages.closed or os.getppid() != self._launcher):
                launcher_gone = True
                self._end(signal.SIGTERM, min(grace_s, _ORPHAN_GRACE_S))
            if time.monotonic() >= timeout_at:
                timeout_at = float("inf")
                _report(event="timed_out")
                self._end(signal.SIGTERM, end_grace_s)
            done, failed = self._reap()
            if done or failed:
                self._end(signal.SIGTERM, failed_grace_s if failed else end_grace_s)
            if self._running and time.monotonic() >= self._kill_at:
                _report(event="killed", tasks=sorted(self._running))
                self._signal(signal.SIGKILL)
                self._kill_at = time.monotonic() + _END_GRACE_S
        self._end_leftovers()
        _report(event="done")

    def _start(self, task: dict[str, Any]) -> bool:
        agent = os.getpid()
        libc = ctypes.CDLL(None)
        cores = task["cores"]

        def prepare() -> None:
            if sys.platform.startswith("linux"):
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != agent:
                    os._exit(1)
                if cores:
                    with contextlib.suppress(OSError):
                        os.sched_setaffinity(0, cores)
            # A launcher started in the background by a shell ignores SIGINT; its tasks must not.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)

        with _open_log(task) as log:
            try:
                process = subprocess.Popen(
                    task["argv"],
                    env=task["env"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=prepare,
                )
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                with contextlib.suppress(OSError):
                    log.write(f"Cannot start {task['argv'][0]!r}: {error}\n".encode())
                _report(event="exited", task=task["name"], status=127, ended=False)
                return False
        self._running[task["name"]] = process
        _report(event="started", task=task["name"], pid=process.pid)
        return True

    def _end(self, number: int, grace_s: float) -> None:
        """Sends every task a signal, at most once, and sets the time at which they are killed."""
        if not self._ending:
            self._ending = True
            self._signal(number)
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)

    def _signal(self, number: int) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def _kill_task(self, name: str) -> None:
        if name in self._running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._running[name].pid, signal.SIGKILL)

    def _reap(self) -> tuple[bool, bool]:
        """Reports tasks that have ended; returns whether the cluster is done and if it failed."""
        statuses = _reap_children()
        failed = False
        for name, process in list(self._running.items()):
            if process.pid not in statuses:
                continue
            status = process.returncode = statuses[process.pid]
            del self._running[name]
            _report(event="exited", task=name, status=status, ended=self._ending or failed)
            failed = failed or (status != 0 and name not in self._replaceable)
        done = not self._essential & self._running.keys()
        return not self._ending and done, not self._ending and failed

    def _end_leftovers(self) -> None:
        """Ends the processes that the tasks have left behind."""
        for number, seconds in ((signal.SIGTERM, _LEFTOVER_GRACE_S), (signal.SIGKILL, 10.0)):
            until = time.monotonic() + seconds
            signaled: set[int] = set()
            while time.monotonic() < until:
                _reap_children()
                left = _find_descendants(os.getpid())
                if not left:
                    return
                for pid in left - signaled:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
                signaled |= left
                time.sleep(0.01)


def _open_log(task: dict[str, Any]) -> IO[bytes]:
    """Opens a task's log; if that fails, the task runs without one."""
    try:
        return open(task["log"], "ab", buffering=0)
    except OSError as error:
        _report(event="unlogged", log=task["log"], problem=error.strerror)
        return open(os.devnull, "ab", buffering=0)


def _isolate() -> str:
    """Moves this process to its own network; returns what prevents it, or ""."""
    # Try it in a child first: there is no way back from a namespace whose loopback cannot be
    # brought up.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        problem = _enter_network_namespace()
        os.write(write, problem.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        problem = pipe.read().decode()
    os.waitpid(child, 0)
    return problem or _enter_network_namespace()


def _enter_network_namespace() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    step = "unshare"
    try:
        if libc.unshare(_CLONE_NEWNET) != 0:
            # Without root privileges, this takes a user namespace in which the user stays the same.
            if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
            step = "user namespace"
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{uid} {uid} 1"),
                ("gid_map", f"{gid} {gid} 1"),
            ):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        step = "loopback"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            request = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
            flags = struct.unpack("16sh14x", request)[1] | _IFF_UP
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))
    except OSError as error:
        return f"{step}: {error.strerror}"
    return ""


def _reap_children() -> dict[int, int]:
    """Returns pid -> status, negative for a signal, of every child that has ended."""
    statuses: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return statuses
        if pid == 0:
            return statuses
        statuses[pid] = os.waitstatus_to_exitcode(status)


def _find_descendants(ancestor: int) -> set[int]:
    """Returns the pids of a process's living descendants, read from /proc."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The state and the parent follow the name, whose parentheses may contain others.
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found: set[int] = set()
    waiting = [ancestor]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            found.add(pid)
            waiting.append(pid)
    return found


def _report(**event: Any) -> None:
    """Writes an event. If the launcher is gone, the tasks must still be ended."""
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    main()
