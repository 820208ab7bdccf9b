"""One process of a configuration: `python -m tfdist.benchmark.worker DIRECTORY`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tfdist.benchmark.configurations import Configuration
from tfdist.benchmark.options import BenchmarkOptions
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.errors import TfdistError
from tfdist.launch.machine import list_cores


def main(directory: str) -> int:
    """Measures what `task.json` describes and writes `result.json`; prints an error last."""
    task = json.loads((Path(directory) / "task.json").read_text())
    configuration = Configuration(**task["configuration"])
    options = BenchmarkOptions.from_dict(task["options"])
    if configuration.cores and list_cores():
        os.sched_setaffinity(0, list_cores()[: configuration.cores])
    start_tensorflow_quietly()
    from tfdist.benchmark.measuring import measure, measure_ceilings

    try:
        if configuration.kind == "ceiling":
            found: dict[str, Any] | None = measure_ceilings(configuration, options)
        else:
            found = measure(configuration, options)
    except TfdistError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    if found is not None:
        (Path(directory) / "result.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
