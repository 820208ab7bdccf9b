"""Explains errors of Keras and TensorFlow about data that do not fit the model."""

import contextlib
import re
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdist.aliases import Nested
from tfdist.errors import TfdistError

_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_LABEL = re.compile(r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")
_INDEX = re.compile(r"indices\[[\d, ]*\] = (-?\d+) is not in \[0, (\d+)\)")
_OF_SHAPES = re.compile(r"\b(rank|ndim|shapes?|dimensions?|ax[ei]s)\b")
_SHAPE = re.compile(
    r"(?:[Ll]ayer '?\"?(?P<layer>[^'\"\s,]+)'?\"? )(?:\([^)]*\) )?is incompatible with the layer: "
    r"(?P<reason>[^\n]+)"
)


_INPUT = re.compile(
    r"Expected shape (?P<expected>\([^)]*\)), but input has incompatible shape (?P<found>\([^)]*\))"
)
_NO_LABELS = "None values not supported."


@contextlib.contextmanager
def explain_data_errors(batch_spec: Nested[tf.TypeSpec]) -> Iterator[None]:
    """Raises a TfdistError of one line in place of an error about the data, if understood."""
    try:
        yield
    except TfdistError:
        raise
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        text = _describe(_COLORS.sub("", str(error)), batch_spec)
        if text is None:
            raise
        raise TfdistError(text) from error


def describe_value(text: str) -> str | None:
    """Returns one line about a label or an index that is out of range, if this is the error."""
    if found := _LABEL.search(text):
        label, count = found.groups()
        return (
            f"Cannot use the label {label}: the model has {count} outputs, so labels must be from "
            f"0 to {int(count) - 1}. Map the labels, or give the last layer more units."
        )
    if found := _INDEX.search(text):
        index, count = found.groups()
        return (
            f"Cannot look up the index {index}: the table has {count} rows, so indices must be "
            f"from 0 to {int(count) - 1}. Map the indices, or give the embedding more rows."
        )
    return None


def _describe(text: str, batch_spec: Nested[tf.TypeSpec]) -> str | None:
    if said := describe_value(text):
        return said
    if _is_single(batch_spec) and _OF_SHAPES.search(text):
        return (
            "Cannot use single examples: the elements of a dataset must be global batches. Call "
            ".batch(batch_size) on it."
        )
    if text.strip() == _NO_LABELS and _has_no_labels(batch_spec):
        return (
            "Cannot compute the loss without labels. Give y; the elements of a dataset must be "
            "(x, y), and so must validation_data."
        )
    if found := _INPUT.search(text):
        return (
            f"The data do not fit the model: an input of shape {found['expected']} got data of "
            f"shape {found['found']}. If these are single examples, call .batch(batch_size) on the "
            "dataset. Otherwise change the data, or the model's input."
        )
    if found := _SHAPE.search(text):
        return (
            f"The data do not fit the model: the layer {found['layer']!r} {found['reason']}. "
            "Change the data, or the model's input."
        )
    return None


def _is_single(batch_spec: Nested[tf.TypeSpec]) -> bool:
    """Returns whether the elements of a dataset cannot be batches: they share no dimension."""
    leaves = [leaf for leaf in keras.tree.flatten(batch_spec) if isinstance(leaf, tf.TensorSpec)]
    shapes = [leaf.shape for leaf in leaves if leaf.shape.rank is not None]
    rows = {shape[0] if shape.rank else 0 for shape in shapes}
    return 0 in rows or len(rows - {None}) > 1


def _has_no_labels(batch_spec: Nested[tf.TypeSpec]) -> bool:
    """Returns whether the elements of data are inputs only."""
    return not (isinstance(batch_spec, tuple) and len(batch_spec) > 1)
