"""The trainer: Keras's `fit`, `evaluate` and `predict`, under any strategy."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Callbacks, KerasData
from tfdist.data.pipeline import BatchAugmentation
from tfdist.data.source import Source
from tfdist.errors import TfdistError
from tfdist.internals import array_slicing, global_seed
from tfdist.placement.options import Placement
from tfdist.records.durable_files import sync_to_disk, temporary_directory
from tfdist.records.pattern_paths import check_saved_model_path
from tfdist.stopping import ScriptStop
from tfdist.strategies.base import Strategy
from tfdist.strategies.registry import to_strategy
from tfdist.training.checkpoint.recovery import Recovery
from tfdist.training.fit import evaluation
from tfdist.training.fit.arguments import BatchArguments, FitArguments, TrainerArguments, check_kind
from tfdist.training.fit.callback_list import CallbackList, find_history
from tfdist.training.fit.engine import Engine
from tfdist.training.fit.loop import FitLoop, Validation
from tfdist.training.fit.own_methods import TrainerRoute, find_own_method, open_route, run_own_first
from tfdist.training.fit.schedule import (
    Interval,
    Progress,
    Schedule,
    limit_epochs,
    limit_steps,
    make_reading,
    make_schedule,
)
from tfdist.training.fit.single_batches import SingleBatches, on_all_workers
from tfdist.training.inputs.data_adapter import DataAdapter
from tfdist.training.inputs.example_order import ExampleOrder, find_order, read_order
from tfdist.training.inputs.make_adapter import check_order, find_batch_size
from tfdist.training.step.model_variables import hash_each
from tfdist.training.step_options import StepOptions, find_default_options
from tfdist.training.workers.agreement import agree_on_data
from tfdist.training.workers.alone import alone
from tfdist.training.workers.communication import Workers
from tfdist.training.workers.taking_part import building_alike

_STOPPED = (
    "This trainer was stopped and trains no further: fit returns at once. Run the program again to "
    "continue."
)


class Trainer(SingleBatches):
    """Trains a compiled Keras model under a `tf.distribute` strategy.

    The strategy changes the speed, never the result: losses, metrics, clipping and
    normalization are those of the global batch.

    Under a strategy with several workers, every worker runs the same program. All workers must call
    each method, which returns the same on each; only the chief writes. Callbacks run on every
    worker: pass those that write on the chief only (`is_chief`), or give each worker its own path.

    Example:

        def build_model():
            model = keras.Sequential([keras.layers.Dense(10)])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            return model

        trainer = tfdist.Trainer(build_model, strategy=tf.distribute.MirroredStrategy())
        history = trainer.fit(x, y, global_batch_size=64, epochs=3)

    Args:
      build_model: a function that builds and compiles a `keras.Model`, called once, in the
        strategy's scope; or a model built in that scope, compiled unless it only predicts.
      strategy: a strategy's name, such as `mirrored`; its options, such as
        `tfdist.strategies.Mirrored(devices=["GPU:0"])`; or any `tf.distribute.Strategy`. By default
        the model's strategy, else the one whose scope is open; without a scope, that is one device.
        For `ParameterServerStrategy`, see `tfdist.training.servers.asynchronous`.
      logical_replicas: divides each batch into this many shares, on any number of devices, with
        the same bits; by default, each device has one share. The devices must not be in use yet.
      checkpoint_dir: the directory of the checkpoints from which `fit` continues; None for none.
        All workers must see it.
      keep_checkpoints: how many of the newest checkpoints to keep.
      seed: the seed of the data's order and augmentation; by default, the order is Keras's, which
        follows `keras.utils.set_random_seed`, or that of seed 0 if no seed was set.
      step_options: how steps are computed; by default, as the flags of `tfdist.run` say, or as
        `tfdist.StepOptions` does.
      placement: how the model of each replica is divided over several devices, such as
        `tfdist.placement.Layers()`; by default, it is not.

    Attributes:
      model, strategy: the model, and the strategy that trains it.
      history: the `keras.callbacks.History` of the newest `fit`, even if it was continued; each
        `fit` has its own.
      progress: the progress of training.
      engine: the model's compiled steps, and the processes that train together.
      recovery: writes and restores checkpoints; None without a `checkpoint_dir`.
      validate_cached: evaluates the validation data while the model's own `evaluate` validates.
    """

    def __init__(
        self,
        build_model: Callable[[], keras.Model] | keras.Model,
        *,
        strategy: tf.distribute.Strategy | Strategy | str | None = None,
        logical_replicas: int = 0,
        checkpoint_dir: str | None = None,
        keep_checkpoints: int = 3,
        seed: int | None = None,
        step_options: StepOptions | None = None,
        placement: Placement | None = None,
    ):
        given = TrainerArguments(
            logical_replicas=logical_replicas,
            checkpoint_dir=checkpoint_dir or None,
            keep_checkpoints=keep_checkpoints,
            seed=seed,
        )
        check_kind("step_options", step_options, StepOptions)
        check_kind("placement", placement, Placement)
        self.strategy = to_strategy(
            strategy, of_model=build_model, logical_replicas=given.logical_replicas
        )
        workers = Workers(self.strategy)
        self.progress = Progress()
        self.history = keras.callbacks.History()
        self._step_options = step_options or find_default_options()
        self.validate_cached: Callable[..., Any] | None = None
        # `fit = model.fit` within build_model gets the route.
        with open_route(TrainerRoute(self)), building_alike(workers):
            self.engine = Engine(
                build_model,
                strategy=self.strategy,
                workers=workers,
                options=self._step_options,
                placement=placement,
            )
        self.model = self.engine.model
        self._seed = given.seed
        self._checkpoint_dir = given.checkpoint_dir
        self._keep_checkpoints = given.keep_checkpoints
        self.recovery = None
        if self._checkpoint_dir:
            self.recovery = Recovery(
                self._checkpoint_dir, keep=self._keep_checkpoints, workers=workers
            )
            if global_seed() is not None:
                self.progress.initial_values = hash_each(self.model.weights)

    @run_own_first
    @on_all_workers
    def fit(
        self,
        x: KerasData = None,
        y: KerasData = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Callbacks = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool | str = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: KerasData = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Collection[int] = 1,
        *,
        global_batch_size: int | None = None,
        max_steps: int | None = None,
        augmentation: BatchAugmentation | None = None,
        checkpoint_every: int | None = None,
        checkpoint_every_s: float | None = None,
    ) -> keras.callbacks.History:
        """Trains as `keras.Model.fit` does, continuing from the newest checkpoint if there is one.

        A second call continues training, with its own checkpoints. They record the state that it
        began from, and are only restored to a training that begins from the same state.

        Args:
          x, y, sample_weight: data as in Keras: arrays, data frames, lists or dictionaries of them,
            a `tf.data.Dataset` of global batches, a generator, a `keras.utils.PyDataset`, a loader
            of another library; or in `x` a `tfdist.data.Source`, or a function from a
            `tf.distribute.InputContext` to a dataset of per-replica batches. A continued run skips
            the batches of a dataset that were seen. Batches of a source are always full: its epochs
            follow one another without a gap.
          batch_size: examples per step, over all replicas; 32 by default.
          epochs, verbose, class_weight, initial_epoch, steps_per_epoch: as in Keras.
          validation_split, validation_data, validation_steps: as in Keras.
          validation_batch_size, validation_freq: as in Keras.
          shuffle: whether arrays, sources and the batches of a `PyDataset` are shuffled; `"batch"`
            changes the order within each batch of arrays only. The order of arrays is Keras's,
            under every strategy, unless the trainer has a `seed`: it then differs in each epoch.
            A continued run keeps the order that it began with.
          callbacks: Keras callbacks; they see the global batch's losses and metrics.
          global_batch_size: another name for `batch_size`.
          max_steps: the total number of steps; overrides `epochs`.
          augmentation: a seeded transformation of a source's examples.
          checkpoint_every: steps between checkpoints, in addition to one per epoch.
          checkpoint_every_s: seconds between checkpoints, besides those.

        Returns:
          The `History` of the whole run, even if it was continued.

        Raises:
          TfdistError: the data do not fit the model, the strategy or the batch size.
          TrainingError: the loss or a weight is not finite; the last checkpoint has finite weights.
        """
        given = FitArguments(
            steps_per_epoch=steps_per_epoch,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            verbose=verbose,
            epochs=epochs,
            initial_epoch=initial_epoch,
            max_steps=max_steps,
            validation_split=validation_split or 0.0,
            validation_batch_size=validation_batch_size,
            validation_steps=validation_steps,
            validation_freq=validation_freq,
            checkpoint_every=checkpoint_every,
            checkpoint_every_s=checkpoint_every_s,
        )
        batch_size = given.size
        if self.progress.was_stopped:
            warnings.warn(_STOPPED, stacklevel=2)
            history = find_history(callbacks)
            history.on_train_begin()
            return history
        epochs, steps_per_epoch = limit_epochs(given.epochs), limit_steps(given.steps_per_epoch)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = array_slicing.train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        if self.recovery is not None:
            check_order(x)

        def make_adapter(order: ExampleOrder) -> tuple[DataAdapter, dict[str, Any]]:
            adapter = self._make_adapter(
                x,
                y,
                sample_weight,
                global_batch_size=find_batch_size(batch_size, x, steps_per_epoch),
                shuffle=shuffle,
                class_weight=class_weight,
                augmentation=augmentation,
                micro_batches=self._step_options.micro_batches,
                order=order,
            )
            adapter = dataclasses.replace(
                adapter, reorder=make_adapter if self._seed is None else None
            )
            return self._prepare_adapter(
                adapter, steps_per_epoch=steps_per_epoch, max_steps=max_steps
            )

        adapter, fingerprint = make_adapter(self._find_order())
        reading = make_reading(
            adapter,
            steps_per_epoch=steps_per_epoch,
            at_a_time=self.model.steps_per_execution,
            reads_on=isinstance(x, Source),
        )
        schedule = make_schedule(
            adapter,
            reading,
            epochs=epochs,
            max_steps=given.max_steps,
            initial_epoch=given.initial_epoch,
            validation_freq=validation_freq,
        )
        validation = None
        if validation_data is not None:
            validation = self._make_validation(
                validation_data,
                batch_size=given.validation_batch_size or batch_size,
                steps=limit_steps(given.validation_steps),
            )
        self.engine.build(adapter)
        data = {"train": fingerprint, "batch_size": batch_size}
        return self._run_loop(adapter, schedule, given, callbacks, validation, data)

    @run_own_first
    @on_all_workers
    def evaluate(
        self,
        x: KerasData = None,
        y: KerasData = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: KerasData = None,
        steps: int | None = None,
        callbacks: Callbacks = None,
        return_dict: bool = False,
        *,
        global_batch_size: int | None = None,
    ) -> Any:
        """Returns the losses and metrics over a dataset, with every example counted once.

        Args:
          x, y, sample_weight, batch_size, global_batch_size: as in `fit`.
          verbose, steps, callbacks, return_dict: as in Keras.

        Returns:
          As in Keras: a number, a list of numbers, or with `return_dict` a dictionary.
        """
        given = BatchArguments(
            steps=steps, batch_size=batch_size, global_batch_size=global_batch_size, verbose=verbose
        )
        steps = limit_steps(given.steps)
        batch_size = find_batch_size(given.size, x, steps)
        adapter = self._make_agreed_adapter(x, y, sample_weight, global_batch_size=batch_size)
        logs = self._evaluate(adapter, steps=steps, callbacks=callbacks, verbose=verbose)
        logs = dict(sorted(logs.items()))
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)

    @run_own_first
    @on_all_workers
    def predict(
        self,
        x: KerasData,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Callbacks = None,
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
        given = BatchArguments(
            steps=steps, batch_size=batch_size, global_batch_size=global_batch_size, verbose=verbose
        )
        steps = limit_steps(given.steps)
        batch_size = find_batch_size(given.size, x, steps)
        adapter = self._make_agreed_adapter(x, global_batch_size=batch_size)
        return self._predict(adapter, steps=steps, callbacks=callbacks, verbose=verbose)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model again, as `keras.Model.compile` does, in the strategy's scope."""
        with self.engine.scope():
            self.model.compile(*args, **kwargs)
        self.engine.check_program()

    def request_stop(self) -> None:
        """Makes `fit` finish its step, write a checkpoint and return. Safe in a signal handler.

        The trainer then trains no further: later calls of `fit` return at once, with a warning. If
        any worker is asked to stop, all of them stop after the same step.
        """
        self.progress.is_asked_to_stop = True

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

    @property
    def step(self) -> int:
        """The number of updates made."""
        return self.progress.steps_before + self.progress.step

    def _run_loop(
        self,
        adapter: DataAdapter,
        schedule: Schedule,
        given: FitArguments,
        callbacks: Callbacks,
        validation: Callable[[CallbackList], Validation] | None,
        data: dict[str, Any],
    ) -> keras.callbacks.History:
        verbose = self._find_verbosity(given.verbose)
        epoch_steps = schedule.reading.asked or adapter.num_steps or schedule.max_steps
        self.history = history = find_history(callbacks)
        callback_list = evaluation.make_callbacks(
            callbacks,
            self.model,
            verbose=verbose,
            epochs=schedule.num_epochs,
            steps=min(filter(None, (epoch_steps, schedule.max_steps)), default=None),
            history=history,
        )
        self.model.history = history
        with self._counting_steps() as progress:
            loop = FitLoop(
                self.engine,
                adapter,
                progress=progress,
                recovery=self._make_recovery(),
                schedule=schedule,
                callbacks=callback_list,
                interval=Interval(
                    steps=given.checkpoint_every or 0, seconds=given.checkpoint_every_s or 0
                ),
                data=data,
                validation=None if validation is None else validation(callback_list),
            )
            with self._ending_a_stopped_script():
                loop.run(verbose=verbose)
            progress.end_fit()
        return self.model.history  # as Keras: that of a callback's own `fit`, if it is newer

    @contextlib.contextmanager
    def _counting_steps(self) -> Iterator[Progress]:
        """Yields the progress of a call of `fit`: its own, if a callback of another one made it."""
        outer = self.progress
        if not outer.is_running:
            outer.begin_fit()
            try:
                yield outer
            finally:
                outer.is_running = False
            return
        if self.recovery is not None:
            raise TfdistError(
                "A callback of `fit` calls `fit` of the same trainer, and no checkpoint could say "
                "where both are. Leave out checkpoint_dir, or call it after the first one."
            )
        self.progress = inner = Progress(steps_before=self.step, num_fits=outer.num_fits)
        inner.begin_fit()
        try:
            yield inner
        finally:
            self.progress = outer
            outer.steps_before += inner.step
            outer.is_asked_to_stop |= inner.is_asked_to_stop

    def _ending_a_stopped_script(self) -> contextlib.AbstractContextManager[None]:
        if self.recovery is None:
            return contextlib.nullcontext()
        return ScriptStop.stoppable(self.request_stop, lambda: self.progress.was_stopped)

    def _find_order(self) -> ExampleOrder:
        """Returns the order in which this call of `fit` sees the examples."""
        is_alone = self.recovery is None and self.engine.is_one_process
        order = find_order(self._seed, num_fits=self.progress.num_fits, by_python=is_alone)
        workers = self.engine.workers
        if workers.count > 1 and self._seed is None:
            # Workers may augment by seeds of their own, but see the examples in one order.
            order = read_order(workers.share_json(order.describe(of_arrays=True))[0])
        return order

    def _prepare_adapter(
        self, adapter: DataAdapter, *, steps_per_epoch: int | None, max_steps: int | None
    ) -> tuple[DataAdapter, dict[str, Any]]:
        """Returns the data adapter for `fit`, and the fingerprint of its data where it is kept."""
        is_kept = self.recovery is not None or self.engine.workers.count > 1
        data = agree_on_data(self.engine.workers, adapter) if is_kept else {}
        # Workers that train independently sync at an epoch's end, so its length must be known.
        is_asked = self.engine.local_updates and not (steps_per_epoch or max_steps)
        if is_asked and adapter.num_steps is None and adapter.count_steps:
            adapter = dataclasses.replace(adapter, num_steps=adapter.count_steps())
        if steps_per_epoch and steps_per_epoch < 0:
            adapter = adapter.read_to_end()
        return dataclasses.replace(adapter, drops_between=not steps_per_epoch), data

    def _make_validation_adapter(
        self, data: KerasData, batch_size: int | None, steps: int | None
    ) -> DataAdapter:
        try:
            parts = keras.utils.unpack_x_y_sample_weight(data)
        except ValueError as error:
            raise TfdistError(
                f"Cannot validate on a tuple of {len(data)}: `validation_data` must be x, (x, y) "
                "or (x, y, sample_weight)."
            ) from error
        return self._make_agreed_adapter(
            *parts, global_batch_size=find_batch_size(batch_size, parts[0], steps)
        )

    def _make_agreed_adapter(self, x: KerasData, *others: Any, **options: Any) -> DataAdapter:
        """Returns a data adapter for evaluation, after checking that workers have the same arrays.

        Datasets are compared while they are read, and a source is the same everywhere.
        """
        adapter = self._make_adapter(x, *others, **options)
        workers = self.engine.workers
        if workers.count > 1 and adapter.digests is None and not isinstance(x, Source):
            agree_on_data(workers, adapter)
        return adapter

    def _make_validation(
        self, data: KerasData, *, batch_size: int | None, steps: int | None
    ) -> Callable[[CallbackList], Validation]:
        """Returns a function from callbacks to what validates: the model's own `evaluate`, if any.

        As in Keras, the data are read once, and `_use_cached_eval_dataset` says so.
        """
        adapter = self._make_validation_adapter(data, batch_size, steps)

        def validate(callbacks: CallbackList, is_stopped: Callable[[], bool]) -> Any:
            return evaluation.evaluate(
                self.engine,
                adapter,
                steps=steps,
                make_callbacks=lambda _: callbacks,
                is_stopped=is_stopped,
            )

        own = find_own_method(self.model, "evaluate")
        if own is None:
            return lambda callbacks: Validation(adapter, functools.partial(validate, callbacks))
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        arguments = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": batch_size}

        def run_own(callbacks: CallbackList, is_stopped: Callable[[], bool]) -> Any:
            self.validate_cached = functools.partial(validate, callbacks)
            try:
                return own(
                    **arguments,
                    steps=steps,
                    callbacks=callbacks,
                    return_dict=True,
                    _use_cached_eval_dataset=True,
                )
            finally:
                self.validate_cached = None

        return lambda callbacks: Validation(adapter, functools.partial(run_own, callbacks))

    def make_other(self, model: keras.Model) -> "Trainer":
        """Returns a trainer for another model of the strategy, which the model's methods use."""
        return Trainer(model, strategy=self.strategy, step_options=self._step_options)

    def _make_recovery(self) -> Recovery | None:
        """Returns the recovery for this call of `fit`."""
        if self.recovery is None or self.progress.num_fits == 0:
            return self.recovery
        directory = f"{self._checkpoint_dir}/fit-{self.progress.num_fits + 1}"
        self.recovery = Recovery(
            directory, keep=self._keep_checkpoints, workers=self.engine.workers
        )
        return self.recovery
