"""Start a cluster of processes on this machine, or join one of several machines by hand.

    python -m tfdist.launch --workers=2 -- --strategy=multi_worker_mirrored --run_dir=runs/demo
    python -m tfdist.launch --workers=2 --ps=1 -- --strategy=parameter_server --run_dir=runs/demo
    python -m tfdist.launch --hosts=a:2222,b:2222 --task=worker:0 -- --strategy=...
    python -m tfdist.launch --check --hosts=a:2222,b:2222 --task=worker:0

What follows `--` are the flags of tfdist.train. The chief's output is shown as it comes; each
task's is in <run_dir>/logs. When a task fails, it is named, its last lines are shown, and the
others are ended.
"""

import argparse
import contextlib
import dataclasses
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tfdist._keeper_client import KeeperProcess, keeper_process
from tfdist._logs import Logs, Output, last_lines
from tfdist._machine import divide_cores, divide_gpus, find_gpus
from tfdist.cluster import (
    ClusterConfig,
    parse_host_list,
    parse_hosts,
    read_environment,
    resolve_cluster,
    validate_cluster,
)
from tfdist.errors import TfdistError, make_unknown_name_error

ISOLATION = ("auto", "always", "never")

_FIRST_ISOLATED_PORT = 2222
_MAX_STARTS = 3
_POLL_S = 0.05
_NO_NETWORK = ("name resolution", "Name or service not known", "Network is unreachable")


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """How one task ended.

    Attributes:
      name: role and index, as in "worker-0".
      status: the exit status; minus the signal's number if a signal ended it; None if unknown.
      ended: whether the launcher ended it, because another had failed or the cluster was done.
      log: the file that holds its output.
    """

    name: str
    status: int | None
    ended: bool
    log: Path


