"""Runs the tests of the installed Keras as `tfdist.run` runs a script, and says which ones fail.

    python -m benchmarks.keras_tests [--ways=one_device,mirrored-2] [--files=FILE,...] [-k WORD]

Only those that pass with plain Keras count. Under a strategy, a test may pass or be refused in one
line. What else is known not to pass is in known.txt, with the reason. The exit status is 1 if there
is anything else.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import keras

from benchmarks.keras_tests.plugin import FAILED, PASSED, PLAIN, REFUSED

WAYS = "one_device", "mirrored-2", "mirrored-3"
# The tests that fit, in files whose subject it is.
FILES = (
    "trainers/trainer_test.py",
    "callbacks/*_test.py",
    "backend/tensorflow/*_test.py",
    "models/*_test.py",
    "distillation/*_test.py",
    "saving/saving_lib_test.py",
    "optimizers/optimizer_test.py",
    "optimizers/multi_optimizer_test.py",
    "layers/layer_test.py",
    "layers/normalization/batch_normalization_test.py",
    "layers/preprocessing/feature_space_test.py",
    "metrics/iou_metrics_test.py",
)
KNOWN = pathlib.Path(__file__).with_name("known.txt")
EQUAL, KNOWN_FAULT, UNEXPECTED = "passed", "known", "unexpected"
TIMEOUT_S = 120  # of one test
DIED = "The process ended, or the time-out of a test."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ways", default=",".join(WAYS), help="of training (default: all)")
    parser.add_argument("--files", default=",".join(FILES), help="patterns of their paths")
    parser.add_argument("--below", default=_find_keras(), help="directory (default: Keras's)")
    parser.add_argument("-k", dest="word", default="", help="which tests, as in pytest")
    flags = parser.parse_args()
    known = _read_known()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:

        def run(way: str) -> dict[str, dict[str, str]]:
            return _run(way, flags.below, flags.files.split(","), flags.word, directory)

        plain = run(PLAIN)
        rows = {}
        for way in flags.ways.split(","):
            found = run(way)
            kinds = {
                name: _classify(way, name, found.get(name, {}), known)
                for name, outcome in plain.items()
                if outcome["kind"] == PASSED
            }
            rows[way] = collections.Counter(kinds.values())
            for name, kind in kinds.items():
                if kind != EQUAL:
                    text = " ".join(found.get(name, {}).get("text", "It did not run.").split())
                    print(f"{way}: {kind}: {name}: {text[:300]}", flush=True)
    _print_table(rows, sum(outcome["kind"] == FAILED for outcome in plain.values()))
    print(f"{time.monotonic() - began:.0f} s")
    return int(any(counts[UNEXPECTED] for counts in rows.values()))


def _find_keras() -> str:
    return os.path.join(os.path.dirname(keras.__file__), "src")


def _run(
    way: str, below: str, patterns: list[str], word: str, directory: str
) -> dict[str, dict[str, str]]:
    """Returns how each test ends, by its name. A test that ends its process fails."""
    paths = [str(path) for each in patterns for path in sorted(pathlib.Path(below).glob(each))]
    record, but = (pathlib.Path(directory, f"{way}.{name}") for name in ("jsonl", "txt"))
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={below}"]
    command += ["-p", "no:cacheprovider", "-p", "benchmarks.keras_tests.plugin", f"--way={way}"]
    command += [f"--outcomes={record}", f"--below={below}", f"--but={but}", "--tb=native"]
    command += [f"--timeout={TIMEOUT_S}", "-k", word]
    command += ["--continue-on-collection-errors", *paths]
    record.touch()
    while True:
        but.write_text("\n".join(_read_outcomes(record)[0]))
        output = subprocess.run(command, capture_output=True, text=True, check=False)
        found, running = _read_outcomes(record)
        if not running:
            errors = [line for line in output.stdout.splitlines() if line.startswith("ERROR ")]
            if errors or not found:
                raise SystemExit("\n".join(errors) or output.stdout + output.stderr)
            return found
        with record.open("a") as file:
            print(json.dumps({"name": running, "kind": FAILED, "text": DIED}), file=file)


def _read_outcomes(record: pathlib.Path) -> tuple[dict[str, dict[str, str]], str]:
    """Returns how each test ended, by its name, and the one that began and did not end."""
    found, running = {}, ""
    for line in record.read_text().splitlines():
        outcome = json.loads(line)
        name = outcome["name"]
        if "kind" in outcome:
            found[name] = outcome
        running = "" if "kind" in outcome else name
    return found, running


def _read_known() -> dict[tuple[str, str], str]:
    """Returns the reasons of known.txt by way and name of the test, or a way of any devices."""
    known = {}
    for line in KNOWN.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            names, _, reason = line.partition(": ")
            *ways, name = names.split()
            known |= {(way, name): reason for way in ways}
    return known


def _classify(
    way: str, name: str, outcome: dict[str, str], known: dict[tuple[str, str], str]
) -> str:
    kind = outcome.get("kind")
    if kind == PASSED:
        return EQUAL
    if any((each, name) in known for each in (way, way.partition("-")[0])):
        return KNOWN_FAULT
    # One device refuses nothing that Keras does.
    return REFUSED if kind == REFUSED and way != "one_device" else UNEXPECTED


def _print_table(rows: dict[str, collections.Counter[str]], failed: int) -> None:
    kinds = EQUAL, REFUSED, KNOWN_FAULT, UNEXPECTED
    print(f"| | {' | '.join(kinds)} |")
    print("|---" * (len(kinds) + 1) + "|")
    for way, counts in rows.items():
        print(f"| {way} | {' | '.join(str(counts[kind]) for kind in kinds)} |")
    print(f"{failed} fail with plain Keras as well, and do not count.")


if __name__ == "__main__":
    sys.exit(main())
