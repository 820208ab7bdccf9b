"""What random programs do with their models."""

import keras
import numpy as np

from tests.random_programs.data import BATCH


def _fit(model, data, options, *, epochs=2):
    return model.fit(
        **data.make_arguments(validates=options["validates"]),
        callbacks=options["callbacks"],
        epochs=epochs,
        shuffle=False,
        verbose=0,
    ).history


def _use_once(model, data, options):
    return _read(model, data, {"fit": _fit(model, data, options)})


def _use_twice(model, data, options):
    found = {"fit": _fit(model, data, options, epochs=1)}
    _read(model, data, found)
    return _read(model, data, {**found, "again": _fit(model, data, options, epochs=1)})


def _use_changed(model, data, options):
    """Changes the weights and the learning rate between two trainings."""
    before = _read(model, data, {"fit": _fit(model, data, options)})
    kept = getattr(model, "model", model)
    kept.set_weights([0.5 * weight for weight in kept.get_weights()])
    if isinstance(kept.optimizer.learning_rate, keras.Variable):
        kept.optimizer.learning_rate = 0.02
    return _name(before) | _use_once(model, data, options)


def _use_untrained(model, data, options):
    """Evaluates and predicts first."""
    before = _read(model, data, {})
    return _name(before) | _use_once(model, data, options)


def _name(before):
    return {f"before: {name}": values for name, values in before.items()}


def _take(arrays, count):
    """Returns the first rows of arrays in any structure; None stays."""
    if arrays is None:
        return None
    return keras.tree.map_structure(lambda array: array[:count], arrays)


def _use_batches(model, data, options):
    found = {}
    for call, count in enumerate((7, 3, 1)):
        batch = [_take(part, count) for part in data.make_arrays()]
        found[f"batch {call}"] = model.train_on_batch(*batch, return_dict=True)
        found[f"test {call}"] = model.test_on_batch(*batch, return_dict=True)
    return _read(model, data, {**found, "fit": _fit(model, data, options, epochs=1)})


def _read(model, data, found):
    """Returns what was found, and what the model gives now, by name."""
    x, y, weights = data.make_arrays()
    found["evaluate"] = model.evaluate(
        x, y, sample_weight=weights, batch_size=BATCH, verbose=0, return_dict=True
    )
    found["predict"] = model.predict(x, batch_size=BATCH, verbose=0)
    kept = getattr(model, "model", model)
    found["weights"] = [weight.numpy() for weight in kept.weights]
    found["steps"] = kept.optimizer.iterations.numpy()
    flat = {}
    for name, value in found.items():
        for path, leaf in keras.tree.flatten_with_path(value):
            key = " ".join([name, *map(str, path)])
            flat[key] = np.asarray(leaf, "float64")
    return flat


USES = {
    "once": _use_once,
    "twice": _use_twice,
    "changed": _use_changed,
    "untrained": _use_untrained,
    "single batches": _use_batches,
}
