"""Logical replicas: the same bits, wherever the replicas run."""

import json
import subprocess
import sys

import numpy as np
import pytest

import tfdist
from tests import zoo
from tests.strategies.logical_task import TIMEOUT_S, run_alone, run_workers
from tfdist import TfdistError
from tfdist.devices import share_replicas
from tfdist.strategies import Mirrored, OneDevice
from tfdist.strategies.logical_replicas import (
    describe_change,
    list_whole_subtrees,
    split_node,
    sum_along_tree,
    sum_subtree,
)


def list_leaves(node):
    if node[1] - node[0] == 1:
        return [node[0]]
    left, right = split_node(node)
    return [*list_leaves(left), *list_leaves(right)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 13])
def test_workers_hold_all_replicas_and_their_subtrees_make_up_the_tree(count):
    draws = np.random.default_rng(count)
    values = [draws.normal(size=5).astype("f4") for _ in range(count)]
    total = np.asarray(sum_along_tree(values))
    np.testing.assert_allclose(total, np.sum(values, 0), rtol=1e-5)
    for workers in range(1, count + 1):
        shares = share_replicas(count, workers)
        assert [replica for share in shares for replica in share] == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        known = {}
        for share in shares:
            leaves = {(replica, replica + 1): values[replica] for replica in share}
            nodes = list_whole_subtrees(share, count)
            assert [leaf for node in nodes for leaf in list_leaves(node)] == list(share)
            known |= {node: sum_subtree(node, leaves) for node in nodes}
        np.testing.assert_array_equal(sum_subtree((0, count), known), total)


def test_what_has_no_logical_replicas_is_refused():
    for strategy in ("local_sgd", "parameter_server", "tpu"):
        with pytest.raises(TfdistError, match=f"strategy={strategy}. does not take .logical_rep"):
            tfdist.Trainer(zoo.build_linear, strategy=strategy, logical_replicas=2)
    with pytest.raises(TfdistError, match="needs the name or the options of a strategy"):
        tfdist.Trainer(
            zoo.build_linear, strategy=zoo.STRATEGIES["one_device"](), logical_replicas=2
        )
    with pytest.raises(TfdistError, match="already in use. Build the strategy before"):
        Mirrored(logical_replicas=2, threads_per_replica=3).build()
    with pytest.raises(TfdistError, match="Cannot split CPU:7"):
        Mirrored(logical_replicas=2, devices=("CPU:7",)).build()
    assert OneDevice(logical_replicas=2).resolve() == Mirrored(logical_replicas=2)


def test_the_default_strategy_of_a_command_may_have_logical_replicas(tmp_path):
    command = [sys.executable, "-m", "tfdist.train", *zoo.SMALL_RUN, "--strategy=auto"]
    command += ["--logical_replicas=3", "--epochs=1", "--depth=1", "--norm=none"]
    command += [f"--run_dir={tmp_path}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["strategy"], summary["replicas"]) == ("mirrored", 3)
    assert summary["numerics"]["logical_replicas"] == 3


def test_a_run_that_continues_says_what_may_change_its_bits():
    now = {"logical_replicas": 4, "arithmetic": "CPU; TensorFlow 2.21.0"}
    assert not describe_change(now, dict(now))
    assert "logical_replicas was none and is 4" in describe_change({}, now)


ALL = ("mlp", "transformer", "unet", "gan")
CASES = [
    pytest.param("4", "float32", ALL, [2, 3], id="4"),
    pytest.param("4", "float32", ("resnet",), [2, 4], id="resnet", marks=pytest.mark.thorough),
    pytest.param("4", "float64", ALL, [3], id="float64", marks=pytest.mark.thorough),
    pytest.param("4", "mixed_bfloat16", ALL, [3], id="bfloat16", marks=pytest.mark.thorough),
    pytest.param("2", "float32", ("unet",), [2], id="2", marks=pytest.mark.thorough),
    pytest.param("8", "float32", ("unet",), [3], id="8", marks=pytest.mark.thorough),
]


@pytest.mark.cluster
@pytest.mark.parametrize(("count", "precision", "programs", "workers"), CASES)
def test_every_arrangement_ends_with_the_same_bits(tmp_path, count, precision, programs, workers):
    arguments = (count, precision, "6", *programs)
    alone = run_alone(tmp_path / "alone", "one_device", *arguments)
    assert run_alone(tmp_path / "central", "central_storage", *arguments) == alone
    for number in workers:
        found = run_workers(tmp_path / f"{number}", number, *arguments)
        assert found == alone
