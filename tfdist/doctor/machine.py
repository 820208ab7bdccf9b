"""What the checks read."""

import contextlib
import dataclasses
import functools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tfdist.cluster import ClusterConfig, read_environment
from tfdist.launch.machine import count_cores, find_sources
from tfdist.launch.probe import AddressCheck, check_cluster, find_cluster
from tfdist.reading import parse_object

_IMPORT_TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What the checks read of a machine; tests give another root, clock or environment.

    Attributes:
      root: the directory of /proc, /sys and /dev.
      directory: the run's directory, or where it will be created; empty if unknown.
      hosts, task: the cluster and this machine's task, as in `tfdist.launch`; empty to read the
        environment.
      wait_s: how long to wait for the other tasks, in seconds.
      clock: returns the time, in seconds since 1970.
      report: what TensorFlow reports; empty to ask it.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = dataclasses.field(default_factory=read_environment)
    directory: str = ""
    hosts: str = ""
    task: str = ""
    wait_s: float = 5.0
    clock: Callable[[], float] = time.time
    packages: Sequence[str] = tuple(sys.path)
    report: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def cores(self) -> int:
        """The number of cores that this process may run on."""
        return count_cores()

    @functools.cached_property
    def open_files(self) -> int:
        """How many files this process may open at a time."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    @functools.cached_property
    def versions(self) -> dict[str, str]:
        """Installed package -> version."""
        found: dict[str, str] = {}
        for item in metadata.distributions(path=list(self.packages)):
            name = item.metadata["Name"]
            if name:
                found.setdefault(name.lower().replace("_", "-"), item.version)
        return found

    @property
    def cluster(self) -> ClusterConfig | None:
        """The cluster that this machine belongs to, None for a single process."""
        return find_cluster(self.hosts, self.task, environ=self.environ)[0]

    @property
    def own_task(self) -> tuple[str, int] | None:
        """This machine's role and index in the cluster, None if it is none of its tasks."""
        return find_cluster(self.hosts, self.task, environ=self.environ)[1]

    @functools.cached_property
    def addresses(self) -> list[AddressCheck]:
        """The results of probing every address of the cluster."""
        if self.cluster is None:
            return []
        return check_cluster(self.cluster, own=self.own_task, wait_s=self.wait_s)

    @functools.cached_property
    def tensorflow(self) -> Mapping[str, Any]:
        """What `tfdist.doctor.report_tensorflow` prints, or `error`: why it failed.

        Another process imports TensorFlow, because a broken one may end its process.
        """
        if self.report:
            return self.report
        command = [sys.executable, "-m", "tfdist.doctor.report_tensorflow"]
        environ = find_sources(self.environ) | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        try:
            done = subprocess.run(
                command,
                env=environ,
                capture_output=True,
                text=True,
                timeout=_IMPORT_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"error": str(error)}
        lines = done.stdout.strip().splitlines()
        found = parse_object(lines[-1]) if done.returncode == 0 and lines else None
        if found is not None:
            return found
        said = done.stderr.strip().splitlines()
        return {"error": said[-1] if said else f"it ended with status {done.returncode}"}

    def read(self, path: str) -> str:
        """Returns a file's text, empty if it cannot be read."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (self.root / path).read_text()
        return ""

    def list_directory(self, path: str) -> list[Path]:
        """Returns what a directory holds, nothing if it cannot be read."""
        with contextlib.suppress(OSError):
            return sorted((self.root / path).iterdir())
        return []

    def list_open_files(self) -> Iterator[tuple[int, str]]:
        """Yields (process, what one of its file descriptors refers to), of other processes."""
        for process in self.list_directory("proc"):
            if not process.name.isdigit() or int(process.name) == os.getpid():
                continue
            for file in self.list_directory(f"proc/{process.name}/fd"):
                with contextlib.suppress(OSError):
                    yield int(process.name), os.readlink(file)

    def name_process(self, pid: int) -> str:
        """Returns a process with the beginning of its command line, as in `process 12 (python)`."""
        command = self.read(f"proc/{pid}/cmdline").replace("\0", " ").strip()
        return f"process {pid} ({command[:60]})" if command else f"process {pid}"
