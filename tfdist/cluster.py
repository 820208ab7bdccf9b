"""Descriptions of clusters: flags, TF_CONFIG, Vertex AI, Slurm, Kubernetes -> `ClusterConfig`.

This is the only module that touches `os.environ`. The `parse_*` functions are pure: they
take a text or a mapping and give a `ClusterConfig`, or None where it names no cluster.

Environment variables of our own, for Slurm and Kubernetes:

    TFDIST_NUM_PS        parameter servers among the tasks (0); if any, the first task is the chief
    TFDIST_NUM_WORKERS   workers, without the chief (Kubernetes only)
    TFDIST_PORT          first port (Slurm: derived from the job's id; Kubernetes: 2222)
    TFDIST_SERVICE       the headless Service through which the pods find one another (Kubernetes)
    TFDIST_JOB           the Job's name (Kubernetes; taken from HOSTNAME if absent)

And one that tfdist.launch sets for its tasks:

    TFDIST_LAUNCH_DIR    where it keeps logs, the step reached and its record of restarts
"""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError, make_unknown_name_error

ROLES = ("chief", "worker", "ps", "evaluator")
LAUNCH_DIR = "TFDIST_LAUNCH_DIR"

_VERTEX_ROLES = {f"workerpool{position}": role for position, role in enumerate(ROLES)}
_KUBERNETES_PORT = 2222
_SLURM_FIRST_PORT, _SLURM_PORTS = 20000, 12000  # below Linux's ephemeral ports, from 32768


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """The tasks of a cluster, and which of them this process is.

    Attributes:
      tasks: role -> addresses, "host:port" each, in the order of the tasks' indices. An
        evaluator may be a task without an address.
      role: this process's role, one of `ROLES`.
      index: this process's index among the tasks of its role.
      source: where the description came from, for messages.
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
        """The processes that train: a chief counts, unless it coordinates parameter servers."""
        chiefs = 0 if self.num_ps else len(self.tasks.get("chief", ()))
        return len(self.tasks.get("worker", ())) + chiefs

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
        """Returns the value of TF_CONFIG; evaluators are no part of TensorFlow's cluster."""
        cluster = {role: list(hosts) for role, hosts in self.tasks.items() if role != "evaluator"}
        return {"cluster": cluster, "task": {"type": self.role, "index": self.index}}

    def to_tf_config_json(self) -> str:
        """Returns `to_tf_config` as the text that TF_CONFIG holds."""
        return json.dumps(self.to_tf_config())

    def describe(self) -> str:
        """Returns the cluster as lines to read, this process's task marked.

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


def resolve_cluster(
    *,
    hosts: str = "",
    task: str = "",
    environ: Mapping[str, str] | None = None,
    has_servers: bool = True,
) -> ClusterConfig | None:
    """Returns the cluster this process belongs to; None means a single process.

    Tried in this order: flags, TF_CONFIG, Vertex AI's CLUSTER_SPEC, Slurm, Kubernetes.

    Args:
      hosts: the flag --hosts.
      task: the flag --task.
      environ: the environment to read; this process's own by default.
      has_servers: whether the strategy may have parameter servers. Vertex AI's pool 2 holds
        them or Reduction Servers; else it is the latter, which TensorFlow does not see.

    Raises:
      TfdistError: the first description found is wrong.
    """
    environ = read_environment() if environ is None else environ
    config = parse_hosts(hosts, task)
    if config is None:
        config = parse_tf_config(environ.get("TF_CONFIG", ""))
    if config is None:
        config = parse_vertex(environ.get("CLUSTER_SPEC", ""))
    if config is not None and environ.get("CLUSTER_SPEC") and not has_servers:
        config = _without_reduction_servers(config)
    if config is None:
        config = parse_slurm(environ)
    if config is None:
        config = parse_kubernetes(environ)
    return config


def parse_hosts(hosts: str, task: str) -> ClusterConfig | None:
    """Returns the cluster named by --hosts and --task, or None if both are empty.

    Args:
      hosts: "host:port,..." workers in the order of their indices. "role=" before an address
        gives the role of that address and of those after it.
      task: this process's "role:index".

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
    return _make_config("--hosts", parse_host_list(hosts), role, index)


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


