"""The losses that layers add: separate for each replica, and in the precision of the loss."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras

from tfdist.internals import TensorFlowTrainer, adds_up_activities
from tfdist.replacing import find_function, replaced

if TYPE_CHECKING:
    import tensorflow as tf


@contextlib.contextmanager
def penalties_in_floatx() -> Iterator[None]:
    """Casts layers' penalties to floatx: Keras 3.15 fails to add float16 ones to a float32 loss."""
    original = find_function(TensorFlowTrainer, "_aggregate_additional_loss")

    def aggregate(model: keras.Model, loss: "tf.Tensor") -> Any:
        return original(model, keras.ops.cast(loss, keras.config.floatx()))

    with replaced(TensorFlowTrainer, "_aggregate_additional_loss", aggregate):
        yield


class _ThreadList:
    """A list with separate contents for each thread."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def _items(self) -> list[Any]:
        if not hasattr(self._of_thread, "items"):
            self._of_thread.items = []
        return self._of_thread.items


@contextlib.contextmanager
def losses_by_thread(model: keras.Model) -> Iterator[None]:
    """Keeps the losses that layers add separate for each replica.

    While a layer waits for the other replicas, they run in the middle of its forward pass.
    """
    layers = model._flatten_layers()
    before = [(vars(layer), vars(layer)["_losses"]) for layer in layers]
    for attributes, _ in before:
        attributes["_losses"] = _ThreadList()
    try:
        yield
    finally:
        for attributes, losses in before:
            attributes["_losses"] = losses


@contextlib.contextmanager
def penalties_of_global_batch(model: keras.Model, scale: Callable[[Any], Any]) -> Iterator[None]:
    """Scales penalties on activities, in versions of Keras that add them up over the examples."""
    layers = [each for each in model._flatten_layers() if each.activity_regularizer is not None]
    if not (layers and adds_up_activities()):
        yield
        return
    before = [(vars(layer), layer.activity_regularizer) for layer in layers]

    def make_scaled(penalize: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda activities: scale(penalize(activities))

    for attributes, penalize in before:
        attributes["activity_regularizer"] = make_scaled(penalize)
    try:
        yield
    finally:
        for attributes, penalize in before:
            attributes["activity_regularizer"] = penalize
