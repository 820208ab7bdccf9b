"""TensorBoard's event files: trims them when a run continues, and writes hyperparameters."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

Event = tf.compat.v1.Event


def forget_events_after(directory: str, step: int) -> None:
    """Drops the events of later steps from a directory's event files.

    Each file is rewritten under a temporary name, which then replaces it. An incomplete record
    ends the file.

    Args:
      directory: a directory on any file system of `tf.io.gfile`; it need not exist.
    """
    if not tf.io.gfile.exists(directory):
        return
    for name in tf.io.gfile.listdir(directory):
        if "tfevents" not in name or name.endswith(".writing"):
            continue
        path = f"{directory}/{name}"
        records = _read_records(path)
        kept = [record for record in records if Event.FromString(record).step <= step]
        # The first record holds the version of the format.
        if len(kept) <= 1:
            tf.io.gfile.remove(path)
        elif len(kept) < len(records):
            with tf.io.TFRecordWriter(f"{path}.writing") as writer:
                for record in kept:
                    writer.write(record)
            tf.io.gfile.rename(f"{path}.writing", path, overwrite=True)


def write_hyperparameters(directory: str, values: Mapping[str, Any]) -> None:
    """Writes TensorBoard's hyperparameters anew; what is no number is written as text."""
    from tensorboard.plugins.hparams import api

    forget_events_after(directory, -1)
    plain = {
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in values.items()
    }
    with tf.summary.create_file_writer(directory).as_default():
        api.hparams(plain)


def _read_records(path: str) -> list[bytes]:
    records: list[bytes] = []
    with contextlib.suppress(tf.errors.DataLossError):
        records.extend(tf.data.TFRecordDataset(path).as_numpy_iterator())
    return records


def write_confusion(directory: str, summary: Mapping[str, Any], *, step: int) -> None:
    """Writes a summary's `confusion`, [truth, prediction], for TensorBoard's text plugin."""
    path = f"{directory}/confusion"
    counts = summary["confusion"]
    names = summary["info"].get("class_names") or list(map(str, range(len(counts))))
    forget_events_after(path, -1)
    with tf.summary.create_file_writer(path).as_default():
        tf.summary.text("confusion", format_confusion(counts, names), step=step)


def format_confusion(counts: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Returns a table in Markdown: a row for each true class, a column for each predicted one.

    >>> print(format_confusion([[3, 1], [0, 4]], ["sky", "road"]))
    | true \\ predicted | sky | road |
    |---|---:|---:|
    | **sky** | 3 | 1 |
    | **road** | 0 | 4 |
    """
    rows = [["true \\ predicted", *names]]
    rows += [[f"**{name}**", *map(str, row)] for name, row in zip(names, counts, strict=True)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|---|{'---:|' * len(names)}", *lines[1:]])
