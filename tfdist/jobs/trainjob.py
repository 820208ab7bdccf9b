"""A TrainJob of Kubeflow Trainer 2, over a runtime of its own that knows no framework.

Trainer makes a JobSet named as the TrainJob: its Job is NAME-node-0, and a headless Service of
JobSet's, NAME, gives pod i the name NAME-node-0-i.NAME. So `parse_kubernetes` finds the cluster.

Source: https://www.kubeflow.org/docs/components/trainer/operator-guides/ (runtime, ML policy, job
template) and https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/
"""

from typing import Any

from tfdist.jobs.job import Job
from tfdist.jobs.pods import make_environment, make_failure_policy, make_metadata, make_pod_template

_API = "trainer.kubeflow.org/v1alpha1"
_LABELS = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_NODE = "node"  # Trainer fills in the container and the replicated job of this name


def make_training_runtime(job: Job) -> dict[str, Any]:
    """Returns the TrainingRuntime: the pods, without what the TrainJob says of them."""
    template = make_pod_template(job, name=_NODE, environment={}, with_accelerators=True)
    template["spec"]["restartPolicy"] = "Never"
    (container,) = template["spec"]["containers"]
    for name in ("command", "args", "resources"):
        del container[name]
    spec = {
        "completionMode": "Indexed",
        # When a worker is lost, all others fail with it.
        "backoffLimit": job.cluster.retries * job.num_tasks,
        "podFailurePolicy": make_failure_policy(_NODE),
        "template": template,
    }
    if job.cluster.ps:
        # The servers end when the chief, pod 0, has.
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    return {
        "apiVersion": _API,
        "kind": "TrainingRuntime",
        "metadata": make_metadata(job),
        "spec": {
            "mlPolicy": {"numNodes": job.num_tasks},
            "template": {
                "spec": {
                    "replicatedJobs": [
                        {
                            "name": _NODE,
                            "template": {
                                "metadata": {"labels": _LABELS},
                                "spec": spec,
                            },
                        }
                    ]
                }
            },
        },
    }


def make_train_job(job: Job) -> dict[str, Any]:
    """Returns the TrainJob, whose nodes are the tasks, in the order of their ranks."""
    template = make_pod_template(
        job,
        name=_NODE,
        environment=make_environment(job, job_name=f"{job.name}-{_NODE}-0"),
        with_accelerators=True,
    )
    (container,) = template["spec"]["containers"]
    return {
        "apiVersion": _API,
        "kind": "TrainJob",
        "metadata": make_metadata(job),
        "spec": {
            "runtimeRef": {"kind": "TrainingRuntime", "name": job.name},
            "trainer": {
                "numNodes": job.num_tasks,
                "image": container["image"],
                "command": container["command"],
                "args": container["args"],
                "env": container["env"],
                "resourcesPerNode": container["resources"],
            },
        },
    }
