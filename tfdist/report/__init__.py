"""Pages that show runs, each in one HTML file that loads nothing else.

A task's part of a page consists of sections, which it makes from the functions here.
"""

from tfdist.report.elements import (
    Section,
    make_bars,
    make_confusion,
    make_legend,
    make_pairs,
    make_pictures,
    make_table,
)

__all__ = [
    "Section",
    "make_bars",
    "make_confusion",
    "make_legend",
    "make_pairs",
    "make_pictures",
    "make_table",
]
