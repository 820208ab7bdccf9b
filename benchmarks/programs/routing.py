"""From Keras's own `fit`, `evaluate` and `predict` to tfdist's, under a strategy."""

import weakref
from typing import Any

STRATEGIES = ("one", "mirrored2", "mirrored3", "central2", "workers2", "servers")
# What `tfdist.launch` starts for a strategy of several processes.
CLUSTERS = {"workers2": ("--workers=2",), "servers": ("--workers=1", "--ps=1")}
_trainers: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def make_strategy(name: str) -> Any:
    """Returns the strategy of a column of the table, on logical CPUs or in a task of its cluster.

    Raises:
      ValueError: no strategy has this name.
    """
    import tensorflow as tf

    from tfdist.strategies.multi_worker_mirrored import make_multi_worker_mirrored
    from tfdist.strategies.parameter_server import make_parameter_server

    if name == "one":
        return tf.distribute.OneDeviceStrategy("CPU:0")
    if name.startswith("mirrored"):
        return tf.distribute.MirroredStrategy(_list_cpus(int(name.removeprefix("mirrored"))))
    if name.startswith("central"):
        devices = _list_cpus(int(name.removeprefix("central")))
        return tf.distribute.experimental.CentralStorageStrategy(devices, "CPU:0")
    if name == "workers2":
        return make_multi_worker_mirrored()
    if name == "servers":
        return make_parameter_server()
    raise ValueError(f"Unknown strategy {name!r}. Valid: {', '.join(STRATEGIES)}.")


def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Trains as `keras.Model.fit` does, by tfdist."""
    history = _get_trainer(model).fit(*args, **kwargs)
    for name in ("staleness_max", "staleness_mean"):  # of parameter servers alone
        history.history.pop(name, None)
    return history


def evaluate(model: Any, *args: Any, **kwargs: Any) -> Any:
    return _get_trainer(model).evaluate(*args, **kwargs)


def predict(model: Any, *args: Any, **kwargs: Any) -> Any:
    return _get_trainer(model).predict(*args, **kwargs)


def get_check_seconds() -> float:
    """Returns how long the checks took that a step may be divided."""
    return sum(trainer.check_s for trainer in _trainers.values())


def _get_trainer(model: Any) -> Any:
    import tfdist

    if model not in _trainers:
        # One step in flight: servers then give what one device gives.
        _trainers[model] = tfdist.Trainer(model, step_options=_make_step_options())
    return _trainers[model]


def _make_step_options() -> Any:
    import tensorflow as tf

    import tfdist

    strategy = tf.distribute.get_strategy()
    has_servers = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    return tfdist.StepOptions(max_in_flight=int(has_servers))


def _list_cpus(count: int) -> list[str]:
    return [f"CPU:{index}" for index in range(count)]
