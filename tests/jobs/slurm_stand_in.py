"""Stands in for Slurm on one node: sbatch, srun and scontrol, as far as the job script uses them.

    python -m tests.jobs.slurm_stand_in sbatch SCRIPT BIN_DIR SIGNAL_FILE

BIN_DIR gets the commands that the script calls. When SIGNAL_FILE appears, the first start's tasks
get the signal that they would get before the time limit. The variables and what becomes of them:
manual pages sbatch(1), srun(1), scontrol(1).
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path


def sbatch(script, bin_dir, signal_file):
    """Runs the script, and again as often as it is put back into the queue."""
    given = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", Path(script).read_text(), re.M))
    assert re.search(r"^#SBATCH --requeue$", Path(script).read_text(), re.M)
    Path(bin_dir).mkdir()
    for name in ("srun", "scontrol"):
        path = Path(bin_dir, name)
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {__spec__.name} {name} "$@"\n')
        path.chmod(0o755)
    requeued = Path(bin_dir, "requeued")
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"} | {
        "PATH": f"{bin_dir}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ENVIRONMENT": "BATCH",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NTASKS": given["ntasks"],
        "SLURM_CPUS_PER_TASK": given["cpus-per-task"],
        "SLURM_TASKS_PER_NODE": given["ntasks"],
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "STAND_IN_REQUEUED": str(requeued),
        "STAND_IN_SIGNAL": f"{given['signal'].partition('@')[0]} {signal_file}",
    }
    for count in range(5):
        if count:
            environ["SLURM_RESTART_COUNT"] = str(count)
            environ["STAND_IN_SIGNAL"] = ""
        status = subprocess.run(["bash", script], env=environ).returncode
        print(f"start {count} ended with {status}", flush=True)
        if not requeued.exists():
            return status
        requeued.unlink()
    return status


def srun(*arguments):
    """Starts the tasks of a step and returns the highest of their statuses."""
    options = {}
    command = list(arguments)
    while command[0].startswith("--"):
        name, _, value = command.pop(0)[2:].partition("=")
        options[name] = value
    count = int(options["ntasks"])
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": str(count),
        "SLURM_DISTRIBUTION": options["distribution"],
    }
    tasks = [
        subprocess.Popen(
            command,
            env={**os.environ, **step, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)},
        )
        for i in range(count)
    ]
    number, _, signal_file = os.environ["STAND_IN_SIGNAL"].partition(" ")
    first_end = None
    while any(task.poll() is None for task in tasks):
        if number and Path(signal_file).exists():
            for task in tasks:
                subprocess.run(["kill", f"-{number}", str(task.pid)])
            number = ""
        if first_end is None and any(task.poll() is not None for task in tasks):
            first_end = time.monotonic()
        if first_end and time.monotonic() - first_end > float(options["wait"]):
            for task in tasks:
                task.kill()
        time.sleep(0.05)
    statuses = [task.returncode for task in tasks]
    return max(status if status >= 0 else 128 - status for status in statuses)


def scontrol(command, job):
    """Notes that the job was put back into the queue."""
    assert (command, job) == ("requeue", os.environ["SLURM_JOB_ID"])
    Path(os.environ["STAND_IN_REQUEUED"]).touch()
    return 0


if __name__ == "__main__":
    commands = {"sbatch": sbatch, "srun": srun, "scontrol": scontrol}
    sys.exit(commands[sys.argv[1]](*sys.argv[2:]))
