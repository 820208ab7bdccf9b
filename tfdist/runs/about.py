"""What a report says about how a run was started: command, date, machine, model and data."""

import contextlib
import datetime
import math
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist.launch.machine import count_cores
from tfdist.processor import name_processor

_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_USER_OF_URL = re.compile(r"(://)[^/@\s]+@")
_QUERY_OF_URL = re.compile(r"(://[^?\s]*\?)\S+")
_HIDDEN = "..."
_LIMIT_S = 2


def describe_start(
    model: keras.Model, *, model_name: str, dataset: str, sizes: Mapping[str, int], before: Any
) -> dict[str, Any]:
    """Returns what `options.json` records about the start of a run, ready for JSON.

    Args:
      model: the model; one that its first step builds has no weights yet.
      before: what an earlier start of the run has recorded; None for the first.
    """
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    began = before.get("began") if isinstance(before, Mapping) else None
    return {
        "command": format_command(sys.argv),
        "began": began or now,
        "last_start": now,
        "machine": describe_machine(),
        "model_name": model_name,
        "parameters": _count(model.weights),
        "trainable_parameters": _count(model.trainable_weights),
        "dataset": dataset,
        "examples": dict(sizes),
    }


def format_command(arguments: Sequence[str]) -> str:
    """Returns a command line as a shell takes it, without what may be secret.

    >>> format_command(["/a/tfdist/train.py", "--epochs=3", "--api_key=12", "--data_dir=a b"])
    "python -m tfdist.train --epochs=3 --api_key=... '--data_dir=a b'"
    >>> format_command(["/b/mine.py", "--hub_token", "12", "--data_dir=https://me:pw@a.org/x?sig=3"])
    "python mine.py --hub_token ... '--data_dir=https://...@a.org/x?...'"
    """
    program = Path(arguments[0])
    named = program.parent.name == "tfdist" and program.suffix == ".py"
    words = ["-m", f"tfdist.{program.stem}"] if named else [program.name]
    hides_next = False
    for argument in arguments[1:]:
        name, equals, _ = argument.partition("=")
        is_flag = name.startswith("-")
        if hides_next and not is_flag:
            argument = _HIDDEN
        elif is_flag and equals and _SECRET.search(name):
            argument = f"{name}={_HIDDEN}"
        hides_next = is_flag and not equals and bool(_SECRET.search(name))
        argument = _USER_OF_URL.sub(rf"\1{_HIDDEN}@", argument)
        words.append(_QUERY_OF_URL.sub(rf"\1{_HIDDEN}", argument))
    return f"python {shlex.join(words)}".replace(f"'{_HIDDEN}'", _HIDDEN)


def describe_machine() -> str:
    """Returns the system, the processor, the cores and the GPUs of this machine."""
    parts = [f"{name_processor()}, {count_cores()} cores"]
    gpus = [
        tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    parts += [f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)]
    return ", ".join([*parts, f"Python {platform.python_version()}", platform.system()])


def _count(weights: Sequence[keras.Variable]) -> int | None:
    """Returns how many numbers weights have; None if there are none yet."""
    return sum(math.prod(weight.shape) for weight in weights) or None


def find_commit() -> str | None:
    """Returns the commit of the working directory, with "-dirty" if tracked files are changed.

    Returns None outside of a git checkout, or if git is missing or takes too long.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=True
        )
        return found.stdout.strip()
    return None
