"""The short form of `make faults`: a few faults at random moments change nothing."""

import random
import sys

import pytest

from tests.fault_campaign import CASES, run_twin, run_with_faults

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]

STEPS, KILLS = 20, 4


@pytest.mark.parametrize(
    ("name", "kills"), [("multi_worker_mirrored", KILLS), ("multi_worker_mirrored-layers", 2)]
)
def test_a_run_that_meets_faults_ends_as_one_that_does_not(tmp_path, name, kills):
    case = next(case for case in CASES if case.name == name)
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    expected = run_twin(case, tmp_path, max_steps=STEPS)
    found = run_with_faults(
        case, tmp_path, expected, kills=kills, max_steps=STEPS, rng=random.Random(seed)
    )
    assert not found.problems, f"seed {seed}: {found.problems} after {found.faults}"
    assert found.survived == len(found.faults) >= kills
