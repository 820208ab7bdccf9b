"""The files of a servable, which are found without TensorFlow on this machine's file systems."""

import os
from collections.abc import Mapping
from typing import Any

from tfdist.errors import TfdistError
from tfdist.records.durable_files import is_local
from tfdist.serve.options import ServedModelOptions
from tfdist.tasks.commands import run_task_command

SAVED_MODEL = "saved_model.pb"


def find_versions(path: str) -> dict[int, str]:
    """Returns number -> directory of the complete versions; a lone SavedModel is version 1."""
    isdir: Any
    exists: Any
    listdir: Any
    if is_local(path):
        isdir, exists, listdir = os.path.isdir, os.path.exists, os.listdir
    else:
        import tensorflow as tf

        isdir, exists, listdir = tf.io.gfile.isdir, tf.io.gfile.exists, tf.io.gfile.listdir
    if not isdir(path):
        return {}
    if exists(f"{path}/{SAVED_MODEL}"):
        return {1: path}
    names = [name.rstrip("/") for name in listdir(path)]
    paths = {int(name): f"{path}/{name}" for name in names if name.isdecimal()}
    return {n: p for n, p in paths.items() if exists(f"{p}/{SAVED_MODEL}")}


def export_run(options: ServedModelOptions, output: str) -> int:
    """Exports the run of `run_dir` to a directory; returns the exit status."""
    arguments = [f"--run_dir={options.run_dir}", f"--output={output}", "--quiet"]
    arguments += ["--trust_task"] if options.trust_task else []
    return run_task_command("export", arguments)


def check_versions(path: str, found: Mapping[int, str]) -> None:
    """Checks that a directory has a version."""
    if not found:
        raise TfdistError(
            f"Cannot find a servable in `model={path}`: it has neither {SAVED_MODEL} nor a "
            "directory of a version, such as 1, that has one. Export one with tfdist.export."
        )
