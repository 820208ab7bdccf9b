"""The table of hardware, and files."""

import dataclasses
import re

import pytest

from tfdist.errors import TfdistError
from tfdist.jobs.job import TPU_RUNTIMES
from tfdist.plan.hardware import Measured, _read_kinds, format_hardware, load_hardware


@pytest.mark.parametrize("name", sorted(_read_kinds()))
def test_a_kind(name):
    hardware = load_hardware(name)
    assert hardware.source
    assert hardware.flops_per_s["float32"] <= max(hardware.flops_per_s.values())
    assert hardware.inside.bytes_per_s < hardware.memory_bytes_per_s
    assert hardware.cores or hardware.is_tpu or name in ("cpu", "p40")


@pytest.mark.parametrize("accelerator", ["v4-8", "v5litepod-8", "v5p-8", "v6e-8"])
def test_a_tpu_that_a_job_can_have_is_there(accelerator):
    assert any(re.fullmatch(kind, accelerator) for kind in TPU_RUNTIMES)
    name = f"tpu-{accelerator.partition('-')[0].replace('litepod', 'e')}"
    assert load_hardware(name).is_tpu


def test_a_file_is_read_as_it_was_written(path_with_spaces):
    measured = Measured(
        parameters=7, flops=1.5e9, precision="float32", step_s=0.25, example_s=0.125
    )
    hardware = dataclasses.replace(load_hardware("t4"), measured=(measured,), shares_cores=True)
    path = path_with_spaces / "my machine.toml"
    path.write_text(format_hardware(hardware))
    assert load_hardware(str(path)) == hardware


def test_an_unknown_name():
    with pytest.raises(TfdistError, match=r"Unknown `hardware` 'h10'. Valid: h100"):
        load_hardware("h10")


def test_a_file_that_lacks_something(path_with_spaces):
    path = path_with_spaces / "some.toml"
    path.write_text('title = "x"')
    with pytest.raises(TfdistError, match="lacks source, devices_per_machine"):
        load_hardware(str(path))
    path.write_text("titel = 1")
    with pytest.raises(TfdistError, match="'titel'. Did you mean title"):
        load_hardware(str(path))
    path.write_text("title =")
    with pytest.raises(TfdistError, match="Cannot read `hardware="):
        load_hardware(str(path))


def test_a_precision_that_the_hardware_lacks():
    with pytest.raises(TfdistError, match="`precision=float64` is not one of Google TPU v4"):
        load_hardware("tpu-v4").find_peak("float64")
