"""An indexed Job for any cluster, and for those with Kubeflow a TFJob or a TrainJob.

The pods of the indexed Job find one another as `tfdist.cluster.parse_kubernetes` describes.

Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/ (indexed Jobs, pod failure
policy, success policy) and https://www.kubeflow.org/docs/components/trainer/legacy-v1/
"""

from typing import Any

from tfdist.jobs.job import Job
from tfdist.jobs.patching import check_kinds, patch_objects
from tfdist.jobs.pods import (
    PORT,
    make_environment,
    make_job_spec,
    make_labels,
    make_object,
    make_pod_template,
    needs_volume,
)
from tfdist.jobs.submission import Submission
from tfdist.jobs.trainjob import make_train_job, make_training_runtime
from tfdist.jobs.yaml_text import dump_documents

_JOB, _TF_JOB, _TRAIN_JOB, _STORAGE = "job.yaml", "tfjob.yaml", "trainjob.yaml", "storage.yaml"
_CONTAINER = "tensorflow"  # the TFJob's operator looks for this name


def make_kubernetes_files(job: Job) -> tuple[dict[str, str], Submission]:
    """Returns file name -> text, and how to submit them; there is one file per kind of job."""
    guards = [make_network_policy(job), make_disruption_budget(job)]
    files = {
        _JOB: (
            "An indexed Job, for any cluster (Kubernetes 1.31 or later).",
            [*guards, make_service(job), make_indexed_job(job)],
        ),
        _TF_JOB: (
            "A TFJob, for clusters with Kubeflow's training operator; it replaces job.yaml.",
            [*guards, make_tf_job(job)],
        ),
        _TRAIN_JOB: (
            "A TrainJob, for clusters with Kubeflow Trainer 2; it replaces job.yaml.",
            [*guards, make_training_runtime(job), make_train_job(job)],
        ),
    }
    storage = ""
    if needs_volume(job) and not job.cluster.claim:
        comment = "Deleting this deletes the runs."
        if not job.cluster.storage_class:
            comment += (
                "\nIt names no storage class: the cluster's default class must support "
                "ReadWriteMany,\nor the volume stays pending. Name one with --storage_class."
            )
        files[_STORAGE] = (comment, [make_claim(job)])
        storage = f"-f {{output}}/{_STORAGE} "
    check_kinds([each["kind"] for _, objects in files.values() for each in objects], job.patches)
    texts = {
        name: dump_documents(comment, patch_objects(objects, job.patches))
        for name, (comment, objects) in files.items()
    }
    apply = [f"kubectl apply {storage}-f {{output}}/{name}" for name in (_JOB, _TF_JOB, _TRAIN_JOB)]
    logs = f"kubectl logs --follow --all-pods --pod-running-timeout=1h job/{job.name}"
    return texts, Submission(tuple(apply), followed=(apply[0], logs))


def make_indexed_job(job: Job) -> dict[str, Any]:
    """Returns a Job whose pod i has the name that `parse_kubernetes` expects of task i."""
    template = make_pod_template(
        job,
        name=_CONTAINER,
        environment=make_environment(job, job_name=job.name),
        with_accelerators=True,
    )
    template["spec"]["subdomain"] = job.name
    counts = {"completions": job.num_tasks, "parallelism": job.num_tasks}
    spec = make_job_spec(job, _CONTAINER, template) | counts
    return make_object(job, "batch/v1", "Job", spec)


def make_tf_job(job: Job) -> dict[str, Any]:
    """Returns a TFJob, whose operator sets TF_CONFIG in every pod.

    Its policy `ExitCode` restarts a pod after exit statuses of 128 and above, without a limit. Any
    other failure ends the job: status 2, but also status 1.
    """
    kinds = {"chief": "Chief", "worker": "Worker", "ps": "PS"}
    spec = {
        "runPolicy": {"cleanPodPolicy": "Running"},
        # Without a chief, the success of one worker does not imply that of the others.
        "successPolicy": "" if job.cluster.ps else "AllWorkers",
        "tfReplicaSpecs": {
            kinds[role]: {
                "replicas": count,
                "restartPolicy": "ExitCode",
                "template": make_pod_template(
                    job, name=_CONTAINER, environment={}, with_accelerators=role == "worker"
                ),
            }
            for role, count in job.count_roles().items()
        },
    }
    return make_object(job, "kubeflow.org/v1", "TFJob", spec)


def make_service(job: Job) -> dict[str, Any]:
    """Returns the headless Service that gives the pods of the indexed Job their names."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": make_labels(job),
        "ports": [{"name": "tensorflow", "port": PORT}],
    }
    return make_object(job, "v1", "Service", spec)


def make_network_policy(job: Job) -> dict[str, Any]:
    """Returns a policy that lets only the job's own pods reach its pods, on any port, for NCCL."""
    own = {"matchLabels": make_labels(job)}
    spec = {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": own}]}],
    }
    return make_object(job, "networking.k8s.io/v1", "NetworkPolicy", spec)


def make_disruption_budget(job: Job) -> dict[str, Any]:
    """Returns a budget that keeps nodes from being drained: losing one pod would stop the job."""
    spec = {
        "minAvailable": job.num_tasks,
        "selector": {"matchLabels": make_labels(job)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return make_object(job, "policy/v1", "PodDisruptionBudget", spec)


def make_claim(job: Job) -> dict[str, Any]:
    """Returns a claim for a volume that all pods can write to."""
    storage_class = job.cluster.storage_class
    spec = {
        "accessModes": ["ReadWriteMany"],
        **({"storageClassName": storage_class} if storage_class else {}),
        "resources": {"requests": {"storage": f"{job.cluster.storage_gib}Gi"}},
    }
    return make_object(job, "v1", "PersistentVolumeClaim", spec)
