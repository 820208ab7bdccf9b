"""Runs a cluster of processes on this machine, or one task of a cluster of several machines."""

import dataclasses
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.cli.arguments import find_flag
from tfdist.cluster import LAUNCH_DIR, ClusterConfig, read_environment
from tfdist.errors import TfdistError, make_unknown_name_error
from tfdist.launch.logs import Logs
from tfdist.launch.machine import without_gpus_of
from tfdist.launch.places import ISOLATION, LocalCluster, OneTask
from tfdist.launch.report import report_failure, report_restart, say
from tfdist.launch.restarts import Restarts
from tfdist.launch.results import ClusterResult, TaskResult
from tfdist.launch.supervise import Outcome, Supervisor
from tfdist.launch.tasks import make_configs
from tfdist.strategies.registry import STRATEGIES, validate_cluster

# Longer than a file server's short breaks, in which nothing of a task runs either.
STALL_TIMEOUT_S = 120.0

_MAX_STARTS_FOR_A_PORT = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Launch:
    """What a local cluster and a single task have in common; see `run_local_cluster`."""

    train_flags: Sequence[str]
    run_dir: str | os.PathLike[str] | None
    command: Sequence[str] | None
    timeout_s: float | None
    grace_s: float
    max_restarts: int
    stall_timeout_s: float | None
    stream: bool
    environ: Mapping[str, str] | None

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise TfdistError(
                f"--timeout_s={self.timeout_s:g} is not positive. Use more than 0 seconds."
            )
        if not self.grace_s >= 0:
            raise TfdistError(f"--grace_s={self.grace_s:g} is negative. Use 0 seconds or more.")
        if self.max_restarts < 0:
            raise TfdistError(f"--max_restarts={self.max_restarts} is negative. Use 0 or more.")
        if self.stall_timeout_s is not None and not self.stall_timeout_s >= 0:
            raise TfdistError(
                f"--stall_timeout_s={self.stall_timeout_s:g} is negative. Use 0 for never."
            )

    @property
    def strategy(self) -> str:
        """The strategy that the flags name, "" if they do not."""
        return find_flag(self.train_flags, "strategy") or ""

    @property
    def argv(self) -> list[str]:
        """What every task runs."""
        return [*(self.command or [sys.executable, "-m", "tfdist.train"]), *self.train_flags]

    @property
    def silence_s(self) -> float:
        """After how much silence a task is killed; 0 for never."""
        if self.stall_timeout_s is not None:
            return self.stall_timeout_s
        return 0.0 if self.command else STALL_TIMEOUT_S

    def make_logs(self) -> Logs:
        """Makes the directory of the logs."""
        run_dir = self.run_dir or find_flag(self.train_flags, "run_dir")
        return Logs(os.path.expanduser(run_dir) if run_dir else None)

    def make_environment(self, logs: Logs) -> dict[str, str]:
        """Returns the tasks' environment, but for what differs between them."""
        environ = read_environment() if self.environ is None else self.environ
        return {**environ, LAUNCH_DIR: str(logs.directory)}

    def find_time_left(self, began: float) -> float | None:
        """Returns the seconds until the time is up, None if there is no end."""
        if self.timeout_s is None:
            return None
        return max(0.0, self.timeout_s - (time.monotonic() - began))


