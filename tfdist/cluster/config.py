"""A cluster: its tasks, and which of them this process is."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.errors import TfdistError, make_unknown_name_error

MOST_TASKS = 100_000  # a text must not make a process fill its memory with hosts

ROLES = ("chief", "worker", "ps", "evaluator")


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """The tasks of a cluster, and which of them this process is.

    Attributes:
      tasks: role -> addresses, "host:port" each, in the order of the tasks' indices. An
        evaluator may be a task without an address.
    """

    tasks: Mapping[str, tuple[str, ...]]
    role: str
    index: int = 0
    source: str = dataclasses.field(default="ClusterConfig", compare=False)

    def __post_init__(self) -> None:
        order = [*ROLES, *(role for role in self.tasks if role not in ROLES)]
        tasks = {role: tuple(self.tasks[role]) for role in order if self.tasks.get(role)}
        object.__setattr__(self, "tasks", tasks)

    @property
    def num_workers(self) -> int:
        """The number of processes that train, a chief included unless there are servers."""
        chiefs = 0 if self.num_ps else len(self.tasks.get("chief", ()))
        return len(self.tasks.get("worker", ())) + chiefs

    @property
    def worker_index(self) -> int:
        """The index of this process among those that train together; the chief is the first."""
        return self.index + (len(self.tasks.get("chief", ())) if self.role == "worker" else 0)

    @property
    def num_ps(self) -> int:
        """The number of parameter servers."""
        return len(self.tasks.get("ps", ()))

    @property
    def num_tasks(self) -> int:
        """The number of tasks that have an address."""
        return sum(len(addresses) for addresses in self.tasks.values())

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the run: the chief, or worker 0 where there is none."""
        return self.role == "chief" or (
            self.role == "worker" and self.index == 0 and "chief" not in self.tasks
        )

    @property
    def task_name(self) -> str:
        """This process's name, as in "worker-0"."""
        return f"{self.role}-{self.index}"

    @property
    def address(self) -> str | None:
        """This process's "host:port"; None for an evaluator without one."""
        addresses = self.tasks.get(self.role, ())
        return addresses[self.index] if self.index < len(addresses) else None

    def to_tf_config(self) -> dict[str, Any]:
        """Returns the value of TF_CONFIG; evaluators are not part of TensorFlow's cluster."""
        cluster = {role: list(hosts) for role, hosts in self.tasks.items() if role != "evaluator"}
        return {"cluster": cluster, "task": {"type": self.role, "index": self.index}}

    def to_tf_config_json(self) -> str:
        """Returns `to_tf_config` as the text that TF_CONFIG holds."""
        return json.dumps(self.to_tf_config())

    def describe(self) -> str:
        """Returns a readable description of the cluster, with this process's task marked.

        >>> from tfdist.cluster import parse_hosts
        >>> print(parse_hosts("a:2222,b:2222", "worker:1").describe())
        Cluster of 2 tasks (2 workers), from --hosts
          worker 0  a:2222
          worker 1  b:2222  <- this process
        """
        roles = ", ".join(_count(len(hosts), role) for role, hosts in self.tasks.items())
        lines = [f"Cluster of {_count(self.num_tasks, 'task')} ({roles}), from {self.source}"]
        rows = [
            (f"{role} {index}", address, (role, index) == (self.role, self.index))
            for role, addresses in self.tasks.items()
            for index, address in enumerate(addresses)
        ]
        if self.address is None:
            rows.append((f"{self.role} {self.index}", "no address", True))
        width = max(len(name) for name, _, _ in rows)
        lines += [
            f"  {name:<{width}}  {address}" + ("  <- this process" if own else "")
            for name, address, own in rows
        ]
        return "\n".join(lines)


def check_cluster(config: ClusterConfig) -> None:
    """Checks that roles are known, addresses well-formed and unique, and this task listed."""
    source = config.source
    for role in [*config.tasks, config.role]:
        if role not in ROLES:
            raise make_unknown_name_error(f"role in {source}:", role, ROLES)
    if not config.tasks.get("worker") and not config.tasks.get("chief"):
        raise TfdistError(f"{source} describes neither a worker nor a chief. Add a worker.")
    if len(config.tasks.get("chief", ())) > 1:
        raise TfdistError(
            f"{source} describes {len(config.tasks['chief'])} chiefs. Keep one and make the others "
            "workers."
        )
    seen: dict[str, str] = {}
    for role, addresses in config.tasks.items():
        for index, address in enumerate(addresses):
            name = f"{role} {index}"
            try:
                host, port = split_address(address)
            except TfdistError as error:
                raise TfdistError(f"{source}: {name}: {error}") from None
            other = seen.setdefault(f"{host.lower()}:{port}", name)
            if other != name:
                raise TfdistError(
                    f"{source}: {other} and {name} have the same address {address}. Give each task "
                    "its own port."
                )
    number = len(config.tasks.get(config.role, ()))
    if config.index < 0 or (config.index >= number and (config.role != "evaluator" or number)):
        valid = (
            f"has no {config.role}"
            if not number
            else f"has only {config.role} 0"
            if number == 1
            else f"has {config.role} 0 to {number - 1}"
        )
        raise TfdistError(
            f"{source}: this process is {config.role} {config.index}, but the cluster {valid}. "
            "Correct the task, or add it to the cluster."
        )