def parse_tf_config(text: str) -> ClusterConfig | None:
    """Returns the cluster that TF_CONFIG describes, or None if it holds none.

    The older role "master" is read as "chief", since TensorFlow rejects it now.

    Raises:
      TfdistError: the text is not JSON of the documented shape, names no task, or an evaluator
        of no cluster.
    """
    source = "TF_CONFIG"
    value = _parse_json_object(source, text)
    cluster = value.get("cluster") or {}
    task = value.get("task")
    if not cluster:
        if isinstance(task, Mapping) and task.get("type") == "evaluator":
            raise make_evaluator_error(source)
        return None
    if not isinstance(task, Mapping) or "type" not in task:
        raise TfdistError(
            f"{source} has a cluster but no task with a type. Add "
            '"task": {"type": "worker", "index": 0}, this process\'s role and index.'
        )
    tasks = _parse_tasks(source, cluster)
    role = str(task["type"])
    if "master" in tasks and "chief" not in tasks:
        tasks = {("chief" if name == "master" else name): tasks[name] for name in tasks}
        role = "chief" if role == "master" else role
    return _make_config(source, tasks, role, task.get("index", 0))


def parse_vertex(text: str) -> ClusterConfig | None:
    """Returns the cluster of Vertex AI's CLUSTER_SPEC, or None for a job of one replica.

    Worker pools 0 to 3 are chief, workers, parameter servers, evaluators. Two shapes are read:
    `{"cluster": {"workerpool0": ["host:port"]}, "task": {"type": "workerpool0", "index": 0}}`
    and `{"worker_pools": [{"replicas": ["host:port"]}], "task": ...}`.

    Raises:
      TfdistError: the text has neither shape, or names no task.
    """
    source = "CLUSTER_SPEC"
    value = _parse_json_object(source, text)
    pools = value.get("cluster") or value.get("worker_pools")
    if not pools:
        return None
    if isinstance(pools, list):
        replicas = [pool.get("replicas") if isinstance(pool, Mapping) else pool for pool in pools]
        pools = {f"workerpool{position}": pool or [] for position, pool in enumerate(replicas)}
    pools = _parse_tasks(source, pools)
    tasks = {_vertex_role(pool): addresses for pool, addresses in pools.items()}
    task = value.get("task")
    if not isinstance(task, Mapping) or "type" not in task:
        raise TfdistError(
            f"{source} has a cluster but no task with a type. Set TF_CONFIG or --hosts and --task "
            "instead, which are read first."
        )
    if sum(map(len, tasks.values())) == 1:
        return None
    return _make_config(source, tasks, _vertex_role(str(task["type"])), task.get("index", 0))


