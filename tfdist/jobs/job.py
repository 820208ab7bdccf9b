"""The description of a job for any target, and the checks of its options."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.cli.flags import expand_flag_files, parse_flags, split_command
from tfdist.cluster import ClusterConfig
from tfdist.errors import TfdistError, make_unknown_name_error
from tfdist.jobs.options import ClusterOptions, JobsOptions
from tfdist.jobs.patching import Patch, read_patches
from tfdist.jobs.vertex_machines import BUILT_IN, TPU_TOPOLOGIES, check_machine
from tfdist.run.options import ScriptOptions
from tfdist.runs.options import TrainOptions
from tfdist.strategies.base import Traits
from tfdist.strategies.registry import AUTO, find_strategy, validate_cluster
from tfdist.training.options import AUTO_BATCH_SIZE, RunOptions

TARGETS = ("vertex", "tpu_vm", "kubernetes", "slurm")
CONTAINER_STORAGE = "/mnt/tfdist"

_MARGIN_S = 5
_DEFAULT_ACCELERATORS = {
    "vertex": "NVIDIA_TESLA_T4",
    "tpu_vm": "v5litepod-8",
    "kubernetes": "nvidia.com/gpu",
    "slurm": "",
}
# TPUs on one host -> the software of their VM. The numbers count chips in v5e and v6e, otherwise
# TensorCores, of which a chip has two.
TPU_RUNTIMES = {
    "v6e-[148]": "v2-alpha-tpuv6e",
    "v5p-8": "v2-alpha-tpuv5",
    "v5litepod-[148]": "v2-alpha-tpuv5-lite",
    "v4-8|v[23]-8": "tpu-ubuntu2204-base",
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """A command, and the values of its flags that a job must know.

    Attributes:
      arguments: its arguments, with files of flags expanded.
      run_dir: the run directory; empty for a script.
      directories: option -> directory that all tasks read or write, the run directory included.
      grace_period_s: seconds from SIGTERM until a task may be killed.
      finds_batch_size: whether it searches for its batch size, which takes a single process.
    """

    command: tuple[str, ...]
    arguments: tuple[str, ...]
    strategy: str
    tpu: str = ""
    run_dir: str = ""
    directories: Mapping[str, str] = field(default_factory=dict)
    grace_period_s: float = RunOptions().grace_period_s
    finds_batch_size: bool = False


@dataclass(frozen=True)
class Job:
    """A cluster that trains, and the command that every task runs.

    Attributes:
      name: the name of the job, a DNS label.
      patches: what is merged into the job's files; see `tfdist.jobs.patching`.
    """

    target: str
    name: str
    image: str
    cluster: ClusterOptions
    accelerator: str
    work: Work
    patches: Sequence[Patch] = ()

    @property
    def num_tasks(self) -> int:
        """The number of tasks, including the chief that parameter servers add."""
        return sum(self.count_roles().values())

    @property
    def grace_period_s(self) -> int:
        """Seconds from SIGTERM until a task may be killed: its own grace period plus a margin."""
        return math.ceil(self.work.grace_period_s) + _MARGIN_S

    def count_roles(self) -> dict[str, int]:
        """Returns role -> number of tasks: workers alone, or a chief, workers and servers."""
        if not self.cluster.ps:
            return {"worker": self.cluster.workers}
        return {"chief": 1, "worker": self.cluster.workers, "ps": self.cluster.ps}


def make_job(options: JobsOptions, arguments: Sequence[str]) -> Job:
    """Returns the job that a command line describes.

    Args:
      arguments: flags of `tfdist.train`; or flags of `tfdist.run`, a script and its arguments.

    Raises:
      TfdistError: a flag or target is unknown, a number is out of range, or a flag does not suit
        the target.
    """
    cluster, target = options.cluster, options.cluster.target
    if target not in TARGETS:
        raise make_unknown_name_error("--target", target, TARGETS)
    job = Job(
        target=target,
        name=options.files.name,
        image=options.files.image,
        cluster=cluster,
        accelerator=cluster.accelerator or _find_default_accelerator(cluster),
        work=make_work(arguments),
        patches=read_patches(options.files.patch),
    )
    _check_numbers(cluster)
    _check_name(job.name)
    _check_strategy(job)
    _CHECKS[target](job)
    return job


def _find_default_accelerator(cluster: ClusterOptions) -> str:
    if cluster.target == "vertex" and cluster.machine in BUILT_IN:
        return BUILT_IN[cluster.machine][0]
    return _DEFAULT_ACCELERATORS[cluster.target]


def _check_numbers(cluster: ClusterOptions) -> None:
    if cluster.time_limit_h <= 0:
        raise TfdistError(f"--time_limit_h={cluster.time_limit_h:g} is not positive: give hours.")
    if cluster.accelerator and not cluster.accelerators_per_worker and cluster.target != "tpu_vm":
        raise TfdistError(
            f"--accelerator={cluster.accelerator} is given, but workers have no accelerators. Add "
            "--accelerators_per_worker=1."
        )


def _check_name(name: str) -> None:
    # Kubernetes derives pods' host names from it, which have at most 63 characters.
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", name):
        raise TfdistError(
            f"--name={name} is not a valid job name. Use up to 50 lowercase letters, digits and "
            "hyphens, with a letter first and no hyphen last."
        )


def _check_strategy(job: Job) -> None:
    strategy = job.work.strategy
    traits = Traits() if strategy == AUTO else find_strategy(strategy).traits
    if traits.is_remote or _has_tpu(job):
        _check_tpu(job, is_used=traits.is_remote)
    if traits.has_servers != bool(job.cluster.ps):
        raise TfdistError(
            f"--strategy={strategy} with --ps={job.cluster.ps}: parameter servers and "
            "--strategy=parameter_server go together. Give both, or neither."
        )
    if job.num_tasks > 1 and job.work.finds_batch_size:
        raise TfdistError(
            f"--global_batch_size=auto works only in a single process, but this job has "
            f"{job.num_tasks}. Give a number."
        )
    roles = job.count_roles()
    tasks = {role: [f"{role}-{i}:1" for i in range(n)] for role, n in roles.items()}
    if job.num_tasks > 1:
        config = ClusterConfig(
            {role: tuple(addresses) for role, addresses in tasks.items()},
            role=next(iter(roles)),
            source="--workers" if not job.cluster.ps else "--workers and --ps",
        )
        validate_cluster(config, strategy)


def _has_tpu(job: Job) -> bool:
    """Returns whether the job's machine is a TPU VM."""
    return job.target == "tpu_vm" or (
        job.target == "vertex" and job.cluster.machine in TPU_TOPOLOGIES
    )


