"""The launcher's end of the pipes to `tfdist.launch.agent`."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tfdist.launch import agent as agent_program

_FAREWELL_S = 15.0


class AgentProcess:
    """The pipes to `tfdist.launch.agent`, and what it has reported."""

    def __init__(self, process: "subprocess.Popen[bytes]", isolate: str) -> None:
        self.process = process
        self.done = False
        self.pids: dict[str, int] = {}
        self._buffer = b""
        self.send(isolate=isolate)
        ready: list[dict[str, Any]] = []
        while not ready and not self.done:
            ready = self.poll(1.0)
        if not ready:
            raise RuntimeError("tfdist's agent process did not start")
        self.isolated: bool = ready[0]["isolated"]
        self.problem: str = ready[0]["problem"]

    def send(self, **message: Any) -> None:
        """Sends a message. If the agent is gone, `poll` notices."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def poll(self, timeout_s: float) -> list[dict[str, Any]]:
        """Waits for an event or the timeout; returns the pending events, sets `done` at the end."""
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        if not select.select([pipe], [], [], timeout_s)[0]:
            return []
        data = os.read(pipe, 1 << 16)
        if not data:
            self.done = True
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        events = [json.loads(line) for line in lines]
        for event in events:
            if event["event"] == "started":
                self.pids[event["task"]] = event["pid"]
            elif event["event"] == "exited":
                self.pids.pop(event["task"], None)
        return events


@contextlib.contextmanager
def agent_process(isolate: str) -> Iterator[AgentProcess]:
    """Starts an agent; on exit from the context, waits until all its tasks have ended."""
    # In its own session, so that a terminal's Ctrl-C reaches only the launcher, which passes it on.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", agent_program.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    agent = None
    try:
        agent = AgentProcess(process, isolate)
        yield agent
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()  # the agent now ends all tasks that still run
        try:
            process.wait(_FAREWELL_S)
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            process.stdout.close()
            # If the agent was killed, the kernel has killed its tasks, but not their children.
            for pid in agent.pids.values() if agent and process.returncode else ():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
