"""A parameter server whose chief is killed: `python -m tests.jobs.lost_chief RUN_DIR`.

The exit status is the server's.
"""

import json
import os
import socket
import subprocess
import sys

CHIEF, WORKER, SERVER = (f"127.0.0.1:{port}" for port in (21000, 21001, 21002))

if __name__ == "__main__":
    config = {
        "cluster": {"chief": [CHIEF], "worker": [WORKER], "ps": [SERVER]},
        "task": {"type": "ps", "index": 0},
    }
    command = [sys.executable, "-m", "tfdist.train", "--strategy=parameter_server"]
    with socket.create_server(("127.0.0.1", 21000)) as chief:
        server = subprocess.Popen(
            [*command, f"--run_dir={sys.argv[1]}"],
            env={**os.environ, "TF_CONFIG": json.dumps(config)},
        )
        chief.accept()[0].close()
    sys.exit(server.wait())
