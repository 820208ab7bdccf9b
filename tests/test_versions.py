"""The pairs of versions that are tested, and what may be installed with them."""

import configparser
import pathlib
import re
import subprocess
import sys

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from benchmarks import versions
from tfdist import internals

ROOT = pathlib.Path(__file__).parents[1]
SUPPORTED = [name for name, pair in versions.PAIRS.items() if pair.is_supported]


def read_pins(lines):
    return dict(line.split("==") for line in lines if "==" in line)


def read_setup():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def list_requirements():
    lines = filter(None, read_setup()["options"]["install_requires"].splitlines())
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def test_the_newest_pair_is_what_is_not_warned_about():
    pins = read_pins(versions.PAIRS["newest"].requirements)
    for name, (_, tested) in internals.TESTED.items():
        assert Version(pins[name.lower()]).release[:2] == tested


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_supported_pair_can_be_installed(name):
    required = list_requirements()
    pins = read_pins(versions.PAIRS[name].requirements)
    for package in pins.keys() & required.keys():
        assert required[package].specifier.contains(pins[package]), package


def test_a_release_is_installed_on_each_python_that_can():
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    setup = read_setup()
    supported = SpecifierSet(setup["options"]["python_requires"])
    pythons = [f"3.{minor}" for minor in range(30) if f"3.{minor}" in supported]
    assert workflow["jobs"]["install"]["strategy"]["matrix"]["python"] == pythons
    named = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    assert named == pythons


def test_the_pair_for_tpus_is_what_the_extra_installs():
    extra = filter(None, read_setup()["options.extras_require"]["tpu"].splitlines())
    assert set(extra) <= set(versions.PAIRS["tpu"].requirements)


def test_nothing_that_colab_has_must_change():
    pins = read_pins((ROOT / versions.PAIRS["colab"].constraints).read_text().splitlines())
    assert pins["tensorflow"] == read_pins(versions.PAIRS["colab"].requirements)["tensorflow"]
    there = {name.lower(): version for name, version in pins.items()}
    for name, requirement in list_requirements().items():
        assert requirement.specifier.contains(there[name]), name


def test_a_pair_whose_python_is_missing_is_left_out_in_one_line(tmp_path):
    flags = ("--pairs=colab", "--quick", f"--directory={tmp_path / 'pairs'}")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.versions", *flags],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "colab: left out: there is no python3.13\n"


def test_a_table_has_a_column_for_each_pair():
    table = versions.format_table({"colab": {"zoo": "3 passed"}, "next": {"zoo": "1 failed"}})
    assert "| zoo | 3 passed | 1 failed |" in table


@pytest.mark.parametrize(
    ("results", "passes"),
    [
        (["pass", "pass (1e-06 apart)", "7 passed", "9 passed, 8 skipped", "2 skipped"], False),
        (["pass", "pass (1e-06 apart)", "7 passed", "9 passed, 8 skipped"], True),
        (["9 passed, 8 skipped", "9 passed, 3 skipped"], False),
        *((["pass", "9 passed, 1 failed"], False), (["status 1: no"], False)),
    ],
)
def test_what_counts_as_passing(results, passes):
    assert versions.passes(results) is passes
