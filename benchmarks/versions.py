"""Tests tfdist with pairs of TensorFlow and Keras, each in a virtual environment of its own.

    python -m benchmarks.versions [--pairs=oldest,colab] [--checks=zoo] [--write-docs]
    python -m benchmarks.versions --pairs=colab --quick

An environment takes about 2 GB and is kept in the directory for the next time, beside the output of
each check and the results; the table has those of all pairs that were ever tested there. The exit
status is 1 if a supported pair fails.
"""

import argparse
import configparser
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"
TIMEOUT_S = 1500
MAX_SKIPPED = 10


@dataclasses.dataclass(frozen=True)
class Pair:
    """Versions to test together.

    Attributes:
      python: the interpreter.
      requirements: TensorFlow and Keras, as pip takes them.
      is_supported: whether everything must pass.
      constraints: a file of versions that must not change.
      over: a package whose files take the places of another's, installed last.
      environ: what to set.
      checks: those to make; all by default.
    """

    python: str
    requirements: tuple[str, ...]
    is_supported: bool = True
    constraints: str = ""
    over: str = ""
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    checks: tuple[str, ...] = ()


PAIRS = {
    "oldest": Pair("python3.11", ("tensorflow==2.20.0", "keras==3.13.2")),
    "colab": Pair(
        "python3.13",
        ("tensorflow==2.20.0", "keras==3.13.2"),
        constraints="benchmarks/constraints/colab_2026_08_19.txt",
    ),
    "newest": Pair("python3.11", ("tensorflow==2.21.0", "keras==3.15.1")),
    # What else can be installed together.
    **{
        name: Pair(
            "python3.11",
            (f"tensorflow=={tensorflow}", f"keras=={keras}"),
            checks=("import", "internals", "zoo", "step", "verify", "a run of oldest"),
        )
        for name, tensorflow, keras in (
            ("legacy", "2.19.1", "3.12.4"),
            ("newest_tensorflow", "2.21.0", "3.13.2"),
            ("between", "2.21.0", "3.14.1"),
            ("newest_keras", "2.20.0", "3.15.1"),
        )
    },
    # TensorFlow for Cloud TPUs as docs/jobs.md installs it, here on CPUs.
    "tpu": Pair(
        "python3.12",
        ("tensorflow==2.20.0", "keras==3.15.1", "tensorflow-tpu==2.20.0", "libtpu<0.0.31"),
        over="tensorflow-tpu==2.20.0",
        # Elsewhere than on a TPU VM, its library asks for one for minutes.
        environ={"TPU_SKIP_MDS_QUERY": "1"},
        # Keras's own `fit` fails with it on CPUs, for which it has no XLA.
        checks=("import", "internals", "state", "tpu"),
    ),
    "release_candidate": Pair(
        "python3.13", ("tensorflow==2.22.0rc0", "keras==3.15.1"), is_supported=False
    ),
    "next": Pair(
        "python3.12",
        ("tf-nightly==2.23.0.dev20261026", "keras-nightly==3.16.0.dev2026102704"),
        is_supported=False,
    ),
}
# Name -> arguments of pytest. Those that need packages of [dev] are not among them.
TESTS = {
    "internals": ("tests/test_internals.py",),
    "zoo": (
        "tests/training/test_trainer.py",
        "tests/training/test_synchronous.py",
    ),
    "step": ("tests/training/test_step.py",),
    "programs": ("tests/training/test_programs.py",),
    "state": ("tests/training/test_checkpoints.py", "tests/training/test_randomness.py"),
    "tpu": ("tests/strategies/test_tpu.py",),
    "placement": (
        *("tests/placement/test_graph.py", "tests/placement/test_contract.py"),
        *("tests/placement/test_meshes.py", "tests/placement/test_programs.py"),
    ),
    "scripts": ("tests/run",),
}
SHAPES = (
    *("--image_size=16,16", "--train_examples=40", "--base_filters=4", "--depth=1"),
    *("--global_batch_size=8", "--dataset=shapes", "--val_examples=10", "--schedule=constant"),
)
QUICK = ("import", "internals", "step")
VERIFY = (
    *("--strategies=one_device,mirrored,central_storage", "--steps=3"),
    *("--model=unet", "--image_size=16,16"),
)
ROUNDING = 1e-3


