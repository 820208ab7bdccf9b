"""Parses clusters from TF_CONFIG."""

import json
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.config import ClusterConfig, make_config, make_evaluator_error
from tfdist.errors import TfdistError


def parse_tf_config(text: str) -> ClusterConfig | None:
    """Returns the cluster that TF_CONFIG describes, or None if it holds none.

    The older role "master" is read as "chief", because TensorFlow no longer accepts it.

    Raises:
      TfdistError: the text is not JSON of the documented shape, names no task, or names an
        evaluator without a cluster.
    """
    source = "TF_CONFIG"
    value = parse_json_object(source, text)
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
    tasks = parse_tasks(source, cluster)
    role = str(task["type"])
    if "master" in tasks and "chief" not in tasks:
        tasks = {("chief" if name == "master" else name): tasks[name] for name in tasks}
        role = "chief" if role == "master" else role
    return make_config(source, tasks, role, task.get("index", 0))


def parse_json_object(source: str, text: str) -> Mapping[str, Any]:
    """Returns the JSON object in a variable, which is empty if the variable is."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TfdistError(
            f"{source} is not JSON: {error}. Correct it, or unset it to run a single process."
        ) from None
    if not isinstance(value, Mapping):
        raise TfdistError(
            f'{source} holds {type(value).__name__}, not an object. Write {{"cluster": ..., '
            '"task": ...}.'
        )
    return value


def parse_tasks(source: str, cluster: object) -> dict[str, tuple[str, ...]]:
    """Returns role -> addresses of a cluster in decoded JSON of the right shape."""
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
