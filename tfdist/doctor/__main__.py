"""`python -m tfdist.doctor`: what is wrong with this machine or cluster.

    python -m tfdist.doctor
    python -m tfdist.doctor --hosts=a:2222,b:2222 --task=worker:0 --run_dir=/shared/run
    python -m tfdist.doctor --probe -- FLAGS of tfdist.train

TensorFlow is imported only in other processes, because it may be what is broken.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence

from tfdist.cli.arguments import split_at_dashes
from tfdist.cli.command import EXIT_FAILED, run_command
from tfdist.data.progress import show_status
from tfdist.doctor.findings import Finding, format_findings, sort_findings
from tfdist.doctor.machine import Machine
from tfdist.doctor.options import DoctorOptions
from tfdist.doctor.probe import parse_train_flags, probe
from tfdist.doctor.table import CHECKS, examine
from tfdist.runs.options import TrainOptions


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    given, train_flags = split_at_dashes(sys.argv[1:] if arguments is None else arguments)
    return run_command(
        "tfdist.doctor",
        lambda options: run_doctor(options, train_flags),
        given,
        options_class=DoctorOptions,
        others=(TrainOptions,),
        needs_tensorflow=False,
        is_text=True,
    )


def run_doctor(options: DoctorOptions, train_flags: Sequence[str] = ()) -> int:
    """Examines this machine and prints what it finds.

    Args:
      train_flags: flags of `tfdist.train` that describe what to train for a minute.
    """
    subject, train = options.subject, parse_train_flags(train_flags)
    machine = Machine(
        directory=subject.run_dir, hosts=subject.hosts, task=subject.task, wait_s=subject.wait_s
    )
    found = list(examine(machine, say=show_status))
    if options.speed.probe or train_flags:
        is_broken = any(finding.severity == "wrong" for finding in found)
        measured = [] if is_broken else list(probe(machine, options.speed, train, show_status))
        found += [dataclasses.replace(finding, check="speed") for finding in measured]
    show_status("")
    print(_to_json(found) if options.run.json else _to_text(found))
    return EXIT_FAILED if any(finding.severity != "ok" for finding in found) else 0


def _to_text(found: Sequence[Finding]) -> str:
    problems = sum(finding.severity != "ok" for finding in found)
    verdict = {0: "Nothing is wrong.", 1: "1 problem."}.get(problems, f"{problems} problems.")
    return f"{format_findings(found)}\n\n{verdict}"


def _to_json(found: Sequence[Finding]) -> str:
    rows = [dataclasses.asdict(finding) for finding in sort_findings(found)]
    return json.dumps({"checks": list(CHECKS), "findings": rows}, indent=2)


if __name__ == "__main__":
    sys.exit(main())
