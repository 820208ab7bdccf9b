"""The command, on this machine."""

import json
import re
import subprocess
import sys

import pytest

from tests.two_hosts import ADDRESSES, UnavailableError, two_hosts
from tfdist.doctor.findings import Finding, format_findings
from tfdist.doctor.machine import Machine
from tfdist.doctor.probe import find_link_speed
from tfdist.doctor.table import CHECKS

CLEAN = ["env", "-u", "TF_CONFIG", sys.executable, "-m", "tfdist.doctor"]


def run(*flags, timeout=1000):
    return subprocess.run([*CLEAN, *flags], capture_output=True, text=True, timeout=timeout)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("form", ["--nojson", "--json"])
def test_a_healthy_machine(form, path_with_spaces):
    done = run(form, f"--run_dir={path_with_spaces}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    if form == "--json":
        report = json.loads(done.stdout)
        assert report["checks"] == list(CHECKS)
        assert {finding["severity"] for finding in report["findings"]} == {"ok"}
    else:
        assert done.stdout.endswith("\n\nNothing is wrong.\n")
        assert "ok    versions       tfdist 0." in done.stdout


def test_a_machine_with_a_fault():
    """The limit of open files, through the whole command; TensorFlow is not needed for it."""
    command = 'ulimit -n 64; KERAS_BACKEND=jax exec "$@"'
    done = subprocess.run(
        ["sh", "-c", command, "sh", *CLEAN], capture_output=True, text=True, timeout=1000
    )
    assert done.returncode == 1
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith("WRONG tensorflow     KERAS_BACKEND=jax: tfdist trains with")
    assert second.startswith("WRONG open files     a process may open only 64 files")
    assert done.stdout.endswith("\n\n2 problems.\n")


def test_the_severest_comes_first():
    found = [Finding(s, f"text of\n{s}", "a check") for s in ("ok", "wrong", "slow")]
    assert format_findings(found).splitlines() == [
        "WRONG a check  text of wrong",
        "SLOW  a check  text of slow",
        "ok    a check  text of ok",
    ]


def test_the_speed_of_the_network(path_with_spaces):
    for name, state, speed in (("lo", "unknown", "0"), ("eth0", "up", "10000"), ("x", "up", "-1")):
        place = path_with_spaces / "sys/class/net" / name
        place.mkdir(parents=True)
        (place / "operstate").write_text(f"{state}\n")
        (place / "speed").write_text(f"{speed}\n")
    assert find_link_speed(Machine(root=path_with_spaces)) == 10


PROBED = [
    "--dataset=shapes",
    "--image_size=32,32",
    "--train_examples=64",
    "--val_examples=8",
    "--base_filters=8",
    "--depth=3",
    "--global_batch_size=16",
]


@pytest.mark.cluster
def test_devices_that_share_the_cores():
    flags = [flag for flag in PROBED if not flag.startswith("--depth")]
    done = run("--probe", "--steps=4", "--", *flags, "--depth=1", timeout=1000)
    (line,) = [line for line in done.stdout.splitlines() if "times as fast" in line]
    # On a busy machine the numbers may be anything.
    assert "because they share the same " in line or line.startswith("ok"), line


@pytest.mark.cluster
def test_a_slow_network(path_with_spaces):
    addresses = ",".join(f"{address}:2222" for address in ADDRESSES)
    flags = [f"--hosts={addresses}", f"--run_dir={path_with_spaces}", "--wait_s=10", "--probe"]
    try:
        with two_hosts() as hosts:
            hosts.set_rate(0.01)
            tasks = [
                subprocess.Popen(
                    hosts.on(host, [*CLEAN, f"--task=worker:{host}", *flags, "--", *PROBED]),
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for host in range(2)
            ]
            said = [task.communicate(timeout=1000)[0] for task in tasks]
    except UnavailableError as error:
        pytest.skip(str(error))
    assert re.search(r"because the all-reduce of 0\.\d+ MB takes \d+% of a step, at 0\.0", said[0])
    assert "ok    peers          all tasks agree: versions, clocks, the directory" in said[1]
    assert not list(path_with_spaces.iterdir())