def run_local_cluster(
    *,
    workers: int,
    ps: int = 0,
    chief: bool = False,
    evaluator: bool = False,
    train_flags: Sequence[str] = (),
    run_dir: str | os.PathLike[str] | None = None,
    command: Sequence[str] | None = None,
    isolate: str = "auto",
    timeout_s: float | None = None,
    grace_s: float = 30.0,
    max_restarts: int = 0,
    min_workers: int | None = None,
    stall_timeout_s: float | None = None,
    stream: bool = True,
    environ: Mapping[str, str] | None = None,
) -> ClusterResult:
    """Runs a cluster of processes on this machine until it is done, and ends all of them.

    Every process gets TF_CONFIG, its share of the cores (where there is at least one a task) and as
    many threads (TF_NUM_INTRAOP_THREADS, TF_NUM_INTEROP_THREADS, OMP_NUM_THREADS, unless they are
    set), and its share of the GPUs (CUDA_VISIBLE_DEVICES). This process's environment and signal
    handlers stay as they are.

    The cluster is done when the chief and the workers are; with parameter servers, when the chief
    is. What still runs then is ended. So are all when one task fails, and on KeyboardInterrupt,
    which is passed on as SIGINT first.

    After a failure that may go away all tasks are started again, `max_restarts` times; a worker
    of parameter servers alone is, and the others train on meanwhile. A worker that fails
    three times in a row, with no new step in between, is left out if `min_workers` are left.

    TensorFlow's servers ask for no password and listen on every network interface. So the tasks
    get a network of their own, with nothing but a loopback, where the kernel allows it. Tasks that
    download something then need `isolate="never"`.

    Without it, each task's port is held by a socket that is bound with SO_REUSEADDR and never
    listens: no other process is given the port, and the task, whose server sets SO_REUSEADDR as
    gRPC's does, can listen on it.

    Args:
      workers: how many workers.
      ps: how many parameter servers; with any there is a chief, too.
      chief: whether to add a chief; so does --strategy=parameter_server among the flags.
      evaluator: whether to add an evaluator, without an address in the cluster, to a `command`
        that has one: tfdist.train has none.
      train_flags: the flags of the command.
      run_dir: where logs/ goes; the flags' --run_dir by default. A temporary directory if there
        is none or if it is a bucket.
      command: what every process runs; `python -m tfdist.train` by default.
      isolate: "auto", "always" (refuse to start without) or "never".
      timeout_s: after how long all tasks are ended.
      grace_s: how long tasks may take to end after SIGINT or SIGTERM before SIGKILL.
      max_restarts: how often tasks are started again, all failures together: not after bad
        input, Ctrl-C or SIGTERM.
      min_workers: with fewer the cluster is ended; by default all of them, 1 where there are
        parameter servers.
      stall_timeout_s: after how much silence, none of its threads having run, a task is killed;
        0 for never. By default 120 s, and never with a `command`, which may well sleep.
      stream: whether to show the chief's output and what failed.
      environ: the tasks' environment; this process's by default.

    Raises:
      TfdistError: a bad argument, an evaluator of tfdist.train, or no isolation where it is
        demanded.
    """
    launch = _Launch(
        train_flags=train_flags,
        run_dir=run_dir,
        command=command,
        timeout_s=timeout_s,
        grace_s=grace_s,
        max_restarts=max_restarts,
        stall_timeout_s=stall_timeout_s,
        stream=stream,
        environ=environ,
    )
    if evaluator and command is None:
        raise TfdistError(
            "--evaluator: tfdist.train has no evaluator, for the workers evaluate the validation "
            "data after every epoch. Leave it out, or give --command, a program that has one."
        )
    if isolate not in ISOLATION:
        raise make_unknown_name_error("--isolate", isolate, ISOLATION)
    named = STRATEGIES.get(launch.strategy)
    has_ps = ps > 0 or (named is not None and named.traits.has_servers)
    counts = {"chief": int(chief or has_ps), "worker": workers, "ps": ps}
    if min_workers is None:
        min_workers = 1 if has_ps else workers
    _check_counts(counts, min_workers)
    # Everything that can be refused is refused before anything is started or written.
    validate_cluster(make_configs(counts, range(1, sum(counts.values()) + 1))[0], launch.strategy)
    cluster = LocalCluster(counts, evaluator=evaluator, isolate=isolate)
    return _run(launch, cluster, workers=workers, min_workers=min_workers)


