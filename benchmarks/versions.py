"""Tests tfdist with pairs of TensorFlow and Keras, each in a virtual environment of its own.

    python -m benchmarks.versions [--pairs=oldest,colab] [--directory=build/versions] [--write-docs]

An environment takes about 2 GB and is kept for the next time. The exit status is 1 if a supported
pair fails.
"""

import argparse
import configparser
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"
TIMEOUT_S = 1500


@dataclasses.dataclass(frozen=True)
class Pair:
    """Versions to test together.

    Attributes:
      python: the interpreter.
      requirements: TensorFlow and Keras, as pip takes them.
      is_supported: whether everything must pass.
      constraints: a file of versions that must not change.
    """

    python: str
    requirements: tuple[str, ...]
    is_supported: bool = True
    constraints: str = ""


PAIRS = {
    "oldest": Pair("python3.11", ("tensorflow==2.20.0", "keras==3.13.2")),
    "colab": Pair(
        "python3.13",
        ("tensorflow==2.20.0", "keras==3.13.2"),
        constraints="benchmarks/constraints/colab_2026_08_19.txt",
    ),
    "newest": Pair("python3.11", ("tensorflow==2.21.0", "keras==3.15.1")),
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
        "tests/training/test_step.py",
        "tests/training/test_synchronous.py",
    ),
    "state": ("tests/training/test_checkpoints.py", "tests/training/test_randomness.py"),
    "placement": ("tests/placement/test_graph.py", "tests/placement/test_contract.py"),
}
SHAPES = (
    *("--image_size=16,16", "--train_examples=40", "--base_filters=4", "--depth=1"),
    *("--global_batch_size=8", "--dataset=shapes", "--val_examples=10"),
)
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
        self._runs = directory / "runs"

    def prepare(self) -> None:
        """Installs the packages that are missing."""
        pair, marker = self.pair, self._path / "installed"
        wanted = " ".join(pair.requirements)
        if marker.exists() and marker.read_text() == wanted:
            return
        subprocess.run([pair.python, "-m", "venv", "--clear", self._path], check=True)
        constraints = ["--constraint", ROOT / pair.constraints] if pair.constraints else []
        install = [self._python, "-m", "pip", "install", "--quiet", *constraints]
        subprocess.run([*install, *pair.requirements, *_list_requirements()], check=True)
        subprocess.run([*install[:5], "pytest==9.2.0", "pytest-timeout==2.4.0"], check=True)
        marker.write_text(wanted)

    def check(self, first: "Environment") -> Iterator[tuple[str, str]]:
        """Yields the name of each check and its result, `pass` or what went wrong.

        Args:
          first: began a run that is continued here.
        """
        yield (
            "import",
            _describe(self._run("-c", "import tfdist.run.routing, tfdist.runs.processes")),
        )
        for name, tests in TESTS.items():
            flags = ("-m", "not cluster", "--quick", "-p", "no:cacheprovider")
            yield name, _count(self._run("-m", "pytest", *flags, *tests))
        yield "verify", _describe(self._run("-m", "tfdist.verify", *VERIFY))
        yield "the same bits", self._compare(self, bits=True)
        yield f"a run of {first.name}", self._compare(first, bits=self.pair == first.pair)

    def _compare(self, first: "Environment", *, bits: bool) -> str:
        """Returns whether a run that another environment began ends as one of this environment."""
        shutil.rmtree(self._runs, ignore_errors=True)
        whole, parted = self._runs / "whole", self._runs / "parted"
        runs = ((self, whole, 2), (first, parted, 1), (self, parted, 2))
        for environment, path, epochs in runs:
            flags = (*SHAPES, "--strategy=one_device", "--deterministic", "--quiet")
            done = environment._run(
                *("-m", "tfdist.train", *flags, f"--epochs={epochs}", f"--run_dir={path}")
            )
            if done.returncode:
                return _describe(done)
        ends = [json.loads((path / "summary.json").read_text()) for path in (whole, parted)]
        if bits:
            same = ends[0]["weights_sha256"] == ends[1]["weights_sha256"]
            return "pass" if same else "other bits"
        losses = [end["loss"] for end in ends]
        apart = abs(losses[0] - losses[1]) / abs(losses[0])
        said = self.pair == first.pair or "Continuing a run of" in done.stderr
        holds = apart < ROUNDING and said
        return f"pass ({apart:.0e} apart)" if holds else f"{apart:.0e} apart, said: {said}"

    @property
    def _python(self) -> Path:
        return self._path / "bin" / "python"

    def _run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [self._python, *arguments]
        try:
            return subprocess.run(
                command,
                cwd=ROOT,
                env=environ,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"more than {TIMEOUT_S} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", default=",".join(PAIRS), help="to test (default: all)")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "versions")
    parser.add_argument("--write-docs", action="store_true", help=f"write {PAGE.name}")
    flags = parser.parse_args()
    flags.directory.mkdir(parents=True, exist_ok=True)
    names = flags.pairs.split(",")
    found: dict[str, dict[str, str]] = {}
    for name in names:
        environment = Environment(name, flags.directory.resolve())
        environment.prepare()
        first = Environment(names[0], flags.directory.resolve())
        found[name] = {}
        for check, result in environment.check(first):
            found[name][check] = result
            print(f"{name}: {check}: {result}", flush=True)
    table = format_table(found)
    print(table)
    if flags.write_docs:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2])
    failed = [
        name
        for name, results in found.items()
        if PAIRS[name].is_supported and not all(map(passes, results.values()))
    ]
    return 1 if failed else 0


def format_table(found: dict[str, dict[str, str]]) -> str:
    """Returns the results as a table, a column for each pair."""
    checks = list(dict.fromkeys(check for results in found.values() for check in results))
    lines = [
        ["", *(f"{name}: {', '.join(PAIRS[name].requirements)}" for name in found)],
        ["---"] * (len(found) + 1),
        *([check, *(results.get(check, "") for results in found.values())] for check in checks),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def passes(result: str) -> bool:
    """Returns whether a check passed; skipped tests are allowed."""
    return result.startswith("pass") or bool(re.fullmatch(r"\d+ passed(, \d+ skipped)?", result))


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
