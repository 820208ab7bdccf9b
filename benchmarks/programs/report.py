"""The table of programs and strategies."""

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """The result of a program under a strategy.

    Attributes:
      kind: equal, rounding, refused, differs, error or not run.
      text: the reason, or what differs.
      fits: the number of calls of `fit` that were compared.
      floatx: the precision of the program.
      seconds: the duration of the run.
      loss_gap: the largest relative difference of a loss or metric.
      weights_gap: the relative difference of all weights.
      check_s: the seconds spent on checking whether the program's steps may be divided.
    """

    kind: str
    text: str = ""
    fits: int = 0
    floatx: str = ""
    seconds: float = 0.0
    loss_gap: float = 0.0
    weights_gap: float = 0.0
    check_s: float = 0.0

    @property
    def is_failure(self) -> bool:
        return self.kind in ("differs", "error")

    def __str__(self) -> str:
        if self.text:
            return f"{self.kind} ({self.text})"
        if self.weights_gap or self.loss_gap:
            return f"{self.kind} ({self.loss_gap:.0e}, {self.weights_gap:.0e})"
        return self.kind


Rows = Mapping[str, Mapping[str, Cell]]


def make_table(rows: Rows, strategies: list[str], *, old: str = "", commit: str = "") -> str:
    """Returns a Markdown table with a line for each program, and one with totals.

    Args:
      rows: program -> strategy, or `keras` -> cell.
      strategies: the columns.
      old: a table of the same columns, whose lines are kept for programs without a whole row.
      commit: the commit of tfdist at which these rows were run.
    """
    head = f"| program | computes in | `fit` calls | check, s | {' | '.join(strategies)} | commit |"
    lines = _read_lines(old) if head in old else {}
    for name, row in rows.items():
        keras = row["keras"]
        cells = [str(row[strategy]) for strategy in strategies if strategy in row]
        if keras.kind == "equal" and len(cells) == len(strategies):
            check_s = max((cell.check_s for cell in row.values()), default=0.0)
            values = [keras.floatx, str(keras.fits), f"{check_s:.1f}", *cells, commit]
        elif keras.kind != "equal":
            values = [str(keras), *[""] * (len(strategies) + 2), commit]
        else:
            continue
        lines[name] = f"| {' | '.join([name, *map(_escape, values)])} |"
    table = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines.values()]
    table = [cells for cells in table if cells[4]]  # not those that Keras cannot run
    totals = [_sum([cells[place] for cells in table]) for place in range(4, 4 + len(strategies))]
    total = [f"**{len(table)} programs**", "", "", "", *totals, ""]
    rule = "|---" * (5 + len(strategies)) + "|"
    return "\n".join([head, rule, *lines.values(), f"| {' | '.join(total)} |"])


def make_page(rows: Rows, strategies: list[str], *, old: str = "", commit: str = "") -> str:
    """Returns the page `docs/programs.md`; for the arguments see `make_table`."""
    return _PAGE.format(table=make_table(rows, strategies, old=old, commit=commit))


def _read_lines(table: str) -> dict[str, str]:
    """Returns the lines of a table, by program."""
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return {line[2:].partition(" | ")[0]: line for line in lines if "| **" not in line}


def _sum(cells: list[str]) -> str:
    kinds = [cell.partition(" ")[0] for cell in cells]
    names = ("equal", "rounding", "refused", "differs", "error")
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in names if kind in kinds)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


_PAGE = """\
# Third-party programs

Written by `python -m benchmarks.programs --examples=DIR --write-docs`.

Each program is an example or a guide of Keras. It runs unchanged, except that its data is small and
synthetic and that it trains for fewer epochs. It runs once with Keras's own `fit` on one device,
and once under each strategy, by `python -m tfdist.run`. The order of the data is the same. The
program itself draws random numbers, for dropout and the like.

*Equal* means that all losses, metrics, predictions and weights equal those of Keras, up to
rounding. The numbers in brackets are the largest relative difference of a loss or metric, and the
relative difference of all weights. In float64, losses may differ by 1e-9 in the first epoch and by
1e-7 later, because optimizers amplify rounding; weights may differ by 1e-7. In float32, losses may
differ by 1e-4 in the first epoch and by 1e-2 later, and weights by 2e-2. *Rounding* is a larger
difference, at most ten times the largest one between Keras and three runs of Keras whose initial
weights are perturbed by rounding. *Refused* quotes tfdist's error message. *Check* is the longest
time, in seconds, that a strategy took to find out whether the steps may be divided; 0 for steps of
Keras's own parts. The last column is the commit of tfdist at which a program was run; up to commit
aefd060, the benchmark entered the strategy's scope itself, as `tfdist.run` does.

{table}
"""
