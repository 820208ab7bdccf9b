"""Stands in for Kubernetes: runs the pods of an indexed Job as processes of this machine.

    python -m tests.jobs.pods_stand_in FILE

The cluster is what `parse_kubernetes` makes of each pod's environment. Only the addresses differ:
for "<job>-<i>.<service>:2222", which the cluster's DNS would resolve, stands 127.0.0.1 with a port
of the pod's own.
"""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import yaml

from tfdist.cluster import parse_kubernetes

FIRST_PORT = 21000


def run_pods(path):
    """Runs the pods and returns their statuses, in the order of their indices."""
    job = next(item for item in yaml.safe_load_all(Path(path).read_text()) if item["kind"] == "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    command = [sys.executable, *container["command"][1:], *container["args"]]
    pods = []
    for index in range(job["spec"]["completions"]):
        environ = {
            **{item["name"]: item["value"] for item in container["env"]},
            "JOB_COMPLETION_INDEX": str(index),
            "HOSTNAME": f"{job['metadata']['name']}-{index}",
        }
        config = parse_kubernetes(environ)
        names = [address for addresses in config.tasks.values() for address in addresses]
        ports = {name: f"127.0.0.1:{FIRST_PORT + i}" for i, name in enumerate(names)}
        tasks = {role: tuple(ports[name] for name in names) for role, names in config.tasks.items()}
        here = dataclasses.replace(config, tasks=tasks)
        pods.append(
            subprocess.Popen(command, env={**os.environ, "TF_CONFIG": here.to_tf_config_json()})
        )
    return [pod.wait() for pod in pods]


if __name__ == "__main__":
    found = run_pods(sys.argv[1])
    print("statuses", *found, flush=True)
    sys.exit(max(found))
