"""Runs a cluster of processes on this machine, or one task of a cluster of several machines."""

import dataclasses
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.cli.arguments import find_flag
from tfdist.cluster import LAUNCH_DIR, ClusterConfig, read_environment
from tfdist.errors import TfdistError, make_unknown_name_error
from tfdist.launch.logs import Logs
from tfdist.launch.machine import without_gpus_of
from tfdist.launch.places import ISOLATION, LocalCluster, OneTask
from tfdist.launch.report import report_failure, report_restart, say
from tfdist.launch.restarts import Restarts
from tfdist.launch.results import ClusterResult, TaskResult
from tfdist.launch.stalls import StallWatch
from tfdist.launch.supervise import Outcome, Supervisor
from tfdist.launch.tasks import make_configs
from tfdist.strategies.registry import STRATEGIES, validate_cluster

# Longer than a short outage of a file server, during which none of a task's threads run either.
STALL_TIMEOUT_S = 120.0

_MAX_STARTS_FOR_A_PORT = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """How the tasks of a cluster run, on this machine or on several.

    Attributes:
      train_flags: the flags of the command.
      run_dir: the directory for logs/; the flags' --run_dir by default. A temporary directory is
        used if there is none or it is in a bucket.
      command: the command that every process runs; `python -m tfdist.train` by default.
      timeout_s: seconds until all tasks are ended.
      grace_s: seconds that tasks may take to end after SIGINT or SIGTERM before SIGKILL.
      max_restarts: the number of restarts, over all failures; bad input, Ctrl-C and SIGTERM cause
        none.
      stall_timeout_s: seconds that a task may hang before it is killed: none of its threads runs,
        or, if a value is given, the next sign of life of its trainer does not come; 0 for no limit.
        By default 120 s without a running thread, or no limit with a `command`, which may sleep.
      stream: whether to show the chief's output and what failed.
      environ: the tasks' environment; this process's own by default.

    Raises:
      TfdistError: a value is invalid.
    """

    train_flags: Sequence[str] = ()
    run_dir: str | os.PathLike[str] | None = None
    command: Sequence[str] | None = None
    timeout_s: float | None = None
    grace_s: float = 30.0
    max_restarts: int = 0
    stall_timeout_s: float | None = None
    stream: bool = True
    environ: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise TfdistError(
                f"--timeout_s={self.timeout_s:g} is not positive. Use more than 0 seconds."
            )
        if not self.grace_s >= 0:
            raise TfdistError(f"--grace_s={self.grace_s:g} is negative. Use 0 seconds or more.")
        if self.max_restarts < 0:
            raise TfdistError(f"--max_restarts={self.max_restarts} is negative. Use 0 or more.")
        if self.stall_timeout_s and not Path("/proc").exists():
            raise TfdistError(
                "--stall_timeout_s reads /proc, which this system does not have. Leave it out."
            )
        if self.stall_timeout_s is not None and not self.stall_timeout_s >= 0:
            raise TfdistError(
                f"--stall_timeout_s={self.stall_timeout_s:g} is negative. Use 0 to turn it off."
            )

    @property
    def strategy(self) -> str:
        """The strategy that the flags name, or "" if they name none."""
        return find_flag(self.train_flags, "strategy") or ""

    @property
    def argv(self) -> list[str]:
        """The command line that every task runs."""
        return [*(self.command or [sys.executable, "-m", "tfdist.train"]), *self.train_flags]

    @property
    def hang_timeout_s(self) -> float:
        """Seconds that a task may hang before it is killed; 0 for no limit."""
        if self.stall_timeout_s is not None:
            return self.stall_timeout_s
        return 0.0 if self.command else STALL_TIMEOUT_S

    def make_logs(self) -> Logs:
        """Creates the directory of the logs and returns them."""
        run_dir = self.run_dir or find_flag(self.train_flags, "run_dir")
        return Logs(os.path.expanduser(run_dir) if run_dir else None)

    def make_environment(self, logs: Logs) -> dict[str, str]:
        """Returns the part of the environment that all tasks share."""
        environ = read_environment() if self.environ is None else self.environ
        return {**environ, LAUNCH_DIR: str(logs.directory)}

    def make_stall_watch(
        self, logs: Logs, tasks: Sequence[str], *, is_whole: bool
    ) -> StallWatch | None:
        """Returns a watch over the tasks' steps, which kills only if the user gives a time."""
        if self.stall_timeout_s == 0 or not Path("/proc").exists():
            return None
        timeout_s = self.stall_timeout_s or STALL_TIMEOUT_S
        kills = self.stall_timeout_s is not None
        return StallWatch(logs, tasks, timeout_s=timeout_s, is_whole=is_whole, kills=kills)

    def find_time_left(self, began: float) -> float | None:
        """Returns the seconds until the timeout, or None without one."""
        if self.timeout_s is None:
            return None
        return max(0.0, self.timeout_s - (time.monotonic() - began))


