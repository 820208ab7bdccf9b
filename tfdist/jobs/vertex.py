"""A Vertex AI CustomJob, in the form that `gcloud ai custom-jobs create --config` reads.

The run directory is the job's base output directory: `--run_dir` is not passed on, but
`tfdist.train` finds it in the AIP_ variables that Vertex AI sets for that directory.

Source: https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec and
https://cloud.google.com/vertex-ai/docs/training/distributed-training
"""

import functools
import shlex
from typing import Any

from tfdist.cli.flags import drop_flags
from tfdist.jobs.job import Job
from tfdist.jobs.options import ClusterOptions
from tfdist.jobs.patching import merge
from tfdist.jobs.submission import Submission
from tfdist.jobs.vertex_machines import BUILT_IN, TPU_TOPOLOGIES
from tfdist.jobs.yaml_text import dump_documents

_FILE = "custom_job.yaml"


def make_vertex_files(job: Job) -> tuple[dict[str, str], Submission]:
    """Returns file name -> text, and how to submit them."""
    region = shlex.quote(job.cluster.region).replace("{", "{{").replace("}", "}}")
    create = (
        f"gcloud ai custom-jobs create --region={region} "
        f"--display-name={job.name} --config={{output}}/{_FILE}"
    )
    stream = f"gcloud ai custom-jobs stream-logs {{id}} --region={region}"
    spec = functools.reduce(merge, job.patches, make_custom_job(job))
    text = dump_documents("Vertex AI CustomJobSpec", [spec])
    return {_FILE: text}, Submission(
        (create,), followed=(f"{create} --format='value(name)'", stream)
    )


def make_custom_job(job: Job) -> dict[str, Any]:
    """Returns the CustomJobSpec.

    Worker pools have fixed roles: pool 0 is the chief, 1 the workers, 2 the parameter servers and
    3 the evaluator, which tfdist does not have. Without parameter servers, the chief is a worker.
    Only workers have accelerators.
    """
    roles = job.count_roles()
    if job.cluster.ps:
        pools = [_make_pool(job, roles[role], role == "worker") for role in roles]
    else:
        counts = (1, roles["worker"] - 1)
        pools = [_make_pool(job, count, True) for count in counts if count]
    spec: dict[str, Any] = {
        "workerPoolSpecs": pools,
        "scheduling": {
            "timeout": f"{round(job.cluster.time_limit_h * 3600)}s",
            # Synchronous workers fail together; a worker of parameter servers may come back.
            "restartJobOnWorkerRestart": not job.cluster.ps,
            **({"strategy": "SPOT"} if job.cluster.spot else {}),
        },
    }
    if job.work.run_dir:
        spec["baseOutputDirectory"] = {"outputUriPrefix": job.work.run_dir}
    if job.cluster.service_account:
        spec["serviceAccount"] = job.cluster.service_account
    if job.cluster.vertex_tensorboard:
        spec["tensorboard"] = job.cluster.vertex_tensorboard
    return spec


def _make_pool(job: Job, count: int, with_accelerators: bool) -> dict[str, Any]:
    name = job.cluster.machine
    machine: dict[str, Any] = {"machineType": name}
    if name in TPU_TOPOLOGIES:
        machine["tpuTopology"] = TPU_TOPOLOGIES[name]
    elif with_accelerators and job.cluster.accelerators_per_worker:
        machine["acceleratorType"] = job.accelerator
        machine["acceleratorCount"] = job.cluster.accelerators_per_worker
    elif name in BUILT_IN:
        machine["machineType"] = ClusterOptions().machine  # it cannot be had without accelerators
    return {
        "machineSpec": machine,
        "replicaCount": count,
        "containerSpec": {
            "imageUri": job.image,
            "command": list(job.work.command),
            "args": drop_flags(job.work.arguments, {"run_dir"}),
        },
    }
