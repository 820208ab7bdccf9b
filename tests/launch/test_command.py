"""What the launcher makes of `--command`."""

import subprocess
import sys


def test_an_open_quote_costs_one_line():
    command = [sys.executable, "-m", "tfdist.launch", "--workers=1", "--command='"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "tfdist.launch: Cannot read --command=': No closing quotation. Correct the quotes.\n"
    )
