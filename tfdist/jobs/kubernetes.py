"""A Kubeflow TFJob, and an indexed Job for clusters without Kubeflow.

The pods of the indexed Job find one another as `tfdist.cluster.parse_kubernetes` describes.

Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/ (indexed Jobs, pod failure
policy, success policy) and https://www.kubeflow.org/docs/components/trainer/legacy-v1/
"""

from typing import Any

from tfdist.jobs.job import CONTAINER_STORAGE, Job
from tfdist.jobs.yaml_text import dump_documents
from tfdist.stopping import EXIT_TERMINATED

_JOB, _TF_JOB, _STORAGE = "job.yaml", "tfjob.yaml", "storage.yaml"
_PORT = 2222
USER = 1000  # as in the Dockerfile
_EXIT_BAD_INPUT = 2


def make_kubernetes_files(job: Job) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns file name -> text, and the commands that submit them, one per kind of job."""
    guards = [make_network_policy(job), make_disruption_budget(job)]
    texts = {
        _JOB: dump_documents(
            "An indexed Job, for any cluster (Kubernetes 1.31 or later).",
            [*guards, make_service(job), make_indexed_job(job)],
        ),
        _TF_JOB: dump_documents(
            "A TFJob, for clusters with Kubeflow's training operator; it replaces job.yaml.",
            [*guards, make_tf_job(job)],
        ),
    }
    storage = ""
    if _needs_volume(job) and not job.cluster.claim:
        texts[_STORAGE] = dump_documents("Deleting this deletes the runs.", [make_claim(job)])
        storage = f"-f {{output}}/{_STORAGE} "
    return texts, tuple(f"kubectl apply {storage}-f {{output}}/{name}" for name in (_JOB, _TF_JOB))


def make_indexed_job(job: Job) -> dict[str, Any]:
    """Returns a Job whose pod i has the name that `parse_kubernetes` expects of task i.

    Bad input ends the Job. A pod that was stopped is restarted; failures count toward a limit.
    With parameter servers, the Job is done when the chief, pod 0, is.
    """
    environment = {
        "TFDIST_SERVICE": job.name,
        "TFDIST_JOB": job.name,
        "TFDIST_NUM_WORKERS": str(job.cluster.workers),
        "TFDIST_NUM_PS": str(job.cluster.ps),
        "TFDIST_PORT": str(_PORT),
    }
    template = _make_pod_template(job, environment=environment, with_accelerators=True)
    template["spec"] |= {"subdomain": job.name, "restartPolicy": "Never"}
    spec = {
        "completionMode": "Indexed",
        "completions": job.num_tasks,
        "parallelism": job.num_tasks,
        # When a worker is lost, all others fail with it.
        "backoffLimit": job.cluster.retries * job.num_tasks,
        "podFailurePolicy": {
            "rules": [
                _on_exit("FailJob", _EXIT_BAD_INPUT),
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
                _on_exit("Ignore", EXIT_TERMINATED),
            ]
        },
        "template": template,
    }
    if job.cluster.ps:
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _make_metadata(job),
        "spec": spec,
    }


def make_tf_job(job: Job) -> dict[str, Any]:
    """Returns a TFJob, whose operator sets TF_CONFIG in every pod.

    Its policy `ExitCode` restarts a pod after exit statuses of 128 and above, without a limit. Any
    other failure ends the job: status 2, but also status 1.
    """
    kinds = {"chief": "Chief", "worker": "Worker", "ps": "PS"}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": _make_metadata(job),
        "spec": {
            "runPolicy": {"cleanPodPolicy": "Running"},
            # Without a chief, the success of one worker does not imply that of the others.
            "successPolicy": "" if job.cluster.ps else "AllWorkers",
            "tfReplicaSpecs": {
                kinds[role]: {
                    "replicas": count,
                    "restartPolicy": "ExitCode",
                    "template": _make_pod_template(
                        job, environment={}, with_accelerators=role == "worker"
                    ),
                }
                for role, count in job.count_roles().items()
            },
        },
    }


def make_service(job: Job) -> dict[str, Any]:
    """Returns the headless Service that gives the pods of the indexed Job their names."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _make_metadata(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _make_labels(job),
            "ports": [{"name": "tensorflow", "port": _PORT}],
        },
    }


def make_network_policy(job: Job) -> dict[str, Any]:
    """Returns a policy that lets only the job's own pods reach its pods, on any port, for NCCL."""
    own = {"matchLabels": _make_labels(job)}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _make_metadata(job),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": own}]}],
        },
    }


def make_disruption_budget(job: Job) -> dict[str, Any]:
    """Returns a budget that keeps nodes from being drained: losing one pod would stop the job."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _make_metadata(job),
        "spec": {
            "minAvailable": job.num_tasks,
            "selector": {"matchLabels": _make_labels(job)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def make_claim(job: Job) -> dict[str, Any]:
    """Returns a claim for a volume that all pods can write to."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _make_metadata(job),
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": f"{job.cluster.storage_gib}Gi"}},
        },
    }


def _make_pod_template(
    job: Job, *, environment: dict[str, str], with_accelerators: bool
) -> dict[str, Any]:
    cluster = job.cluster
    resources = {
        "cpu": str(cluster.cpus_per_worker),
        "memory": f"{cluster.memory_gib_per_worker}Gi",
    }
    container: dict[str, Any] = {
        "name": "tensorflow",  # the TFJob's operator looks for this name
        "image": job.image,
        "command": list(job.work.command),
        "args": list(job.work.arguments),
        "ports": [{"name": "tfjob-port", "containerPort": _PORT}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if environment:
        container["env"] = [{"name": key, "value": value} for key, value in environment.items()]
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    if _needs_volume(job):
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
            "labels": _make_labels(job),
            # A sidecar would not end with the training, and would block gRPC.
            "annotations": {"sidecar.istio.io/inject": "false"},
        },
        "spec": spec,
    }


def _needs_volume(job: Job) -> bool:
    paths = (*job.work.directories.values(), *job.work.arguments)
    return any(path.startswith(f"{CONTAINER_STORAGE}/") for path in paths)


def _make_metadata(job: Job) -> dict[str, Any]:
    return {"name": job.name, "labels": _make_labels(job)}


def _make_labels(job: Job) -> dict[str, str]:
    return {"app.kubernetes.io/name": "tfdist", "app.kubernetes.io/instance": job.name}


def _on_exit(action: str, status: int) -> dict[str, Any]:
    return {
        "action": action,
        "onExitCodes": {"containerName": "tensorflow", "operator": "In", "values": [status]},
    }
