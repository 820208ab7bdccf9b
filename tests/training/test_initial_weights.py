"""The weights with which a run begins."""

import keras

from tests import zoo
from tfdist.training.checkpoint.initial_weights import InitialWeights


def _build(seed):
    """Returns a model of two parts whose layers have the same names."""

    def make_part(name, seed):
        inputs = keras.Input((3,))
        layer = keras.layers.Dense(3, name="last", kernel_initializer=zoo.seeded(seed))
        return keras.Model(inputs, layer(inputs), name=name)

    inputs = keras.Input((3,))
    outputs = make_part("second", seed + 1)(make_part("first", seed)(inputs))
    return keras.Model(inputs, outputs)


def test_parts_with_layers_of_the_same_name_get_weights_of_their_own(tmp_path):
    saved, model = _build(1), _build(5)
    path = str(tmp_path / "model.keras")
    saved.save(path)
    InitialWeights(path).give_to(model)
    assert len({variable.path for variable in model.variables}) == 2
    found, expected = ([v.numpy() for v in each.variables] for each in (model, saved))
    assert zoo.largest_difference(found, expected) == 0