def parse_slurm(environ: Mapping[str, str]) -> ClusterConfig | None:
    """Returns the cluster of a Slurm step, a process per task, or None outside of one.

    Hosts come in Slurm's own order. All tasks are workers; with TFDIST_NUM_PS=n the first is
    the chief and the last n are parameter servers. A batch script, which runs once for the
    whole job, is no task of a cluster; neither is the only task of a step.

    Raises:
      TfdistError: the variables are malformed or contradict one another.

    Source: "OUTPUT ENVIRONMENT VARIABLES" in Slurm's manual pages srun(1) and sbatch(1).
    """
    source = "Slurm"
    step_tasks = environ.get("SLURM_STEP_NUM_TASKS")
    in_batch_script = environ.get("ENVIRONMENT") == "BATCH" and step_tasks is None
    if "SLURM_PROCID" not in environ or in_batch_script:
        return None
    num_tasks = _parse_count(
        source, "SLURM_NTASKS", step_tasks or environ.get("SLURM_NTASKS") or "1"
    )
    if num_tasks <= 1:
        return None
    prefix = "SLURM_STEP" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB"
    node_list = environ.get(f"{prefix}_NODELIST") or environ.get("SLURM_NODELIST") or ""
    nodes = expand_node_list(node_list)
    tasks_per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    counts = (
        _expand_task_counts(tasks_per_node)
        if tasks_per_node
        else [num_tasks // len(nodes)] * len(nodes)
    )
    if len(counts) != len(nodes) or sum(counts) != num_tasks:
        raise TfdistError(
            f"Slurm: {num_tasks} tasks on {len(nodes)} nodes ({node_list}), but the tasks per node "
            f"are {counts}. Start the tasks with srun, or give the cluster by TF_CONFIG."
        )
    slots = _place_slurm_tasks(counts, environ.get("SLURM_DISTRIBUTION", "block"))
    task = _parse_count(source, "SLURM_PROCID", environ["SLURM_PROCID"])
    if task >= num_tasks:
        raise TfdistError(
            f"Slurm: SLURM_PROCID={task}, but the step has {num_tasks} tasks. Start the tasks with "
            "srun."
        )
    found = (environ.get("SLURM_NODEID"), environ.get("SLURM_LOCALID"))
    for name, expected, value in zip(("NODEID", "LOCALID"), slots[task], found, strict=True):
        if value is not None and value != str(expected):
            raise TfdistError(
                f"Slurm: task {task} should have SLURM_{name}={expected}, found {value}. Start the "
                "tasks with srun --distribution=block, or give the cluster by TF_CONFIG."
            )
    first_port = _slurm_first_port(environ)
    addresses = [f"{nodes[node]}:{first_port + local}" for node, local in slots]
    return _make_ranked_config(source, addresses, task, _num_ps(environ))


def parse_kubernetes(environ: Mapping[str, str]) -> ClusterConfig | None:
    """Returns the cluster of an indexed Job behind a headless Service, or None outside of one.

    Pod i is `<job>-<i>.<service>:<port>`. The pods are the workers; with TFDIST_NUM_PS the first
    is the chief, then come the workers, then the parameter servers. Without TFDIST_NUM_WORKERS
    and TFDIST_SERVICE an indexed Job is not taken for a cluster.

    Raises:
      TfdistError: only one of the two is set, or a value is malformed.
    """
    source = "Kubernetes"
    if not environ.get("JOB_COMPLETION_INDEX"):
        return None
    service = environ.get("TFDIST_SERVICE", "")
    workers = environ.get("TFDIST_NUM_WORKERS", "")
    if not service and not workers:
        return None
    if not service or not workers:
        missing = "TFDIST_NUM_WORKERS" if service else "TFDIST_SERVICE"
        raise TfdistError(
            f"Kubernetes: {missing} is not set. Set TFDIST_NUM_WORKERS to the number of workers "
            "and TFDIST_SERVICE to the headless Service's name in every pod."
        )
    index = _parse_count(source, "JOB_COMPLETION_INDEX", environ["JOB_COMPLETION_INDEX"])
    num_ps = _num_ps(environ)
    num_tasks = _parse_count(source, "TFDIST_NUM_WORKERS", workers) + num_ps + bool(num_ps)
    if num_tasks <= 1:
        return None
    port = _parse_count(source, "TFDIST_PORT", environ.get("TFDIST_PORT") or str(_KUBERNETES_PORT))
    job = environ.get("TFDIST_JOB") or ""
    hostname = environ.get("HOSTNAME", "")
    if not job:
        job, separator, tail = hostname.rpartition("-")
        if not separator or tail != str(index):
            raise TfdistError(
                f"Kubernetes: HOSTNAME={hostname!r} is not <job>-{index}, so the Job's name is "
                "unknown. Set TFDIST_JOB to it."
            )
    addresses = [f"{job}-{i}.{service}:{port}" for i in range(num_tasks)]
    return _make_ranked_config(source, addresses, index, num_ps)


def check_cluster(config: ClusterConfig) -> None:
    """Checks that a cluster is sound, whatever its strategy.

    Raises:
      TfdistError: an unknown role, a malformed or repeated address, or a task that is not in it.
    """
    source = config.source
    for role in [*config.tasks, config.role]:
        if role not in ROLES:
            raise make_unknown_name_error(f"role in {source}:", role, ROLES)
    if not config.tasks.get("worker") and not config.tasks.get("chief"):
        raise TfdistError(f"{source} describes no worker and no chief. Add at least one worker.")
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
                    "a port of its own."
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


def expand_node_list(text: str) -> list[str]:
    """Returns the hosts of a Slurm node list, in its order.

    Raises:
      TfdistError: the list is empty or malformed.

    >>> expand_node_list("n[1-3,07-08],m5")
    ['n1', 'n2', 'n3', 'n07', 'n08', 'm5']
    """
    hosts: list[str] = []
    # A comma inside brackets does not separate hosts.
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text.strip()):
        pieces = re.split(r"\[([^\]]*)\]", item.strip())
        if any("[" in piece or "]" in piece for piece in pieces):
            raise _node_list_error(text)
        choices = [
            _expand_ranges(text, piece) if position % 2 else [piece]
            for position, piece in enumerate(pieces)
        ]
        hosts += ["".join(parts) for parts in itertools.product(*choices)]
    if not hosts or not all(hosts):
        raise _node_list_error(text)
    return hosts


