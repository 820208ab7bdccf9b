"""Submits a job with its target's own command line tool."""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.errors import TfdistError


@dataclass(frozen=True)
class Submission:
    """How to submit a job.

    Attributes:
      commands: alternative commands that submit it, with {output} for the directory of its files.
      followed: the commands that submit it with the first of these and follow it to its end; {id}
        stands for the last word that the one before printed.
    """

    commands: tuple[str, ...]
    followed: tuple[str, ...]

    def list_commands(self, *, follow: bool) -> tuple[str, ...]:
        """Returns the commands to run, in order."""
        return self.followed if follow else self.commands[:1]


def check_tools(commands: Sequence[str]) -> None:
    """Checks that the tools of commands are on this machine."""
    for command in commands:
        tool = shlex.split(command)[0]
        if shutil.which(tool) is None:
            raise TfdistError(
                f"--submit needs {tool}, which is not on this machine. Install it, or leave "
                "--submit out and run the printed command on a machine that has it."
            )


def run_commands(commands: Sequence[str], output: str) -> int:
    """Runs commands one after the other, and returns the first exit status that is not 0."""
    found = ""
    for position, command in enumerate(commands):
        filled = command.format(output=shlex.quote(output), id=shlex.quote(found))
        is_last = position + 1 == len(commands)
        print(f"$ {filled}", flush=True)
        done = subprocess.run(
            shlex.split(filled), stdout=None if is_last else subprocess.PIPE, text=True, check=False
        )
        if not is_last:
            print(done.stdout, end="", flush=True)
            found = (done.stdout.split() or [""])[-1]
        if done.returncode:
            return done.returncode
    return 0
