"""The table of programs and strategies."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """How a program did under a strategy.

    Attributes:
      kind: equal, rounding, refused, differs, error or not run.
      text: the reason, or what differs.
      fits: calls of `fit` that were compared.
      floatx: that the program computed in.
      seconds: that the run took.
      loss_gap: the largest relative difference of a loss or metric.
      weights_gap: the relative difference of all weights.
      check_s: seconds that the checks took that a step may be divided.
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


def make_table(rows: Rows, strategies: list[str]) -> str:
    """Returns Markdown: a line for each program, and one of sums."""
    lines = [
        f"| program | computes in | `fit` calls | check, s | {' | '.join(strategies)} |",
        "|---" * (4 + len(strategies)) + "|",
    ]
    for name, row in rows.items():
        keras = row["keras"]
        if keras.kind != "equal":
            lines.append(f"| {name} | {_escape(str(keras))} |  |  |" + "  |" * len(strategies))
            continue
        cells = [_escape(str(row[strategy])) for strategy in strategies if strategy in row]
        check_s = max((cell.check_s for cell in row.values()), default=0.0)
        lines.append(
            f"| {name} | {keras.floatx} | {keras.fits} | {check_s:.1f} | {' | '.join(cells)} |"
        )
    sums = [_sum(rows, strategy) for strategy in strategies]
    lines.append(f"| **{_count(rows)} programs** |  |  |  | {' | '.join(sums)} |")
    return "\n".join(lines)


def make_page(rows: Rows, strategies: list[str]) -> str:
    """Returns the page `docs/programs.md`."""
    return _PAGE.format(table=make_table(rows, strategies))


def _sum(rows: Rows, strategy: str) -> str:
    kinds = [row[strategy].kind for row in rows.values() if strategy in row]
    names = ("equal", "rounding", "refused", "differs", "error")
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in names if kind in kinds)


def _count(rows: Rows) -> int:
    return sum(row["keras"].kind == "equal" for row in rows.values())


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


_PAGE = """\
# Programs that others wrote

Written by `python -m benchmarks.programs --examples=DIR --write-docs`.

Each program is an example or a guide of Keras, run unchanged but for its data, which is small and
made, and its length. It runs once with Keras's own `fit` on one device, and once under each
strategy, where `fit`, `evaluate` and `predict` are those of `tfdist.Trainer`. The order of the
data is the same; what is drawn at random, such as dropout, is drawn by the program.

*Equal* means that all losses, metrics, predictions and weights are those of Keras, up to rounding:
in brackets the largest relative difference of a loss or metric, and that of all weights.
In float64 a loss may differ by 1e-9 in the first epoch, and by 1e-7 later, where an optimizer has
divided rounding by itself, as the weights; in float32 a loss by 1e-4 in the first epoch and by 1e-2
later, and the weights by 2e-2. *Rounding* is a larger difference, of at most ten times that of
Keras from itself when its first weights are moved by their rounding. *Refused* gives tfdist's own
words. *Check* is the most seconds that a strategy spent on finding out whether the program's steps
may be divided; 0 where they are made of Keras's own parts.

{table}
"""