class Environment:
    """A virtual environment of a pair, with what the tests need."""

    def __init__(self, name: str, directory: Path):
        self.name, self.pair = name, PAIRS[name]
        self._path = directory / name
        self._runs = directory / "runs" / name
        self._logs = directory / "logs" / name

    def prepare(self) -> None:
        """Installs the packages that are missing.

        Raises:
          FileNotFoundError: there is no such Python.
        """
        pair, marker = self.pair, self._path / "installed"
        wanted = " ".join(pair.requirements)
        if marker.exists() and marker.read_text() == wanted:
            return
        # With pyenv, `python3.13` fails unless one of the chosen versions is 3.13.
        environ = {**os.environ, "PYENV_VERSION": pair.python.removeprefix("python")}
        finder = () if shutil.which(pair.python) else ("pyenv", "exec")
        if finder and not shutil.which(finder[0]):
            raise FileNotFoundError(f"there is no {pair.python}")
        command = [*finder, pair.python, "-m", "venv", "--clear", self._path]
        if subprocess.run(command, env=environ, stderr=subprocess.DEVNULL).returncode:
            raise FileNotFoundError(f"{pair.python} makes no virtual environment")
        constraints = ["--constraint", ROOT / pair.constraints] if pair.constraints else []
        install = [self._python, "-m", "pip", "install", "--quiet", *constraints]
        subprocess.run([*install, *pair.requirements, *_list_requirements()], check=True)
        if pair.over:
            subprocess.run([*install, "--force-reinstall", "--no-deps", pair.over], check=True)
        subprocess.run([*install[:5], "pytest==9.2.0", "pytest-timeout==2.4.0"], check=True)
        marker.write_text(wanted)

    def list_checks(self, first: "Environment | None") -> dict[str, Callable[[], str]]:
        """Returns the names of checks, and functions that return `pass` or what went wrong.

        Args:
          first: begins a run that is continued here, if given.
        """
        checks: dict[str, Callable[[], str]] = {}
        if self.pair.constraints:
            checks["pip install tfdist"] = self._install
        program = "import tfdist.run.routing, tfdist.runs.processes"
        checks["import"] = lambda: _describe(self._run("import", "-c", program))
        for name in TESTS:
            checks[name] = functools.partial(self._test, name)
        checks["verify"] = lambda: _describe(self._run("verify", "-m", "tfdist.verify", *VERIFY))
        checks["the same bits"] = lambda: self._compare(self)
        if first and first.pair != self.pair:
            checks[f"a run of {first.name}"] = lambda: self._compare(first)
        wanted = self.pair.checks or checks
        return {name: make for name, make in checks.items() if name in wanted}

    def _test(self, name: str) -> str:
        flags = ("-m", "not cluster", "--quick", "-p", "no:cacheprovider")
        return _count(self._run(name, "-m", "pytest", *flags, *TESTS[name]))

    def _install(self) -> str:
        """Returns whether pip would install tfdist and change nothing else."""
        flags = ("--dry-run", "--quiet", "--report=-", "--constraint", ROOT / self.pair.constraints)
        done = self._run("pip install tfdist", "-m", "pip", "install", *flags, ROOT)
        if done.returncode:
            return _describe(done)
        names = [each["metadata"]["name"] for each in json.loads(done.stdout)["install"]]
        return "pass" if names == ["tfdist"] else f"it changes {', '.join(names)}"

    def _compare(self, first: "Environment") -> str:
        """Returns whether a run that another environment began ends as one of this environment."""
        shutil.rmtree(self._runs, ignore_errors=True)
        whole, parted = self._runs / "whole", self._runs / "parted"
        runs = ((self, whole, 2), (first, parted, 1), (self, parted, 2))
        for environment, path, epochs in runs:
            flags = (*SHAPES, "--strategy=one_device", "--deterministic", "--quiet")
            done = environment._run(
                *(f"a run of {first.name}, {path.name}, {epochs}", "-m", "tfdist.train"),
                *(*flags, f"--epochs={epochs}", f"--run_dir={path}"),
            )
            if done.returncode:
                return _describe(done)
        ends = [json.loads((path / "summary.json").read_text()) for path in (whole, parted)]
        if first is self:
            same = ends[0]["weights_sha256"] == ends[1]["weights_sha256"]
            return "pass" if same else "other bits"
        losses = [end["loss"] for end in ends]
        apart = abs(losses[0] - losses[1]) / abs(losses[0])
        said = "Not the same bits as before" in done.stderr
        if said != (first.pair.requirements != self.pair.requirements):
            return f"{apart:.0e} apart; said that versions differ: {said}"
        return f"pass ({apart:.0e} apart)" if apart < ROUNDING else f"{apart:.0e} apart"

    @property
    def _python(self) -> Path:
        return self._path / "bin" / "python"

    def _run(self, check: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        own = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
        environ = {**os.environ, **own, **self.pair.environ}
        command = [self._python, *arguments]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environ,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(command, 124, "", f"more than {TIMEOUT_S} s")
        self._logs.mkdir(parents=True, exist_ok=True)
        (self._logs / f"{check}.txt").write_text(done.stdout + done.stderr)
        return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", default=",".join(PAIRS), help="to test (default: all)")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "versions")
    parser.add_argument("--checks", default="", help="to make (default: all), such as zoo,verify")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"make the checks {', '.join(QUICK)}, and leave pairs out whose Python is missing",
    )
    parser.add_argument("--write-docs", action="store_true", help=f"write {PAGE.name}")
    flags = parser.parse_args()
    names = flags.pairs.split(",")
    if not PAIRS.keys() >= set(names):
        parser.error(f"the pairs are {', '.join(PAIRS)}")
    directory = flags.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    checks = QUICK if flags.quick else [*filter(None, flags.checks.split(","))]
    found: dict[str, dict[str, str]] = {}
    first = None if flags.quick else Environment(next(iter(PAIRS)), directory)
    for name in names:
        environment = first if first and name == first.name else Environment(name, directory)
        try:
            for each in filter(None, (first, environment)):
                each.prepare()
        except FileNotFoundError as error:
            if not flags.quick:
                parser.error(str(error))
            print(f"{name}: left out: {error}", flush=True)
            continue
        kept = directory / f"{name}.json"
        found[name] = json.loads(kept.read_text()) if flags.checks and kept.exists() else {}
        for check, make in environment.list_checks(first).items():
            if not checks or check in checks:
                found[name][check] = make()
                print(f"{name}: {check}: {found[name][check]}", flush=True)
        if first:
            kept.write_text(json.dumps(found[name], indent=1))
    failed = [
        name
        for name, results in found.items()
        if PAIRS[name].is_supported and not passes(results.values())
    ]
    if first:
        _show_table(directory, write_docs=flags.write_docs)
    return 1 if failed else 0


