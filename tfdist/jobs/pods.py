"""The pods of a job on Kubernetes, and what is decided by their exit status."""

from typing import Any

from tfdist.jobs.job import CONTAINER_STORAGE, Job
from tfdist.stopping import EXIT_TERMINATED

PORT = 2222
USER = 1000  # as in the Dockerfile
_EXIT_BAD_INPUT = 2


def make_pod_template(
    job: Job, *, name: str, environment: dict[str, str], with_accelerators: bool
) -> dict[str, Any]:
    """Returns the template of a task's pod; an operator finds its container by the name."""
    cluster = job.cluster
    resources = {
        "cpu": str(cluster.cpus_per_worker),
        "memory": f"{cluster.memory_gib_per_worker}Gi",
    }
    container: dict[str, Any] = {
        "name": name,
        "image": job.image,
        "command": list(job.work.command),
        "args": list(job.work.arguments),
        "ports": [{"name": "tfjob-port", "containerPort": PORT, "protocol": "TCP"}],
        # The secret by which the tasks know one another, TFDIST_TOKEN, if there is one.
        "envFrom": [{"secretRef": {"name": job.name, "optional": True}}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if environment:
        container["env"] = [{"name": key, "value": value} for key, value in environment.items()]
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    if needs_volume(job):
        claim = {"claimName": cluster.claim or job.name}
        volumes.append({"name": "storage", "persistentVolumeClaim": claim})
        mounts.append({"name": "storage", "mountPath": CONTAINER_STORAGE})
    if with_accelerators and cluster.accelerators_per_worker:
        resources[job.accelerator] = str(cluster.accelerators_per_worker)
        # NCCL needs shared memory between a pod's GPUs; a container's default is 64 MiB.
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    container["resources"] = {"requests": resources, "limits": resources.copy()}
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": job.grace_period_s,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
    }
    if volumes:
        container["volumeMounts"] = mounts
        spec["volumes"] = volumes
    return {
        "metadata": {
            "labels": make_labels(job),
            # A sidecar would not end with the training, and would block gRPC.
            "annotations": {"sidecar.istio.io/inject": "false"},
        },
        "spec": spec,
    }


def needs_volume(job: Job) -> bool:
    """Returns whether a path of the job is on the shared volume."""
    paths = (*job.work.directories.values(), *job.work.arguments)
    return any(path.startswith(f"{CONTAINER_STORAGE}/") for path in paths)


def make_object(job: Job, api: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Returns an object of the job."""
    metadata = {"name": job.name, "labels": make_labels(job)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def make_job_spec(job: Job, container: str, template: dict[str, Any]) -> dict[str, Any]:
    """Returns what decides when the pods of a Job are restarted, and when it ends.

    Bad input ends the Job. A pod that was stopped is restarted; failures count toward a limit.
    With parameter servers, the Job is done when the chief, pod 0, is.
    """
    template["spec"]["restartPolicy"] = "Never"
    spec = {
        "completionMode": "Indexed",
        # When a worker is lost, all others fail with it.
        "backoffLimit": job.cluster.retries * job.num_tasks,
        "podFailurePolicy": _make_failure_policy(container),
        "template": template,
    }
    if job.cluster.ps:
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    return spec


def make_labels(job: Job) -> dict[str, str]:
    """Returns the labels by which the job's pods are found."""
    return {"app.kubernetes.io/name": "tfdist", "app.kubernetes.io/instance": job.name}


def make_environment(job: Job, *, job_name: str) -> dict[str, str]:
    """Returns the variables that `parse_kubernetes` reads; pods' names begin with `job_name`."""
    return {
        "TFDIST_SERVICE": job.name,
        "TFDIST_JOB": job_name,
        "TFDIST_NUM_WORKERS": str(job.cluster.workers),
        "TFDIST_NUM_PS": str(job.cluster.ps),
        "TFDIST_PORT": str(PORT),
    }


def _make_failure_policy(container: str) -> dict[str, Any]:
    """Returns a policy that ends a Job on bad input, and does not count stops as failures."""
    disruption = {"type": "DisruptionTarget", "status": "True"}
    return {
        "rules": [
            _on_exit(container, "FailJob", _EXIT_BAD_INPUT),
            {"action": "Ignore", "onPodConditions": [disruption]},
            _on_exit(container, "Ignore", EXIT_TERMINATED),
        ]
    }


def _on_exit(container: str, action: str, status: int) -> dict[str, Any]:
    return {
        "action": action,
        "onExitCodes": {"containerName": container, "operator": "In", "values": [status]},
    }