def make_evaluator_error(source: str) -> TfdistError:
    """Returns the error for a process that is an evaluator."""
    return TfdistError(
        f"{source} makes this process an evaluator, but tfdist has none: the workers evaluate the "
        "validation data after every epoch. Leave the evaluator out; python -m tfdist.evaluate "
        "scores a finished run."
    )


def split_address(address: str) -> tuple[str, int]:
    """Returns the host, without IPv6's brackets, and the port of a well-formed "host:port"."""
    if "://" in address:
        raise TfdistError(
            f"{address!r} is a URL. Write host:port alone, as in {address.partition('://')[2]}."
        )
    host, separator, port = address.rpartition(":")
    if not separator or (address.startswith("[") and address.endswith("]")):
        raise TfdistError(f"{address!r} has no port. Write host:port, as in {address}:2222.")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise TfdistError(
            f"{address!r} has more than one colon. Write host:port, an IPv6 host in brackets, as "
            "in [::1]:2222."
        )
    if not host or re.search(r"[\s/=|;]", host):
        raise TfdistError(f"{address!r} has no valid host. Write host:port, as in node1:2222.")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise TfdistError(
            f"{address!r} has the port {port!r}. Write a number from 1 to 65535, as in {host}:2222."
        )
    return host.strip("[]"), int(port)


def make_config(
    source: str, tasks: Mapping[str, Sequence[str]], role: str, index: Any
) -> ClusterConfig:
    """Returns a checked cluster; the index must be a number."""
    if isinstance(index, bool) or not re.fullmatch(r"\d{1,9}", str(index).strip(), re.ASCII):
        raise TfdistError(
            f"{source}: the task's index is {index!r}. Write a whole number, 0 or more, as in "
            "worker 0."
        )
    addresses = {name: tuple(hosts) for name, hosts in tasks.items()}
    config = ClusterConfig(addresses, role.strip(), int(index), source)
    check_cluster(config)
    return config


def make_ranked_config(
    source: str, addresses: Sequence[str], rank: int, num_ps: int
) -> ClusterConfig:
    """Returns the cluster of numbered tasks, whose order is chief (if any), workers, ps."""
    if not num_ps:
        return make_config(source, {"worker": addresses}, "worker", rank)
    first_ps = len(addresses) - num_ps
    if first_ps < 2:
        raise TfdistError(
            f"{source}: {len(addresses)} tasks are too few for a chief, a worker and {num_ps} "
            f"parameter servers. Start {num_ps + 2} tasks or more, or lower TFDIST_NUM_PS."
        )
    tasks = {"chief": addresses[:1], "worker": addresses[1:first_ps], "ps": addresses[first_ps:]}
    if rank == 0:
        return make_config(source, tasks, "chief", 0)
    if rank < first_ps:
        return make_config(source, tasks, "worker", rank - 1)
    return make_config(source, tasks, "ps", rank - first_ps)


def parse_count(source: str, name: str, text: str) -> int:
    """Returns the whole number of at most 18 digits in a variable."""
    if not re.fullmatch(r"\d{1,18}", text.strip(), re.ASCII):
        raise TfdistError(f"{source}: {name}={text[:80]!r} is not a whole number. Correct it.")
    return int(text)


def parse_task_count(source: str, name: str, text: str) -> int:
    """Returns a number of tasks in a variable, at most `MOST_TASKS`."""
    count = parse_count(source, name, text)
    if count > MOST_TASKS:
        raise TfdistError(f"{source}: {name}={count} is above {MOST_TASKS}. Correct it.")
    return count


def count_servers(environ: Mapping[str, str]) -> int:
    """Returns the number of parameter servers that TFDIST_NUM_PS requests."""
    return parse_task_count("Environment", "TFDIST_NUM_PS", environ.get("TFDIST_NUM_PS") or "0")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 and noun != "ps" else "")