def run_task(
    config: ClusterConfig,
    *,
    train_flags: Sequence[str] = (),
    run_dir: str | os.PathLike[str] | None = None,
    command: Sequence[str] | None = None,
    timeout_s: float | None = None,
    grace_s: float = 30.0,
    max_restarts: int = 0,
    stall_timeout_s: float | None = None,
    stream: bool = True,
    environ: Mapping[str, str] | None = None,
) -> ClusterResult:
    """Runs one task of a cluster of several machines in the foreground, and ends it.

    The arguments are those of `run_local_cluster`. When a task fails, those of the other machines
    fail with it; each machine's launcher starts its own again, and they wait for one another.

    Raises:
      TfdistError: a bad argument, or a cluster that does not suit the strategy.
    """
    launch = _Launch(
        train_flags=train_flags,
        run_dir=run_dir,
        command=command,
        timeout_s=timeout_s,
        grace_s=grace_s,
        max_restarts=max_restarts,
        stall_timeout_s=stall_timeout_s,
        stream=stream,
        environ=environ,
    )
    # A program of one's own may have what tfdist.train has not, such as an evaluator.
    validate_cluster(config, launch.strategy or ("auto" if command is None else ""))
    return _run(launch, OneTask(config), workers=1, min_workers=1)


def _run(
    launch: _Launch, cluster: LocalCluster | OneTask, *, workers: int, min_workers: int
) -> ClusterResult:
    """Runs a cluster, again after a failure that may go away."""
    began = time.monotonic()
    logs: Logs | None = None
    starts_for_a_port = 1
    while True:
        with cluster.keeper() as keeper:
            if logs is None:
                logs = launch.make_logs()
                environ = launch.make_environment(logs)
                restarts = Restarts(
                    max_restarts=launch.max_restarts,
                    workers=workers,
                    min_workers=min_workers,
                    reports_steps=launch.command is None,
                    directory=logs.directory,
                )
            with cluster.place(keeper, logs, environ, stream=launch.stream) as (configs, places):
                supervisor = Supervisor(
                    keeper,
                    configs,
                    places,
                    launch.argv,
                    logs,
                    restarts,
                    stall_timeout_s=launch.silence_s,
                    stream=launch.stream,
                )
                outcome = supervisor.run(
                    grace_s=launch.grace_s, timeout_s=launch.find_time_left(began)
                )
        paths = {config.task_name: logs.path(config.task_name) for config in configs}
        seconds = time.monotonic() - began
        result = _make_result(outcome, paths, keeper.isolated, seconds, restarts.count)
        if _port_was_taken(result, logs) and starts_for_a_port < _MAX_STARTS_FOR_A_PORT:
            starts_for_a_port += 1
            say("a port was taken by another process. Starting again on other ports.")
            continue
        if outcome.failure is None or not restarts.restart(outcome.failure):
            break
        report_restart(result, logs, restarts, stream=launch.stream)
        if restarts.dropped:
            environ = without_gpus_of(restarts.dropped, configs, places, environ)
        cluster.resize(restarts.workers)
    report_failure(result, logs, timeout_s=launch.timeout_s, stream=launch.stream)
    if result.status == 2:
        logs.remove_new()
    return result


def _make_result(
    outcome: Outcome,
    paths: Mapping[str, Path],
    isolated: bool,
    seconds: float,
    restarts: int,
) -> ClusterResult:
    exits, failure = outcome.exits, outcome.failure
    return ClusterResult(
        tasks=tuple(
            TaskResult(
                name=name,
                status=exits[name]["status"] if name in exits else None,
                ended=exits[name]["ended"] if name in exits else True,
                log=path,
            )
            for name, path in paths.items()
        ),
        first_failed=failure.task if failure else None,
        cause=failure.cause if failure else None,
        timed_out=outcome.timed_out,
        isolated=isolated,
        seconds=seconds,
        restarts=restarts,
    )


def _port_was_taken(result: ClusterResult, logs: Logs) -> bool:
    if result.first_failed is None or result.isolated or result.seconds > 60:
        return False
    texts = (logs.read(task.log).lower() for task in result.tasks)
    return any(b"address already in use" in text for text in texts)


def _check_counts(counts: Mapping[str, int], min_workers: int) -> None:
    if counts["worker"] < 1:
        raise TfdistError(
            f"--workers={counts['worker']}: a cluster needs a worker. Use --workers=1 or more."
        )
    if counts["ps"] < 0:
        raise TfdistError(
            f"--ps={counts['ps']}: the number of parameter servers is negative. Use 0 or more."
        )
    if not 1 <= min_workers <= counts["worker"]:
        raise TfdistError(
            f"--min_workers={min_workers} is not between 1 and --workers={counts['worker']}. Give "
            "the fewest workers that are worth training with."
        )
