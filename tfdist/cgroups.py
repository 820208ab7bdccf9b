"""Finds the control groups of this process: containers, Slurm, systemd."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ControlGroup:
    """A control group that limits this process."""

    path: Path
    version: int


def list_cgroups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yields the control groups that may limit this process, of cgroup v1 and v2.

    Not all of their directories need to exist: in a container, the path may be the host's, of which
    only the root is visible.

    Args:
      controller: what they limit, such as `memory` or `cpu`.
    """
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
            elif controller in controllers.split(","):
                tops = [root / "sys/fs/cgroup" / name for name in {controllers, controller}]
            else:
                continue
            inner = Path(path.lstrip("/"))
            groups = {top / part for top in tops for part in (inner, *inner.parents)}
            for group in sorted(groups):
                yield ControlGroup(group, 2 if controllers == "" else 1)
