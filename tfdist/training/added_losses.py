"""What layers add to the loss: by replica, and in the loss's precision."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras

from tfdist.internals import TensorFlowTrainer
from tfdist.training.replacing import replaced


@contextlib.contextmanager
def penalties_in_floatx() -> Iterator[None]:
    """Lets penalties of float16 layers be added to a float32 loss, at which Keras 3.15 fails."""
    original = TensorFlowTrainer._aggregate_additional_loss

    def aggregate(model: keras.Model, loss: Any) -> Any:
        return original(model, keras.ops.cast(loss, keras.config.floatx()))

    with replaced(TensorFlowTrainer, "_aggregate_additional_loss", aggregate):
        yield


class _ThreadList:
    """A list of which every thread sees its own."""

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
    """Keeps apart what the replicas' layers add to the loss.

    A layer that waits for the other replicas lets them go on in the middle of the forward pass.
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
