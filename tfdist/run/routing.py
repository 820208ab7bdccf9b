"""Routes Keras's own `fit`, `evaluate`, `predict` and `save` to a trainer while a script runs."""

import contextlib
import functools
import secrets
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.announcing import announcing, print_message
from tfdist.cli.output import lenient_output
from tfdist.distributed_variables import make_variables_ordinary
from tfdist.internals import TrackableSaver, legacy_h5_format, model_saving, saving_lib
from tfdist.placement.options import Placement
from tfdist.replacing import find_function, replaced
from tfdist.run.overlay import Overlay
from tfdist.training.fit.own_methods import METHODS, TrainerRoute, call_inner, open_route
from tfdist.training.fit.trainer import Trainer
from tfdist.training.step_options import StepOptions, using_by_default
from tfdist.training.workers.alone import alone, creating_alone
from tfdist.training.workers.communication import Workers

_TRAINER = "_tfdist_trainer"
# Calls that may take hours, which what they print is not worth.
_LONG = ("fit", "evaluate", "predict")
_SAVING: tuple[tuple[Any, str], ...] = (
    *((keras.Model, name) for name in ("save", "save_weights", "export")),
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
    (legacy_h5_format, "save_weights_to_hdf5_group"),
    (keras.export.ExportArchive, "write_out"),
    (model_saving, "save_and_return_nodes"),
    (TrackableSaver, "save"),
)


class Routing:
    """The trainers of the models that a script creates, one per model.

    Args:
      quiet: whether not to say what `fit` waits for, such as the tracing of its step.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step_options: StepOptions,
        placement: Placement | None = None,
        *,
        quiet: bool = True,
    ):
        self._strategy = strategy
        self.workers = Workers(strategy)
        self._step_options = step_options
        self._placement = placement
        self._is_quiet = quiet
        # A model holds its own trainer, which holds the model, so that both can be deleted.
        self._trainers: weakref.WeakSet[Trainer] = weakref.WeakSet()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Makes a trainer train and use every model, and only the chief write."""
        with contextlib.ExitStack() as stack:
            make_variables_ordinary()
            stack.enter_context(open_route(self, for_all_threads=True))
            stack.enter_context(using_by_default(self._step_options))
            if self.workers.count > 1:
                stack.enter_context(self._writing_alone())
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
        if seed is None and self.workers.count > 1:
            seed = self.workers.ask_chief(secrets.randbelow(2**31))
        if seed is not None:
            keras.utils.set_random_seed(seed)

    def takes(self, model: keras.Model) -> bool:
        return True

    def call(
        self, name: str, model: keras.Model, args: Sequence[object], kwargs: dict[str, Any]
    ) -> Any:
        with contextlib.ExitStack() as stack:
            if name in _LONG and threading.current_thread() is threading.main_thread():
                stack.enter_context(lenient_output())
            is_chief = self.workers.is_chief
            if is_chief and not self._is_quiet and kwargs.get("verbose", "auto"):
                stack.enter_context(announcing(_show))
            return call_inner(self.find_trainer(model), name, args, kwargs)

    def refuse(self, name: str, model: keras.Model) -> None:
        if name not in METHODS:  # these, a script looks up after the route was opened
            TrainerRoute(self.find_trainer(model)).refuse(name, model)

    def _saving_alone(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that saves without the other workers, which need not call it."""

        @functools.wraps(save)
        def call(*args: Any, **kwargs: Any) -> Any:
            with alone(self._strategy):
                return save(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def _writing_alone(self) -> Iterator[None]:
        """Lets each worker create, load and save models by itself, and only the chief write."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(creating_alone(self._strategy))
            for owner, name in _SAVING:
                save = self._saving_alone(find_function(owner, name))
                stack.enter_context(replaced(owner, name, save, in_all_threads=True))
            if not self.workers.is_chief:
                root = stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-run-"))
                stack.enter_context(Overlay(root).open())
            yield


def _show(text: str) -> None:
    """Prints what begins, apart from the script's own output."""
    print_message(f"tfdist.run: {text} ...")