def run_local_cluster(
    *,
    workers: int,
    ps: int = 0,
    chief: bool = False,
    evaluator: bool = False,
    isolate: str = "auto",
    min_workers: int | None = None,
    **settings: Any,
) -> ClusterResult:
    """Runs a cluster of processes on this machine until it is done, then ends all of them.

    Every process gets TF_CONFIG, its share of the cores (if there is at least one per task), as
    many threads (TF_NUM_INTRAOP_THREADS, TF_NUM_INTEROP_THREADS, OMP_NUM_THREADS, unless they are
    set), and its share of the GPUs (CUDA_VISIBLE_DEVICES). This process's environment and signal
    handlers stay as they are.

    The cluster is done when the chief and the workers are; with parameter servers, when the chief
    is. Tasks that still run then are ended. All tasks are also ended when one of them fails, and
    on KeyboardInterrupt, which is first passed on as SIGINT.

    After a failure that may not recur, all tasks are restarted, up to `max_restarts` times. A
    worker of parameter servers is restarted alone while the others keep training. A worker that
    fails three times in a row without a new step in between is left out if `min_workers` remain.

    TensorFlow's servers require no password and listen on every network interface. Where the
    kernel allows it, the tasks therefore get their own network, with only a loopback interface.
    Tasks that download something then need `isolate="never"`.

    Without such a network, each task's port is held by a socket that is bound with SO_REUSEADDR
    and never listens: no other process is assigned the port, but the task can listen on it, because
    its server also sets SO_REUSEADDR, as gRPC does.

    Args:
      ps: the number of parameter servers; they add a chief.
      chief: whether to add a chief; --strategy=parameter_server among the flags adds one too.
      evaluator: whether to add an evaluator, which has no address in the cluster; only for a
        `command` that has one, as tfdist.train has none.
      isolate: "auto", "always" (fails if isolation is not possible) or "never".
      min_workers: the fewest workers to continue with; by default all of them, or 1 with
        parameter servers.
      **settings: see `tfdist.launch.TaskSettings`.

    Raises:
      TfdistError: an argument is invalid, tfdist.train is given an evaluator, or isolation is
        demanded but not possible.
    """
    launch = TaskSettings(**settings)
    if evaluator and launch.command is None:
        raise TfdistError(
            "--evaluator: tfdist.train has no evaluator, because the workers evaluate the "
            "validation data after every epoch. Leave it out, or give a --command that has one."
        )
    if isolate not in ISOLATION:
        raise make_unknown_name_error("--isolate", isolate, ISOLATION)
    named = STRATEGIES.get(launch.strategy)
    has_ps = ps > 0 or (named is not None and named.traits.has_servers)
    counts = {"chief": int(chief or has_ps), "worker": workers, "ps": ps}
    if min_workers is None:
        min_workers = 1 if has_ps else workers
    _check_counts(counts, min_workers)
    # Refuse all that can be refused before anything is started or written.
    validate_cluster(make_configs(counts, range(1, sum(counts.values()) + 1))[0], launch.strategy)
    cluster = LocalCluster(counts, evaluator=evaluator, isolate=isolate)
    return _run(launch, cluster, workers=workers, min_workers=min_workers)


def run_task(config: ClusterConfig, **settings: Any) -> ClusterResult:
    """Runs one task of a cluster of several machines in the foreground until it is done.

    When a task fails, the tasks on the other machines fail too; each machine's launcher restarts
    its own task, and the tasks wait for one another.

    Args:
      **settings: see `tfdist.launch.TaskSettings`.

    Raises:
      TfdistError: a setting is invalid, or the cluster does not suit the strategy.
    """
    launch = TaskSettings(**settings)
    # Another program may have what tfdist.train lacks, such as an evaluator.
    validate_cluster(config, launch.strategy or ("auto" if launch.command is None else ""))
    return _run(launch, OneTask(config), workers=1, min_workers=1)


def _run(
    launch: TaskSettings, cluster: LocalCluster | OneTask, *, workers: int, min_workers: int
) -> ClusterResult:
    """Runs a cluster, and restarts it after a failure that may not recur."""
    began = time.monotonic()
    logs: Logs | None = None
    starts_for_a_port = 1
    while True:
        with cluster.agent() as agent:
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
            with cluster.place(agent, logs, environ, stream=launch.stream) as (configs, places):
                names = [config.task_name for config in configs]
                supervisor = Supervisor(
                    agent,
                    configs,
                    places,
                    launch.argv,
                    logs,
                    restarts,
                    stall_timeout_s=launch.hang_timeout_s,
                    stalls=launch.make_stall_watch(logs, names, is_whole=cluster.is_whole),
                    stream=launch.stream,
                )
                outcome = supervisor.run(
                    grace_s=launch.grace_s, timeout_s=launch.find_time_left(began)
                )
        paths = {config.task_name: logs.path(config.task_name) for config in configs}
        seconds = time.monotonic() - began
        result = _make_result(outcome, paths, agent.isolated, seconds, restarts.count)
        if _port_was_taken(result, logs) and starts_for_a_port < _MAX_STARTS_FOR_A_PORT:
            starts_for_a_port += 1
            say("another process took a port. Starting again on other ports.")
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
    outcome: Outcome, paths: Mapping[str, Path], isolated: bool, seconds: float, restarts: int
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
