"""Parses clusters from the variables in the pods of an indexed Job on Kubernetes."""

from collections.abc import Mapping

from tfdist.cluster.config import (
    ClusterConfig,
    count_servers,
    make_ranked_config,
    parse_count,
    parse_task_count,
)
from tfdist.errors import TfdistError

_PORT = 2222


def parse_kubernetes(environ: Mapping[str, str]) -> ClusterConfig | None:
    """Returns the cluster of an indexed Job behind a headless Service, or None outside of one.

    Pod i is `<job>-<i>.<service>:<port>`. All pods are workers; with TFDIST_NUM_PS, the first pod
    is the chief, followed by the workers and then the parameter servers. Without
    TFDIST_NUM_WORKERS and TFDIST_SERVICE, an indexed Job is not a cluster.

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
    index = parse_count(source, "JOB_COMPLETION_INDEX", environ["JOB_COMPLETION_INDEX"])
    num_ps = count_servers(environ)
    num_tasks = parse_task_count(source, "TFDIST_NUM_WORKERS", workers) + num_ps + bool(num_ps)
    if num_tasks <= 1:
        return None
    port = parse_count(source, "TFDIST_PORT", environ.get("TFDIST_PORT") or str(_PORT))
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
    return make_ranked_config(source, addresses, index, num_ps)
