"""Clusters of processes on this machine: tasks, the agent that owns them, logs, restarts."""

from tfdist._lazy import lazy_exports

__all__ = ["ClusterResult", "TaskResult", "TaskSettings", "run_local_cluster", "run_task"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ClusterResult": "tfdist.launch.results:ClusterResult",
        "TaskResult": "tfdist.launch.results:TaskResult",
        "TaskSettings": "tfdist.launch.run:TaskSettings",
        "run_local_cluster": "tfdist.launch.run:run_local_cluster",
        "run_task": "tfdist.launch.run:run_task",
    },
)
