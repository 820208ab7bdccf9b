"""Runs third-party programs, each under Keras alone and under every strategy.

    git clone https://github.com/keras-team/keras DIR/keras-team/keras
    python -m benchmarks.programs --examples=DIR [--programs=a,b] [--strategies=one,mirrored2]
        [--results=DIR [--again]] [--jobs=2] [--write-docs]

Nothing is copied from them: their texts are read from the checkouts, at the commits that the
adapters were written for. Small synthetic data replaces downloads, and the number of epochs is
reduced to two. Under a strategy, `python -m tfdist.run` runs the program, so that each call of
`fit`, `evaluate` and `predict` goes to `tfdist.Trainer`; the losses, metrics, predictions and
weights are compared with those of Keras on one device. If they differ, Keras trains up to three
times more from weights that are perturbed by their rounding; a difference of at most ten times the
one that this makes is due to rounding. Results are kept in `--results` and reused. The exit status
is 1 if something differs or fails.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.programs.adapters import AdapterError, Program, adapt_text
from benchmarks.programs.catalog import PROGRAMS
from benchmarks.programs.columns import KERAS, MOVED, STRATEGIES
from benchmarks.programs.record import compare
from benchmarks.programs.report import Cell, make_page, make_table

TIMEOUT_S = 400.0
_ROUNDING = 10  # the largest ratio to the difference of Keras from itself
ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", required=True, help="directory of the checkouts")
    parser.add_argument("--programs", default="", help="names of the programs; empty: all")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="empty: only Keras")
    parser.add_argument("--results", default="", help="a directory to keep and reuse results")
    parser.add_argument("--again", action="store_true", help="run all again, except Keras alone")
    parser.add_argument("--jobs", type=int, default=1, help="number of programs at a time")
    parser.add_argument("--timeout_s", type=float, default=TIMEOUT_S, help="seconds per run")
    parser.add_argument("--write-docs", action="store_true", help="update docs/programs.md")
    flags = parser.parse_args()
    # The names of a program's parts contain ", ".
    names = [name for name in re.split(",(?! )", flags.programs) if name] or list(PROGRAMS)
    if unknown := [name for name in names if name not in PROGRAMS]:
        parser.error(f"unknown program {unknown[0]!r}; valid: {', '.join(PROGRAMS)}")
    strategies = [name for name in flags.strategies.split(",") if name]
    with tempfile.TemporaryDirectory(prefix="programs") as temporary:
        results = Path(flags.results or temporary).absolute()
        if flags.again:
            _forget(results, names, strategies)

        def report_row(name: str) -> dict[str, Cell]:
            examples = Path(flags.examples)
            row = run_row(PROGRAMS[name], examples, strategies, results, flags.timeout_s)
            if row["keras"].kind == "not run":
                print(f"{name}: {row['keras']}", flush=True)
            return row

        with concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool:
            rows = dict(zip(names, pool.map(report_row, names), strict=True))
    print(make_table(rows, strategies))
    if flags.write_docs:
        page = ROOT / "docs" / "programs.md"
        head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
        text = make_page(rows, strategies, old=page.read_text(encoding="utf-8"), commit=commit)
        page.write_text(text, encoding="utf-8")
    # A program that Keras alone cannot run here is not a failure of a strategy.
    judged = [cell for row in rows.values() for name, cell in row.items() if name != KERAS]
    return int(any(cell.is_failure for cell in judged))


def _forget(results: Path, names: list[str], strategies: list[str]) -> None:
    for name in names:
        for strategy in strategies:
            (results / name / f"{strategy}.json").unlink(missing_ok=True)


def run_row(
    program: Program, examples: Path, strategies: list[str], results: Path, timeout_s: float
) -> dict[str, Cell]:
    """Returns a cell for `keras` and for each strategy."""
    missing = [name for name in program.needs if importlib.util.find_spec(name) is None]
    if missing:
        return {"keras": Cell("not run", f"needs {', '.join(missing)}")}
    try:
        text = adapt_text(read_program(examples, program), program)
    except (AdapterError, OSError, SyntaxError) as error:
        return {"keras": Cell("not run", str(error))}
    row: dict[str, Cell] = {}
    for strategy in [KERAS, *strategies]:
        end = run_once(program, text, strategy, results=results, timeout_s=timeout_s)
        row[strategy] = _judge(program, strategy, end, results / program.name)
        if row[strategy].kind == "differs":
            row[strategy] = _explain(row[strategy], program, text, results, timeout_s)
        cell = row[strategy]
        print(f"{program.name}, {strategy}: {cell} {end['seconds']:.0f} s", flush=True)
        if cell.kind != "equal" and strategy == "keras":
            break
    return row


def read_program(examples: Path, program: Program) -> str:
    """Returns the text of a program at the adapter's commit, from a checkout.

    Raises:
      OSError: there is no such checkout, commit or file.
    """
    checkout = examples / program.repository
    if not checkout.exists():
        raise OSError(f"git clone https://github.com/{program.repository} {checkout}")
    shown = subprocess.run(
        ["git", "-C", str(checkout), "show", f"{program.commit}:{program.path}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if shown.returncode:
        raise OSError(shown.stderr.strip().partition("\n")[0])
    return shown.stdout


def run_once(program: Program, text: str, column: str, *, results: Path, timeout_s: float) -> dict:
    """Runs a text in processes of its own, unless its result is already there.

    Returns:
      How it ended: `status`, `message`, `seconds`, and more.
    """
    directory = results / program.name
    directory.mkdir(parents=True, exist_ok=True)
    out = directory / f"{column}.json"
    script = directory / "program.py"
    key = hashlib.sha256(f"{program.floatx} {text}".encode()).hexdigest()
    if out.exists() and json.loads(out.read_text()).get("key") == key:
        return json.loads(out.read_text())
    out.unlink(missing_ok=True)
    script.write_text(text, encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="program") as working:
        command = [sys.executable]
        if column in STRATEGIES:
            command += ["-m", "tfdist.run", *STRATEGIES[column]]
        command += [str(Path(__file__).with_name("child.py"))]
        command += [f"--program={program.name}", f"--column={column}", f"--text={script}"]
        command += [f"--out={out}", f"--floatx={program.floatx}", f"--key={key}"]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment |= {"KERAS_HOME": working, "KERAS_BACKEND": "tensorflow", "HOME": working}
        try:
            run = subprocess.run(
                command,
                cwd=working,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            end = {"status": "error", "message": f"not done after {timeout_s:.0f} s"}
        else:
            if out.exists():
                return json.loads(out.read_text())
            end = {"status": "error", "message": _get_last_line(run.stderr, run.returncode)}
    end |= {"seconds": timeout_s, "trace": "", "calls": [], "key": key}
    out.write_text(json.dumps(end))
    return end


def _judge(program: Program, strategy: str, end: dict, directory: Path) -> Cell:
    if end["status"] != "ended":
        return Cell(end["status"], end["message"])
    fits = sum(call["call"] == "fit" for call in end["calls"])
    cell = Cell(
        "equal",
        fits=fits,
        floatx=program.floatx,
        seconds=end["seconds"],
        check_s=end.get("check_s", 0.0),
    )
    if strategy == "keras":
        return cell
    files = (directory / f"{name}.npz" for name in ("keras", strategy))
    difference = compare(*files, program.rounds_to or program.floatx)
    cell = dataclasses.replace(cell, loss_gap=difference.loss, weights_gap=difference.weights)
    return (
        dataclasses.replace(cell, kind="differs", text=difference.text) if difference.text else cell
    )


def _explain(cell: Cell, program: Program, text: str, results: Path, timeout_s: float) -> Cell:
    """Returns the cell, marked as rounding if rounding makes Keras differ by a similar amount."""
    loss = weights = 0.0
    for moved in MOVED:
        end = run_once(program, text, moved, results=results, timeout_s=timeout_s)
        if end["status"] != "ended":
            return cell
        files = (results / program.name / f"{name}.npz" for name in (KERAS, moved))
        own = compare(*files, program.rounds_to or program.floatx)
        loss, weights = max(loss, own.loss), max(weights, own.weights)
        if cell.loss_gap <= _ROUNDING * loss and cell.weights_gap <= _ROUNDING * weights:
            found = f"{cell.loss_gap:.0e}, {cell.weights_gap:.0e}"
            perturbed = f"Keras with weights perturbed by rounding: {loss:.0e}, {weights:.0e}"
            return dataclasses.replace(cell, kind="rounding", text=f"{found}; {perturbed}")
    return cell


def _get_last_line(text: str, code: int) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return f"exit status {code}: {lines[-1][:300] if lines else 'no message'}"


if __name__ == "__main__":
    sys.exit(main())
