"""The command says equal of what is, and names the part that makes a model wrong."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from tfdist.placement.options import PLACEMENTS
from tfdist.placement.shards.elementwise import updates_elements
from tfdist.verify import runs
from tfdist.verify.options import VerificationOptions, VerifiedModelOptions, VerifyOptions
from tfdist.verify.recording import keep_first_gradients
from tfdist.verify.table import format_table

ROOT = pathlib.Path(__file__).parents[2]
MODULE = "tests.verify.wrong_models"


@pytest.fixture
def verify():
    """Compares mirrored replicas of a model with one device, in float64."""
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")

    def run(build, strategies=("mirrored",), *, shards=False):
        options = VerifyOptions(
            verification=VerificationOptions(
                strategies=strategies, steps=3, shard_optimizer=shards
            ),
            model=VerifiedModelOptions(model=f"{MODULE}:{build}"),
        )
        return list(runs.run_strategies(options, lambda name, step: None))

    yield run
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def test_a_model_that_is_right_is_equal(verify):
    verdicts = verify("build_right", ("one_device", "mirrored", "central_storage"))
    assert all(verdict.holds for verdict in verdicts), format_table(verdicts)
    assert "equal" in format_table(verdicts)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("build", "start", "cause"),
    [
        ("build_loss_per_replica", "loss", "mean_of_valid.*averaged per replica"),
        ("build_clipping", "gradient of below/kernel", "clips it before the reduction"),
        ("build_dropout_per_replica", "above/kernel", "'drop'.*seeded per replica"),
        ("build_dropout_seeded_by_replica", "above/kernel", "'drop'.*per replica"),
    ],
)
def test_names_what_makes_a_model_wrong(verify, build, start, cause):
    (verdict,) = verify(build)
    text = format_table([verdict])
    assert not verdict.holds, text
    assert verdict.comparison.start.startswith("step 1:")
    assert start in verdict.comparison.start, text
    assert re.search(cause, verdict.problem), text


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("build", "status", "verdict"),
    [
        ("build_right", 0, "the same bits"),
        ("build_otherwise_in_clusters", 1, "other bits from step 1 on, first in the log 'loss'"),
    ],
)
def test_says_where_the_bits_of_arrangements_part(build, status, verdict):
    command = [sys.executable, "-m", "tfdist.verify", "--bits", "--logical_replicas=2", "--steps=2"]
    run = subprocess.run(
        [*command, f"--model={MODULE}:{build}"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == status, run.stdout + run.stderr
    one, two = run.stdout.splitlines()[-2:]
    assert one.startswith("one process")
    assert re.fullmatch(f"2 workers +[0-9a-f]{{16}}  {verdict}", two)


def test_local_sgd_is_not_compared_where_a_layer_sees_the_batch(verify):
    (verdict,) = verify("build_right", ("local_sgd",))
    assert verdict.holds
    assert "not comparable" in format_table([verdict])
    assert "'batch_normalization'" in verdict.problem


def test_a_divided_optimizer_is_equal(verify):
    verdicts = verify("build_right", ("one_device", "mirrored", "central_storage"), shards=True)
    texts = [format_table([verdict]) for verdict in verdicts]
    assert [verdict.holds for verdict in verdicts] == [True] * 3, texts
    assert "not supported" in texts[2]


def test_recording_does_not_change_how_an_optimizer_is_divided():
    import keras

    optimizer = keras.optimizers.Adam()
    keep_first_gradients(optimizer)
    assert updates_elements(optimizer)


VERDICTS = {
    "one_device": "equal",
    "mirrored": "equal",
    "central_storage": "not supported",
    "multi_worker_mirrored": "equal",
    "local_sgd": "equal",
}
# `make test-cluster` runs each placement and each strategy, and all placements on several workers.
IN_SHORT = {
    "layers": ("mirrored", "multi_worker_mirrored"),
    "shards": ("central_storage", "multi_worker_mirrored"),
    "strips": ("local_sgd",),
    "strips --grid=2,2": ("one_device", "multi_worker_mirrored"),
}


@pytest.mark.cluster
@pytest.mark.thorough(keep=len(IN_SHORT))
@pytest.mark.parametrize(
    ("placement", "strategies"),
    [*IN_SHORT.items(), *((placement, tuple(VERDICTS)) for placement in IN_SHORT)],
)
def test_placements_are_equal_alone_and_on_several_workers(tmp_path, placement, strategies):
    command = [sys.executable, "-m", "tfdist.verify", *f"--placement={placement}".split()]
    command += ["--steps=3", "--image_size=16,16", "--base_filters=4", "--depth=1"]
    command += [f"--strategies={','.join(strategies)}", f"--json={tmp_path}/found.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    verdicts = {row["strategy"]: row["verdict"] for row in found}
    assert verdicts == {name: VERDICTS[name] for name in strategies}, done.stdout


def test_every_placement_is_verified():
    assert {placement.split()[0] for placement in IN_SHORT} == set(PLACEMENTS)
    assert {name for names in IN_SHORT.values() for name in names} == set(VERDICTS)


@pytest.mark.cluster
def test_all_strategies_are_equal_and_a_wrong_model_is_not(tmp_path):
    def run(*flags):
        command = [sys.executable, "-m", "tfdist.verify", f"--json={tmp_path}/found.json", *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1000)
        return done, json.loads((tmp_path / "found.json").read_text())

    done, found = run(f"--model={MODULE}:build_random", "--steps=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["verdict"] for row in found] == ["equal"] * 6, done.stdout
    # A process that waits on a busy machine may be killed at the end; its result is known then.
    assert re.sub(".*did not stop in time and had to be killed.\n", "", done.stderr) == ""
    done, (row,) = run(
        f"--model={MODULE}:build_loss_per_replica",
        "--steps=3",
        "--strategies=multi_worker_mirrored",
    )
    assert done.returncode == 1
    assert "mean_of_valid" in row["problem"]
