"""Runs `tfdist COMMAND ...`, which is the same as `python -m tfdist.COMMAND ...`."""

import runpy
import sys

import tfdist
from tfdist.cli.arguments import print_help
from tfdist.cli.output import lenient_output
from tfdist.errors import make_unknown_name_error

COMMANDS = {
    "train": "train a task's model under a strategy",
    "run": "run a Keras script, unchanged, under a strategy",
    "launch": "start a cluster on this machine, or join one",
    "evaluate": "score a finished run",
    "predict": "predict with a finished run",
    "export": "export a finished run as a servable",
    "report": "write the report of a run, or compare runs",
    "serve": "serve a finished run or a servable over HTTP",
    "verify": "compare every strategy with one device",
    "benchmark": "measure the speed of strategies and baselines",
    "plan": "predict memory, speed and price of every strategy",
    "doctor": "find out what is wrong with this machine or cluster",
    "jobs": "write job files for Vertex AI, Kubernetes and Slurm",
}


def main() -> int:
    """Runs the command that the first argument names and returns the exit status."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        sys.argv = [f"tfdist {name}", *arguments]
        runpy.run_module(f"tfdist.{name}", run_name="__main__", alter_sys=True)
        return 0
    with lenient_output() as is_lost:
        status = _print_about(name)
        return 1 if status == 0 and is_lost() else status


def _print_about(name: str) -> int:
    if name == "--version":
        print(f"tfdist {tfdist.__version__}")
        return 0
    if name in ("--help", "-h", "help"):
        lines = [f"  {command:<12}{text}" for command, text in COMMANDS.items()]
        usage = "usage: tfdist COMMAND [--flag=value ...]; tfdist COMMAND --help; tfdist --version"
        print_help("\n".join([usage, "", *lines]))
        return 0
    print(f"tfdist: {make_unknown_name_error('command', name, COMMANDS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
