"""The formulas of collectives agree with their simulation, message by message."""

import numpy as np
import pytest

from benchmarks.plan_checks import run_reduction_to_one, run_ring, run_servers, run_tree
from tfdist.plan.collectives import (
    Path,
    expect_slowest,
    find_exposed,
    time_hierarchical,
    time_reduction_to_one,
    time_ring,
    time_servers,
    time_tree,
)

PATH = Path(alpha=1e-5, beta=1e-9)
BYTES = 1e8


@pytest.mark.parametrize("count", [2, 3, 8, 64, 1024])
def test_a_ring(count):
    ends = run_ring(np.zeros(count), BYTES, PATH)
    assert ends.max() == pytest.approx(time_ring(count, BYTES, PATH))


@pytest.mark.parametrize("count", [2, 8, 64, 1024])
def test_trees_in_small_pieces(count):
    ends = run_tree(np.zeros(count), BYTES, Path(1e-7, 1e-9), pieces=512)
    assert ends.max() == pytest.approx(time_tree(count, BYTES, PATH), rel=0.05)


@pytest.mark.parametrize("count", [2, 8, 64])
def test_a_sum_on_one_device(count):
    ends = run_reduction_to_one(np.zeros(count), BYTES, PATH)
    assert ends.max() == pytest.approx(time_reduction_to_one(count, BYTES, PATH))


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (8, 2), (64, 4)])
@pytest.mark.parametrize("num_bytes", [BYTES, 1e3])
def test_servers(workers, servers, num_bytes):
    found = run_servers(workers, servers, num_bytes, PATH)
    assert found == pytest.approx(time_servers(workers, servers, num_bytes, PATH), rel=0.05)


def test_a_ring_ends_with_its_latest_participant():
    starts = np.zeros(64)
    starts[17] = 5.0
    ends = run_ring(starts, BYTES, PATH)
    assert ends.min() >= 5.0
    assert ends.max() == pytest.approx(5.0 + time_ring(64, BYTES, PATH), rel=0.01)


def test_a_hierarchy_crosses_the_network_once_per_machine():
    fast, slow = Path(0.0, 1e-11), Path(0.0, 1e-9)
    flat = time_ring(64, BYTES, slow)
    assert time_hierarchical(8, 8, BYTES, fast, slow) < flat
    assert time_hierarchical(8, 1, BYTES, fast, slow) == time_ring(8, BYTES, fast)


def test_small_messages_take_trees_and_large_ones_rings():
    path = Path(1e-4, 1e-10)
    assert time_tree(512, 1e3, path) < time_ring(512, 1e3, path)
    assert time_ring(4, 1e9, path) < time_tree(4, 1e9, path)


def test_packs_are_hidden_by_the_backward_pass():
    ready = [(float(second), 1.0) for second in range(1, 11)]
    assert find_exposed(ready, lambda size: 0.5 * size, bytes_per_pack=1) == pytest.approx(0.5)
    assert find_exposed(ready, lambda size: 0.5 * size, bytes_per_pack=0) == pytest.approx(5.0)
    # A link that is slower than the backward pass works from the first gradient on.
    assert find_exposed(ready, lambda size: 2.0 * size, bytes_per_pack=1) == pytest.approx(11.0)


def test_the_slowest_of_many():
    random = np.random.default_rng(0)
    for count in (8, 512):
        drawn = random.normal(size=(4000, count)).max(axis=1).mean()
        assert expect_slowest(count) == pytest.approx(drawn, rel=0.02)
