"""An sbatch script that starts steps for `tfdist.cluster.parse_slurm` to read.

Source: the manual pages sbatch(1) and srun(1), https://slurm.schedmd.com
"""

import math
import shlex
from typing import Any

from tfdist.errors import TfdistError
from tfdist.jobs.job import Job
from tfdist.jobs.patching import SlurmPatch, format_option, make_script_patch, merge
from tfdist.jobs.submission import Submission

_FILE = "train.sbatch"
# Slurm may send the signal up to 60 s early, never late.
_SIGNAL_MARGIN_S = 30
# How long the other tasks may run after the first one has ended.
_WAIT_S = 60


def make_slurm_files(job: Job) -> tuple[dict[str, str], Submission]:
    """Returns file name -> text, and how to submit them."""
    path = f"{{output}}/{_FILE}"
    submission = Submission((f"sbatch {path}",), followed=(f"sbatch --wait {path}",))
    return {_FILE: make_script(job)}, submission


def make_script(job: Job) -> str:
    """Returns the script: a task per worker; parameter servers come last and add a chief, first."""
    cluster = job.cluster
    added: SlurmPatch = make_script_patch(SlurmPatch, job.patches)
    directives: dict[str, Any] = {
        "job-name": job.name,
        "ntasks": job.num_tasks,
        "cpus-per-task": cluster.cpus_per_worker,
        "mem-per-cpu": f"{cluster.memory_gib_per_worker * 1024 // cluster.cpus_per_worker}M",
        "time": math.ceil(cluster.time_limit_h * 60),
        "signal": f"TERM@{job.grace_period_s + _SIGNAL_MARGIN_S}",
        "output": "%x-%j.log",
        "open-mode": "append",
    }
    for name, value in (("partition", cluster.partition), ("account", cluster.account)):
        if value:
            directives[name] = value
    if cluster.accelerators_per_worker:
        kind = f"{job.accelerator}:" if job.accelerator else ""
        directives["gpus-per-task"] = f"{kind}{cluster.accelerators_per_worker}"
    directives = merge(directives, added.sbatch)
    head = "\n".join(_make_directive(name, value) for name, value in directives.items())
    setup = f"{added.setup.rstrip()}\n" if added.setup else ""
    options = "".join(f"{format_option(*each)} " for each in added.srun.items())
    command = " \\\n  ".join(map(shlex.quote, job.work.arguments))
    return f"""#!/bin/bash
# The tasks use the environment from which this is submitted, and a directory that all nodes see.
# Status 0: done. 2: bad input. 143: stopped after a checkpoint, for example before the time limit.
{head}
#SBATCH --requeue

export TFDIST_NUM_PS={cluster.ps}
# The secret by which the tasks know one another.
export TFDIST_TOKEN="${{TFDIST_TOKEN:-$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \\n')}}"
{setup}
srun --ntasks={job.num_tasks} --cpus-per-task={cluster.cpus_per_worker} --distribution=block \\
  --kill-on-bad-exit=0 --wait={_WAIT_S} {options}\\
  {shlex.join([*map(str, added.prefix), *job.work.command])} \\
  {command}
status=$?

if [ "$status" -eq 143 ]; then
  again=1
elif [ "$status" -eq 0 ] || [ "$status" -eq 2 ] || [ "$status" -eq 130 ]; then
  again=0
else
  again=$(( ${{SLURM_RESTART_COUNT:-0}} < {cluster.retries} ))
fi
if [ "$again" -eq 1 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def _make_directive(name: str, value: object) -> str:
    """Returns a line for sbatch, which reads quotes as a shell does; refuses values of several."""
    if len(f"{name}{value}.".splitlines()) > 1:
        raise TfdistError(
            f"Cannot write #SBATCH --{name}={value!r}: it has a line break. Give one line."
        )
    return f"#SBATCH {format_option(name, value)}"
