"""From Keras's own `fit`, `evaluate` and `predict` to tfdist's, under a strategy."""

import weakref
from typing import Any

STRATEGIES = ("one", "mirrored2", "mirrored3", "central2")
_trainers: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def make_strategy(name: str) -> Any:
    """Returns the strategy of a column of the table, on logical CPUs.

    Raises:
      ValueError: no strategy has this name.
    """
    import tensorflow as tf

    if name == "one":
        return tf.distribute.OneDeviceStrategy("CPU:0")
    if name.startswith("mirrored"):
        return tf.distribute.MirroredStrategy(_list_cpus(int(name.removeprefix("mirrored"))))
    if name.startswith("central"):
        devices = _list_cpus(int(name.removeprefix("central")))
        return tf.distribute.experimental.CentralStorageStrategy(devices, "CPU:0")
    raise ValueError(f"Unknown strategy {name!r}. Valid: {', '.join(STRATEGIES)}.")


def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Trains as `keras.Model.fit` does, by tfdist."""
    return _get_trainer(model).fit(*args, **kwargs)


def evaluate(model: Any, *args: Any, **kwargs: Any) -> Any:
    return _get_trainer(model).evaluate(*args, **kwargs)


def predict(model: Any, *args: Any, **kwargs: Any) -> Any:
    return _get_trainer(model).predict(*args, **kwargs)


def _get_trainer(model: Any) -> Any:
    import tfdist

    if model not in _trainers:
        _trainers[model] = tfdist.Trainer(model)
    return _trainers[model]


def _list_cpus(count: int) -> list[str]:
    return [f"CPU:{index}" for index in range(count)]
