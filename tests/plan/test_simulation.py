"""Simulated training: stragglers, staleness, failures."""

import pytest

from benchmarks.plan_checks import estimate_goodput
from tfdist.plan.collectives import expect_slowest
from tfdist.plan.simulation import (
    Failures,
    Workers,
    find_best_interval,
    find_interval_of_daly,
    find_interval_of_young,
    run_asynchronous,
    run_failures,
    run_synchronous,
)


@pytest.mark.parametrize("count", [2, 64, 1024])
def test_synchronous_steps_wait_as_the_formula_says(count):
    workers = Workers(count=count, step_s=1.0, jitter=0.02)
    waited = run_synchronous(workers, steps=2000) - 1
    assert waited == pytest.approx(0.02 * expect_slowest(count), rel=0.08)


def test_local_steps_even_out():
    workers = Workers(count=64, step_s=1.0, jitter=0.05)
    each = run_synchronous(workers, steps=800) - 1
    rarely = run_synchronous(workers, steps=800, sync_every=16) - 1
    assert rarely == pytest.approx(each / 4, rel=0.1)


def test_a_straggler_delays_all_but_asynchronous_workers_with_steps_ahead():
    workers = Workers(count=32, step_s=1.0, straggler_share=0.01, straggler_factor=4.0)
    synchronous = 1 / run_synchronous(workers, steps=800)
    few = run_asynchronous(workers, steps=3200).steps_per_s / 32
    many = run_asynchronous(workers, steps=3200, in_flight=160).steps_per_s / 32
    assert synchronous < few < many
    assert many == pytest.approx(1 / 1.03, rel=0.05)  # the mean step


@pytest.mark.parametrize("in_flight", [1, 4, 16])
def test_staleness_is_below_the_steps_in_flight(in_flight):
    workers = Workers(count=16, step_s=1.0, jitter=0.3)
    found = run_asynchronous(workers, steps=500, in_flight=in_flight)
    assert len(found.staleness) == 500
    assert found.staleness.max() == in_flight - 1
    assert found.staleness.min() >= 0


def test_servers_limit_asynchronous_workers():
    workers = Workers(count=64, step_s=1.0)
    found = run_asynchronous(workers, steps=2000, serve_s=0.05)
    assert found.steps_per_s == pytest.approx(1 / 0.05, rel=0.05)


def test_goodput_is_that_of_the_formula():
    failures = Failures(machines=256, mtbf_s=3.6e6, checkpoint_s=20, restart_s=120)
    for interval in (200, 800, 3000):
        found = run_failures(failures, interval)
        assert found == pytest.approx(estimate_goodput(failures, interval), rel=0.01)


def test_the_best_interval_is_about_that_of_young_and_daly():
    failures = Failures(machines=512, mtbf_s=3.6e6, checkpoint_s=30, restart_s=60)
    young, daly = find_interval_of_young(failures), find_interval_of_daly(failures)
    assert young == pytest.approx(649.5, rel=0.01)
    assert daly < young
    best, goodput = find_best_interval(failures)
    assert young / 2 < best < young * 2
    # Around the best, the goodput is flat.
    assert run_failures(failures, young) == pytest.approx(goodput, abs=0.005)
    assert run_failures(failures, young / 8) < goodput - 0.05


def test_all_wait_for_a_slow_worker_but_asynchronous_ones_with_steps_ahead():
    workers = Workers(count=3, step_s=1.0, slowness=(1.0, 1.0, 4.0))
    assert run_synchronous(workers, steps=64) == pytest.approx(4)
    assert run_synchronous(workers, steps=64, sync_every=8) == pytest.approx(4)
    # The one that waited longest is next: the slow worker gets the last step of three. While it
    # computes, the others compute two before and two after this step.
    few = run_asynchronous(workers, steps=600).steps_per_s
    assert few == pytest.approx(5 / 4, rel=0.05)
    many = run_asynchronous(workers, steps=600, in_flight=24).steps_per_s
    assert many == pytest.approx(1 + 1 + 1 / 4, rel=0.05)
