"""Configures and lists this process's devices, precision and determinism.

Commands call the `configure_*` functions, which change the process, before the first
tensor is made. The factories in `tfdist.strategies` only look devices up.
"""

import ctypes
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

import keras
import tensorflow as tf

from tfdist import memory
from tfdist.errors import TfdistError
from tfdist.processor import name_processor

ACCELERATORS = ("GPU", "TPU")
_MAX_VIRTUAL_DEVICES = 1024  # to start more of them takes minutes
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # mallopt(3)


def set_virtual_devices(count: int) -> None:
    """Splits the CPU, or every GPU, into `count` logical devices.

    With them, every single-machine strategy can be tried without accelerators.

    Args:
      count: the total number of logical devices to make of all GPUs, or of the CPU if
        there is no GPU; 0 leaves the devices as they are.

    Raises:
      TfdistError: `count` is negative, above 1024 or not a multiple of the number of GPUs, or
        TensorFlow has already started its devices.
    """
    if count == 0:
        return
    if count > _MAX_VIRTUAL_DEVICES:
        raise TfdistError(
            f"`virtual_devices={count}` is too large: give at most {_MAX_VIRTUAL_DEVICES}."
        )
    gpus = tf.config.list_physical_devices("GPU")
    physical = gpus or tf.config.list_physical_devices("CPU")
    if count < 1 or count % len(physical):
        raise TfdistError(
            f"`virtual_devices={count}` does not divide evenly among {len(physical)} "
            f"{physical[0].device_type}s. Give a positive multiple of {len(physical)}."
        )
    share = count // len(physical)
    try:
        for device in physical:
            tf.config.set_logical_device_configuration(
                device, [_make_logical_configuration(device, share)] * share
            )
    except RuntimeError as error:
        raise TfdistError(
            f"Cannot create {count} virtual devices: TensorFlow's devices are already in use. "
            "Request them before the first tensor, dataset or model is made."
        ) from error


def configure_logical_replicas(
    count: int, *, threads: int, devices: Sequence[str] = ()
) -> tuple[str, ...]:
    """Splits devices into parts for logical replicas, whose arithmetic does not depend on others.

    Args:
      threads: the number of threads with which each computes an operation.
      devices: the devices to split, such as `GPU:0`, before they are split; by default, all GPUs,
        or the CPU if there is no GPU.

    Raises:
      TfdistError: there is no such device, or TensorFlow has already started its devices otherwise.
    """
    gpus = tf.config.list_physical_devices("GPU")
    physical = gpus or tf.config.list_physical_devices("CPU")
    kind = physical[0].device_type
    names = [f"{kind}:{index}" for index in range(len(physical))]
    chosen = [shorten(name) for name in devices] or names
    if missing := [name for name in chosen if name not in names]:
        raise TfdistError(
            f"Cannot split {missing[0]} into logical replicas: there are {', '.join(names)}. Leave "
            "out `devices`, or name some of these."
        )
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        for name, replicas in zip(chosen, share_replicas(count, len(chosen)), strict=True):
            device, share = physical[names.index(name)], len(replicas)
            if gpus:
                tf.config.experimental.set_memory_growth(device, False)
            parts = [_make_logical_configuration(device, share)] * share
            tf.config.set_logical_device_configuration(device, parts)
        unused = [d for name, d in zip(names, physical, strict=True) if name not in chosen[:count]]
        if unused:
            used = [physical[names.index(name)] for name in chosen[:count]]
            tf.config.set_visible_devices(used, kind)
    except RuntimeError as error:
        raise TfdistError(
            f"Cannot make {count} logical replicas: TensorFlow's devices are already in use. Build "
            "the strategy before the first tensor, dataset or model is made."
        ) from error
    # It shares and reorders operations of replicas that happen to be in the same process.
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    if gpus or threads > 1:
        tf.config.experimental.enable_op_determinism()
    return tuple(f"{kind}:{index}" for index in range(count))


def share_replicas(count: int, holders: int) -> list[range]:
    """Returns the logical replicas of each worker or device that shares them.

    >>> [list(share) for share in share_replicas(4, 3)]
    [[0, 1], [2], [3]]
    """
    each, more = divmod(count, holders)
    starts = [index * each + min(index, more) for index in range(holders + 1)]
    return [range(first, end) for first, end in itertools.pairwise(starts)]


