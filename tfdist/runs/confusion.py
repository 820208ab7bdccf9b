"""The confusion matrix of a finished run, for TensorBoard."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.runs.events import forget_events_after


def write_confusion(directory: str, summary: Mapping[str, Any], *, step: int) -> None:
    """Writes the confusion matrix of a summary for TensorBoard's text plugin.

    Args:
      directory: the directory of the run's events.
      summary: the run's summary, with `confusion`: counts [classes (truth), classes (prediction)].
      step: the run's last step.
    """
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
