"""What workers compare of their models is found for every model."""

import keras

from tfdist.training.workers.program import describe_program


def test_quantized_layers_differ_by_their_mode():
    def describe(*modes):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        for mode in modes:
            model.layers[0].quantize(mode)
        return describe_program(model)

    found = describe("int8")
    assert "int8" in found.values()
    assert found != describe()