def _show_table(directory: Path, *, write_docs: bool) -> None:
    """Prints the results of all pairs that were tested in a directory, and maybe writes them."""
    kept = {name: directory / f"{name}.json" for name in PAIRS}
    table = format_table({n: json.loads(p.read_text()) for n, p in kept.items() if p.exists()})
    print(table)
    if write_docs:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2])


def format_table(found: dict[str, dict[str, str]]) -> str:
    """Returns the results as a table, a column for each pair."""
    checks = list(dict.fromkeys(check for results in found.values() for check in results))
    lines = [
        ["", *map(_describe_pair, found)],
        ["---"] * (len(found) + 1),
        *([check, *(results.get(check, "") for results in found.values())] for check in checks),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _describe_pair(name: str) -> str:
    pair = PAIRS[name]
    return f"{name}: {', '.join([pair.python, *pair.requirements])}"


def passes(results: Iterable[str]) -> bool:
    """Returns whether all checks of a pair passed; up to `MAX_SKIPPED` tests may be skipped."""
    tests = [re.fullmatch(r"\d+ passed(?:, (\d+) skipped)?|pass.*", result) for result in results]
    return all(tests) and sum(int(test[1] or 0) for test in tests if test) <= MAX_SKIPPED


def _list_requirements() -> list[str]:
    """Returns what setup.cfg requires, but TensorFlow and Keras."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options"]["install_requires"].split("\n")
    return [line for line in lines if line and not re.match(r"(tensorflow|keras)\b(?!-)", line)]


def _count(done: subprocess.CompletedProcess[str]) -> str:
    """Returns how many tests passed, failed and were skipped."""
    kinds = ("passed", "failed", "error", "skipped")
    last = (done.stdout.strip().splitlines() or [""])[-1]
    numbers = {kind: re.search(rf"(\d+) {kind}", last) for kind in kinds}
    said = [f"{number[1]} {kind}" for kind, number in numbers.items() if number]
    return ", ".join(said) or _describe(done)


def _describe(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode == 0:
        return "pass"
    said: Sequence[str] = (done.stderr or done.stdout).strip().splitlines() or [""]
    return f"status {done.returncode}: {said[-1][:120]}"


if __name__ == "__main__":
    sys.exit(main())
