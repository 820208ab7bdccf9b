"""What `python -m tfdist.jobs` takes; see `tfdist.options`."""

from dataclasses import dataclass
from typing import ClassVar

from tfdist.options import CommandOptions, OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(OptionGroup):
    """Where it will run."""

    target: str = option("", "vertex, kubernetes or slurm", metavar="NAME")
    workers: int = option(1, "processes that train")
    ps: int = option(0, "parameter servers; with any, a chief is added")
    cpus_per_worker: int = option(4, "kubernetes, slurm: processor cores a task")
    memory_gib_per_worker: int = option(16, "kubernetes, slurm: memory a task, in GiB")
    accelerators_per_worker: int = option(0, "accelerators a worker")
    accelerator: str = option(
        "",
        "their kind: NVIDIA_TESLA_T4 (vertex, its default), nvidia.com/gpu (kubernetes, its "
        "default), or as the cluster calls it (slurm; any kind by default)",
        metavar="KIND",
    )
    machine: str = option("n1-standard-8", "vertex: machine type; it must suit the accelerator")
    region: str = option("us-central1", "vertex: where", metavar="REGION")
    time_limit_h: float = option(24.0, "vertex, slurm: hours until one start is ended")
    retries: int = option(
        3, "kubernetes, slurm: starts after failures; bad input is never tried again"
    )
    storage_gib: int = option(100, "kubernetes: size of the volume for the run directory, in GiB")
    claim: str = option(
        "", "kubernetes: an existing volume claim instead; many nodes must be able to write to it"
    )


@dataclass(frozen=True, kw_only=True)
class FileOptions(OptionGroup):
    """What it writes."""

    name: str = option("tfdist", "the job's name")
    image: str = option(
        "", "vertex, kubernetes: container image, made with the Dockerfile", metavar="IMAGE"
    )
    output: str = option("jobs", "directory for the job's files", metavar="DIR")
    quiet: bool = option(False, "print nothing but errors")


@dataclass(frozen=True, kw_only=True)
class JobsOptions(CommandOptions):
    """Everything that `python -m tfdist.jobs` takes before `--`.

    Attributes:
      cluster, files: the groups.
    """

    rest: ClassVar[str] = " -- [--flag=value of tfdist.train ...] [script.py ...]"

    cluster: ClusterOptions = ClusterOptions()
    files: FileOptions = FileOptions()