def describe_arithmetic() -> str:
    """Returns what the bits of a result depend on besides the program: processors and versions."""
    kinds = {
        tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
        for gpu in tf.config.list_physical_devices("GPU")
    }
    name = ", ".join(sorted(kinds)) or name_processor()
    return f"{name}; TensorFlow {tf.__version__}; Keras {keras.__version__}"


def configure_devices(virtual_devices: int) -> None:
    """Sets up devices and memory as training needs them."""
    set_virtual_devices(virtual_devices)
    configure_memory_growth()
    configure_allocator()
    configure_layout()


def configure_memory_growth() -> None:
    """Lets every GPU allocate memory as needed instead of all of it at the start."""
    for gpu in tf.config.list_physical_devices("GPU"):
        if not tf.config.get_logical_device_configuration(gpu):
            tf.config.experimental.set_memory_growth(gpu, True)


def configure_allocator() -> None:
    """Lets the C library keep the memory that a step frees for the next step.

    By default, glibc returns freed blocks of more than 32 MiB to the system, so that every step
    waits for new pages; see mallopt(3). Other allocators are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def configure_layout() -> None:
    """Keeps channels last in TensorFlow's graphs, on GPUs of compute capability 8.0 and above.

    TensorFlow moves float32's channels first when it trains. The convolutions of such GPUs need
    them last, and copied them back.
    """
    if _has_gpus_since_ampere():
        tf.config.optimizer.set_experimental_options({"layout_optimizer": False})


def configure_precision(precision: str) -> None:
    """Sets Keras's floating-point type and dtype policy for the whole process.

    Args:
      precision: `float32`, `float64` (for comparisons; slow on GPUs), or `mixed_bfloat16` or
        `mixed_float16`, which compute in 16 bits and keep float32 variables; float16 scales the
        loss and is for GPUs without bfloat16.
    """
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)


def choose_precision(precision: str) -> str:
    """Returns the precision that `auto` stands for on this machine, or any other unchanged.

    `auto` is `mixed_bfloat16` if the computing devices support it natively: TPUs, GPUs of compute
    capability 8.0 and above, x86 CPUs with AVX512-BF16 or AMX-BF16. Otherwise it is `float32`.
    """
    if precision != "auto":
        return precision
    if tf.config.list_physical_devices("TPU"):
        native = True
    elif tf.config.list_physical_devices("GPU"):
        native = _has_gpus_since_ampere()
    else:
        native = bool({"avx512_bf16", "amx_bf16"} & _read_cpu_flags())
    return "mixed_bfloat16" if native else "float32"


def configure_determinism(seed: int, *, deterministic: bool) -> None:
    """Seeds Python, NumPy and TensorFlow and, on request, allows only deterministic kernels."""
    keras.utils.set_random_seed(seed)
    if deterministic:
        tf.config.experimental.enable_op_determinism()


def list_devices() -> tuple[str, ...]:
    """Returns the names of the computing devices: accelerators, or else the logical CPUs."""
    for kind in ACCELERATORS:
        names = _list_own(kind)
        if names:
            return names
    return _list_own("CPU")


def resolve_devices(
    names: Sequence[str] | None, *, purpose: str, name: str = "devices"
) -> tuple[str, ...]:
    """Returns checked device names such as `GPU:0`; all computing devices if none is named.

    Args:
      names: device names, `GPU:0` or `/device:GPU:0`; None or empty for `list_devices()`.
      purpose: what is built on the devices, for error messages.
      name: the parameter that names the devices, for error messages.

    Raises:
      TfdistError: a name is malformed or given twice, or there is no such device.
    """
    if not names:
        return list_devices()
    resolved = tuple(shorten(name) for name in names)
    there = tuple(name for kind in ("CPU", *ACCELERATORS) for name in _list_own(kind))
    for device, given in zip(resolved, names, strict=True):
        kind, _, index = device.partition(":")
        if not kind.isalpha() or not index.isdigit():
            several = "" if not given.isdigit() else " strategy=mirrored uses all, without names."
            raise TfdistError(
                f"Cannot build {purpose}: {given!r} is not a device name. "
                f"Write KIND:INDEX, for example {there[0]}.{several}"
            )
        if device not in there:
            same_kind = [other for other in there if other.startswith(f"{kind}:")]
            seen = f"{len(same_kind)} {kind}s are visible"
            if same_kind:
                seen += f" ({', '.join(same_kind)})"
            count = int(index) + 1
            fix = {
                "GPU": "Name only those, or check CUDA_VISIBLE_DEVICES and the driver.",
                "CPU": f"Name only those, or split the CPU first: `virtual_devices={count}`, or in "
                f"Python tfdist.set_virtual_devices({count}).",
            }.get(kind, f"Visible: {', '.join(there)}.")
            raise TfdistError(f"Cannot build {purpose}: `{name}` names {device}, but {seen}. {fix}")
    if len(set(resolved)) < len(resolved):
        raise TfdistError(
            f"Cannot build {purpose}: `{name}` names a device twice ({', '.join(resolved)}). "
            "Name each once."
        )
    return resolved


def measure_peak_memory() -> int:
    """Returns the peak memory in bytes: the largest of the GPUs', or else the process's."""
    return max(measure_peak_memory_per_device().values())


def measure_peak_memory_per_device() -> dict[str, int]:
    """Returns device -> peak memory in bytes: of each GPU, or else of the process (`CPU`)."""
    gpus = _list_own("GPU")
    peaks = {gpu: tf.config.experimental.get_memory_info(gpu)["peak"] for gpu in gpus}
    return peaks or {"CPU": memory.measure_peak_memory()}


def measure_process_age() -> float:
    """Returns the seconds since this process started; 0 if the system does not say."""
    if not (hasattr(time, "CLOCK_BOOTTIME") and Path("/proc/self/stat").exists()):
        return 0.0
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # proc(5): the 22nd field is the start, in clock ticks since boot.
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def find_memory_limit(name: str) -> int | None:
    """Returns the bytes of a GPU, such as `GPU:0`, or of its part; None for other devices."""
    kind, _, place = name.partition(":")
    if kind != "GPU":
        return None
    gpu, part = _list_parts("GPU")[int(place)]
    if part is not None and part.memory_limit:
        return int(part.memory_limit * 2**20)
    return read_gpu_memory(int(gpu.name.rpartition(":")[2]))


def _has_gpus_since_ampere() -> bool:
    """Whether there are GPUs, and all have a compute capability of 8.0 or above."""
    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    is_new = [found.get("compute_capability", (0, 0)) >= (8, 0) for found in details]
    return bool(is_new) and all(is_new)


def _list_own(kind: str) -> tuple[str, ...]:
    """Returns the names of this process's logical devices of a kind."""
    # TensorFlow lists the GPUs of all workers of a cluster.
    names = dict.fromkeys(shorten(device.name) for device in tf.config.list_logical_devices(kind))
    count = len(names) if kind == "TPU" else len(_list_parts(kind))
    return tuple(sorted(names, key=lambda name: int(name.rpartition(":")[2])))[:count]