def _check_tpu(job: Job, *, is_used: bool) -> None:
    strategy = job.work.strategy
    if not _has_tpu(job):
        raise TfdistError(
            f"--strategy={strategy} with --target={job.target}: this job has no TPU. Give "
            "--target=tpu_vm, or --target=vertex --machine=ct5lp-hightpu-8t."
        )
    if not is_used or job.work.tpu != "local":
        raise TfdistError(
            "A job on a TPU VM uses its own TPU. Give --strategy=tpu --tpu=local after `--`."
        )
    if job.cluster.workers > 1 or job.cluster.accelerators_per_worker:
        raise TfdistError(
            "A TPU job is one process on one machine. Leave --workers and "
            "--accelerators_per_worker out; the kind of TPU decides how many chips there are."
        )


def _check_accelerator(job: Job, pattern: str, example: str) -> None:
    if not re.fullmatch(pattern, job.accelerator):
        raise TfdistError(
            f"--accelerator={job.accelerator!r} is not how --target={job.target} names a kind of "
            f"accelerator. Write it as in --accelerator={example}."
        )


def _check_vertex(job: Job) -> None:
    _check_image(job, "REGION-docker.pkg.dev/PROJECT/REPOSITORY/tfdist")
    if not re.fullmatch(r"[A-Z0-9_]+", job.accelerator):
        name = re.sub(r"[^A-Z0-9]+", "_", job.accelerator.upper())
        raise TfdistError(
            f"--accelerator={job.accelerator} is not Vertex AI's spelling. Write {name}."
        )
    check_machine(job.cluster.machine, job.accelerator, job.cluster.accelerators_per_worker)
    if job.cluster.vertex_tensorboard and not (job.cluster.service_account and job.work.run_dir):
        raise TfdistError(
            "--vertex_tensorboard needs --service_account, an account that may write to it, and a "
            "--run_dir. Give both, or leave it out."
        )
    _check_buckets(job, "Vertex AI")


