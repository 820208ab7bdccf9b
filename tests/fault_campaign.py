"""Kills a run's processes at random moments, and looks whether the result is the same.

Every run goes through `tfdist.launch`, that of a single process too. A fault is a SIGKILL to one of
its tasks or, now and then, to the launcher, which is then started again by the same command. Some
tasks are stopped (SIGSTOP) instead, for the launcher to find out.
"""

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

HANG_S = 60.0
# A cluster on two busy cores takes this long from its start to its first step.
_START_S = 12.0
_POLL_S = 0.002
_STALL_TIMEOUT_S = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """A strategy, and how its runs are started.

    Attributes:
      strategy: the flag.
      launch: the launcher's flags.
      train: the command's flags besides the common ones.
      is_exact: whether a run must end with its twin's weights, whatever it met; else with the
        exact number of updates.
      share: how many of a campaign's kills are its, in proportion.
      twin: the strategy of the undisturbed run, in one process, if it is another one.
      lost: workers of each run that are lost for good: killed whenever they start again.
    """

    strategy: str
    launch: tuple[str, ...] = ("--workers=1",)
    train: tuple[str, ...] = ()
    is_exact: bool = True
    share: int = 10
    twin: str = ""
    lost: int = 0

    @property
    def name(self) -> str:
        """The strategy, and the placement or the number of logical replicas if there is one."""
        flags = ("--placement", "--logical_replicas")
        placed = [flag.partition("=")[2] for flag in self.train if flag.startswith(flags)]
        return "-".join([self.strategy, *placed, *(["lost"] if self.lost else [])])


CASES = (
    Case("one_device"),
    Case("mirrored", train=("--virtual_devices=2",)),
    Case("central_storage", train=("--virtual_devices=2",), share=8),
    Case("multi_worker_mirrored", ("--workers=2",)),
    Case(
        "multi_worker_mirrored",
        ("--workers=2",),
        ("--virtual_devices=2", "--placement=layers"),
        share=4,
    ),
    Case(
        "multi_worker_mirrored",
        ("--workers=3", "--min_workers=2"),
        ("--logical_replicas=4",),
        share=8,
        twin="one_device",
    ),
    Case(
        "multi_worker_mirrored",
        ("--workers=4", "--min_workers=2"),
        ("--logical_replicas=4",),
        share=4,
        twin="one_device",
        lost=2,
    ),
    Case("local_sgd", ("--workers=2",), ("--sync_every=2",), share=8),
    Case("parameter_server", ("--workers=2", "--ps=1"), is_exact=False, share=14),
)


@dataclasses.dataclass
class Findings:
    """What became of a case's faults.

    Attributes:
      faults: what was done, and when.
      survived: faults after which the run ended as it should.
      continue_s: seconds from a fault to the next step.
      lost_steps: steps done twice.
      problems: what went wrong, a line each.
    """

    faults: list[str] = dataclasses.field(default_factory=list)
    survived: int = 0
    continue_s: list[float] = dataclasses.field(default_factory=list)
    lost_steps: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def num_kills(self) -> int:
        """The faults that were kills."""
        return sum(fault.startswith("kill") for fault in self.faults)


