"""What a trainer writes of its model and reads of it."""

import tempfile
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.training.durable_files import sync_to_disk
from tfdist.training.workers import Workers


class ModelFiles:
    """Saves and loads a model on every worker; a base of `Trainer`.

    Attributes:
      model, strategy: what is trained, and where.
      workers: the processes that train together.
    """

    model: keras.Model
    strategy: tf.distribute.Strategy
    workers: Workers

    @property
    def is_chief(self) -> bool:
        """Whether this process writes: with one process it does."""
        return self.workers.is_chief

    def save_weights(self, path: str) -> None:
        """Writes the weights as Keras does; all workers call it, and the chief's file stays."""
        # Reading a variable may take all workers, and so may what Keras creates meanwhile.
        with tempfile.TemporaryDirectory() as directory:
            self.model.save_weights(path if self.is_chief else f"{directory}/own.weights.h5")

    def load_weights(self, path: str, **kwargs: Any) -> None:
        """Reads weights as Keras does, on every worker."""
        with self.strategy.scope():
            self.model.load_weights(path, **kwargs)

    def export(self, path: str, **kwargs: Any) -> None:
        """Writes a servable as `keras.Model.export` does; the chief does."""
        if self.is_chief:
            self.model.export(path, **kwargs)

    def save(
        self, path: str, *, convert: Callable[[keras.Model], keras.Model] = lambda model: model
    ) -> None:
        """Writes the model as a `.keras` file, on any file system of `tf.io.gfile`.

        All workers call it, and the chief's file stays.

        Args:
          path: of the file.
          convert: makes of the model the one that is written.
        """
        with tempfile.TemporaryDirectory() as directory:
            local = f"{directory}/model.keras"
            convert(self.model).save(local)
            if not self.is_chief:
                return
            tf.io.gfile.copy(local, f"{path}.writing", overwrite=True)
            sync_to_disk(f"{path}.writing")
        tf.io.gfile.rename(f"{path}.writing", path, overwrite=True)
