"""TensorBoard's event files, when a run continues from before their end."""

import contextlib

import tensorflow as tf

Event = tf.compat.v1.Event


def forget_events_after(directory: str, step: int) -> None:
    """Drops the events of later steps from a directory's event files.

    Each file is written anew beside itself and then takes its place; a record that was cut short
    ends it.

    Args:
      directory: on any file system of `tf.io.gfile`; it need not exist.
      step: the last one that is kept.
    """
    if not tf.io.gfile.exists(directory):
        return
    for name in tf.io.gfile.listdir(directory):
        if "tfevents" not in name or name.endswith(".writing"):
            continue
        path = f"{directory}/{name}"
        records = _read_records(path)
        kept = [record for record in records if Event.FromString(record).step <= step]
        # The first record says the format's version.
        if len(kept) <= 1:
            tf.io.gfile.remove(path)
        elif len(kept) < len(records):
            with tf.io.TFRecordWriter(f"{path}.writing") as writer:
                for record in kept:
                    writer.write(record)
            tf.io.gfile.rename(f"{path}.writing", path, overwrite=True)


def _read_records(path: str) -> list[bytes]:
    records: list[bytes] = []
    with contextlib.suppress(tf.errors.DataLossError):
        records.extend(tf.data.TFRecordDataset(path).as_numpy_iterator())
    return records
