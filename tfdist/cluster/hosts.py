"""Parses clusters from the flags `--hosts` and `--task`."""

from tfdist.cluster.config import ClusterConfig, make_config
from tfdist.errors import TfdistError


def parse_hosts(hosts: str, task: str) -> ClusterConfig | None:
    """Returns the cluster named by --hosts and --task, or None if both are empty.

    Args:
      hosts: "host:port,...", the workers in the order of their indices. "role=" before an address
        sets the role of that address and of those after it.

    Raises:
      TfdistError: one of the two is missing or malformed.

    >>> parse_hosts("chief=a:1,worker=b:1,c:1,ps=d:1", "worker:1").address
    'c:1'
    """
    if not hosts.strip() and not task.strip():
        return None
    if not hosts.strip():
        raise TfdistError(
            f"--task={task} names a task, but --hosts is empty. List all tasks, the same on every "
            "machine, as in --hosts=a:2222,b:2222."
        )
    if not task.strip():
        raise TfdistError(
            "--hosts lists a cluster, but --task is empty. Say which task this process is, as in "
            "--task=worker:0."
        )
    role, separator, index = task.strip().replace("/", ":").partition(":")
    if not separator:
        raise TfdistError(
            f"--task={task} is not role:index. Write the role and the index, as in --task=worker:0."
        )
    return make_config("--hosts", parse_host_list(hosts), role, index)


def parse_host_list(hosts: str) -> dict[str, tuple[str, ...]]:
    """Returns role -> addresses from the text of --hosts (see `parse_hosts`), unchecked."""
    tasks: dict[str, list[str]] = {}
    role = "worker"
    for item in hosts.split(","):
        prefix, separator, address = item.strip().rpartition("=")
        if separator:
            role = prefix.strip()
        tasks.setdefault(role, []).append(address.strip())
    return {role: tuple(addresses) for role, addresses in tasks.items()}
