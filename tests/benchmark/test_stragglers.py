"""The benchmark of slow workers: what it expects, and that its workers are slow."""

import pytest

from benchmarks.stragglers import (
    EXAMPLE_MS,
    ROWS,
    SLOWNESS,
    Alone,
    Case,
    Scenario,
    compare,
    format_row,
    measure_rate,
    simulate,
    thin,
)

ALONE = {
    rows: Alone(step_s=rows * EXAMPLE_MS / 1e3, jitter=0.0) for rows in (ROWS, 2 * ROWS, 3 * ROWS)
}
EQUAL = 1e3 / EXAMPLE_MS  # examples per second of a worker


@pytest.mark.parametrize(
    ("case", "share"),
    [
        (Case(strategy="multi_worker_mirrored"), 3 / SLOWNESS),
        (Case(strategy="local_sgd", flags={"sync_every": 8}), 3 / SLOWNESS),
        (Case(strategy="parameter_server", ahead=8), 2 + 1 / SLOWNESS),
    ],
    ids=lambda value: getattr(value, "strategy", None),
)
def test_what_is_expected_of_a_slow_worker(case, share):
    equal, _ = simulate(case, Scenario(), ALONE, workers=3, steps=800)
    assert equal == pytest.approx(3 * EQUAL, rel=0.01)
    slow, _ = simulate(case, Scenario(slowest=SLOWNESS), ALONE, workers=3, steps=800)
    assert slow == pytest.approx(share * EQUAL, rel=0.05)


def test_a_stored_curve_has_the_means_of_neighbors():
    times, losses = [10.0 + step for step in range(200)], [float(step) for step in range(200)]
    curve = thin(times, losses)
    assert curve[:2] == [(0.5, 0.5), (2.5, 2.5)]
    assert len(curve) == 100
    assert measure_rate(times, 8, 200) == 1.0


@pytest.mark.cluster
def test_one_of_two_workers_of_a_parameter_server_is_slow():
    case = Case(strategy="parameter_server", ahead=8)
    result = compare(case, Scenario(slowest=SLOWNESS), ALONE, workers=2, seconds=5)
    assert 0 < result["measured"] < 1.1 * result["simulated"]  # equal workers: 1.6 times
    assert 0 < result["staleness"] < 16
    assert result["curve"][-1][1] < result["curve"][0][1]
    assert "parameter_server" in format_row({"scenario": "", "training": case.strategy, **result})