def _list_parts(
    kind: str,
) -> list[tuple[tf.config.PhysicalDevice, tf.config.LogicalDeviceConfiguration | None]]:
    """Returns the physical device of each logical one, and how it is configured if it is split."""
    return [
        (device, part)
        for device in tf.config.get_visible_devices(kind)
        for part in tf.config.get_logical_device_configuration(device) or [None]
    ]


def _make_logical_configuration(
    device: tf.config.PhysicalDevice, share: int
) -> tf.config.LogicalDeviceConfiguration:
    if device.device_type != "GPU":
        return tf.config.LogicalDeviceConfiguration()
    # TensorFlow requires a limit, and the GPU's libraries need some memory for themselves.
    total = read_gpu_memory(int(device.name.rpartition(":")[2]))
    return tf.config.LogicalDeviceConfiguration(memory_limit=int(total * 0.9) // share // 2**20)


def read_gpu_memory(index: int, *, library: str = "libcuda.so.1") -> int:
    """Returns the bytes of the GPU that has this number for CUDA, without reserving any of them."""
    handle, size = ctypes.c_int(), ctypes.c_size_t()
    try:
        cuda = ctypes.CDLL(library)
        failed = (
            cuda.cuInit(0)
            or cuda.cuDeviceGet(ctypes.byref(handle), index)
            or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), handle)
        )
    except (OSError, AttributeError) as error:
        failed = error
    if failed:
        raise TfdistError(
            f"Cannot split GPU:{index} into virtual devices: {library} does not tell its memory "
            f"({failed}). Leave out `virtual_devices`."
        )
    return size.value


def shorten(name: str) -> str:
    """Returns `GPU:0` for `/job:localhost/replica:0/task:0/device:GPU:0` and for `gpu:0`."""
    return name.rpartition("device:")[2].lstrip("/").upper()


def _read_cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())
