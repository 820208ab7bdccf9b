"""Saves and loads the model of a trainer."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.records.durable_files import sync_to_disk, temporary_directory
from tfdist.records.pattern_paths import check_saved_model_path
from tfdist.training.fit.engine import Engine
from tfdist.training.workers.alone import alone


class ModelFiles:
    """Saves and loads a model on every worker; a base of `Trainer`."""

    model: keras.Model
    strategy: tf.distribute.Strategy
    engine: Engine

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files, which a single process always does."""
        return self.engine.workers.is_chief

    def save_weights(self, path: str) -> None:
        """Saves the weights as Keras does, on the chief; see `save` for the other workers."""
        with self._saving() as directory:
            if directory:
                self.model.save_weights(path if self.is_chief else f"{directory}/own.weights.h5")

    @contextlib.contextmanager
    def _saving(self) -> Iterator[str]:
        """Yields a temporary directory; an empty text if this worker need not take part."""
        is_needed = self.is_chief or self.engine.options.shard_optimizer
        with alone(self.strategy), temporary_directory() as directory:
            yield directory if is_needed else ""

    def load_weights(self, path: str, **kwargs: Any) -> None:
        """Loads weights as Keras does, on every worker."""
        with self.strategy.scope():
            self.model.load_weights(path, **kwargs)

    def export(self, path: str, **kwargs: Any) -> None:
        """Exports the model as `keras.Model.export` does, on the chief only; checks the path."""
        if kwargs.get("format", "tf_saved_model") == "tf_saved_model":
            check_saved_model_path("path", str(path))
        if self.is_chief:
            with alone(self.strategy):
                self.model.export(path, **kwargs)

    def save(
        self, path: str, *, convert: Callable[[keras.Model], keras.Model] = lambda model: model
    ) -> None:
        """Saves the model as a `.keras` file, on any file system of `tf.io.gfile`.

        Only the chief writes. Other workers need not call this, unless `shard_optimizer` divides
        the optimizer's state over them.
        """
        with self._saving() as directory:
            if not directory:
                return
            local = f"{directory}/model.keras"
            convert(self.model).save(local)
            if not self.is_chief:
                return
            tf.io.gfile.copy(local, f"{path}.writing", overwrite=True)
            sync_to_disk(f"{path}.writing")
        tf.io.gfile.rename(f"{path}.writing", path, overwrite=True)
