"""Processes that are measured in turns, by `benchmarks.turns`."""

import sys
import textwrap

from benchmarks.turns import Contestant, hold_contest

PROGRAM = """
    import sys, time
    from benchmarks.turns import Turns

    step_s, log = float(sys.argv[1]), open(sys.argv[2], "a")
    turns = Turns(lambda: None, warmup=2, steps=10)
    print("about to begin", flush=True)
    turns.begin()
    while True:
        print(step_s, time.monotonic(), file=log, flush=True)
        if step_s < 0:
            raise ValueError("no such step")
        time.sleep(step_s)
        turns.end_steps()
"""


def test_processes_take_turns(tmp_path):
    log = tmp_path / "log"

    def make(step_s, *, compiles=False):
        program = textwrap.dedent(PROGRAM)
        return Contestant([sys.executable, "-c", program, str(step_s), str(log)], compiles)

    found = hold_contest(
        {"slow": make(0.02), "fast": make(0.005, compiles=True), "failing": make(-1)},
        rounds=2,
        limit_s=1000,
    )
    assert "ValueError: no such step" in found["failing"]["error"]
    assert "ms_per_step" not in found["failing"]
    assert found["slow"]["ms_per_step"] >= 20
    assert found["fast"]["ms_per_step"] >= 5
    assert len(found["slow"]["turns"]) == len(found["fast"]["turns"]) == 2
    # Nobody runs within a turn of another: 12 steps in a row, first each once, then in rounds.
    order = [line.split()[0] for line in log.read_text().splitlines()]
    turns = [order[i] for i in range(0, len(order)) if i == 0 or order[i] != order[i - 1]]
    assert turns == ["0.02", "-1.0", "0.005", "0.02", "0.005", "0.02"]


def test_one_that_is_not_ready_in_time_is_left_out(tmp_path):
    sleeping = Contestant([sys.executable, "-c", "import time; time.sleep(60)"])
    found = hold_contest({"sleeping": sleeping}, rounds=1, limit_s=0.5)
    assert found == {"sleeping": {"error": "not ready in 0.5 s"}}
