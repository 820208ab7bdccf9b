"""Checks that the installed packages fit together, and that TensorFlow and Keras start."""

import re
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from tfdist.doctor.findings import Finding, ok, wrong
from tfdist.doctor.machine import Machine

_ROOTS = ("tfdist", "tensorflow", "keras")
_SHOWN = ("tfdist", "tensorflow", "keras", "numpy")
# Packages that install the same files as TensorFlow.
_TWINS = ("tensorflow-cpu", "tensorflow-gpu", "tf-nightly", "tf-nightly-cpu", "intel-tensorflow")


def check_versions(machine: Machine) -> Iterator[Finding]:
    """Compares each version with what tfdist, TensorFlow and Keras require, CUDA's included."""
    installed = machine.versions
    twins = [name for name in _TWINS if name in installed]
    if twins and "tensorflow" in installed:
        yield wrong(
            f"{' and '.join(twins)} and tensorflow are both installed, and overwrite each other's "
            f"files. Run pip uninstall {' '.join(twins)} tensorflow, then pip install tensorflow."
        )
    for package, requirement in _list_requirements(machine):
        name = requirement.name.lower().replace("_", "-")
        version = installed.get(name)
        is_optional = "extra" in str(requirement.marker or "")
        if version is None and not is_optional:
            yield wrong(
                f"{package} needs {requirement.name}, which is not installed. "
                f"Run pip install '{requirement.name}{requirement.specifier}'."
            )
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            yield wrong(
                f"{requirement.name} {version} is installed, but {package} "
                f"{installed.get(package, '')} needs {requirement.specifier}. "
                f"Run pip install '{requirement.name}{requirement.specifier}'."
            )
    yield ok(", ".join(f"{name} {installed[name]}" for name in _SHOWN if name in installed))


def _list_requirements(machine: Machine) -> Iterator[tuple[str, Requirement]]:
    """Yields (package, requirement); those of extras only as far as they concern CUDA."""
    seen = set()
    for item in metadata.distributions(path=list(machine.packages)):
        package = (item.metadata["Name"] or "").lower()
        if package not in _ROOTS or package in seen:
            continue
        seen.add(package)
        for text in item.requires or ():
            requirement = Requirement(text)
            extra = re.search(r"extra == ['\"]([\w-]+)['\"]", text)
            environment = {"extra": extra[1] if extra else ""}
            is_wanted = not extra or extra[1] == "and-cuda"
            if is_wanted and (not requirement.marker or requirement.marker.evaluate(environment)):
                yield package, requirement


def check_tensorflow(machine: Machine) -> Iterator[Finding]:
    """Imports TensorFlow and Keras in a process of their own."""
    flags = machine.read("proc/cpuinfo").partition("\nflags")[2].partition("\n")[0].split()
    if flags and "avx" not in flags:
        yield wrong(
            "the processor has no AVX, which TensorFlow's packages require. Use another machine, "
            "or build TensorFlow from source."
        )
        return
    backend = machine.environ.get("KERAS_BACKEND") or "tensorflow"
    if backend != "tensorflow":
        yield wrong(f"KERAS_BACKEND={backend}: tfdist trains with TensorFlow. Unset it.")
        return
    report = machine.tensorflow
    if "error" in report:
        yield wrong(
            f"TensorFlow or Keras cannot be imported: {report['error']}. Reinstall them in a new "
            "environment: pip install tfdist."
        )
        return
    if report["backend"] != "tensorflow":
        yield wrong(
            f"Keras runs on {report['backend']}, but tfdist trains with TensorFlow. Correct the "
            "backend in ~/.keras/keras.json."
        )
    built = "without CUDA"
    if report["is_cuda_build"]:
        built = f"for CUDA {report['cuda_version']} and cuDNN {report['cudnn_version']}"
    fast = [name for name in ("avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    yield ok(f"starts; built {built}; the processor has {', '.join(fast) or 'no AVX-512'}")