@dataclasses.dataclass(frozen=True)
class ClusterResult:
    """How a cluster ended.

    Attributes:
      tasks: one result a task.
      first_failed: the name of the task that failed first, None if none did.
      timed_out: whether the time was up.
      isolated: whether the cluster had a network of its own.
      seconds: how long it ran.
    """

    tasks: tuple[TaskResult, ...]
    first_failed: str | None
    timed_out: bool
    isolated: bool
    seconds: float

    @property
    def status(self) -> int:
        """The launcher's exit status: that of the task that failed first, 0 if all went well."""
        statuses = {task.name: task.status for task in self.tasks}
        if self.first_failed is None:
            return 1 if self.timed_out else 0
        status = statuses[self.first_failed] or 1
        return status if status > 0 else 128 - status  # as a shell says it


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
    grace_s: float = 20.0,
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
      evaluator: whether to add an evaluator, without an address in the cluster.
      train_flags: the flags of the command.
      run_dir: where logs/ goes; the flags' --run_dir by default. A temporary directory if there
        is none or if it is a bucket.
      command: what every process runs; `python -m tfdist.train` by default.
      isolate: "auto", "always" (refuse to start without) or "never".
      timeout_s: after how long all tasks are ended.
      grace_s: how long tasks may take to end after SIGINT or SIGTERM before SIGKILL.
      stream: whether to show the chief's output and what failed.
      environ: the tasks' environment; this process's by default.

    Raises:
      TfdistError: a bad argument, or no isolation where it is demanded.
    """
    _check_arguments(isolate=isolate, timeout_s=timeout_s, grace_s=grace_s)
    strategy = _find_flag(train_flags, "strategy") or ""
    chief = chief or ps > 0 or strategy == "parameter_server"
    if workers < 1:
        raise TfdistError(
            f"--workers={workers}: a cluster needs a worker. Use --workers=1 or more."
        )
    if ps < 0:
        raise TfdistError(f"--ps={ps}: the number of parameter servers is negative. Use 0 or more.")
    counts = {"chief": int(chief), "worker": workers, "ps": ps}
    num_ports = sum(counts.values())
    # Everything that can be refused is refused before anything is started or written.
    validate_cluster(_make_configs(counts, False, range(1, num_ports + 1))[0], strategy)
    environ = dict(read_environment() if environ is None else environ)
    logs = None
    for start in range(1, _MAX_STARTS + 1):
        with contextlib.ExitStack() as stack:
            keeper = stack.enter_context(keeper_process(isolate))
            if isolate == "always" and not keeper.isolated:
                raise TfdistError(
                    f"--isolate=always: no network of its own for the cluster ({keeper.problem}). "
                    "Use --isolate=auto behind a firewall, or allow network namespaces."
                )
            logs = logs or Logs(run_dir or _find_flag(train_flags, "run_dir"))
            ports: Sequence[int]
            if keeper.isolated:
                ports = range(_FIRST_ISOLATED_PORT, _FIRST_ISOLATED_PORT + num_ports)
            else:
                ports = stack.enter_context(_hold_ports(num_ports))
            configs = _make_configs(counts, evaluator, ports)
            environments = _divide_machine(configs, environ)
            _announce(configs, keeper, logs, isolate=isolate, stream=stream)
            result = _run_tasks(
                keeper,
                configs,
                environments,
                _make_command(command, train_flags),
                logs,
                timeout_s=timeout_s,
                grace_s=grace_s,
                stream=stream,
            )
        if start == _MAX_STARTS or not _port_was_taken(result, logs):
            break
        _say("a port was taken by another process. Starting again on other ports.")
    assert logs is not None
    _report_failure(result, logs, stream=stream, timeout_s=timeout_s)
    return result


def run_task(
    config: ClusterConfig,
    *,
    train_flags: Sequence[str] = (),
    run_dir: str | os.PathLike[str] | None = None,
    command: Sequence[str] | None = None,
    timeout_s: float | None = None,
    grace_s: float = 20.0,
    stream: bool = True,
    environ: Mapping[str, str] | None = None,
) -> ClusterResult:
    """Runs one task of a cluster of several machines in the foreground, and ends it.

    The arguments are those of `run_local_cluster`.

    Raises:
      TfdistError: a bad argument, or a cluster that does not suit the strategy.
    """
    _check_arguments(timeout_s=timeout_s, grace_s=grace_s)
    validate_cluster(config, _find_flag(train_flags, "strategy") or "")
    logs = Logs(run_dir or _find_flag(train_flags, "run_dir"))
    environment = dict(read_environment() if environ is None else environ)
    environment |= {"TF_CONFIG": config.to_tf_config_json(), "PYTHONUNBUFFERED": "1"}
    _add_package_path(environment)
    with keeper_process("never") as keeper:
        result = _run_tasks(
            keeper,
            [config],
            [(environment, None)],
            _make_command(command, train_flags),
            logs,
            timeout_s=timeout_s,
            grace_s=grace_s,
            stream=stream,
        )
    _report_failure(result, logs, stream=stream, timeout_s=timeout_s)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    try:
        with _signals_as_exceptions():
            return _run_command(list(sys.argv[1:] if argv is None else argv))
    except TfdistError as error:
        _say(str(error))
        return 2
    except KeyboardInterrupt as interrupt:
        return 128 + _signal_number(interrupt)


class _SignalError(KeyboardInterrupt):
    """A signal that asks the launcher to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise TfdistError(f"{message[:1].upper()}{message[1:]}. See --help.")


