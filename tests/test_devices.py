import resource
import shutil
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

from tfdist import devices
from tfdist.errors import TfdistError


def test_lists_the_cpus_without_accelerators():
    assert devices.list_devices() == ("CPU:0", "CPU:1", "CPU:2")
    assert devices.resolve_devices(None, purpose="a test") == devices.list_devices()


def test_understands_long_and_short_names():
    names = ["cpu:0", "/device:CPU:1", "/job:localhost/replica:0/task:0/device:CPU:2"]
    assert devices.resolve_devices(names, purpose="a test") == ("CPU:0", "CPU:1", "CPU:2")


def test_virtual_devices_come_before_everything_else():
    assert tf.zeros(()).numpy() == 0
    with pytest.raises(TfdistError, match="devices are already in use.*before the first tensor"):
        devices.set_virtual_devices(5)
    with pytest.raises(TfdistError, match="`virtual_devices=-1` does not divide"):
        devices.set_virtual_devices(-1)
    with pytest.raises(TfdistError, match="`virtual_devices=1025` is too large"):
        devices.set_virtual_devices(1025)
    devices.set_virtual_devices(0)


def test_precision_is_keras_s():
    try:
        devices.configure_precision("float64")
        assert keras.layers.Dense(1).compute_dtype == "float64"
        devices.configure_precision("mixed_bfloat16")
        layer = keras.layers.Dense(1)
        assert (layer.compute_dtype, layer.variable_dtype) == ("bfloat16", "float32")
    finally:
        devices.configure_precision("float32")
    with pytest.raises(ValueError, match="float46"):
        devices.configure_precision("float46")


def test_measures_memory():
    assert devices.measure_peak_memory() > 50 * 2**20


def test_memory_that_a_step_frees_is_kept():
    code = """
import resource
from tfdist import devices

def count_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

devices.configure_allocator()
b"x" * 2**27
before = count_faults()
for _ in range(5):
    b"x" * 2**27
print(count_faults() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pages = 2**27 // resource.getpagesize()
    assert int(done.stdout) < pages


def test_channels_stay_last_on_new_gpus_only(monkeypatch):
    options = tf.config.optimizer
    if not tf.config.list_physical_devices("GPU"):
        devices.configure_layout()
        assert "layout_optimizer" not in options.get_experimental_options()
    monkeypatch.setattr(devices, "_has_gpus_since_ampere", lambda: True)
    try:
        devices.configure_layout()
        assert options.get_experimental_options()["layout_optimizer"] is False
    finally:
        options.set_experimental_options({"layout_optimizer": True})


def test_auto_takes_bfloat16_where_the_processor_has_it(tmp_path, monkeypatch):
    assert devices.choose_precision("float64") == "float64"
    cpuinfo = devices.Path("/proc/cpuinfo").read_text()
    has_it = "avx512_bf16" in cpuinfo or "amx_bf16" in cpuinfo
    assert devices.choose_precision("auto") == ("mixed_bfloat16" if has_it else "float32")
    monkeypatch.setattr(devices, "_read_cpu_flags", lambda: {"avx2"})
    assert devices.choose_precision("auto") == "float32"


_DRIVER = """
#include <stddef.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int* device, int index) { *device = 40 + index; return index > 1 ? 101 : 0; }
int cuDeviceTotalMem_v2(size_t* size, int device) { *size = device * (size_t)1000000000; return 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_gpu_s_memory_is_what_the_driver_says(path_with_spaces):
    """A library with the driver's functions, where there is no GPU."""
    source, library = path_with_spaces / "driver.c", path_with_spaces / "libdriver.so"
    source.write_text(_DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert devices.read_gpu_memory(1, library=str(library)) == 41_000_000_000
    with pytest.raises(TfdistError, match=r"Cannot split GPU:2 .* tell its memory \(101\)"):
        devices.read_gpu_memory(2, library=str(library))
    with pytest.raises(TfdistError, match="Leave out `virtual_devices`"):
        devices.read_gpu_memory(0, library="libno-such-driver.so")
