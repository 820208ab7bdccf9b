"""The programs of docs/coming_from.md run as the page has them."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "coming_from.md").read_text()
FILES = {
    match[1]: match[2]
    for match in re.finditer(r"```python\n# (\w+\.py)\n(.+?)```", TEXT, re.DOTALL)
}
COMMANDS = [
    line for block in re.findall(r"```sh\n(.+?)```", TEXT, re.DOTALL) for line in block.splitlines()
]
# Programs of others' libraries are not run.
BEFORE = [
    name
    for name, text in FILES.items()
    if name != "data.py" and not re.search(r"horovod|\bray\b|tfdist", text)
]


def run(command, directory):
    for name, text in FILES.items():
        (directory / name).write_text(text)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_has_them_all():
    assert {"keras_fit.py", "distribute.py", "horovod_fit.py", "ray_fit.py"} <= set(FILES)
    assert len(COMMANDS) == 6
    for text in FILES.values():
        compile(text, "docs/coming_from.md", "exec")


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", BEFORE)
def test_a_program_before_runs(name, path_with_spaces):
    assert "accuracy" in run([name], path_with_spaces)


@pytest.mark.cluster
@pytest.mark.parametrize("line", COMMANDS)
def test_a_program_after_runs(line, path_with_spaces):
    python, *command = shlex.split(line)
    assert python == "python"
    printed = run(command, path_with_spaces)
    assert ("accuracy" in printed) != ("tfdist.jobs" in command)
