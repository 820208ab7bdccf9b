"""The options of `python -m tfdist.jobs`; see `tfdist.options`."""

from dataclasses import dataclass
from typing import ClassVar

from tfdist.options import CommandOptions, OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(OptionGroup):
    """Where the job runs."""

    target: str = option("", "vertex, tpu_vm, kubernetes or slurm", metavar="NAME")
    workers: int = option(1, "number of processes that train", minimum=1)
    ps: int = option(0, "number of parameter servers; they add a chief", minimum=0)
    cpus_per_worker: int = option(4, "kubernetes, slurm: CPU cores per task", minimum=1)
    memory_gib_per_worker: int = option(16, "kubernetes, slurm: memory per task, in GiB", minimum=1)
    accelerators_per_worker: int = option(0, "accelerators per worker", minimum=0)
    accelerator: str = option(
        "",
        "kind of accelerator: on vertex, the machine's or NVIDIA_TESLA_T4 by default; on tpu_vm, "
        "v5litepod-8; on kubernetes, nvidia.com/gpu; on slurm, the cluster's name for it, or any",
        metavar="KIND",
    )
    machine: str = option("n1-standard-8", "vertex: machine type; it must suit the accelerator")
    region: str = option("us-central1", "vertex: region", metavar="REGION")
    zone: str = option("us-west4-a", "tpu_vm: zone", metavar="ZONE")
    runtime_version: str = option(
        "", "tpu_vm: software of the TPU VM, by default that of its kind", metavar="VERSION"
    )
    spot: bool = option(False, "vertex, tpu_vm: use machines that may be taken back at any time")
    service_account: str = option(
        "", "vertex, tpu_vm: the account that the job acts as", metavar="EMAIL"
    )
    vertex_tensorboard: str = option(
        "",
        "vertex: show the run's events in this TensorBoard; needs --service_account",
        metavar="projects/P/locations/R/tensorboards/ID",
    )
    partition: str = option("", "slurm: partition")
    account: str = option("", "slurm: account to charge")
    time_limit_h: float = option(24.0, "vertex, slurm: time limit of one start, in hours")
    retries: int = option(
        3, "not on vertex: number of restarts after failures; bad input is never retried", minimum=0
    )
    storage_gib: int = option(
        100, "kubernetes: size of the volume for the run directory, in GiB", minimum=1
    )
    storage_class: str = option(
        "", "kubernetes: the volume's storage class, which must support ReadWriteMany"
    )
    claim: str = option(
        "", "kubernetes: an existing volume claim to use instead; many nodes must be able to write"
    )


@dataclass(frozen=True, kw_only=True)
class FileOptions(OptionGroup):
    """What the command writes."""

    name: str = option("tfdist", "the job's name")
    image: str = option(
        "", "not on slurm: container image, built with the Dockerfile", metavar="IMAGE"
    )
    output: str = option("jobs", "directory for the job's files", metavar="DIR")
    patch: str = option(
        "",
        "YAML with what your cluster needs besides: parts of its objects, which are merged into "
        "the job's; see docs/jobs.md",
        metavar="FILE",
    )
    submit: bool = option(False, "also submit the job, with the target's command line tool")
    follow: bool = option(False, "with --submit: follow the job to its end")
    quiet: bool = option(False, "print nothing but errors")


@dataclass(frozen=True, kw_only=True)
class JobsOptions(CommandOptions):
    """All options of `python -m tfdist.jobs`, which precede `--`."""

    rest: ClassVar[str] = " -- [--flag=value of tfdist.train ...] [script.py ...]"

    cluster: ClusterOptions = ClusterOptions()
    files: FileOptions = FileOptions()
