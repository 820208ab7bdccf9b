"""The Dockerfile: no daemon builds it here, so what it relies on is looked at piece by piece."""

import configparser
import fnmatch
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tfdist.jobs.job import make_work
from tfdist.jobs.pods import USER

ROOT = pathlib.Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def copy_context(target):
    """Copies what `COPY .` copies: only what .dockerignore excepts."""
    patterns = (ROOT / ".dockerignore").read_text().split()
    kept = [line[1:] for line in patterns if line.startswith("!")]
    assert patterns[0] == "*"
    for name in kept:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)


@pytest.mark.thorough
def test_what_is_copied_is_enough_to_install(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    copy_context(source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--no-deps", "--target", site, source],
        check=True,
        timeout=1000,
    )
    here = {path.relative_to(ROOT) for path in (ROOT / "tfdist").rglob("*.py")}
    here |= {"tfdist" / path.relative_to(ROOT) for path in (ROOT / "models").rglob("*.py")}
    assert here == {path.relative_to(site) for path in site.rglob("*.py")}
    check_beside_models(tmp_path, PYTHONPATH=str(site))


def check_beside_models(directory, **environment):
    """Runs a command where there are a module and a package that are called as half of all are."""
    for name in ("a", "b"):
        (directory / name).mkdir()
    (directory / "a" / "models.py").touch()
    (directory / "b" / "models").mkdir()
    (directory / "b" / "models" / "__init__.py").touch()
    for name in ("a", "b"):
        run = subprocess.run(
            [sys.executable, "-m", "tfdist.train", "--dry_run", "--image_size=16,16", "--depth=1"],
            cwd=directory / name,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=1000,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert "unet" in run.stdout


@pytest.mark.thorough
def test_the_layer_of_dependencies_needs_nothing_that_changes_with_the_code(tmp_path):
    build = DOCKERFILE[: DOCKERFILE.index("COPY . .")]
    (copied,) = re.findall(r"^COPY (.+) \./$", build, re.M)
    for name in copied.split():
        shutil.copy(ROOT / name, tmp_path)
    ((before, after),) = re.findall(r"^RUN (mkdir [^\\]+)\\\n.*\\\n && (rm .+)$", build, re.M)
    subprocess.run(["sh", "-c", before], cwd=tmp_path, check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    site = tmp_path / "site"
    subprocess.run(
        [*pip, "--no-deps", "--target", site, "."], cwd=tmp_path, check=True, timeout=1000
    )
    (metadata,) = site.glob("tfdist-*.dist-info/METADATA")
    named = re.findall(r"^Requires-Dist: (\w+)", metadata.read_text(), re.M)
    assert {"tensorflow", "keras", "absl"} <= set(named)
    # What is left of this would end up in the package, instead of newer files of the same names.
    subprocess.run(["sh", "-c", after], cwd=tmp_path, check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"site", *copied.split()}


@pytest.mark.thorough
def test_a_user_may_have_models_of_their_own(tmp_path):
    check_beside_models(tmp_path)


def test_agrees_with_the_job_files_and_the_package():
    assert re.search(r"^USER (\d+)$", DOCKERFILE, re.M)[1] == str(USER)
    assert f"--uid {USER} " in DOCKERFILE
    assert re.search(r"^ENTRYPOINT (.+)$", DOCKERFILE, re.M)[1] == str(
        list(make_work([]).command)
    ).replace("'", '"')
    package = configparser.ConfigParser()
    package.read(ROOT / "setup.cfg")
    assert "gpu" in package["options.extras_require"]
    python = re.search(r"^ARG PYTHON=(.+)$", DOCKERFILE, re.M)[1]
    assert fnmatch.fnmatch(python, "3.1[123].*-slim-*")  # the same base whenever it is built
