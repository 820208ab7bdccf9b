"""A model's operations run one by one give what the model gives."""

import keras
import numpy as np
import pytest

from tests import zoo
from tfdist.errors import TfdistError
from tfdist.placement.graph import make_graph


def _run(model, inputs):
    graph = make_graph(model)
    values = dict(zip(graph.inputs, graph.model._standardize_inputs(inputs), strict=True))
    for operation in graph.operations:
        operation.run(values, training=False)
    return graph, [values[number] for number in graph.outputs]


@pytest.mark.parametrize("name", zoo.EXAMPLES)
def test_operations_in_order_are_the_model(name):
    example = zoo.EXAMPLES[name]
    model = example.build(keras.optimizers.SGD())
    inputs = keras.tree.map_structure(lambda a: a[:4], example.data[0])
    _, outputs = _run(model, inputs)
    for ours, theirs in zip(outputs, keras.tree.flatten(model(inputs)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_nested_models_are_entered_and_shared_layers_counted_twice():
    inner_input = keras.Input((4,), name="given")
    inner = keras.Model(inner_input, keras.layers.Dense(3, name="dense")(inner_input), name="inner")
    tail = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="tail")], name="outer")
    left, right = keras.Input((4,)), keras.Input((4,))
    model = keras.Model([left, right], tail(inner(left) - inner(right)))
    x = [np.ones((2, 4), "f4"), np.zeros((2, 4), "f4")]
    graph, outputs = _run(model, x)
    np.testing.assert_array_equal(outputs[0], model(x))
    names = [operation.name for operation in graph.operations]
    assert [name for name in names if "dense" in name] == ["inner/dense", "inner/dense#2"]
    assert "outer/tail" in names


def test_a_frozen_call_of_a_nested_model_stays_one():
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.9)], name="inner")
    given = keras.Input((3,))
    graph = make_graph(keras.Model(given, inner(given, training=False)))
    values = {graph.inputs[0]: np.ones((2, 3), "f4")}
    for operation in graph.operations:
        operation.run(values, training=None)
    np.testing.assert_array_equal(values[graph.outputs[0]], np.ones((2, 3)))


class AddTraining(keras.layers.Layer):
    def call(self, inputs, training=None):
        return inputs + (1 if training else 0)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("defined", [None, False, True])
@pytest.mark.parametrize("is_nested", [False, True])
def test_training_of_the_definition_and_of_the_call_are_as_in_keras(is_nested, defined, called):
    given = keras.Input((1,))
    layer = AddTraining()
    if is_nested:
        inner_input = keras.Input((1,))
        layer = keras.Model(inner_input, layer(inner_input))
    outputs = layer(given) if defined is None else layer(given, training=defined)
    model, x = keras.Model(given, outputs), np.zeros((1, 1), "f4")
    graph = make_graph(model)
    values = {graph.inputs[0]: x}
    for operation in graph.operations:
        operation.run(values, training=called)
    np.testing.assert_array_equal(values[graph.outputs[0]], model(x, training=called))


def test_a_subclass_is_refused_by_name():
    class Mine(keras.Model):
        def call(self, inputs):
            return inputs

    with pytest.raises(TfdistError, match=r"'mine' \(Mine\): its layers are known"):
        make_graph(Mine())
