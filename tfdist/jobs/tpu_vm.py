"""A script that requests a TPU VM, trains in a container on it and gives it back.

Source: https://cloud.google.com/tpu/docs/queued-resources and
https://cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources/create
"""

import re
import shlex

from tfdist.jobs.job import TPU_RUNTIMES, Job
from tfdist.jobs.patching import TpuVmPatch, format_option, make_script_patch
from tfdist.jobs.submission import Submission

_FILE = "tpu_vm.sh"
_POLL_S = 30
_MOST_FAILURES = 10  # in a row, of reading the state of a request


def make_tpu_vm_files(job: Job) -> tuple[dict[str, str], Submission]:
    """Returns file name -> text, and how to submit them; the script follows the job itself."""
    command = f"bash {{output}}/{_FILE}"
    return {_FILE: make_script(job)}, Submission((command,), followed=(command,))


def make_script(job: Job) -> str:
    """Returns the script, which starts again on a new TPU as the Slurm script does."""
    cluster = job.cluster
    added: TpuVmPatch = make_script_patch(TpuVmPatch, job.patches)
    where = f"{job.name} --zone={shlex.quote(cluster.zone)}"
    request = [
        f"--node-id={job.name}",
        f"--accelerator-type={shlex.quote(job.accelerator)}",
        f"--runtime-version={shlex.quote(cluster.runtime_version or _find_runtime(job))}",
        *(["--spot"] if cluster.spot else []),
        *(
            [f"--service-account={shlex.quote(cluster.service_account)}"]
            if cluster.service_account
            else []
        ),
        *(format_option(*each) for each in added.create.items()),
    ]
    # TPUs can be reached only from a privileged container on the host's network.
    container = ["sudo", "docker", "run", "--rm", "--privileged", "--network=host"]
    command = shlex.join(
        [
            *container,
            *map(str, added.docker),
            "--entrypoint=",
            job.image,
            *job.work.command,
            *job.work.arguments,
        ]
    )
    registry = job.image.partition("/")[0]
    if registry.endswith(("docker.pkg.dev", "gcr.io")):
        command = f"sudo gcloud auth configure-docker {shlex.quote(registry)} --quiet && {command}"
    return f"""#!/bin/bash
# Requests a TPU VM, trains on it, and deletes it. Status 0: done. 2: bad input.
delete() {{
  gcloud compute tpus queued-resources delete {where} --force --quiet
}}
trap 'delete; exit 130' INT TERM

for start in $(seq 0 {cluster.retries}); do
  gcloud compute tpus queued-resources create {where} \\
    {" ".join(request)} || exit 1
  failures=0
  while true; do
    if state=$(gcloud compute tpus queued-resources describe {where} --format='value(state.state)')
    then
      failures=0
    elif [ "$((failures += 1))" -ge {_MOST_FAILURES} ]; then
      delete; echo "The request cannot be read: gcloud failed {_MOST_FAILURES} times." >&2; exit 1
    fi
    case "$state" in
      ACTIVE) break ;;
      FAILED | SUSPENDED) delete; echo "The request is $state." >&2; exit 1 ;;
    esac
    sleep {_POLL_S}
  done
  gcloud compute tpus tpu-vm ssh {where} --command={shlex.quote(command)}
  status=$?
  delete
  if [ "$status" -eq 0 ] || [ "$status" -eq 2 ]; then
    break
  fi
done
exit "$status"
"""


def _find_runtime(job: Job) -> str:
    return next(name for kind, name in TPU_RUNTIMES.items() if re.fullmatch(kind, job.accelerator))
