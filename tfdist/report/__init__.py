"""Pages that show runs, each in one HTML file without links to anything else."""

from tfdist.report.elements import Section

__all__ = ["Section"]
