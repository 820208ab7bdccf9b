"""Keeps what XLA compiles in a directory, from which the next start reads it.

TensorFlow's own cache knows an executable by its operations and their shapes only. What else it
depends on decides the name of the subdirectory. TensorFlow reads the flag once, while it starts.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from tfdist import cluster
from tfdist.errors import TfdistError

AUTO, NONE = "auto", "none"
_FLAG = "tf_xla_persistent_cache_directory"
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "TF_CUDNN_DETERMINISTIC"),
    *("TF_DETERMINISTIC_OPS", "TF_ENABLE_ONEDNN_OPTS", "TF_XLA_FLAGS", "XLA_FLAGS"),
)
_ENOUGH_BYTES = 2**30  # a step that XLA cannot store fails
_LENGTH_DELIMITED = 2  # the kind of all fields of an entry, by protobuf's wire format


def use_xla_cache(directory: str, *, deterministic: bool = False) -> Path | None:
    """Makes TensorFlow read what XLA has compiled before, and keep what it compiles.

    This has an effect only before TensorFlow is imported. If TF_XLA_FLAGS names a directory
    already, that is used.

    Args:
      directory: where the subdirectories are; `auto` for `~/.cache/tfdist/xla`, or none if nothing
        can be written there; `none`.
      deterministic: whether only deterministic kernels are allowed.

    Returns:
      The subdirectory; None for none.

    Raises:
      TfdistError: nothing can be written to the directory that is given.
    """
    environ = cluster.read_environment()
    if directory == NONE or _FLAG in environ.get("TF_XLA_FLAGS", ""):
        return None
    try:
        own = Path.home() / ".cache" / "tfdist" / "xla"
        parent = own if directory == AUTO else Path(directory).expanduser()
        place = parent.absolute() / make_key(environ, deterministic=deterministic)
        _check_place(place)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        if directory == AUTO:
            return None
        problem = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise TfdistError(
            f"Cannot use `xla_cache={directory}`: {problem}. Name a directory for files, or none."
        ) from error
    remove_damaged(place)
    cluster.add_xla_flag(f'--{_FLAG}="{place}"')
    return place


def make_key(environ: Mapping[str, str], *, deterministic: bool) -> str:
    """Returns the name for everything on which executables of the same operations depend.

    These are TensorFlow, the processor and its cores, GPUs and their driver, and settings.
    """
    found = [
        *_list_packages(),
        _read_processor(),
        str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        *_read_gpus(),
        str(deterministic),
        *(f"{name}={environ.get(name, '')}" for name in _VARIABLES),
    ]
    return hashlib.sha256("\0".join(found).encode(errors="surrogateescape")).hexdigest()[:16]


def remove_damaged(place: Path) -> list[Path]:
    """Removes entries that were not written to their end, and returns them.

    TensorFlow would fail on them.
    """
    damaged = []
    for path in place.glob("*.pb"):
        # Another process may remove it, too.
        with contextlib.suppress(OSError):
            with path.open("rb") as file:
                is_whole = _is_whole(file, path.stat().st_size)
            if not is_whole:
                path.unlink()
                damaged.append(path)
    return damaged


def _check_place(place: Path) -> None:
    """Raises OSError if TensorFlow could not write to a directory."""
    if '"' in str(place) or not str(place).isprintable():
        raise OSError(f"{str(place)!r} has characters that TF_XLA_FLAGS cannot have")
    place.mkdir(parents=True, exist_ok=True)
    probe = place / f".{os.getpid()}.probe"
    probe.touch()
    probe.unlink()
    if shutil.disk_usage(place).free < _ENOUGH_BYTES:
        raise OSError(f"{place} has less than 1 GiB free")


def _is_whole(file: BinaryIO, size: int) -> bool:
    """Returns whether the fields of a protobuf message end where its file ends."""
    place = 0
    while place < size:
        key, place = _read_varint(file, place)
        length, place = _read_varint(file, place)
        if key is None or length is None or key & 7 != _LENGTH_DELIMITED:
            return False
        place += length
        file.seek(place)
    return place == size > 0


def _read_varint(file: BinaryIO, place: int) -> tuple[int | None, int]:
    """Returns a variable-length integer and the place after it; None where there is none."""
    value = 0
    for shift in range(0, 64, 7):
        byte = file.read(1)
        if not byte:
            return None, place
        place += 1
        value |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return value, place
    return None, place


def _list_packages() -> list[str]:
    """Returns what is installed beside TensorFlow that decides what XLA compiles."""
    found = importlib.util.find_spec("tensorflow")
    if found is None or found.origin is None:
        return []
    package = Path(found.origin).parent
    names = [path.name for path in package.parent.glob("*.dist-info")]
    kept = [name for name in names if name.startswith(("tensorflow", "tf_nightly", "nvidia"))]
    library = package / "libtensorflow_cc.so.2"
    return [*sorted(kept), str(library.stat().st_size if library.exists() else 0)]


def _read_processor() -> str:
    """Returns the processor's model and instructions."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kept = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
        return "\n".join(sorted(kept))
    return "unknown"


def _read_gpus() -> list[str]:
    """Returns the models of NVIDIA's GPUs, and their driver."""
    driver = Path("/proc/driver/nvidia")
    found = []
    for path in [driver / "version", *sorted(driver.glob("gpus/*/information"))]:
        with contextlib.suppress(OSError):
            lines = path.read_text().splitlines()
            found += [line for line in lines if line.startswith(("Model", "NVRM"))]
    return found