def split_address(address: str) -> tuple[str, int]:
    """Returns the host, without IPv6's brackets, and the port of "host:port".

    Raises:
      TfdistError: the address is malformed.
    """
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
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise TfdistError(
            f"{address!r} has the port {port!r}. Write a number from 1 to 65535, as in {host}:2222."
        )
    return host.strip("[]"), int(port)


def read_environment() -> Mapping[str, str]:
    """Returns a copy of this process's environment."""
    return dict(os.environ)


def find_metadata_host() -> str | None:
    """Returns where Google Cloud's metadata server answers, or None on other machines.

    GCE_METADATA_HOST names another one, as for Google's own libraries.
    """
    named = os.environ.get("GCE_METADATA_HOST")
    if named:
        return named
    try:
        product = Path("/sys/class/dmi/id/product_name").read_text()
    except OSError:
        return None
    return "metadata.google.internal" if product.strip() == "Google Compute Engine" else None


def find_tf_config() -> ClusterConfig | None:
    """Returns the cluster that TF_CONFIG describes; None where there is none."""
    return parse_tf_config(os.environ.get("TF_CONFIG", ""))


def has_peers() -> bool:
    """Returns whether TF_CONFIG describes several workers that train in step."""
    config = find_tf_config()
    return config is not None and config.num_workers > 1 and not config.num_ps


def find_launch_dir() -> str | None:
    """Returns where this task's launcher keeps its files, None without a launcher."""
    return os.environ.get(LAUNCH_DIR)


def set_tf_config(config: ClusterConfig) -> None:
    """Sets TF_CONFIG of this process, for the parts of TensorFlow that read only that."""
    os.environ["TF_CONFIG"] = config.to_tf_config_json()


