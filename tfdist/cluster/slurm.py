"""Parses clusters from Slurm's variables."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence

from tfdist.cluster.config import (
    MOST_TASKS,
    ClusterConfig,
    count_servers,
    make_ranked_config,
    parse_count,
    parse_task_count,
)
from tfdist.errors import TfdistError

_FIRST_PORT, _PORTS = 20000, 12000  # below Linux's ephemeral ports, from 32768


def parse_slurm(environ: Mapping[str, str]) -> ClusterConfig | None:
    """Returns the cluster of a Slurm step, with one process per task, or None outside of a step.

    Hosts are in Slurm's own order. All tasks are workers; with TFDIST_NUM_PS=n, the first task
    is the chief and the last n are parameter servers. A batch script, which runs once for the
    whole job, is not a task of a cluster; neither is the only task of a step.

    Raises:
      TfdistError: the variables are malformed or contradict one another.

    Source: "OUTPUT ENVIRONMENT VARIABLES" in Slurm's manual pages srun(1) and sbatch(1).
    """
    source = "Slurm"
    step_tasks = environ.get("SLURM_STEP_NUM_TASKS")
    in_batch_script = environ.get("ENVIRONMENT") == "BATCH" and step_tasks is None
    if "SLURM_PROCID" not in environ or in_batch_script:
        return None
    num_tasks = parse_task_count(
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
            f"are {counts}. Start the tasks with srun, or describe the cluster in TF_CONFIG."
        )
    slots = _place_tasks(counts, environ.get("SLURM_DISTRIBUTION", "block"))
    task = parse_count(source, "SLURM_PROCID", environ["SLURM_PROCID"])
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
                "tasks with srun --distribution=block, or describe the cluster in TF_CONFIG."
            )
    first_port = _find_first_port(environ)
    addresses = [f"{nodes[node]}:{first_port + local}" for node, local in slots]
    return make_ranked_config(source, addresses, task, count_servers(environ))


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
        if len(hosts) + math.prod(map(len, choices)) > MOST_TASKS:
            raise _node_list_error(text)
        hosts += ["".join(parts) for parts in itertools.product(*choices)]
    if not hosts or not all(hosts):
        raise _node_list_error(text)
    return hosts


def _find_first_port(environ: Mapping[str, str]) -> int:
    """Returns a port that normally differs between the jobs and steps that share a node."""
    if environ.get("TFDIST_PORT"):
        return parse_count("Slurm", "TFDIST_PORT", environ["TFDIST_PORT"])
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or "0"
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or "0"
    number = parse_count("Slurm", "SLURM_JOB_ID", job) * 131
    number += parse_count("Slurm", "SLURM_STEP_ID", step) * 1031
    return _FIRST_PORT + number % _PORTS


def _place_tasks(counts: Sequence[int], distribution: str) -> list[tuple[int, int]]:
    """Returns each task's node and its index on that node."""
    kind = re.split(r"[:,]", distribution)[0].lower()
    by_node = [[(node, local) for local in range(count)] for node, count in enumerate(counts)]
    if kind == "cyclic":
        rounds = itertools.zip_longest(*by_node)
        return [slot for slots in rounds for slot in slots if slot is not None]
    if kind in ("", "*", "block"):
        return list(itertools.chain.from_iterable(by_node))
    raise TfdistError(
        f"Slurm: SLURM_DISTRIBUTION={distribution} is not supported. Start the tasks with srun "
        "--distribution=block or cyclic, or describe the cluster in TF_CONFIG."
    )


def _expand_task_counts(text: str) -> list[int]:
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", item.strip(), re.ASCII)
        if not match or len(counts) + int(match[2] or 1) > MOST_TASKS:
            raise TfdistError(
                f"Slurm: SLURM_STEP_TASKS_PER_NODE={text!r} is not of the form 2(x3),1. Correct "
                "it, or describe the cluster in TF_CONFIG."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand_ranges(text: str, ranges: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", item.strip(), re.ASCII)
        if not match:
            raise _node_list_error(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if not 0 <= last - first < MOST_TASKS - len(numbers):
            raise _node_list_error(text)
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers


def _node_list_error(text: str) -> TfdistError:
    return TfdistError(
        f"Slurm: the node list {text[:200]!r} is not of the form n[1-3,07-10],m5, of at most "
        f"{MOST_TASKS} nodes. Correct it, or "
        "describe the cluster in TF_CONFIG."
    )
