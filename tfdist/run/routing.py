"""Routes Keras's own `fit`, `evaluate`, `predict` and `save` to a trainer while a script runs."""

import contextlib
import functools
import os
import secrets
import tempfile
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.distributed_variables import make_variables_ordinary
from tfdist.placement.options import Placement
from tfdist.training.own_methods import call_inner, open_route
from tfdist.training.step_options import StepOptions
from tfdist.training.trainer import Trainer
from tfdist.training.workers import Workers

_TRAINER = "_tfdist_trainer"
_WRITING = ("save", "save_weights", "export")


class Routing:
    """The trainers of the models that a script creates, one per model.

    Args:
      strategy: the strategy in whose scope the script runs.
      step_options: the step options of every trainer.
      placement: how each model is divided over the devices of a replica, if at all.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step_options: StepOptions,
        placement: Placement | None = None,
    ):
        self._workers = Workers(strategy)
        self._step_options = step_options
        self._placement = placement
        # A model holds its own trainer, which holds the model, so that both can be deleted.
        self._trainers: weakref.WeakSet[Trainer] = weakref.WeakSet()
        self._directory = tempfile.TemporaryDirectory(prefix="tfdist-run-")

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Makes a trainer train and use every model, and only the chief write."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._directory)
            make_variables_ordinary()
            stack.enter_context(open_route(self, for_all_threads=True))
            for name in _WRITING if self._workers.count > 1 else ():
                stack.enter_context(_replaced_method(name, self._write))
            yield

    @property
    def check_s(self) -> float:
        """The seconds spent checking that replicas can divide the steps."""
        return sum(trainer.engine.check_s for trainer in self._trainers)

    def find_trainer(self, model: keras.Model) -> Trainer:
        """Returns the trainer of a model."""
        trainer: Trainer | None = vars(model).get(_TRAINER)
        if trainer is None or trainer not in self._trainers or trainer.model is not model:
            trainer = Trainer(model, step_options=self._step_options, placement=self._placement)
            self._trainers.add(trainer)
            vars(model)[_TRAINER] = trainer  # not an attribute that Keras tracks
        return trainer

    def set_seed(self, seed: int | None) -> None:
        """Seeds all generators; without a seed, those of several workers with a common one."""
        if seed is None and self._workers.count > 1:
            seed = self._workers.ask_chief(secrets.randbelow(2**31))
        if seed is not None:
            keras.utils.set_random_seed(seed)

    def takes(self, model: keras.Model) -> bool:
        return True

    def call(
        self, name: str, original: Callable[..., Any], model: keras.Model, args: Any, kwargs: Any
    ) -> Any:
        if not model.compiled and not name.startswith("predict"):
            return original(model, *args, **kwargs)
        if not self._workers.is_chief and "callbacks" in kwargs:
            kwargs["callbacks"] = [
                self._redirect(callback) for callback in _list_callbacks(kwargs["callbacks"])
            ]
        return call_inner(self.find_trainer(model), name, args, kwargs)

    def refuse(self, name: str, model: keras.Model) -> None:
        pass  # a script looks up Keras's methods after the route was opened

    def _write(
        self, name: str, original: Any, model: keras.Model, *args: Any, **kwargs: Any
    ) -> Any:
        """Writes on the chief; every other worker takes part but keeps no file.

        Reading a variable may require all workers, and so may creating one: Keras creates an
        optimizer to find out which attributes not to save.
        """
        if self._workers.is_chief:
            found = original(model, *args, **kwargs)
        else:
            path, *others = [kwargs.pop("filepath"), *args] if "filepath" in kwargs else args
            with tempfile.TemporaryDirectory(dir=self._directory.name) as own:
                path = f"{own}/{os.path.basename(str(path))}"
                found = original(model, path, *others, **kwargs)
        self._workers.wait_for_all()  # The next line of the script may read the chief's file.
        return found

    def _redirect(self, callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
        """Redirects what a Keras callback writes to a temporary directory, except on the chief."""
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.filename = os.devnull
        elif isinstance(callback, keras.callbacks.TensorBoard):
            callback.log_dir = self._directory.name
        elif isinstance(callback, keras.callbacks.BackupAndRestore):
            begin = callback.on_train_begin

            def restore(logs: Any = None) -> None:
                begin(logs)
                for name in ("_weights_path", "_training_metadata_path"):
                    base = os.path.basename(getattr(callback, name))
                    setattr(callback, name, os.path.join(self._directory.name, base))
                callback.backup_dir = self._directory.name
                callback.delete_checkpoint = False

            callback.on_train_begin = restore
        return callback


@contextlib.contextmanager
def _replaced_method(name: str, route: Callable[..., Any]) -> Iterator[None]:
    """Routes calls of a method of `keras.Model` to `route(name, original, model, ...)`.

    The calls that the method itself makes go to Keras.
    """
    original = getattr(keras.Model, name)
    inside: set[int] = set()

    @functools.wraps(original)
    def method(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if id(self) in inside:
            return original(self, *args, **kwargs)
        inside.add(id(self))
        try:
            return route(name, original, self, *args, **kwargs)
        finally:
            inside.discard(id(self))

    is_own = name in vars(keras.Model)
    setattr(keras.Model, name, method)
    try:
        yield
    finally:
        if is_own:
            setattr(keras.Model, name, original)
        else:
            delattr(keras.Model, name)


def _list_callbacks(callbacks: Any) -> list[keras.callbacks.Callback]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
