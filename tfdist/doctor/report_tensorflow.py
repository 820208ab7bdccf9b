"""Prints what TensorFlow says about itself and its devices, in one line of JSON."""

import ctypes
import json
import sys

from tfdist.cli.quiet import start_tensorflow_quietly


def main() -> int:
    """Imports TensorFlow and Keras and prints the report."""
    start_tensorflow_quietly()
    import keras
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    gpus = tf.config.list_physical_devices("GPU")
    report = {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "backend": keras.backend.backend(),
        "is_cuda_build": bool(build.get("is_cuda_build")),
        "cuda_version": build.get("cuda_version", ""),
        "cudnn_version": build.get("cudnn_version", ""),
        "cuda_compute_capabilities": build.get("cuda_compute_capabilities", []),
        "gpus": [gpu.name for gpu in gpus],
        "compute_capabilities": [
            tf.config.experimental.get_device_details(gpu).get("compute_capability") for gpu in gpus
        ],
        "libcuda": _find_problem_of_libcuda(),
    }
    print(json.dumps(report))
    return 0


def _find_problem_of_libcuda() -> str:
    """Returns why NVIDIA's driver library does not work, empty if it does."""
    try:
        status = ctypes.CDLL("libcuda.so.1").cuInit(0)
    except (OSError, AttributeError) as error:
        return str(error)
    return f"cuInit returns {status}" if status else ""


if __name__ == "__main__":
    sys.exit(main())