def set_environment_defaults(values: Mapping[str, str]) -> None:
    """Sets those environment variables that are not set yet."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def set_tensorflow_log_level(level: int) -> None:
    """Sets from which severity TensorFlow's C++ code logs: 0 all, 1 warnings, 2 errors, 3 fatal.

    It has its effect only before TensorFlow is imported.
    """
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = str(level)


def quiet_environment() -> None:
    """Silences TensorFlow's and gRPC's logs, except where the user has set a level.

    It has its effect only before TensorFlow is imported. TensorFlow 2.21 still writes a few
    lines to the standard error while it is imported, before it reads these.
    """
    set_environment_defaults({"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"})


def _make_config(
    source: str, tasks: Mapping[str, Sequence[str]], role: str, index: Any
) -> ClusterConfig:
    if isinstance(index, bool) or not re.fullmatch(r"\d+", str(index).strip(), re.ASCII):
        raise TfdistError(
            f"{source}: the task's index is {index!r}. Write a whole number from 0 on, as in "
            "worker 0."
        )
    addresses = {name: tuple(hosts) for name, hosts in tasks.items()}
    config = ClusterConfig(addresses, role.strip(), int(index), source)
    check_cluster(config)
    return config


def _make_ranked_config(
    source: str, addresses: Sequence[str], rank: int, num_ps: int
) -> ClusterConfig:
    """Returns the cluster of tasks that are only numbered: chief if any, workers, ps."""
    if not num_ps:
        return _make_config(source, {"worker": addresses}, "worker", rank)
    first_ps = len(addresses) - num_ps
    if first_ps < 2:
        raise TfdistError(
            f"{source}: {len(addresses)} tasks cannot hold a chief, a worker and {num_ps} parameter"
            f" servers. Start {num_ps + 2} tasks or more, or lower TFDIST_NUM_PS."
        )
    tasks = {"chief": addresses[:1], "worker": addresses[1:first_ps], "ps": addresses[first_ps:]}
    if rank == 0:
        return _make_config(source, tasks, "chief", 0)
    if rank < first_ps:
        return _make_config(source, tasks, "worker", rank - 1)
    return _make_config(source, tasks, "ps", rank - first_ps)


def _without_reduction_servers(config: ClusterConfig) -> ClusterConfig:
    if config.role == "ps":
        raise TfdistError(
            f"{config.source}: this process is in Vertex AI's pool 2, and the strategy has no "
            "parameter servers. Run the Reduction Server's image in that pool, or leave it out."
        )
    tasks = {role: hosts for role, hosts in config.tasks.items() if role != "ps"}
    return dataclasses.replace(config, tasks=tasks)


def _vertex_role(pool: str) -> str:
    name = pool.strip()
    if name in ROLES:
        return name
    if name == "master":
        return "chief"
    if name not in _VERTEX_ROLES:
        raise make_unknown_name_error("worker pool in CLUSTER_SPEC:", pool, _VERTEX_ROLES)
    return _VERTEX_ROLES[name]


def _parse_json_object(source: str, text: str) -> Mapping[str, Any]:
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise TfdistError(
            f"{source} is not JSON: {error}. Correct it, or unset it to run a single process."
        ) from None
    if not isinstance(value, Mapping):
        raise TfdistError(
            f'{source} holds {type(value).__name__}, not an object. Write {{"cluster": ..., '
            '"task": ...}.'
        )
    return value


def _parse_tasks(source: str, cluster: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(cluster, Mapping):
        raise TfdistError(
            f"{source}: the cluster is {json.dumps(cluster)}. Write an object of roles, as in "
            '{"worker": ["host:port"]}.'
        )
    tasks = {}
    for role, addresses in cluster.items():
        if isinstance(addresses, Mapping):  # TensorFlow's other form: {"0": "host:port"}
            indices = sorted(addresses, key=str)
            if sorted(map(str, addresses)) != sorted(map(str, range(len(addresses)))):
                raise TfdistError(
                    f"{source}: the indices of {role} are {', '.join(map(str, indices))}. Number "
                    "them 0, 1, ... without gaps."
                )
            by_index = {int(key): address for key, address in addresses.items()}
            addresses = [by_index[index] for index in range(len(by_index))]
        if not isinstance(addresses, list) or not all(isinstance(item, str) for item in addresses):
            raise TfdistError(
                f"{source}: the tasks of {role} are {json.dumps(addresses)}. "
                'Write a list for each role, as in "worker": ["host:port"].'
            )
        tasks[str(role)] = tuple(address.strip() for address in addresses)
    return tasks


def _parse_count(source: str, name: str, text: str) -> int:
    if not re.fullmatch(r"\d+", text.strip(), re.ASCII):
        raise TfdistError(f"{source}: {name}={text!r} is not a whole number. Correct it.")
    return int(text)


def _num_ps(environ: Mapping[str, str]) -> int:
    return _parse_count("Environment", "TFDIST_NUM_PS", environ.get("TFDIST_NUM_PS") or "0")


def _slurm_first_port(environ: Mapping[str, str]) -> int:
    """Returns a port that differs between jobs, and steps of a job, that share a node."""
    if environ.get("TFDIST_PORT"):
        return _parse_count("Slurm", "TFDIST_PORT", environ["TFDIST_PORT"])
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or "0"
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or "0"
    number = _parse_count("Slurm", "SLURM_JOB_ID", job) * 131
    number += _parse_count("Slurm", "SLURM_STEP_ID", step) * 1031
    return _SLURM_FIRST_PORT + number % _SLURM_PORTS


def _place_slurm_tasks(counts: Sequence[int], distribution: str) -> list[tuple[int, int]]:
    """Returns each task's node and its index on that node."""
    kind = re.split(r"[:,]", distribution)[0].lower()
    by_node = [[(node, local) for local in range(count)] for node, count in enumerate(counts)]
    if kind == "cyclic":
        rounds = itertools.zip_longest(*by_node)
        return [slot for slots in rounds for slot in slots if slot is not None]
    if kind in ("", "*", "block"):
        return list(itertools.chain.from_iterable(by_node))
    raise TfdistError(
        f"Slurm: SLURM_DISTRIBUTION={distribution} is not known here. Start the tasks with srun "
        "--distribution=block or cyclic, or give the cluster by TF_CONFIG."
    )


def _expand_task_counts(text: str) -> list[int]:
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip(), re.ASCII)
        if not match:
            raise TfdistError(
                f"Slurm: SLURM_STEP_TASKS_PER_NODE={text!r} is not of the form 2(x3),1. Correct "
                "it, or give the cluster by TF_CONFIG."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand_ranges(text: str, ranges: str) -> Iterable[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip(), re.ASCII)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise _node_list_error(text)
        first, last = int(match[1]), int(match[2] or match[1])
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers


def _node_list_error(text: str) -> TfdistError:
    return TfdistError(
        f"Slurm: the node list {text!r} is not of the form n[1-3,07-10],m5. Correct it, or give "
        "the cluster by TF_CONFIG."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 and noun != "ps" else "")
