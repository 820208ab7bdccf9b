import pytest
import tensorflow as tf

from tfdist.data.graph_errors import as_user_error, assert_in_graph, make_graph_error
from tfdist.errors import TfdistError

MESSAGE = "Cannot read 'a file' of \"é\" \\ size: mend it."


def test_assertion_is_found_again():
    def check(number):
        with tf.control_dependencies([assert_in_graph(number < 0, MESSAGE)]):
            return tf.identity(number)

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        list(tf.data.Dataset.range(2).map(check))
    assert str(as_user_error(caught.value)) == MESSAGE


def test_python_error_is_found_again():
    def fail(number):
        raise make_graph_error(MESSAGE)

    dataset = tf.data.Dataset.range(2).map(lambda i: tf.numpy_function(fail, [i], tf.int64))
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        list(dataset)
    assert str(as_user_error(caught.value)) == MESSAGE


def test_causes_are_searched_and_others_left():
    error = TfdistError("Cannot do it.")
    outer = RuntimeError("outer")
    outer.__cause__ = error
    assert as_user_error(outer) is error
    assert as_user_error(RuntimeError("other")) is None
