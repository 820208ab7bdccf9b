"""Parses clusters from Vertex AI's CLUSTER_SPEC."""

import dataclasses
from collections.abc import Mapping

from tfdist.cluster.config import ROLES, ClusterConfig, make_config
from tfdist.cluster.tf_config import parse_json_object, parse_tasks
from tfdist.errors import TfdistError, make_unknown_name_error

_VERTEX_ROLES = {f"workerpool{position}": role for position, role in enumerate(ROLES)}


def parse_vertex(text: str) -> ClusterConfig | None:
    """Returns the cluster in Vertex AI's CLUSTER_SPEC, or None for a job with a single replica.

    Worker pools 0 to 3 are chief, workers, parameter servers, evaluators. Two shapes are read:
    `{"cluster": {"workerpool0": ["host:port"]}, "task": {"type": "workerpool0", "index": 0}}`
    and `{"worker_pools": [{"replicas": ["host:port"]}], "task": ...}`.

    Raises:
      TfdistError: the text has neither shape, or names no task.
    """
    source = "CLUSTER_SPEC"
    value = parse_json_object(source, text)
    pools = value.get("cluster") or value.get("worker_pools")
    if not pools:
        return None
    if isinstance(pools, list):
        replicas = [pool.get("replicas") if isinstance(pool, Mapping) else pool for pool in pools]
        pools = {f"workerpool{position}": pool or [] for position, pool in enumerate(replicas)}
    pools = parse_tasks(source, pools)
    tasks = {_vertex_role(pool): addresses for pool, addresses in pools.items()}
    task = value.get("task")
    if not isinstance(task, Mapping) or "type" not in task:
        raise TfdistError(
            f"{source} has a cluster but no task with a type. Set TF_CONFIG or --hosts and --task "
            "instead, which are read first."
        )
    if sum(map(len, tasks.values())) == 1:
        return None
    return make_config(source, tasks, _vertex_role(str(task["type"])), task.get("index", 0))


def without_reduction_servers(config: ClusterConfig) -> ClusterConfig:
    """Returns a cluster without the tasks in Vertex AI's pool 2, which this process is not in."""
    if config.role == "ps":
        raise TfdistError(
            f"{config.source}: this process is in Vertex AI's pool 2, and the strategy has no "
            "parameter servers. Run the Reduction Server's container in that pool, or leave it out."
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
