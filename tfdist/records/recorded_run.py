"""Reads what a run has written to its directory so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.errors import TfdistError, shorten_error
from tfdist.reading import parse_object, parse_options
from tfdist.records.durable_files import read_file
from tfdist.records.run_directory import WITHIN_EPOCHS, RunDirectory


@dataclass(frozen=True)
class RecordedRun:
    """The records of a run, finished or not.

    Attributes:
      options: the contents of `options.json`.
      lines: the lines of `metrics.jsonl`.
      steps: the lines of `steps.jsonl`, which are within epochs; none in older runs.
      summary: the contents of `summary.json`; empty if the run is not finished.
      failures: the lines of `logs/restarts.jsonl` about failures of the cluster's tasks.
    """

    path: str
    options: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    failures: Sequence[Mapping[str, Any]] = ()
    steps: Sequence[Mapping[str, Any]] = ()

    @property
    def last(self) -> Mapping[str, Any]:
        """The last line; empty if there is none."""
        return self.lines[-1] if self.lines else {}

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file in the directory; None if it cannot be read."""
        try:
            return read_file(f"{self.path}/{name}")
        except OSError:
            return None


def read_recorded_run(path: str) -> RecordedRun:
    """Reads a run's directory, on any file system of `tf.io.gfile`.

    Raises:
      TfdistError: there is no run, or its `options.json` or `metrics.jsonl` cannot be read.
    """
    run = RecordedRun(path, {})
    options = parse_options(run.read("options.json"))
    if options is None:
        raise TfdistError(
            f"Cannot find a run in {path}: it has no readable options.json. Give the run directory "
            "of a tfdist.train command."
        )
    try:
        lines = tuple(RunDirectory(path).read_metrics())
        steps = tuple(RunDirectory(path).read_metrics(WITHIN_EPOCHS))
    except (OSError, ValueError) as error:
        raise TfdistError(f"Cannot read {path}/metrics.jsonl: {shorten_error(error)}") from error
    records = (run.read("logs/restarts.jsonl") or b"").splitlines()
    failures = [line for line in map(parse_object, records) if line is not None]
    return RecordedRun(
        path,
        options,
        lines,
        parse_object(run.read("summary.json")) or {},
        tuple(line for line in failures if "cause" in line),
        steps,
    )