class Run:
    """One run of a case, in a directory of its own.

    Args:
      case: the case.
      run_dir: where it goes.
      max_steps: steps of the run.
    """

    def __init__(self, case: Case, run_dir: Path, *, max_steps: int):
        self.run_dir = run_dir
        self._mark = f"TFDIST_FAULTS_{uuid.uuid4().hex}"
        self._argv = [
            *(sys.executable, "-m", "tfdist.launch", "--max_restarts=1000"),
            *(f"--stall_timeout_s={_STALL_TIMEOUT_S}", *case.launch, "--"),
            *(f"--strategy={case.strategy}", "--deterministic", *case.train),
            *("--dataset=shapes", "--image_size=32,32", "--base_filters=4", "--depth=2"),
            *("--train_examples=64", "--val_examples=8", "--global_batch_size=8"),
            *("--checkpoint_every=3", f"--max_steps={max_steps}", "--notensorboard", "--quiet"),
            f"--run_dir={run_dir}",
        ]
        self._launcher: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0

    def start(self) -> None:
        """Starts the launcher."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.started_at = time.monotonic()
        with open(self.run_dir.parent / f"{self.run_dir.name}.log", "ab") as log:
            self._launcher = subprocess.Popen(
                self._argv, env={**os.environ, self._mark: "1"}, stdout=log, stderr=log
            )

    def poll(self) -> int | None:
        """Returns the launcher's exit status, None while it runs."""
        assert self._launcher is not None
        return self._launcher.poll()

    def strike(self, rng: random.Random) -> str:
        """Kills or stops a task, or kills the launcher and starts it again.

        Returns:
          What was done, "" if there was nobody.
        """
        assert self._launcher is not None
        kind = rng.choices(("kill", "stop", "launcher"), (8, 1, 1))[0]
        tasks = self.find_tasks()
        if not tasks or self.poll() is not None:
            return ""
        if kind == "launcher":
            self._launcher.kill()
            self._launcher.wait()
            self.wait_for_end_of_all()
            self.start()
            return "kill launcher"
        name = rng.choice(sorted(tasks))
        with contextlib.suppress(ProcessLookupError):
            os.kill(tasks[name], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        self.started_at = time.monotonic()
        return f"{kind} {name}"

    def lose(self, name: str) -> bool:
        """Kills a worker whenever it starts again, until the launcher goes on without it.

        Returns:
          Whether it does; not if the run has ended before.
        """
        before = self._count_dropped()
        until = time.monotonic() + HANG_S
        while self.poll() is None and self._count_dropped() == before:
            if time.monotonic() > until:
                raise TimeoutError(f"{name} was not given up")
            with contextlib.suppress(KeyError, ProcessLookupError):
                os.kill(self.find_tasks()[name], signal.SIGKILL)
                until = time.monotonic() + HANG_S
            time.sleep(0.1)
        self.started_at = time.monotonic()
        return self._count_dropped() > before

    def _count_dropped(self) -> int:
        log = self.run_dir.parent / f"{self.run_dir.name}.log"
        return log.read_text(errors="replace").count("which failed repeatedly")

    def find_tasks(self) -> dict[str, int]:
        """Returns the processes that train or serve, by their tasks' names."""
        found = {}
        for pid, environment in self._find_processes().items():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"tfdist.train" in command and b"TF_CONFIG" in environment:
                    config = json.loads(environment[b"TF_CONFIG"])
                    found["{type}-{index}".format(**config["task"])] = pid
        return found

    def wait_for_end_of_all(self) -> None:
        """Waits until no process of the run is left.

        Raises:
          TimeoutError: one is, after ten seconds.
        """
        until = time.monotonic() + 10
        while left := self._find_processes():
            if time.monotonic() > until:
                raise TimeoutError(f"left behind: {sorted(left)}")
            time.sleep(0.05)

    def read_step(self) -> tuple[int, int]:
        """Returns the step reached, and when it was written (ns)."""
        path = self.run_dir / "logs" / "step"
        try:
            return int(path.read_text() or 0), path.stat().st_mtime_ns
        except (OSError, ValueError):
            return 0, 0

    def list_checkpoints(self) -> set[str]:
        """Returns the names of the checkpoints, begun or done."""
        return {path.name for path in (self.run_dir / "checkpoints").glob("step-*")}

    def read_summary(self) -> dict:
        """Returns the run's summary."""
        return json.loads((self.run_dir / "summary.json").read_text())

    def end(self) -> None:
        """Ends what is left after a test has failed."""
        for pid in self._find_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _find_processes(self) -> dict[int, dict[bytes, bytes]]:
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                entries = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                environment = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
                if self._mark.encode() in environment:
                    found[int(name)] = environment
        return found


def run_twin(case: Case, directory: Path, *, max_steps: int) -> dict:
    """Returns the summary of a run without faults."""
    if case.twin:
        case = dataclasses.replace(case, strategy=case.twin, launch=("--workers=1",))
    run = Run(case, directory / f"{case.name} twin", max_steps=max_steps)
    try:
        run.start()
        while run.poll() is None:
            time.sleep(0.1)
        if run.poll() != 0:
            raise RuntimeError(f"the run without faults failed: see {run.run_dir}.log")
        run.wait_for_end_of_all()
        return run.read_summary()
    finally:
        run.end()


def run_with_faults(
    case: Case,
    directory: Path,
    expected: dict,
    *,
    kills: int,
    max_steps: int,
    rng: random.Random,
) -> Findings:
    """Runs a case until it has been killed so often, over as many runs as that takes."""
    findings = Findings()
    number = 0
    while findings.num_kills < kills and not findings.problems:
        run = Run(case, directory / f"{case.name} {number}", max_steps=max_steps)
        before = len(findings.faults)
        try:
            run.start()
            for _ in range(case.lost):
                _lose_at_random(run, findings, rng=rng)
            if not case.lost:
                _strike_at_random(run, findings, kills=kills, rng=rng)
            _wait_for_end(run)
            run.wait_for_end_of_all()
            findings.problems += _check(case, run, expected)
        except TimeoutError as error:
            findings.problems.append(f"{run.run_dir}: {error}")
        finally:
            run.end()
        if not findings.problems:
            findings.survived += len(findings.faults) - before
            findings.lost_steps += run.read_summary()["lost_steps"]
        number += 1
    return findings


def _strike_at_random(run: Run, findings: Findings, *, kills: int, rng: random.Random) -> None:
    """Strikes until there were enough kills, then waits for its end."""
    while findings.num_kills < kills and run.poll() is None:
        moment = rng.choice(("start-up", "step", "checkpoint"))
        if moment == "start-up":
            _sleep(run, until=run.started_at + rng.uniform(0.2, _START_S))
        else:
            _wait_for_step(run, findings)
            _wait_for_more(run, steps=rng.randint(1, 10))
            if moment == "checkpoint":
                _wait_for_checkpoint(run)
            _sleep(run, until=time.monotonic() + rng.uniform(0, 0.03))
        if done := run.strike(rng):
            findings.faults.append(f"{done} at {moment}")
    if run.poll() is None and findings.faults:
        _wait_for_step(run, findings)


def _lose_at_random(run: Run, findings: Findings, *, rng: random.Random) -> None:
    """Loses a worker for good at a random step."""
    _wait_for_step(run, findings)
    _wait_for_more(run, steps=rng.randint(1, 10))
    if tasks := run.find_tasks():
        name = rng.choice(sorted(tasks))
        step = run.read_step()[0]
        if run.lose(name):
            findings.faults.append(f"kill {name} for good at step {step}")
            _wait_for_step(run, findings)


def _wait_for_end(run: Run) -> None:
    until = time.monotonic() + 2 * HANG_S
    while run.poll() is None:
        if time.monotonic() > until:
            raise TimeoutError(f"hangs {2 * HANG_S:g} s after the last fault")
        time.sleep(0.05)


def _wait_for_step(run: Run, findings: Findings) -> None:
    """Waits for a step done since the last start or fault, and notes how long it took."""
    since = time.time_ns() - int((time.monotonic() - run.started_at) * 1e9)
    while run.poll() is None:
        if run.read_step()[1] > since:
            if findings.faults:
                findings.continue_s.append(time.monotonic() - run.started_at)
            return
        if time.monotonic() - run.started_at > HANG_S:
            raise TimeoutError(f"no step for {HANG_S:g} s after {findings.faults[-1:]}")
        time.sleep(_POLL_S)


def _wait_for_more(run: Run, *, steps: int) -> None:
    first = run.read_step()[0]
    until = time.monotonic() + HANG_S
    while run.poll() is None and run.read_step()[0] < first + steps:
        if time.monotonic() > until:
            return  # the last steps of the run
        time.sleep(_POLL_S)


def _wait_for_checkpoint(run: Run) -> None:
    before = run.list_checkpoints()
    until = time.monotonic() + 5
    while run.poll() is None and time.monotonic() < until:
        if run.list_checkpoints() - before:
            return
        time.sleep(_POLL_S / 4)


def _sleep(run: Run, *, until: float) -> None:
    while run.poll() is None and time.monotonic() < until:
        time.sleep(_POLL_S)


def _check(case: Case, run: Run, expected: dict) -> list[str]:
    """Returns what is wrong with a run that has ended."""
    if run.poll() != 0:
        return [f"{run.run_dir}: exit status {run.poll()}, see {run.run_dir}.log"]
    summary = run.read_summary()
    keys = ["steps", "weights_sha256"] if case.is_exact else ["steps", "updates"]
    problems = [
        f"{run.run_dir}: {key} is {summary[key]}, without faults {expected[key]}"
        for key in keys
        if summary[key] != expected[key]
    ]
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    epochs = [json.loads(line)["epoch"] for line in lines]
    if epochs != list(range(1, summary["epochs"] + 1)):
        problems.append(f"{run.run_dir}: metrics.jsonl has the epochs {epochs}")
    return problems