def _check_tpu_vm(job: Job) -> None:
    _check_image(job, "REGION-docker.pkg.dev/PROJECT/REPOSITORY/tfdist")
    if job.accelerator.startswith(("tpu7", "v7x")):
        raise TfdistError(
            f"--accelerator={job.accelerator}: TensorFlow does not run on TPU7x "
            "(https://cloud.google.com/tpu/docs/tpu7x). Give v6e-8 or another kind."
        )
    if not any(re.fullmatch(kind, job.accelerator) for kind in TPU_RUNTIMES):
        raise TfdistError(
            f"--accelerator={job.accelerator} is not a TPU on one host. Give v6e-1, v6e-4, v6e-8, "
            "v5p-8, v5litepod-1, v5litepod-4, v5litepod-8, v4-8, v3-8 or v2-8."
        )
    _check_buckets(job, "the job")


def _check_buckets(job: Job, owner: str) -> None:
    run_dir, data_dir = job.work.run_dir, job.work.directories.get("data_dir")
    if "run_dir" in job.work.directories and not run_dir.startswith("gs://"):
        raise TfdistError(
            f"--run_dir={run_dir} is on a machine that {owner} deletes afterwards. Give a "
            "directory in a bucket, as in --run_dir=gs://BUCKET/RUN."
        )
    if data_dir and not data_dir.startswith(("gs://", "/gcs/")):
        raise TfdistError(
            f"--data_dir={data_dir} is not on the job's machines. Copy it to a bucket and give "
            "--data_dir=gs://BUCKET/DATA."
        )


def _check_kubernetes(job: Job) -> None:
    _check_image(job, "REGISTRY/tfdist")
    _check_accelerator(
        job, r"([A-Za-z0-9][-.A-Za-z0-9]*/)?[A-Za-z0-9][-_.A-Za-z0-9]*", "amd.com/gpu"
    )
    for flag, path in job.work.directories.items():
        if path and "://" not in path and not path.startswith(f"{CONTAINER_STORAGE}/"):
            raise TfdistError(
                f"--{flag}={path} is inside a pod, where other pods cannot see it. Give a path in "
                f"a bucket, or below {CONTAINER_STORAGE}, where the shared volume is, as in "
                f"--{flag}={CONTAINER_STORAGE}/{path.strip('/')}."
            )


def _check_slurm(job: Job) -> None:
    _check_accelerator(job, r"[-_.:A-Za-z0-9]*", "a100")
    if job.image:
        raise TfdistError(
            f"--image={job.image}: the Slurm script does not use a container, but the environment "
            "that it is submitted from. Leave --image out."
        )


def _check_image(job: Job, example: str) -> None:
    if not job.image:
        raise TfdistError(
            f"--target={job.target} needs --image, a container image with tfdist. Build one with "
            f"the Dockerfile, push it, and give --image={example}."
        )


_CHECKS = {
    "vertex": _check_vertex,
    "tpu_vm": _check_tpu_vm,
    "kubernetes": _check_kubernetes,
    "slurm": _check_slurm,
}


def make_work(arguments: Sequence[str]) -> Work:
    """Returns the work in flags of `tfdist.train`, or in flags of `tfdist.run` and a script."""
    flags, script = split_command(ScriptOptions, arguments)
    if script and script[0].endswith(".py"):
        return _make_script(expand_flag_files(flags), script)
    arguments = expand_flag_files(arguments)
    options = parse_flags(TrainOptions, arguments, runs_here=False)
    options.check()
    return Work(
        command=("python", "-m", "tfdist.train"),
        arguments=tuple(arguments),
        strategy=options.strategy.strategy,
        tpu=getattr(options.strategy, "tpu", ""),
        run_dir=options.run.run_dir,
        directories={"run_dir": options.run.run_dir, **options.task.list_directories()},
        grace_period_s=options.run.grace_period_s,
        finds_batch_size=options.training.global_batch_size == AUTO_BATCH_SIZE,
    )


def _make_script(flags: Sequence[str], script: Sequence[str]) -> Work:
    options = parse_flags(ScriptOptions, flags, runs_here=False)
    for name in ("workers", "ps", "max_restarts", "log_dir"):
        if getattr(options.run, name) != getattr(ScriptOptions().run, name):
            raise TfdistError(
                f"--{name} belongs before `--`: the job starts the processes, not tfdist.run."
            )
    return Work(
        command=("python", "-m", "tfdist.run"),
        arguments=(*flags, *script),
        strategy=options.strategy.strategy,
        tpu=getattr(options.strategy, "tpu", ""),
    )
