"""Run directories, written as runs write them."""

import json

import pytest

from tfdist.runs.options import TrainOptions


@pytest.fixture
def write_run(path_with_spaces):
    """Writes the records of a run and returns its path."""

    def write(name="run", *, lines=(), summary=None, restarts=(), task=None, **options):
        path = path_with_spaces / name
        (path / "logs").mkdir(parents=True)
        content = TrainOptions().to_dict() | {"devices": ["CPU:0"], "cluster": None} | options
        content["task"] |= task or {}
        (path / "options.json").write_text(json.dumps(content))
        write_lines(path / "metrics.jsonl", lines)
        write_lines(path / "logs" / "restarts.jsonl", restarts)
        if summary is not None:
            (path / "summary.json").write_text(json.dumps(summary))
        return str(path)

    return write


def write_lines(path, lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