def _run_command(argv: Sequence[str]) -> int:
    split = argv.index("--") if "--" in argv else len(argv)
    train_flags = argv[split + 1 :]
    parser = _make_parser()
    flags, unknown = parser.parse_known_args(argv[:split])
    if unknown:
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            raise TfdistError(f"Unexpected argument {name!r}. tfdist.train's flags go after --.")
        valid = [option for action in parser._actions for option in action.option_strings]
        error = make_unknown_name_error("flag", name, (v for v in valid if v.startswith("--")))
        raise TfdistError(f"{error} tfdist.train's flags go after --.")
    if flags.check:
        from tfdist import probe

        tasks, own = _find_cluster_to_check(flags.hosts, flags.task)
        return probe.run_check(tasks, own, wait_s=flags.wait_s)
    command = shlex.split(flags.command) or None
    common = {
        "train_flags": train_flags,
        "command": command,
        "timeout_s": flags.timeout_s,
        "grace_s": flags.grace_s,
    }
    config = parse_hosts(flags.hosts, flags.task)
    if config is not None:
        if flags.workers is not None or flags.ps or flags.chief or flags.evaluator:
            raise TfdistError(
                "--hosts lists the whole cluster, so --workers, --ps, --chief and --evaluator do "
                "not go with it. Leave them out, or leave out --hosts and --task."
            )
        return run_task(config, **common).status
    if flags.workers is None:
        raise TfdistError(
            "Nothing to start. Give --workers=2 for a cluster on this machine, or --hosts and "
            "--task to join one of several machines."
        )
    return run_local_cluster(
        workers=flags.workers,
        ps=flags.ps,
        chief=flags.chief,
        evaluator=flags.evaluator,
        isolate=flags.isolate,
        **common,
    ).status


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="python -m tfdist.launch",
        usage="%(prog)s --workers=N [--ps=N] [flags] -- <flags of tfdist.train>\n"
        "       %(prog)s --hosts=a:p,b:p --task=role:index [flags] -- <flags of tfdist.train>\n"
        "       %(prog)s --check [--hosts=a:p,b:p] [--task=role:index]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    local = parser.add_argument_group("a cluster on this machine")
    local.add_argument("--workers", type=int, metavar="N", help="how many workers")
    local.add_argument(
        "--ps", type=int, default=0, metavar="N", help="how many parameter servers; adds a chief"
    )
    local.add_argument("--chief", action="store_true", help="add a chief to the workers")
    local.add_argument("--evaluator", action="store_true", help="add an evaluator")
    local.add_argument(
        "--isolate",
        default="auto",
        metavar="|".join(ISOLATION),
        help="whether the cluster gets a network of its own, loopback only, because TensorFlow's "
        "servers ask for no password and listen on every interface; auto: where the kernel allows "
        "it; never: needed by tasks that download (default: auto)",
    )
    hosts = parser.add_argument_group("a cluster of several machines")
    hosts.add_argument(
        "--hosts",
        default="",
        metavar="HOST:PORT,...",
        help="all tasks, the same text on every machine: workers, or any role after role=, as in "
        "chief=a:2222,worker=b:2222,c:2222,ps=d:2222",
    )
    hosts.add_argument(
        "--task", default="", metavar="ROLE:INDEX", help="the task to run on this machine"
    )
    hosts.add_argument(
        "--check",
        action="store_true",
        help="start nothing: print the cluster as understood (from --hosts, or the environment), "
        "resolve its names, probe its ports and say what is wrong; run it on all machines at once",
    )
    hosts.add_argument(
        "--wait_s",
        type=float,
        default=5.0,
        metavar="S",
        help="with --check: how long to wait for the other machines' answers (default: 5)",
    )
    both = parser.add_argument_group("both")
    both.add_argument(
        "--timeout_s", type=float, metavar="S", help="end all tasks after that many seconds"
    )
    both.add_argument(
        "--grace_s",
        type=float,
        default=20.0,
        metavar="S",
        help="how long tasks may take to stop, say to write a checkpoint, after Ctrl-C or SIGTERM "
        "before they are killed (default: 20)",
    )
    both.add_argument(
        "--command",
        default="",
        metavar="'PROGRAM ...'",
        help="what to run instead of python -m tfdist.train",
    )
    return parser


def _find_cluster_to_check(
    hosts: str, task: str
) -> tuple[ClusterConfig | None, tuple[str, int] | None]:
    """Returns the cluster and this process's task in it, if it is known."""
    if hosts and not task:
        tasks = parse_host_list(hosts)
        config = ClusterConfig(tasks, next(iter(tasks)), 0, "--hosts")
        validate_cluster(config, "")
        return config, None
    found = resolve_cluster(hosts=hosts, task=task)
    return found, (found.role, found.index) if found else None


def _check_arguments(
    *, timeout_s: float | None, grace_s: float, isolate: str = ISOLATION[0]
) -> None:
    if isolate not in ISOLATION:
        raise make_unknown_name_error("--isolate", isolate, ISOLATION)
    if timeout_s is not None and not timeout_s > 0:
        raise TfdistError(f"--timeout_s={timeout_s:g} is not positive. Use more than 0 seconds.")
    if not grace_s >= 0:
        raise TfdistError(f"--grace_s={grace_s:g} is negative. Use 0 seconds or more.")


def _find_flag(flags: Sequence[str], name: str) -> str | None:
    """Returns a flag's value among absl flags, the last one as absl does; None if not there."""
    found = None
    for position, flag in enumerate(flags):
        if flag == "--":
            break
        match = re.match(rf"--?{name}(?:=(.*))?$", flag, re.DOTALL)
        if match and match[1] is not None:
            found = match[1]
        elif match and position + 1 < len(flags):
            found = flags[position + 1]
    return found


