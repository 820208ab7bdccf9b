"""Checks that TensorFlow and Keras start."""

from collections.abc import Iterator

from tfdist.doctor.findings import Finding, ok, wrong
from tfdist.doctor.machine import Machine


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
