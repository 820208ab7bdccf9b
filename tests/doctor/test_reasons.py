"""The reason why several devices are not faster, from the numbers of their runs."""

import dataclasses

import pytest

from tfdist.doctor.reasons import Measurement, explain

ONE = Measurement(examples_per_second=100, batch=32, replicas=1, fractions={"input": 0.01})


def make(rate, **fractions):
    parts = {"input": 0.01, "host": 0.02, "all-reduce": 0.0}
    parts |= {name.replace("_", "-"): part for name, part in fractions.items()}
    return Measurement(
        examples_per_second=rate, batch=32, replicas=4, fractions=parts, gradient_bytes=31_000_000
    )


@pytest.mark.parametrize(
    ("many", "reason"),
    [
        (make(110, input=0.62), "steps wait for their batches 62% of the time. Use --cache"),
        (make(110, host=0.2), "the host works between steps 20% of the time. Use --steps_per"),
        (
            make(200, all_reduce=0.35),
            "the all-reduce of 31 MB takes 35% of a step, at 6.6 of 10 Gbit/s",
        ),
        (make(150), "of a cause that the run does not measure. Look at it with tfdist.train"),
    ],
)
def test_the_largest_part_is_the_reason(many, reason):
    found = explain(ONE, many, link_gbit_per_second=10)
    assert found.severity == "slow"
    assert f"4 devices are {many.examples_per_second / 100:.2f} times as fast as one" in found.text
    assert f"because {reason}" in found.text


def test_a_small_batch():
    many = make(150)
    larger = dataclasses.replace(many, examples_per_second=380, batch=128)
    found = explain(ONE, many, larger).text
    assert "because the batch is too small: each has only 8 examples per step. With batch" in found
    assert "batches of 128, they are 3.80 times as fast" in found


def test_a_larger_batch_that_is_no_faster():
    many = make(150)
    larger = dataclasses.replace(many, examples_per_second=160, batch=128)
    assert "of a cause that the run does not measure" in explain(ONE, many, larger).text


def test_devices_that_share_cores():
    found = explain(ONE, make(104), shared_cores=4).text
    assert "they share the same 4 cores, which one device already uses" in found
    waiting = explain(ONE, make(104, input=0.5), shared_cores=4).text
    assert "steps wait for their batches 50%" in waiting


def test_devices_that_are_fast():
    found = explain(ONE, make(330), shared_cores=4)
    assert found.severity == "ok"
    assert "4 devices are 3.30 times as fast as one (100 and 330 examples/s)" in found.text
