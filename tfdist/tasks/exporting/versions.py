"""Writes the versions of a servable, as TensorFlow Serving expects them."""

import os
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from tfdist.records.durable_files import temporary_directory
from tfdist.tasks.finished_files import writing_output


def write_version(output: str, write: Callable[[str], None]) -> str:
    """Writes the next version in a directory, in a way that no server loads an incomplete one.

    Args:
      output: a directory on any file system of `tf.io.gfile`; created if it does not exist.
      write: writes the servable to a directory on this machine.

    Returns:
      The version's directory: `output` and a number, one above the highest so far.
    """
    with temporary_directory() as directory:
        local = f"{directory}/servable"
        write(local)
        with writing_output(output):
            tf.io.gfile.makedirs(output)
            names = [name.rstrip("/") for name in tf.io.gfile.listdir(output)]
            last = max((int(name) for name in names if name.isdigit()), default=0)
            path = f"{output}/{last + 1}"
            _publish(local, path)
    return path


def _publish(local: str, path: str) -> None:
    """Copies a servable.

    A server regards a directory whose name is a number as a version, but loads nothing without
    `saved_model.pb`. That file is therefore copied last, for object stores, which cannot rename.
    """
    partial = path if "://" in path else f"{path}.writing"
    files = [file for file in Path(local).rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda file: file.name == "saved_model.pb"):
        target = f"{partial}/{file.relative_to(local)}"
        tf.io.gfile.makedirs(os.path.dirname(target))
        tf.io.gfile.copy(str(file), target, overwrite=True)
    if partial != path:
        tf.io.gfile.rename(partial, path)
