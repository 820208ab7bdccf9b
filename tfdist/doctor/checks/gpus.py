"""Finds out why GPUs are not used."""

import re
from collections.abc import Iterator, Sequence

from tfdist.doctor.findings import Finding, ok, slow, wrong
from tfdist.doctor.machine import Machine
from tfdist.launch.machine import find_gpus

_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # the class of display controllers, which GPUs belong to
# CUDA's major version -> the oldest driver.
# Source: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
_INSTALL = "pip install 'tensorflow[and-cuda]'"


def check_gpus(machine: Machine) -> Iterator[Finding]:
    """Compares the GPUs of this machine with those that TensorFlow sees."""
    number = count_gpus(machine)
    if not number:
        yield ok("no NVIDIA GPU")
        return
    problem = _find_problem(machine, number)
    if problem is not None:
        yield problem
        return
    seen = len(machine.tensorflow.get("gpus", ()))
    yield from _list_processes(machine)
    yield ok(f"TensorFlow sees {seen} of {number}, driver {_read_driver(machine)}")


def count_gpus(machine: Machine) -> int:
    """Returns the number of NVIDIA's GPUs, whether they work or not."""
    on_bus = sum(
        machine.read(f"sys/bus/pci/devices/{device.name}/vendor").strip() == _NVIDIA
        and machine.read(f"sys/bus/pci/devices/{device.name}/class").startswith(_DISPLAY)
        for device in machine.list_directory("sys/bus/pci/devices")
    )
    return max(on_bus, len(machine.list_directory("proc/driver/nvidia/gpus")))


def _find_problem(machine: Machine, number: int) -> Finding | None:
    """Returns the first thing that keeps TensorFlow from using all GPUs, from the bottom up."""
    there = f"{number} NVIDIA GPU{'s' * (number > 1)}"
    driver = _read_driver(machine)
    if driver is None:
        return wrong(
            f"{there}, but no driver is loaded. Install NVIDIA's driver on the machine itself (not "
            "in a container), and check that nvidia-smi lists them."
        )
    nodes = [p for p in machine.list_directory("dev") if re.fullmatch(r"nvidia\d+", p.name)]
    if not nodes:
        return wrong(
            f"{there} with driver {driver}, but this container has no /dev/nvidia0. Start it with "
            "docker run --gpus=all, or request nvidia.com/gpu in Kubernetes."
        )
    report = machine.tensorflow
    if "error" in report:
        return None
    if not report["is_cuda_build"]:
        return wrong(f"{there}, but TensorFlow is built without CUDA. Run {_INSTALL}.")
    cuda = report["cuda_version"]
    oldest = _OLDEST_DRIVERS.get(int(cuda.partition(".")[0] or 0), 0)
    if int(driver.partition(".")[0]) < oldest:
        return wrong(
            f"driver {driver} is too old: TensorFlow is built for CUDA {cuda}, which needs "
            f"{oldest} or newer. Update the driver."
        )
    return _find_problem_above_the_driver(machine, number)


def _find_problem_above_the_driver(machine: Machine, number: int) -> Finding | None:
    report = machine.tensorflow
    visible = machine.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len(find_gpus(machine.environ)) < number:
        left = len(find_gpus(machine.environ))
        return (slow if left else wrong)(
            f"CUDA_VISIBLE_DEVICES={visible} shows {left} of {number} GPUs. Unset it, or name more."
        )
    newest = _find_newest(report.get("cuda_compute_capabilities", ()))
    for name, found in zip(report["gpus"], report.get("compute_capabilities", ()), strict=False):
        if newest and found and found[0] > newest:
            return wrong(
                f"{name} has compute capability {found[0]}.{found[1]}, but TensorFlow "
                f"{report['tensorflow']} is built for {newest}.x at most, and its kernels do not "
                "run there (https://github.com/tensorflow/tensorflow/issues/89272). Use an older "
                "GPU, or a TensorFlow that is built for it, such as tf-nightly."
            )
    if len(report["gpus"]) >= number:
        return None
    if report["libcuda"]:
        return wrong(
            f"NVIDIA's driver library does not work: {report['libcuda']}. Install the library of "
            "the driver's version; in a container, NVIDIA's container toolkit provides it."
        )
    if not any(name.startswith("nvidia-cudnn") for name in machine.versions):
        return wrong(f"CUDA's libraries are not installed. Run {_INSTALL}.")
    return wrong(
        f"TensorFlow sees {len(report['gpus'])} of {number} GPUs. Reinstall CUDA's libraries "
        f"({_INSTALL}), and unset LD_LIBRARY_PATH if it names others."
    )


def _find_newest(capabilities: Sequence[str]) -> int:
    """Returns the major version of the newest compute capability; 0 if none is named.

    >>> _find_newest(["sm_60", "sm_89", "compute_90"]), _find_newest(["sm_120a"]), _find_newest([])
    (9, 12, 0)
    """
    numbers = (re.search(r"_(\d+)\d", name) for name in capabilities)
    return max((int(number[1]) for number in numbers if number), default=0)


def _read_driver(machine: Machine) -> str | None:
    """Returns the version of NVIDIA's driver, None if it is not loaded."""
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", machine.read("proc/driver/nvidia/version"))
    return found[0] if found else None


def _list_processes(machine: Machine) -> Iterator[Finding]:
    """Yields the processes that use a GPU."""
    users: dict[int, set[str]] = {}
    for pid, file in machine.list_open_files():
        if re.fullmatch(r"/dev/nvidia\d+", file):
            users.setdefault(pid, set()).add(file)
    for pid, files in sorted(users.items()):
        yield slow(
            f"{machine.name_process(pid)} uses {', '.join(sorted(files))}. End it if it is left "
            "from an earlier run."
        )
