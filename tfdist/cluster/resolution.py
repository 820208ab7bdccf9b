"""Chooses among the descriptions of a cluster."""

from collections.abc import Mapping

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.environment import read_environment
from tfdist.cluster.hosts import parse_hosts
from tfdist.cluster.kubernetes import parse_kubernetes
from tfdist.cluster.slurm import parse_slurm
from tfdist.cluster.tf_config import parse_tf_config
from tfdist.cluster.vertex import parse_vertex, without_reduction_servers


def resolve_cluster(
    *,
    hosts: str = "",
    task: str = "",
    environ: Mapping[str, str] | None = None,
    has_servers: bool = True,
) -> ClusterConfig | None:
    """Returns the cluster that this process belongs to; None means a single process.

    The order of precedence is: flags, TF_CONFIG, Vertex AI's CLUSTER_SPEC, Slurm, Kubernetes.

    Args:
      has_servers: whether the strategy may have parameter servers. If not, Vertex AI's pool 2
        holds Reduction Servers, which TensorFlow does not see.
    """
    environ = read_environment() if environ is None else environ
    config = parse_hosts(hosts, task)
    if config is None:
        config = parse_tf_config(environ.get("TF_CONFIG", ""))
    if config is None:
        config = parse_vertex(environ.get("CLUSTER_SPEC", ""))
    if config is not None and environ.get("CLUSTER_SPEC") and not has_servers:
        config = without_reduction_servers(config)
    if config is None:
        config = parse_slurm(environ)
    if config is None:
        config = parse_kubernetes(environ)
    return config
