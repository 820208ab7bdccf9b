"""The trainer: Keras's `fit`, `evaluate` and `predict`, under any strategy."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import array_slicing

from tfdist.data.fingerprint import describe_difference
from tfdist.data.graph_errors import show_user_errors
from tfdist.data.pipeline import MAX_SEED, BatchAugmentation
from tfdist.data.source import Source
from tfdist.errors import TfdistError
from tfdist.strategies.base import Strategy
from tfdist.strategies.registry import build, find_traits, make_strategy
from tfdist.strategies.servers import make_placement
from tfdist.training.asynchronous import AsynchronousSteps
from tfdist.training.durable_files import sync_to_disk
from tfdist.training.feed import Feed, make_feed
from tfdist.training.guard import check_division, is_known
from tfdist.training.local import LocalSteps
from tfdist.training.loop import FitLoop, Interval, Progress, Schedule
from tfdist.training.model_variables import (
    aggregate_state,
    aggregate_variables,
    build_model,
    build_outputs,
    check_scope,
)
from tfdist.training.randomness import lend_global_generator, list_seed_generators
from tfdist.training.recovery import Recovery
from tfdist.training.reduction import measure_all_reduce
from tfdist.training.replica_optimizers import list_optimizers
from tfdist.training.step_checks import (
    check_model,
    check_program,
    check_strategy,
)
from tfdist.training.step_options import StepOptions
from tfdist.training.synchronous import SynchronousSteps
from tfdist.training.workers import Workers, explain_lost_worker

# Where only the data's end ends an epoch.
_UNKNOWN_STEPS = 1 << 40


def _drawing_alike(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets workers draw by one global generator, which none could create within a step."""

    @functools.wraps(method)
    def call(trainer: "Trainer", *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if trainer.num_workers > 1:
                with trainer.strategy.scope(), tf.variable_creator_scope(trainer._create_variable):
                    stack.enter_context(lend_global_generator())
            return method(trainer, *args, **kwargs)

    return call


class Trainer:
    """Trains a compiled Keras model under a `tf.distribute` strategy.

    The strategy changes the speed, never the result: losses, metrics, clipping and
    normalisation are those of the global batch.

    Under a strategy of several workers every worker runs the same program: each method is called
    by all of them, returns the same on each, and only the chief writes. Callbacks run on every
    worker; give those that write to the chief alone (`is_chief`), or each worker its own path.

    Example:

        def build_model():
            model = keras.Sequential([keras.layers.Dense(10)])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            return model

        trainer = tfdist.Trainer(build_model, strategy=tf.distribute.MirroredStrategy())
        history = trainer.fit(x, y, global_batch_size=64, epochs=3)

    Args:
      build_model: builds and compiles a `keras.Model`; called once, in the strategy's scope. Or a
        model that was built in `strategy.scope()`: a compiled one, or one that only predicts.
      strategy: a strategy's name, such as `mirrored`; its options, such as
        `tfdist.strategies.Mirrored(devices=["GPU:0"])`; or any `tf.distribute.Strategy`. By default
        the model's, else the one whose scope this is called in, which is one device outside of all.
        Under `ParameterServerStrategy`, see `tfdist.training.asynchronous`.
      checkpoint_dir: where checkpoints go, and where `fit` continues from; None for none. All
        workers must see it.
      keep_checkpoints: how many of the newest checkpoints stay.
      seed: of the data's order and augmentation.
      step_options: how steps are computed, see `tfdist.StepOptions`.
    """

    def __init__(
        self,
        build_model: Callable[[], keras.Model] | keras.Model,
        *,
        strategy: tf.distribute.Strategy | Strategy | str | None = None,
        checkpoint_dir: str | None = None,
        keep_checkpoints: int = 3,
        seed: int = 0,
        step_options: StepOptions | None = None,
    ):
        self.strategy = _find_strategy(build_model, strategy)
        self._traits = find_traits(self.strategy)
        self.seed = seed
        self.history = keras.callbacks.History()
        self._progress = Progress()
        self._was_stopped = False
        self._workers = Workers(self.strategy)
        self._checkpoint_dir = checkpoint_dir
        self._keep_checkpoints = keep_checkpoints
        self._recovery = (
            Recovery(checkpoint_dir, keep=keep_checkpoints, workers=self._workers)
            if checkpoint_dir
            else None
        )
        self.check_s = 0.0
        self._step_options = step_options or StepOptions()
        check_strategy(self._step_options, self.strategy, num_workers=self.num_workers)
        self._is_asynchronous = self._traits.has_servers
        self._create_variable = (
            make_placement(self.strategy) if self._is_asynchronous else aggregate_state
        )
        if isinstance(build_model, keras.Model):
            self.model = build_model
        else:
            with self.strategy.scope(), tf.variable_creator_scope(self._create_variable):
                self.model = build_model()
        is_model = isinstance(self.model, keras.Model)
        # A model that is given may only predict until it is compiled.
        if not is_model or not (self.model.compiled or self.model is build_model):
            raise TfdistError(
                f"build_model returned {type(self.model).__name__}, not a compiled keras.Model. "
                "Call model.compile(optimizer=..., loss=...) in it and return the model."
            )
        if self.model.compiled:
            self._check_program()
        check_scope(self.model, self.strategy)
        self._steps: Any = None
        self._prediction: Any = None
        self._checked: set[str] = set()
        self._compiled: tuple[Any, ...] = ()
        self._num_fits = 0

    @explain_lost_worker
    @show_user_errors()
    @_drawing_alike
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
        *,
        global_batch_size: int | None = None,
        max_steps: int | None = None,
        augmentation: BatchAugmentation | None = None,
        checkpoint_every: int | None = None,
        checkpoint_every_s: float | None = None,
    ) -> keras.callbacks.History:
        """Trains as `keras.Model.fit` does, continuing from the newest checkpoint if there is one.

        A second call trains on, with checkpoints of its own.

        Args:
          x, y, sample_weight: what Keras takes: arrays, data frames, lists or dictionaries of them,
            a `tf.data.Dataset` of global batches, a generator, a `keras.utils.PyDataset`, a loader
            of another library; or in `x` a `tfdist.data.Source`, or a function from a
            `tf.distribute.InputContext` to a dataset of per-replica batches. A dataset is continued
            by skipping what was seen. Batches of a source are always full: its epochs follow one
            another without a gap.
          batch_size: examples of a step, over all replicas: 32 by default.
          epochs, verbose, class_weight, initial_epoch, steps_per_epoch: as in Keras.
          validation_split, validation_data, validation_steps: as in Keras.
          validation_batch_size, validation_freq: as in Keras.
          shuffle: whether arrays and sources come in a new order each epoch, by the trainer's seed.
          callbacks: Keras callbacks; they see the global batch's losses and metrics.
          global_batch_size: another name of `batch_size`.
          max_steps: steps in all; wins over `epochs`.
          augmentation: seeded transformation of a source's examples.
          checkpoint_every: steps between checkpoints, besides one an epoch.
          checkpoint_every_s: seconds between checkpoints, besides those.

        Returns:
          The `History`, of the whole run even when it was continued.

        Raises:
          TfdistError: data that do not fit the model, the strategy or the batch.
          TrainingError: the loss or a weight is not finite; the last checkpoint is older.
        """
        batch_size = batch_size or global_batch_size
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = array_slicing.train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        feed = self._make_feed(
            x,
            y,
            sample_weight,
            global_batch_size=_find_batch_size(batch_size, x, steps_per_epoch),
            shuffle=shuffle,
            class_weight=class_weight,
            augmentation=augmentation,
            micro_batches=self._step_options.micro_batches,
            keeps_order=self._recovery is not None or self.num_workers > 1,
            seed=(self.seed + self._num_fits) % MAX_SEED if self._num_fits else self.seed,
        )
        data = self._describe_data(feed, batch_size)
        # Workers that train apart come together at an epoch's end, before their data tell it.
        is_asked = self._trains_apart and not (steps_per_epoch or max_steps)
        if is_asked and feed.num_steps is None and feed.count_steps:
            feed = dataclasses.replace(feed, num_steps=feed.count_steps())
        feed = dataclasses.replace(feed, drops_between=not steps_per_epoch)
        if not isinstance(x, Source):
            _check_steps(steps_per_epoch, feed.num_steps, epochs)
        schedule = self._make_schedule(
            feed, epochs, max_steps, steps_per_epoch, initial_epoch, validation_freq
        )
        validation_feed = None
        if validation_data is not None:
            validation_feed = self._make_eval_feed(
                validation_data, validation_batch_size or batch_size
            )
        steps = self._build(feed)
        callback_list = self._make_callbacks(callbacks, verbose, schedule, history=True)
        self.model.history = self.history
        self._progress.steps_before += self._progress.step
        self._progress.step = 0
        loop = FitLoop(
            self.model,
            steps=steps,
            check=lambda iterator: self._check_division("train", iterator, feed),
            progress=self._progress,
            list_state=self._list_state,
            workers=self._workers,
            recovery=self._make_recovery(),
            schedule=schedule,
            history=self.history,
            callbacks=callback_list,
            interval=Interval(steps=checkpoint_every or 0, seconds=checkpoint_every_s or 0),
            steps_per_loop=self._step_options.steps_per_loop,
            data=data,
            evaluate=None
            if validation_feed is None
            else lambda is_stopped: self._evaluate(
                validation_feed,
                steps=validation_steps,
                callback_list=callback_list,
                is_stopped=is_stopped,
            ),
        )
        loop.run(feed, verbose=self._find_verbosity(verbose))
        self._was_stopped = loop.was_stopped
        self._progress.is_asked_to_stop = False
        self._num_fits += 1
        return self.history

    @explain_lost_worker
    @show_user_errors()
    @_drawing_alike
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        *,
        global_batch_size: int | None = None,
    ) -> Any:
        """Returns the losses and metrics over a data set, every example counted once.

        Args:
          x, y, sample_weight, batch_size, global_batch_size: as in `fit`.
          verbose, steps, callbacks, return_dict: as in Keras.

        Returns:
          As in Keras: a number, or a list of them, or with `return_dict` a dictionary.
        """
        data = tuple(part for part in (x, y, sample_weight) if part is not None)
        logs = self._evaluate(
            self._make_eval_feed(data if len(data) > 1 else x, batch_size or global_batch_size),
            steps=steps,
            callbacks=callbacks,
            verbose=verbose,
        )
        assert logs is not None
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)

    @explain_lost_worker
    @show_user_errors()
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = 0,
        steps: int | None = None,
        callbacks: Any = None,
        *,
        global_batch_size: int | None = None,
    ) -> Any:
        """Returns the model's outputs for every example, in order.

        Args:
          x: as in `fit`.
          batch_size, global_batch_size: as in `fit`.
          verbose, steps, callbacks: as in Keras.

        Returns:
          float array [examples, ...], or the model's structure of them.
        """
        feed = self._make_feed(x, global_batch_size=batch_size or global_batch_size or 32)
        predictor = self._build_prediction(feed)
        iterator = predictor.iterate_predict(feed, steps=steps)
        callback_list = self._make_callbacks(callbacks, verbose, steps=steps or feed.num_steps)
        batches: list[Any] = []
        callback_list.on_predict_begin()
        while steps is None or len(batches) < steps:
            callback_list.on_predict_batch_begin(len(batches))
            try:
                replicas = predictor.predict(iterator)
            except (tf.errors.OutOfRangeError, StopIteration):
                break
            parts = [
                keras.tree.map_structure(lambda t, n=0 if is_copy else None: t.numpy()[:n], outputs)
                for outputs, is_copy in replicas
            ]
            outputs = keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *parts)
            callback_list.on_predict_batch_end(len(batches), {"outputs": outputs})
            batches.append(outputs)
        callback_list.on_predict_end()
        if steps is None and feed.num_steps is not None:
            feed.drop_pass()
        if not batches:
            raise TfdistError("Cannot predict: the data are empty.")
        batches = [keras.tree.map_structure(self._workers.gather, batch) for batch in batches]
        return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *batches)

    @_drawing_alike
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: dict[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Makes one step on one global batch; arguments and result as in Keras."""
        feed = self._make_batch_feed(x, y, sample_weight, class_weight)
        steps = self._build(feed)
        steps.reset_metrics()
        iterator = steps.iterate_train(feed, start_step=0, steps_per_epoch=1, total_steps=1)
        iterator = self._check_division("train", iterator, feed)
        trained = steps.train(iterator)[0]
        steps.settle(1, is_last=True)
        logs = steps.read_training_logs(trained)
        self._progress.step += 1
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Evaluates one global batch; arguments and result as in Keras."""
        logs = self._evaluate(self._make_batch_feed(x, y, sample_weight), steps=1)
        assert logs is not None
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)

    def predict_on_batch(self, x: Any) -> Any:
        """Returns the model's outputs for one global batch."""
        return self.predict(x, batch_size=_count_rows(x))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model again, as `keras.Model.compile` does, in the strategy's scope."""
        with self.strategy.scope(), tf.variable_creator_scope(self._create_variable):
            self.model.compile(*args, **kwargs)
        self._check_program()

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

    def prepare(self, x: Any, y: Any = None, *, global_batch_size: int = 32) -> None:
        """Checks the data against model and strategy and creates every variable.

        `fit` and `evaluate` do so themselves; a command calls it before it writes anything.

        Args:
          x, y, global_batch_size: as in `fit`.
        """
        feed = self._make_feed(
            x,
            y,
            global_batch_size=global_batch_size,
            micro_batches=self._step_options.micro_batches,
        )
        self._build(feed)

    def save_model(
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

    def request_stop(self) -> None:
        """Lets `fit` finish its step, write a checkpoint and return. Safe in a signal handler.

        Asked of any worker, all of them stop after the same step.
        """
        self._progress.is_asked_to_stop = True

    @property
    def step(self) -> int:
        """The updates made."""
        return self._progress.steps_before + self._progress.step

    @property
    def seconds_in_steps(self) -> float:
        """What this process spent in training steps, without what is done between them."""
        return self._progress.steps_s

    @property
    def seconds_of_input(self) -> float | None:
        """What training steps waited for this process's part of their batches.

        None under `ParameterServerStrategy`, whose workers read the batches, and where only
        deterministic kernels are allowed.
        """
        seconds = self._steps.input_s if self._steps else 0.0
        return None if seconds is None or math.isnan(seconds) else seconds

    @property
    def resumed_from_step(self) -> int | None:
        """The step of the checkpoint that `fit` continued from, if it did."""
        return self._progress.resumed_from_step

    @property
    def is_epoch_open(self) -> bool:
        """Whether all steps of the present epoch are done, but its validation and end are not."""
        return self._progress.is_epoch_open

    @property
    def stop_requested(self) -> bool:
        """Whether `fit` ended because of `request_stop`."""
        return self._was_stopped

    @property
    def is_chief(self) -> bool:
        """Whether this process writes: with one process it does."""
        return self._workers.is_chief

    @property
    def num_replicas(self) -> int:
        """The replicas that share a global batch, over all workers."""
        return self._workers.num_replicas

    @property
    def num_workers(self) -> int:
        """The processes that train together."""
        return self._workers.count

    def wait_for_all(self) -> None:
        """Returns once every worker has called it."""
        self._workers.wait_for_all()

    def mark_best_checkpoint(self) -> None:
        """Lets the next checkpoint, that of this epoch, stay until another one is marked."""
        if self._recovery is not None:
            self._recovery.mark_best()

    def restore_best_checkpoint(self) -> int | None:
        """Gives the model the weights of the marked checkpoint; returns its step, if any."""
        return (
            self._recovery.restore_best(self._list_state(), optimizer=self.model.optimizer)
            if self._recovery
            else None
        )

    def count_traces(self) -> dict[str, int]:
        """Returns how often each step was traced: once, or an input changed its shape."""
        return self._steps.count_traces() if self._steps else {}

    def summarize_strategy(self) -> dict[str, Any]:
        """Returns what only this strategy has to say for a summary, such as the staleness."""
        return self._steps.summarize() if self._steps else {}

    def measure_all_reduce(self) -> float | None:
        """Returns the seconds that a step's gradients take to be summed when nothing else runs.

        All workers call it. None where they do not sum gradients at each step.
        """
        if type(self._steps) is not SynchronousSteps:
            return None
        if self.num_replicas == 1:
            return 0.0
        is_compressed = self._step_options.compress_gradients
        return measure_all_reduce(self.model, self.strategy, is_compressed=is_compressed)

    def measure_peak_memory(self) -> dict[str, int]:
        """Returns the most memory that each device has had in use, in bytes: `CPU` or each GPU.

        With several workers their names are as in `worker 0/CPU`. Under `ParameterServerStrategy`
        it is the chief's own.
        """
        return self._workers.measure_peak_memory()

    def weights_sha256(self) -> str:
        """Returns a hash over the float32 bytes of all weights, in the model's order."""
        digest = hashlib.sha256()
        for weight in self.model.weights:
            digest.update(np.ascontiguousarray(weight.numpy(), dtype="<f4").tobytes())
        return digest.hexdigest()

    def _make_feed(self, x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Feed:
        return make_feed(
            x,
            y,
            sample_weight,
            num_replicas=self.num_replicas,
            **{"seed": self.seed, **options},
        )

    def _make_eval_feed(self, data: Any, batch_size: int | None) -> Feed:
        parts = data if isinstance(data, (tuple, list)) else (data,)
        return self._make_feed(*parts, global_batch_size=batch_size or 32)

    def _make_batch_feed(
        self, x: Any, y: Any, sample_weight: Any, class_weight: Any = None
    ) -> Feed:
        return self._make_feed(
            x,
            y,
            sample_weight,
            global_batch_size=_count_rows(x),
            shuffle=False,
            class_weight=class_weight,
        )

    def _describe_data(self, feed: Feed, batch_size: int | None) -> dict[str, Any]:
        """Returns what a checkpoint keeps of the data, the same on all workers.

        Raises:
          TfdistError: this worker's data are not the chief's.
        """
        if self._recovery is None and self.num_workers == 1:
            return {"train": {}, "batch_size": batch_size}
        train = feed.make_fingerprint()
        if self.num_workers > 1:
            others = self._workers.share_json(train)
            for worker, other in enumerate(others):
                difference = describe_difference(others[0], other)
                if difference is not None:
                    raise TfdistError(
                        f"Worker {worker} has other data than the chief: {difference}. Give all "
                        "workers the same data."
                    )
        return {"train": train, "batch_size": batch_size}

    def _make_schedule(
        self,
        feed: Feed,
        epochs: int,
        max_steps: int | None,
        steps_per_epoch: int | None,
        initial_epoch: int,
        validation_freq: Any,
    ) -> Schedule:
        known = feed.num_steps
        if known is None and not (steps_per_epoch or max_steps) and feed.is_endless:
            raise TfdistError(
                "The data do not say how long an epoch is. Give steps_per_epoch or max_steps."
            )
        if steps_per_epoch and known:
            steps_per_epoch = min(steps_per_epoch, known)
        steps = steps_per_epoch or known or max_steps or _UNKNOWN_STEPS
        total = max_steps or epochs * steps

        def is_validated(epoch: int) -> bool:
            if isinstance(validation_freq, int):
                return (epoch + 1) % validation_freq == 0
            return epoch + 1 in validation_freq

        return Schedule(
            steps,
            total,
            is_known=steps != _UNKNOWN_STEPS,
            first_step=min(initial_epoch * steps, total),
            validation_epochs=is_validated,
        )

    def _make_callbacks(
        self,
        callbacks: Any,
        verbose: int | str,
        schedule: Schedule | None = None,
        *,
        steps: int | None = None,
        history: bool = False,
    ) -> keras.callbacks.CallbackList:
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = callbacks.callbacks
        if isinstance(callbacks, keras.callbacks.Callback):
            callbacks = [callbacks]
        verbose = self._find_verbosity(verbose)
        if schedule is not None:
            steps = min(schedule.steps_per_epoch, schedule.total_steps)
            steps = steps if schedule.is_known else None
        chosen = [c for c in callbacks or () if not isinstance(c, keras.callbacks.History)]
        bars = [] if not verbose else [keras.callbacks.ProgbarLogger()]
        if any(isinstance(c, keras.callbacks.ProgbarLogger) for c in chosen):
            bars = []
        return keras.callbacks.CallbackList(
            # The history comes last, to see what the others log.
            [*chosen, *bars, *([self.history] if history else [])],
            model=self.model,
            verbose=verbose,
            epochs=schedule.num_epochs if schedule else 1,
            steps=steps,
        )

    def _make_recovery(self) -> Recovery | None:
        """Returns where the checkpoints of this call of `fit` go."""
        if self._recovery is None or self._num_fits == 0:
            return self._recovery
        directory = f"{self._checkpoint_dir}/fit-{self._num_fits + 1}"
        self._recovery = Recovery(directory, keep=self._keep_checkpoints, workers=self._workers)
        return self._recovery

    def _build(self, feed: Feed) -> Any:
        """Creates every variable that is not there yet, and the compiled steps."""
        if not self.model.compiled:
            raise TfdistError(
                f"The model {self.model.name!r} is not compiled. Call model.compile(optimizer=..., "
                "loss=...) in the strategy's scope before it is trained or evaluated."
            )
        compiled = (
            self.model._compile_loss,
            self.model._compile_metrics,
            self.model._loss_tracker,
            *list_optimizers(self.model),
        )
        if self._steps is not None and all(
            a is b for a, b in itertools.zip_longest(compiled, self._compiled)
        ):
            return self._steps
        self._check_program()
        check_scope(self.model, self.strategy)
        with self.strategy.scope(), tf.variable_creator_scope(self._create_variable):
            must_be_built = self._is_asynchronous or self._step_options.changes_gradient
            can_wait = self.num_replicas == 1 and not must_be_built
            build_model(self.model, feed.batch_spec, can_wait=can_wait)
        check_scope(self.model, self.strategy)
        aggregate_variables(self.model, self.strategy)
        x_spec, _, _ = keras.utils.unpack_x_y_sample_weight(feed.batch_spec)
        is_mirrored = self._traits.copies_variables
        check_model(
            self._step_options,
            self.model,
            x_spec,
            is_mirrored=is_mirrored,
            num_replicas=self.num_replicas,
        )
        self._steps = self._make_steps()
        self._checked.clear()
        self._compiled = compiled
        return self._steps

    @property
    def _trains_apart(self) -> bool:
        return self.num_workers > 1 and self._traits.trains_apart

    def _check_program(self) -> None:
        check_program(self._step_options, self.model, self.strategy, num_workers=self.num_workers)

    def _make_steps(self) -> Any:
        if self._is_asynchronous:
            return AsynchronousSteps(
                self.model, self.strategy, max_in_flight=self._step_options.max_in_flight
            )
        return (LocalSteps if self._trains_apart else SynchronousSteps)(
            self.model,
            self.strategy,
            self._workers,
            self._step_options,
            create_variable=self._create_variable,
        )

    def _check_division(self, kind: str, iterator: Any, feed: Feed) -> Any:
        """Refuses a program that this strategy's replicas would give another result.

        Returns:
          An iterator like that given.
        """
        is_divided = self.strategy.num_replicas_in_sync > 1 and not self._is_asynchronous
        if not is_divided or kind in self._checked:
            return iterator
        self._checked.add(kind)
        check = self._step_options.check
        is_needed = check == "on" or (check == "auto" and not is_known(self.model))
        if not is_needed:
            return iterator
        batch, iterator = self._steps.look_ahead(iterator, feed, of_training=kind == "train")
        if batch is not None:
            self.check_s += check_division(
                self.model,
                self.strategy,
                self._steps.steps,
                batch,
                kind=kind,
                generators=list_seed_generators(self.model),
            )
        return iterator

    def _build_prediction(self, feed: Feed) -> Any:
        """Returns steps that can predict, which needs neither labels nor losses."""
        if self._steps is not None:
            return self._steps
        if not all(layer.built for layer in self.model._flatten_layers()):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(feed.batch_spec)
            with self.strategy.scope(), tf.variable_creator_scope(self._create_variable):
                build_outputs(self.model, x)
        if self._prediction is None:
            self._prediction = self._make_steps()
        return self._prediction

    def _list_state(self) -> list[keras.Variable]:
        """Returns the variables of a checkpoint."""
        extra = self._steps.state if self._steps else []
        optimizer = self.model.optimizer
        own = optimizer.variables if optimizer is not None else []
        return [*self.model.variables, *own, *extra]

    def _find_verbosity(self, verbose: int | str) -> int:
        if not self.is_chief:
            return 0
        return 1 if verbose == "auto" else int(verbose)

    def _evaluate(
        self,
        feed: Feed,
        *,
        steps: int | None,
        callback_list: keras.callbacks.CallbackList | None = None,
        callbacks: Any = None,
        verbose: int | str = 0,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any] | None:
        """Returns the losses and metrics, or None if it was stopped before its end."""
        of_model = self._build(feed)
        is_whole = not steps and feed.num_steps is not None
        steps = steps or feed.num_steps
        if callback_list is None:
            callback_list = self._make_callbacks(callbacks, verbose, steps=steps)
        of_model.reset_metrics()
        callback_list.on_test_begin()
        iterator = of_model.iterate_eval(feed, steps=steps)
        iterator = self._check_division("test", iterator, feed)
        batch = 0
        logs: dict[str, Any] = {}
        while (steps is None or batch < steps) and not is_stopped():
            callback_list.on_test_batch_begin(batch)
            try:
                logs = of_model.evaluate(iterator)
            except (tf.errors.OutOfRangeError, StopIteration):
                break
            callback_list.on_test_batch_end(batch, logs)
            batch += 1
        if is_stopped():
            callback_list.on_test_end(None)
            return None
        if not batch:
            raise TfdistError("Cannot evaluate: the validation data are empty.")
        if is_whole:
            feed.drop_pass()
        logs = of_model.conclude(of_model.read_logs(logs))
        callback_list.on_test_end(logs)
        return logs


def _find_strategy(model: Any, strategy: Any) -> tf.distribute.Strategy:
    if isinstance(strategy, str):
        return make_strategy(strategy)
    if isinstance(strategy, Strategy):
        return build(strategy)
    if isinstance(strategy, tf.distribute.Strategy):
        return strategy
    if strategy is not None:
        raise TfdistError(
            f'`strategy` is a {type(strategy).__name__}. Give a name such as "mirrored", a '
            "tf.distribute.Strategy, or options of tfdist.strategies."
        )
    is_model = isinstance(model, keras.Model)
    return model.distribute_strategy if is_model else tf.distribute.get_strategy()


def _check_steps(steps_per_epoch: int | None, known: int | None, epochs: int) -> None:
    """Refuses epochs in whose middle the data would end, where Keras cuts one short."""
    if not steps_per_epoch or not known or steps_per_epoch >= known:
        return
    if known % steps_per_epoch and epochs * steps_per_epoch > known:
        raise TfdistError(
            f"The data have {known} batches, which end in the middle of an epoch of "
            f"steps_per_epoch={steps_per_epoch}. Give a number that divides {known}, or a dataset "
            "that ends in .repeat()."
        )


def _find_batch_size(batch_size: int | None, x: Any, steps_per_epoch: int | None) -> int:
    """Returns the examples of a step, as Keras finds them."""
    if batch_size:
        return batch_size
    is_array = hasattr(keras.tree.flatten(x)[0] if x is not None else None, "shape")
    return -(-_count_rows(x) // steps_per_epoch) if steps_per_epoch and is_array else 32


def _count_rows(x: Any) -> int:
    leaf = keras.tree.flatten(x)[0]
    return int(leaf.shape[0]) if getattr(leaf, "shape", ()) else len(leaf)
