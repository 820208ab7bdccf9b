"""Trains the models of the zoo, whole and divided."""

import functools
from typing import Any

import keras

from tests import zoo
from tfdist.devices import shorten


def make_adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-2, clipnorm=1.0)


def train(
    name: str, *, optimizer: Any = make_adam, **options: Any
) -> tuple[Any, dict[str, list[float]], list[Any]]:
    """Returns the trainer, its history and the model's weights after four steps."""
    example = zoo.EXAMPLES[name]
    options.setdefault("strategy", zoo.STRATEGIES["one_device"]())
    trainer = zoo.make_trainer(lambda: example.build(optimizer()), **options)
    history = trainer.fit(
        *example.data,
        sample_weight=example.sample_weight,
        batch_size=15,
        max_steps=4,
        verbose=0,
    )
    return trainer, history.history, [v.numpy() for v in trainer.model.variables]


@functools.cache
def train_whole(name: str) -> tuple[Any, dict[str, list[float]], list[Any]]:
    """Returns the same from one device; once for all tests."""
    return train(name)


def find_graph(trainer: Any) -> Any:
    """Returns the graph of the traced step."""
    trace, *_ = trainer.engine._steps._traces.values()
    return trace.graph


def find_devices(trainer: Any) -> dict[str, set[str]]:
    """Returns the kind of an operation -> the devices that it runs on in the traced step."""
    found: dict[str, set[str]] = {}
    for operation in find_graph(trainer).get_operations():
        found.setdefault(operation.type, set()).add(shorten(operation.device))
    return found
