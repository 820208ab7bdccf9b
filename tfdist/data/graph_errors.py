"""Carries errors meant for the user through TensorFlow, which wraps them in its own."""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from tfdist.errors import TfdistError

_OPEN = "<tfdist>"
_CLOSE = "</tfdist>"
_MARKED = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)
# tf.debugging.Assert prints its strings with C's escapes.
_ESCAPED = re.compile(r"\\(['\"\\])")


def make_graph_error(message: str) -> TfdistError:
    """Returns an error whose message `as_user_error` can recover.

    Raise it in Python code that TensorFlow calls (`tf.numpy_function`).
    """
    return TfdistError(f"{_OPEN}{message}{_CLOSE}")


def assert_in_graph(condition: tf.Tensor, message: str | tf.Tensor) -> tf.Operation:
    """Makes a graph fail if a condition is false, with a message `as_user_error` can recover.

    Args:
      message: one line, or a string scalar built with `tf.strings`.

    Returns:
      The assertion, for use as a control dependency (None when executing eagerly).
    """
    marked = tf.strings.join([_OPEN, message, _CLOSE])
    return tf.debugging.Assert(condition, [marked])


def as_user_error(exception: BaseException) -> TfdistError | None:
    """Returns the error meant for the user inside an exception, or None.

    When a dataset raises an error, a training loop sees a `tf.errors.OpError` of many lines.
    A command that catches it prints this one line instead:

    >>> import tensorflow as tf
    >>> wrapped = tf.errors.InvalidArgumentError(
    ...     None, None, "in MapDataset: <tfdist>Cannot read a.jpg.</tfdist> [[node]]")
    >>> as_user_error(wrapped)
    TfdistError('Cannot read a.jpg.')
    >>> as_user_error(KeyError("a")) is None
    True
    """
    for link in _walk_causes(exception):
        match = _MARKED.search(str(link))
        if match:
            return TfdistError(_ESCAPED.sub(r"\1", match.group(1)).strip())
        if isinstance(link, TfdistError):
            return link
    return None


@contextlib.contextmanager
def show_user_errors() -> Iterator[None]:
    """Raises the TfdistError inside another error, if there is one.

    Use it as a context manager or as a decorator.
    """
    try:
        yield
    except TfdistError:
        raise
    except Exception as error:  # of TensorFlow or AutoGraph
        user_error = as_user_error(error)
        if user_error is None:
            raise
        raise user_error from error


def _walk_causes(exception: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = exception
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
