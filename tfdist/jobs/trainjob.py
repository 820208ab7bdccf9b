"""A TrainJob of Kubeflow Trainer 2, over a runtime of its own that knows no framework.

Trainer makes a JobSet named as the TrainJob: its Job is NAME-node-0, and a headless Service of
JobSet's, NAME, gives pod i the name NAME-node-0-i.NAME. So `parse_kubernetes` finds the cluster.

Source: https://www.kubeflow.org/docs/components/trainer/operator-guides/ (runtime, ML policy, job
template) and https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/
"""

from typing import Any

from tfdist.jobs.job import Job
from tfdist.jobs.pods import make_environment, make_job_spec, make_object, make_pod_template

_API = "trainer.kubeflow.org/v1alpha1"
_LABELS = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_NODE = "node"  # Trainer fills in the container and the replicated job of this name


def make_training_runtime(job: Job) -> dict[str, Any]:
    """Returns the TrainingRuntime: the pods, without what the TrainJob says of them."""
    template = make_pod_template(job, name=_NODE, environment={}, with_accelerators=True)
    (container,) = template["spec"]["containers"]
    for name in ("command", "args", "resources"):
        del container[name]
    node = {"metadata": {"labels": _LABELS}, "spec": make_job_spec(job, _NODE, template)}
    jobs = {"replicatedJobs": [{"name": _NODE, "template": node}]}
    spec = {"mlPolicy": {"numNodes": job.num_tasks}, "template": {"spec": jobs}}
    return make_object(job, _API, "TrainingRuntime", spec)


def make_train_job(job: Job) -> dict[str, Any]:
    """Returns the TrainJob, whose nodes are the tasks, in the order of their ranks."""
    template = make_pod_template(
        job,
        name=_NODE,
        environment=make_environment(job, job_name=f"{job.name}-{_NODE}-0"),
        with_accelerators=True,
    )
    (container,) = template["spec"]["containers"]
    trainer = {
        "numNodes": job.num_tasks,
        **{name: container[name] for name in ("image", "command", "args", "env")},
        "resourcesPerNode": container["resources"],
    }
    runtime = {"kind": "TrainingRuntime", "name": job.name}
    return make_object(job, _API, "TrainJob", {"runtimeRef": runtime, "trainer": trainer})
