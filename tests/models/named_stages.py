"""The layers of each stage of a model, by their names."""

import keras

from tfdist.models.stages import stage_names


def stage_layers(model: keras.Model) -> dict[str, list[keras.Layer]]:
    """Returns name of a stage -> its layers, both in running order; all have a stage."""
    stages: dict[str, list[keras.Layer]] = {}
    for layer in model.layers:
        if not isinstance(layer, keras.layers.InputLayer):
            stage = next(n for n in stage_names(9) if layer.name.startswith(f"{n}_"))
            stages.setdefault(stage, []).append(layer)
    return {name: stages[name] for name in stage_names(9) if name in stages}
