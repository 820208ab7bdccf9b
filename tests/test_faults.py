"""The short form of `make faults`: a few kills at random moments change nothing."""

import random
import sys

import pytest

from tests.fault_campaign import CASES, run_killed, run_twin

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]

STEPS = 20


@pytest.mark.parametrize(("strategy", "kills"), [("mirrored", 3), ("multi_worker_mirrored", 2)])
def test_a_killed_run_ends_as_one_that_is_not(tmp_path, strategy, kills):
    case = next(case for case in CASES if case.strategy == strategy)
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    expected = run_twin(case, tmp_path, max_steps=STEPS)
    found = run_killed(
        case, tmp_path, expected, kills=kills, max_steps=STEPS, rng=random.Random(seed)
    )
    assert not found.problems, f"seed {seed}: {found.problems} after {found.kills}"
    assert found.survived == len(found.kills) == kills
