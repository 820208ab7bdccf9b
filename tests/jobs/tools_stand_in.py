"""Stands in for sbatch, gcloud and kubectl: answers as their documentation shows, and notes calls.

    BIN_DIR/TOOL ARGUMENTS

Source: the manual page sbatch(1); https://cloud.google.com/sdk/gcloud/reference for
`ai custom-jobs create`, `compute tpus queued-resources describe` and `compute tpus tpu-vm ssh`;
https://kubernetes.io/docs/reference/kubectl/
"""

import json
import sys
from pathlib import Path

TOOLS = ("sbatch", "gcloud", "kubectl", "sleep")
CUSTOM_JOB = "projects/123/locations/us-central1/customJobs/456"


def install(directory, *, statuses=()):
    """Makes the directory, with the tools; the calls that train end with the statuses, in order."""
    directory.mkdir()
    (directory / "statuses").write_text(json.dumps(list(statuses)))
    for tool in TOOLS:
        path = directory / tool
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$0" "$@"\n')
        path.chmod(0o755)


def read_calls(directory):
    """Returns the calls so far, as lists of arguments that begin with the tool."""
    return [json.loads(line) for line in (directory / "calls").read_text().splitlines()]


def main(path, *arguments):
    directory, tool = Path(path).parent, Path(path).name
    with (directory / "calls").open("a") as file:
        file.write(json.dumps([tool, *arguments]) + "\n")
    if tool == "sbatch":
        print("Submitted batch job 7")
    elif tool == "kubectl" and arguments[0] == "apply":
        print("job.batch/tfdist created")
    elif arguments[:3] == ("ai", "custom-jobs", "create"):
        print("Using endpoint [https://us-central1-aiplatform.googleapis.com/]", file=sys.stderr)
        print(CUSTOM_JOB)
    elif arguments[2:4] == ("queued-resources", "describe"):
        # The first answer of each request is that it waits.
        calls = [call for call in read_calls(directory) if call[0] == "gcloud"]
        print("ACTIVE" if calls[-2][4] == "describe" else "WAITING_FOR_RESOURCES")
    if {"--wait", "logs", "stream-logs", "ssh"} & set(arguments):
        statuses = json.loads((directory / "statuses").read_text())
        status = statuses.pop(0) if statuses else 0
        (directory / "statuses").write_text(json.dumps(statuses))
        return status
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
