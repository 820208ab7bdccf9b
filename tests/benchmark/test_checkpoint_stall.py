"""The measurement of what a checkpoint costs a step."""

from benchmarks.checkpoint_stall import _time_steps, measure


def test_a_checkpoint_after_each_step_takes_time():
    stall = measure(2.0, steps=3)
    assert stall.step_s > 0
    assert 0 < stall.copy_s < stall.save_s
    without = _time_steps(2.0, steps=3, checkpoint_every=0)
    assert without[1] < stall.save_s