def _make_command(command: Sequence[str] | None, train_flags: Sequence[str]) -> list[str]:
    return [*(command or [sys.executable, "-m", "tfdist.train"]), *train_flags]


def _make_configs(
    counts: Mapping[str, int], evaluator: bool, ports: Sequence[int]
) -> list[ClusterConfig]:
    """Returns one configuration a task; the chief, or worker 0, comes first."""
    addresses = iter([f"127.0.0.1:{port}" for port in ports])
    tasks = {role: tuple(next(addresses) for _ in range(n)) for role, n in counts.items()}
    names = [(role, index) for role, number in counts.items() for index in range(number)]
    if evaluator:
        names.append(("evaluator", 0))
    return [ClusterConfig(tasks, role, index, "tfdist.launch") for role, index in names]


@contextlib.contextmanager
def _hold_ports(number: int) -> Iterator[list[int]]:
    """Yields free ports that are given to no other process as long as the context lasts.

    Linux lets a second socket bind and listen if both have SO_REUSEADDR and the first does not
    listen, but hands a bound port out to nobody, for listening or for connecting.
    """
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(number):
            try:
                holder = stack.enter_context(socket.socket(socket.AF_INET6))
                holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind(("::", 0))
            except OSError:  # no IPv6 here
                holder = stack.enter_context(socket.socket(socket.AF_INET))
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind(("0.0.0.0", 0))
            ports.append(holder.getsockname()[1])
        yield ports


_Environment = tuple[dict[str, str], list[int] | None]


