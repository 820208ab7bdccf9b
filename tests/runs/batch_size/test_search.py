"""The search for the largest size, over made-up memories."""

import pytest

from tfdist.runs.batch_size.search import Usage, search_largest


def search(memory_of, *, unit, most, limit=20_000):
    """Returns what is found where a size takes `memory_of(size)`, and the sizes tried."""
    tried = []

    def try_size(size):
        tried.append(size)
        peak = memory_of(size)
        return Usage(peak=peak, limit=limit) if peak <= limit else None

    largest, _ = search_largest(try_size, unit=unit, most=most)
    return largest, tried


@pytest.mark.parametrize("unit", [1, 6])
@pytest.mark.parametrize("slope", [1, 7, 50])
def test_follows_a_straight_line_in_a_few_trials(unit, slope):
    best = (20_000 - 500) // slope
    largest, tried = search(lambda size: 500 + slope * size, unit=unit, most=10**6)
    assert 0.9 * best - unit < largest <= best
    assert largest % unit == 0
    assert len(tried) <= 5
    assert max(tried) == largest  # nothing that does not fit was tried


@pytest.mark.parametrize(
    "memory_of",
    [
        lambda size: 500 + 300 * bool(size) + 3 * size,  # the first step has a cost of its own
        lambda size: 500 + 40 * (size // 40) + 3 * max(0, size - 200),  # steps, and a bend
        lambda size: 500 + size**1.3,
    ],
)
def test_comes_close_where_the_line_is_not_straight(memory_of):
    largest, tried = search(memory_of, unit=2, most=10**6)
    best = max(size for size in range(0, 20_000, 2) if memory_of(size) <= 20_000)
    assert 0.8 * best <= largest <= best
    assert len(tried) <= 8


def test_keeps_to_what_there_is():
    assert search(lambda size: size, unit=4, most=50)[0] == 48
    assert search(lambda size: 20_001, unit=4, most=50) == (0, [4])
