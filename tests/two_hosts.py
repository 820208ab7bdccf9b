"""Two hosts on this machine: network namespaces that are joined by a virtual cable.

Needs root and iproute2. Each host has one half of the cores. The file system is the same on both,
as with a shared directory.
"""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence

from tfdist.launch.machine import divide_cores

ADDRESSES = ("10.99.7.1", "10.99.7.2")


class UnavailableError(Exception):
    """This machine cannot have two hosts; the message says why."""


@dataclasses.dataclass(frozen=True)
class TwoHosts:
    """The hosts 0 and 1, whose addresses are `ADDRESSES`.

    Attributes:
      spaces: the name of each host's network namespace.
      devices: the name of each host's network device.
    """

    spaces: tuple[str, str]
    devices: tuple[str, str]

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """Returns the command that runs a command on a host, on its cores."""
        cores = divide_cores(sorted(os.sched_getaffinity(0)), 2)[host]
        pinned = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
        return ["ip", "netns", "exec", self.spaces[host], *pinned, *command]

    def launch(self, host: int, hosts: str, task: str, *rest: str) -> list[str]:
        """Returns the command that starts a task of a cluster on a host with `tfdist.launch`."""
        launcher = [sys.executable, "-m", "tfdist.launch", f"--hosts={hosts}", f"--task={task}"]
        return self.on(host, [*launcher, *rest])

    def set_rate(self, gbit_per_s: float) -> None:
        """Limits how much each host sends."""
        # The bucket must hold what the rate allows between two ticks of the kernel's clock.
        burst = max(256 << 10, int(gbit_per_s * 1e9 / 8 / 100))
        for space, device in zip(self.spaces, self.devices, strict=True):
            limit = f"rate {gbit_per_s * 1000:.0f}mbit burst {burst} latency 50ms"
            _run("tc", "-n", space, *f"qdisc replace dev {device} root tbf {limit}".split())

    def drop_packets_to(self, host: int, port: int) -> None:
        """Drops what a host receives for a TCP port, as a firewall does."""
        rule = ["ip", "-n", self.spaces[host], "rule"]
        # The rule of the machine's own addresses comes first, unless it is moved.
        _run(*rule, *["add", "pref", "2", "lookup", "local"])
        _run(*rule, *["del", "pref", "0", "lookup", "local"])
        match = f"add pref 1 iif {self.devices[host]} ipproto tcp dport {port} blackhole"
        _run(*rule, *match.split())


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Yields two connected hosts, and removes them afterwards.

    Raises:
      UnavailableError: the programs or the rights are missing.
    """
    for program in ("ip", "tc"):
        if not shutil.which(program):
            raise UnavailableError(f"{program} (iproute2) is not installed")
    tag = uuid.uuid4().hex[:6]
    spaces = (f"tfdist-{tag}-0", f"tfdist-{tag}-1")
    devices = (f"v{tag}0", f"v{tag}1")
    with contextlib.ExitStack() as stack:
        for space in spaces:
            _run("ip", "netns", "add", space)
            stack.callback(_run, "ip", "netns", "del", space)
        cable = f"link add {devices[0]} netns {spaces[0]} type veth peer name {devices[1]} netns"
        _run("ip", *cable.split(), spaces[1])
        for space, device, address in zip(spaces, devices, ADDRESSES, strict=True):
            for line in (f"addr add {address}/24 dev {device}", f"link set {device} up"):
                _run("ip", "-n", space, *line.split())
            _run("ip", "-n", space, *["link", "set", "lo", "up"])
        yield TwoHosts(spaces, devices)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    if done.returncode:
        raise UnavailableError(f"{' '.join(command[:3])}: {done.stderr.strip()}")