def _divide_machine(
    configs: Sequence[ClusterConfig], environ: Mapping[str, str]
) -> list[_Environment]:
    """Returns each task's environment and cores."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores = divide_cores(usable, len(configs))
    computing = [config for config in configs if _computes(config)]
    gpus = find_gpus(environ)
    shares = divide_gpus(gpus, len(computing))
    if 0 < len(gpus) < len(computing):
        _say(
            f"{len(computing)} workers share {len(gpus)} GPU(s). NCCL wants one GPU a worker: use "
            "--collective=ring, or fewer workers."
        )
    environments: list[_Environment] = []
    for config, own_cores in zip(configs, cores, strict=True):
        environment = dict(environ)
        threads = max(1, len(own_cores))
        defaults = {
            "TF_NUM_INTRAOP_THREADS": str(threads),
            # One thread for whole operations would let one that waits for a peer stop all others.
            "TF_NUM_INTEROP_THREADS": str(max(2, threads)),
            "OMP_NUM_THREADS": str(threads),
        }
        if gpus:
            share = shares[computing.index(config)] if config in computing else ["-1"]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(share)
            if len(gpus) < len(computing):
                defaults["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        environment = defaults | environment
        # A proxy for the outside world must not get what goes over the loopback.
        without = environment.get("no_grpc_proxy") or environment.get("no_proxy")
        environment["no_grpc_proxy"] = f"{without},127.0.0.1" if without else "127.0.0.1"
        environment["TF_CONFIG"] = config.to_tf_config_json()
        environment["PYTHONUNBUFFERED"] = "1"
        _add_package_path(environment)
        environments.append((environment, own_cores or None))
    return environments


def _computes(config: ClusterConfig) -> bool:
    """Whether a task trains: not the coordinator of parameter servers, nor those."""
    return config.role == "worker" or (config.role == "chief" and not config.num_ps)


def _add_package_path(environment: dict[str, str]) -> None:
    """Lets the tasks find tfdist where it is used from its sources, without being installed."""
    sources = Path(__file__).resolve().parent.parent
    if not {"site-packages", "dist-packages"} & set(sources.parts):
        paths = [path for path in (environment.get("PYTHONPATH"), str(sources)) if path]
        environment["PYTHONPATH"] = os.pathsep.join(paths)


def _run_tasks(
    keeper: KeeperProcess,
    configs: Sequence[ClusterConfig],
    environments: Sequence[_Environment],
    argv: Sequence[str],
    logs: Logs,
    *,
    timeout_s: float | None,
    grace_s: float,
    stream: bool,
) -> ClusterResult:
    """Runs the tasks until the last is gone; a KeyboardInterrupt is raised after that."""
    began = time.monotonic()
    paths = {config.task_name: logs.open(config.task_name) for config in configs}
    tasks = [
        {
            "name": config.task_name,
            "argv": list(argv),
            "env": environment,
            "cores": cores,
            "log": str(paths[config.task_name]),
            "essential": len(configs) == 1 or _is_essential(config),
        }
        for config, (environment, cores) in zip(configs, environments, strict=True)
    ]
    shown = logs.follow(paths[configs[0].task_name])
    output = Output(sys.stdout) if stream else None
    events: list[dict[str, Any]] = []
    stop: KeyboardInterrupt | None = None
    keeper.send(tasks=tasks, grace_s=grace_s, timeout_s=timeout_s)
    while not keeper.done:
        try:
            events += keeper.poll(_POLL_S)
            if output:
                output.write(next(shown))
        except KeyboardInterrupt as interrupt:
            if stop is None:
                keeper.send(signal=_signal_number(interrupt))
            else:
                keeper.send(kill=True)
            stop = stop or interrupt
    if output:
        output.write(next(shown), last=True)
    result = _make_result(events, paths, keeper.isolated, time.monotonic() - began)
    for event in events:
        if event["event"] == "killed":
            _say(f"{', '.join(event['tasks'])} did not stop in time and had to be killed.")
    if stop is not None:
        raise stop
    if not any(event["event"] == "done" for event in events):
        raise RuntimeError("tfdist's keeper process was killed; its tasks were killed with it")
    return result


def _is_essential(config: ClusterConfig) -> bool:
    """Whether the cluster is not done before this task is."""
    if config.num_ps:
        return config.role == "chief"
    return config.role in ("chief", "worker")


def _make_result(
    events: Sequence[Mapping[str, Any]],
    paths: Mapping[str, Path],
    isolated: bool,
    seconds: float,
) -> ClusterResult:
    exits = {event["task"]: event for event in events if event["event"] == "exited"}
    failed = [name for name, exit_ in exits.items() if exit_["status"] and not exit_["ended"]]
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
        first_failed=failed[0] if failed else None,
        timed_out=any(event["event"] == "timed_out" for event in events),
        isolated=isolated,
        seconds=seconds,
    )


def _port_was_taken(result: ClusterResult, logs: Logs) -> bool:
    if result.first_failed is None or result.isolated or result.seconds > 60:
        return False
    texts = (logs.read(task.log).lower() for task in result.tasks)
    return any(b"address already in use" in text for text in texts)


def _announce(
    configs: Sequence[ClusterConfig],
    keeper: KeeperProcess,
    logs: Logs,
    *,
    isolate: str,
    stream: bool,
) -> None:
    if stream:
        names = " ".join(config.task_name for config in configs)
        network = ", in a network of their own" if keeper.isolated else ""
        _say(f"{names}{network}; logs in {logs.directory}")
    if isolate == "auto" and not keeper.isolated:
        _say(
            f"no network of its own for the cluster ({keeper.problem}): TensorFlow's servers, "
            "which ask for no password, listen on every interface. Use a firewall."
        )


def _report_failure(
    result: ClusterResult, logs: Logs, *, stream: bool, timeout_s: float | None
) -> None:
    if stream and result.timed_out:
        _say(f"the time of {timeout_s:g} s was up: all tasks were ended. Logs in {logs.directory}")
    for task in result.tasks:
        if task.name != result.first_failed or task.status is None:
            continue
        lines = last_lines(logs.read(task.log))
        if task.status == 2:  # bad input costs one line, and leaves nothing
            seen = set(last_lines(logs.shown))
            lines = [line for line in lines if line not in seen]
            logs.remove_new()
        how = (
            f"was ended by {_signal_name(-task.status)}"
            if task.status < 0
            else f"exited with status {task.status}"
        )
        if stream:
            where = "" if task.status == 2 else f" Its last lines (all: {task.log}):"
            _say(f"{task.name} failed first: it {how}.{where}")
            for line in lines:
                print(f"[{task.name}] {line}", file=sys.stderr)
            sys.stderr.flush()
            if result.isolated and any(sign in line for sign in _NO_NETWORK for line in lines):
                _say(
                    "the cluster has a network of its own, without the outside. If the task needs "
                    "that, say for a download, use --isolate=never."
                )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _signal_number(interrupt: KeyboardInterrupt) -> int:
    return interrupt.number if isinstance(interrupt, _SignalError) else signal.SIGINT


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Raises `_SignalError` on SIGINT, SIGTERM and SIGHUP (unless nohup ignores that)."""

    def stop(number: int, _: Any) -> None:
        raise _SignalError(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(f"tfdist.launch: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
