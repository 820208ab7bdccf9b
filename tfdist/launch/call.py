"""Calls a function in processes of its own: `python -m tfdist.launch.call FUNCTION DIRECTORY`.

`task.json` in the directory is the function's argument, and `result.json` what it returned.
"""

import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist import cluster
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.errors import TfdistError
from tfdist.launch.logs import last_lines
from tfdist.launch.machine import keep_on_cores, list_cores
from tfdist.launch.run import run_local_cluster

_GRACE_S = 5.0  # short, because the result is complete when the chief ends


def make_command(function: str) -> list[str]:
    """Returns the command that calls `package.module:NAME`, except for the directory."""
    return [sys.executable, "-m", "tfdist.launch.call", function]


def call_in_cluster(
    task: Mapping[str, Any],
    command: Sequence[str],
    *,
    workers: int = 1,
    ps: int = 0,
    timeout_s: float,
) -> dict[str, Any]:
    """Runs a command in one process or in a cluster of them, without showing its output.

    Args:
      task: the contents of `task.json` in a directory, which is the command's last argument. With
        `cores`, a function has only so many of the cores; 0 for all.
      command: a result of `make_command`, or another command that writes `result.json`.

    Returns:
      The contents of `result.json` in the directory, or only `error`, one line, if it failed.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-call-") as directory:
        (Path(directory) / "task.json").write_text(json.dumps(task))
        result = run_local_cluster(
            workers=workers,
            ps=ps,
            command=[*command, directory],
            run_dir=directory,
            timeout_s=timeout_s,
            grace_s=_GRACE_S,
            stream=False,
            environ=dict(cluster.read_environment()) | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        if result.timed_out:
            return {"error": f"not finished after {timeout_s:g} s (--timeout_s)"}
        if result.status:
            failed = next(t for t in result.tasks if t.name == result.first_failed)
            return {"error": f"{failed.name}: {_find_last_line(failed.log)}"}
        return json.loads((Path(directory) / "result.json").read_text())


def run_watched(
    command: Sequence[str],
    directory: str | Path,
    *,
    environ: Mapping[str, str],
    watch: Callable[[int], bool],
    every_s: float,
) -> tuple[int | None, str]:
    """Runs a command on this machine until it ends, or `watch` no longer lets it run.

    Args:
      command: the command. Its standard input closes when this process ends, in whatever way.
      watch: takes the process's number, and returns whether it may go on.

    Returns:
      The exit status, None if `watch` stopped it, and the last line of its output.
    """
    log = Path(directory) / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=output, stderr=output
        ) as process,
    ):
        try:
            while process.poll() is None and watch(process.pid):
                time.sleep(every_s)
            status = process.returncode
        finally:
            process.kill()
    return status, _find_last_line(log)


def _find_last_line(log: Path) -> str:
    return (last_lines(log.read_bytes()) or ["it printed nothing"])[-1]


def main(function: str, directory: str) -> int:
    """Calls the function in a process; the last line of its output says what failed, if any."""
    task = json.loads((Path(directory) / "task.json").read_text())
    if task.get("cores") and list_cores():
        keep_on_cores(list_cores()[: task["cores"]])
    start_tensorflow_quietly()
    module, _, name = function.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)(task)
    except TfdistError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    if found is not None:
        (Path(directory) / "result.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
