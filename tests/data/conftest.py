import os
import subprocess
import sys

import pytest


@pytest.fixture
def last_lines_of():
    """A function: code -> the last line that each of two processes prints, of other hash seeds."""

    def run(code: str) -> list[str]:
        return [
            subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                check=True,
                timeout=1000,
                env={**os.environ, "PYTHONHASHSEED": seed},
            ).stdout.splitlines()[-1]
            for seed in "12"
        ]

    return run
