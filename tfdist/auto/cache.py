"""Remembers what trials found, by everything on which the speed of a candidate depends."""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfdist
from tfdist.auto.trials import Findings
from tfdist.data.code_hash import hash_code
from tfdist.errors import shorten_error
from tfdist.launch.machine import describe_machine
from tfdist.reading import parse_object
from tfdist.records.durable_files import write_atomically
from tfdist.runs.plan import Plan
from tfdist.tasks.data import SourceData

_LENGTHS = {"epochs", "max_steps", "early_stopping", "seed", "init_from"}


@dataclass(frozen=True)
class Cache:
    """The file for the trials of one machine and training program, in `~/.cache/tfdist/auto`."""

    path: Path
    key: Mapping[str, Any]

    @classmethod
    def find(cls, plan: Plan, data: SourceData, devices: Sequence[str]) -> "Cache":
        """Returns the file for a run; shapes and `info` of its data decide what its model is."""
        key = make_key(plan, data, devices)
        try:
            home = Path.home()
        except RuntimeError:  # this user has none
            home = Path(os.devnull)  # where nothing can be read or written
        return cls(home / ".cache" / "tfdist" / "auto" / f"{_digest(key)}.json", key)

    def read(self) -> Findings | None:
        """Returns the findings; None if there are none, or the file is damaged."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            found = Findings(**(parse_object(self.path.read_bytes()) or {})["found"])
            found.describe()  # fails if it lacks a number
            return found
        return None

    def write(self, found: Findings) -> str:
        """Writes the findings; returns why that failed, or an empty text."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = {"found": dataclasses.asdict(found), "key": self.key}
            write_atomically(str(self.path), json.dumps(content, indent=1))
        except (OSError, tf.errors.OpError) as error:
            return shorten_error(error)
        return ""


def make_key(plan: Plan, data: SourceData, devices: Sequence[str]) -> dict[str, Any]:
    """Returns what the findings depend on, ready for JSON; see `Cache.find`."""
    options = plan.options.to_dict()
    options["training"] = {
        name: value for name, value in options["training"].items() if name not in _LENGTHS
    }
    gpus = [
        tf.config.experimental.get_device_details(gpu).get("device_name", "")
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    threads = tf.config.threading
    return {
        "machine": describe_machine(),
        "gpus": gpus,
        "devices": list(devices),
        "threads": [
            threads.get_intra_op_parallelism_threads(),
            threads.get_inter_op_parallelism_threads(),
        ],
        "versions": {
            "tfdist": tfdist.__version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        },
        "task": hash_code(type(plan.task)),
        "example": str(data.train.element_spec),
        "info": _digest(data.info),
        "options": {name: options[name] for name in ("strategy", "task", "training", "step")},
    }


def _digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(dict(values), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
