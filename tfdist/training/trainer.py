"""The trainer: Keras's `fit`, `evaluate` and `predict`, under any strategy."""

import dataclasses
import hashlib
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.graph_errors import show_user_errors
from tfdist.data.pipeline import BatchAugmentation
from tfdist.errors import TfdistError, TrainingError
from tfdist.strategies.local_sgd import LocalSgdStrategy
from tfdist.strategies.parameter_server import make_placement
from tfdist.training.asynchronous import AsynchronousSteps
from tfdist.training.averaging import WeightAverager
from tfdist.training.checkpoints import CheckpointStore
from tfdist.training.feed import Feed, make_feed
from tfdist.training.objective import Objective
from tfdist.training.step import (
    list_metric_variables,
    list_metrics,
    make_eval_step,
    make_logs_of_sums,
    make_predict_step,
    make_read_logs,
    make_read_sums,
    make_train_step,
    make_write_metrics,
    split_sums,
)
from tfdist.training.workers import Workers, explain_lost_worker


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
      build_model: builds and compiles a `keras.Model`; called once, in the strategy's scope.
      strategy: any `tf.distribute.Strategy` or a `LocalSgdStrategy`; one device by default.
        Under `ParameterServerStrategy`, see `tfdist.training.asynchronous`.
      checkpoint_dir: where checkpoints go, and where `fit` continues from; None for none. All
        workers must see it.
      keep_checkpoints: how many of the newest checkpoints stay.
      seed: of the data's order and augmentation.
      max_in_flight: under `ParameterServerStrategy`, how many steps are given out to workers
        at a time; 0 for one a worker.
    """

    def __init__(
        self,
        build_model: Callable[[], keras.Model],
        *,
        strategy: tf.distribute.Strategy | None = None,
        checkpoint_dir: str | None = None,
        keep_checkpoints: int = 3,
        seed: int = 0,
        max_in_flight: int = 0,
    ):
        self.strategy = strategy or tf.distribute.get_strategy()
        self.seed = seed
        self.history = keras.callbacks.History()
        self.step = 0
        self.resumed_from_step: int | None = None
        self._stop_requested = self._stop_agreed = False
        self._workers = Workers(self.strategy)
        self._averager: WeightAverager | None = None
        self._checkpoints = (
            CheckpointStore(checkpoint_dir, keep=keep_checkpoints) if checkpoint_dir else None
        )
        self._max_in_flight = max_in_flight
        self._is_asynchronous = isinstance(self.strategy, tf.distribute.ParameterServerStrategy)
        self._create_variable = (
            make_placement(self.strategy) if self._is_asynchronous else _aggregate_state
        )
        with self.strategy.scope(), tf.variable_creator_scope(self._create_variable):
            self.model = build_model()
        if not isinstance(self.model, keras.Model) or not self.model.compiled:
            raise TfdistError(
                f"build_model returned {type(self.model).__name__}, not a compiled keras.Model. "
                "Call model.compile(optimizer=..., loss=...) in it and return the model."
            )
        if self.model.optimizer.gradient_accumulation_steps:
            raise TfdistError(
                "The optimizer has gradient_accumulation_steps, which Keras cannot run under "
                "tf.distribute. Leave it out."
            )
        self._objective: Objective | None = None
        self._steps: dict[str, Any] = {}
        self._asynchronous: AsynchronousSteps | None = None

    @explain_lost_worker
    @show_user_errors()
    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        sample_weight: Any = None,
        global_batch_size: int = 32,
        epochs: int = 1,
        max_steps: int | None = None,
        steps_per_epoch: int | None = None,
        validation_data: Any = None,
        validation_steps: int | None = None,
        shuffle: bool = True,
        augmentation: BatchAugmentation | None = None,
        callbacks: Iterable[keras.callbacks.Callback] = (),
        checkpoint_every: int | None = None,
        verbose: int | str = "auto",
    ) -> keras.callbacks.History:
        """Trains, continuing from the newest checkpoint if there is one.

        Batches of arrays and sources are always full: the passes over the data follow one
        another without a gap, and an epoch is the `ceil(examples / global_batch_size)` steps
        that see every example at least once.

        Args:
          x, y, sample_weight: arrays, as in Keras; or in `x` a `tfdist.data.Source`, a
            `tf.data.Dataset` of global batches (continued by skipping what was seen), or a
            function from a `tf.distribute.InputContext` to a dataset of per-replica batches.
          global_batch_size: examples of a step, over all replicas.
          epochs: passes over the data.
          max_steps: steps in all; wins over `epochs`.
          steps_per_epoch: needed where the data do not say how long a pass is.
          validation_data: what `evaluate` takes, as one argument: a source, a dataset, or a
            tuple of arrays.
          validation_steps: global batches to validate on; all by default.
          shuffle: a new order each pass (arrays and sources).
          augmentation: seeded transformation of a source's examples.
          callbacks: Keras callbacks; they see the global batch's losses and metrics.
          checkpoint_every: steps between checkpoints; one an epoch by default.
          verbose: as in Keras.

        Returns:
          The `History`, of the whole run even when it was continued.

        Raises:
          TfdistError: data that do not fit the model, the strategy or the batch.
          TrainingError: the loss is not finite; the last checkpoint is of a step before.
        """
        feed = self._make_feed(
            x,
            y,
            sample_weight,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            augmentation=augmentation,
        )
        steps_per_epoch = steps_per_epoch or feed.num_steps
        if steps_per_epoch is None and max_steps is None:
            raise TfdistError(
                "The data do not say how long an epoch is. Give steps_per_epoch or max_steps."
            )
        total_steps = max_steps or epochs * (steps_per_epoch or 0)
        steps_per_epoch = steps_per_epoch or total_steps
        epochs = math.ceil(total_steps / steps_per_epoch)
        validation_feed = None
        if validation_data is not None:
            validation_feed = self._make_eval_feed(validation_data, global_batch_size)
        self._build(feed)
        model, averager = self.model, self._averager
        verbose = self._find_verbosity(verbose)
        callback_list = keras.callbacks.CallbackList(
            [self.history, *callbacks],
            add_progbar=verbose != 0,
            model=model,
            verbose=verbose,
            epochs=epochs,
            steps=steps_per_epoch,
        )
        model.history = self.history
        self.history.history = {}
        model.stop_training = False
        self._stop_requested = self._stop_agreed = False
        restored = self._restore()
        if averager:
            averager.begin(restored=restored is not None)
        callback_list.on_train_begin()
        if restored:
            if verbose:
                print(f"Continuing after step {self.step} of {total_steps}{feed.how_to_continue}.")
            self.history.epoch = list(restored["history"]["epoch"])
            self.history.history = {k: list(v) for k, v in restored["history"]["logs"].items()}
        epoch_logs: dict[str, float] = {}
        if self.step < total_steps:
            iterator = self._iterate_train(feed, steps_per_epoch, total_steps)
        agreed_step = self.step
        while self.step < total_steps and not model.stop_training:
            epoch, first = divmod(self.step, steps_per_epoch)
            last = min(steps_per_epoch, total_steps - epoch * steps_per_epoch)
            if first == 0:
                self._reset_metrics()
                if self._asynchronous:
                    self._asynchronous.reset_staleness()
            callback_list.on_epoch_begin(epoch)
            for batch in range(first, last):
                callback_list.on_train_batch_begin(batch)
                loss, num_examples = map(float, self._steps["train"](iterator))
                self.step += 1
                if not math.isfinite(loss):
                    raise TrainingError(
                        f"The loss of step {self.step} is {loss}. {self._describe_last_good()} "
                        "Lower --learning_rate, clip the gradients, or check the data."
                    )
                if averager:
                    averager.count(num_examples)
                    if batch + 1 < last and not averager.is_due(self.step):
                        # Workers that train by themselves know only their own part.
                        callback_list.on_train_batch_end(batch, self._read_own_logs())
                        continue
                    averager.average()
                epoch_logs = self._read_logs() | self._read_staleness()
                callback_list.on_train_batch_end(batch, epoch_logs)
                self._agree_to_stop()
                if self._stop_agreed or model.stop_training:
                    break
                before, agreed_step = agreed_step, self.step
                if (
                    checkpoint_every
                    and self.step // checkpoint_every > before // checkpoint_every
                    and batch + 1 < last
                ):
                    self.save_checkpoint()
            if self._stop_agreed and batch + 1 < last:
                self.save_checkpoint()
                break
            if validation_feed is not None:
                validation_logs = self._evaluate(
                    validation_feed,
                    steps=validation_steps,
                    callback_list=callback_list,
                )
                epoch_logs |= {f"val_{name}": value for name, value in validation_logs.items()}
            callback_list.on_epoch_end(epoch, epoch_logs)
            self.save_checkpoint()
            self._agree_to_stop()
            if self._stop_agreed:
                break
        if self._asynchronous:
            self._asynchronous.wait()
        callback_list.on_train_end(epoch_logs)
        return self.history

    @explain_lost_worker
    @show_user_errors()
    def evaluate(
        self,
        x: Any,
        y: Any = None,
        *,
        sample_weight: Any = None,
        global_batch_size: int = 32,
        steps: int | None = None,
        callbacks: Iterable[keras.callbacks.Callback] = (),
        verbose: int | str = "auto",
    ) -> dict[str, float]:
        """Returns the losses and metrics over a data set, every example counted once.

        Args:
          x, y, sample_weight, global_batch_size: as in `fit`.
          steps: global batches to use; all by default.
          callbacks, verbose: as in Keras.
        """
        data = tuple(part for part in (x, y, sample_weight) if part is not None)
        return self._evaluate(
            self._make_eval_feed(data, global_batch_size),
            steps=steps,
            callbacks=callbacks,
            verbose=verbose,
        )

    @explain_lost_worker
    @show_user_errors()
    def predict(self, x: Any, *, global_batch_size: int = 32) -> Any:
        """Returns the model's outputs for every example, in order.

        Args:
          x: an array or a structure of them, a source, or a `tf.data.Dataset` of batches of
            `x` alone.
          global_batch_size: as in `fit`.

        Returns:
          float array [examples, ...], or the model's structure of them.
        """
        feed = self._make_feed(x, global_batch_size=global_batch_size)
        if self._is_asynchronous:
            self._build(feed)
        if self._asynchronous:
            predict_step: Any = self._asynchronous.predict
            iterator: Any = self._asynchronous.iterate_predict(feed)
        else:
            predict_step = make_predict_step(self.model, self.strategy)
            iterator = _unwrap_inputs(feed).iterate_eval(self.strategy, self._workers.place_input)
        batches: list[Any] = []
        while True:
            try:
                replicas = predict_step(iterator)
            except (tf.errors.OutOfRangeError, StopIteration):
                break
            parts = [
                keras.tree.map_structure(lambda t, n=int(count): t.numpy()[:n], outputs)
                for outputs, count in replicas
            ]
            batches.append(keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *parts))
        if not batches:
            raise TfdistError("Cannot predict: the data are empty.")
        batches = [keras.tree.map_structure(self._workers.gather, batch) for batch in batches]
        return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *batches)

    def prepare(self, x: Any, y: Any = None, *, global_batch_size: int = 32) -> None:
        """Checks the data against model and strategy and creates every variable.

        `fit` and `evaluate` do so themselves; a command calls it before it writes anything.

        Args:
          x, y, global_batch_size: as in `fit`.
        """
        self._build(self._make_feed(x, y, global_batch_size=global_batch_size))

    def save_model(self, path: str) -> None:
        """Writes the model as a `.keras` file, on any file system of `tf.io.gfile`."""
        if not (self.is_chief or self._must_read_together()):
            return
        with tempfile.TemporaryDirectory() as directory:
            local = f"{directory}/model.keras"
            self.model.save(local)
            if not self.is_chief:
                return
            tf.io.gfile.copy(local, f"{path}.writing", overwrite=True)
        tf.io.gfile.rename(f"{path}.writing", path, overwrite=True)

    def request_stop(self) -> None:
        """Lets `fit` finish its step, write a checkpoint and return. Safe in a signal handler.

        Asked of any worker, all of them stop after the same step.
        """
        self._stop_requested = True

    @property
    def stop_requested(self) -> bool:
        """Whether `fit` ended because of `request_stop`."""
        return self._stop_agreed

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

    def save_checkpoint(self) -> None:
        """Writes a checkpoint of the present step, if the trainer has a directory for them.

        Every worker calls it, and none returns before the chief has written.
        """
        if self._checkpoints is None:
            return
        if self._averager:
            self._averager.collect()
        state = {
            "step": self.step,
            "history": {"epoch": self.history.epoch, "logs": self.history.history},
            "metrics": [value.tolist() for value in self._read_metrics()],
        }
        if self.is_chief:
            self._checkpoints.save(step=self.step, variables=self._list_state(), state=state)
        elif self._must_read_together():
            with tempfile.TemporaryDirectory() as directory:
                CheckpointStore(directory).save(
                    step=self.step, variables=self._list_state(), state=state
                )
        # What this says is written, is: a worker that went on could end before the chief is done.
        self.wait_for_all()

    def mark_best_checkpoint(self) -> None:
        """Lets the checkpoint of the present step stay until another one is marked."""
        if self._checkpoints is not None and self.is_chief:
            self._checkpoints.mark_best(self.step)

    def restore_best_checkpoint(self) -> int | None:
        """Gives the model the weights of the marked checkpoint; returns its step, if any."""
        if self._checkpoints is None:
            return None
        found = self._checkpoints.best_step() if self.is_chief else None
        best = self._workers.ask_chief(-1 if found is None else found)
        if best < 0:
            return None
        self._restore_step_of_chief(best)
        return best

    def count_traces(self) -> dict[str, int]:
        """Returns how often each step was traced: once, or an input changed its shape."""
        return {name: step.experimental_get_tracing_count() for name, step in self._steps.items()}

    def summarize_strategy(self) -> dict[str, Any]:
        """Returns what only this strategy has to say for a summary, such as the staleness."""
        return self._asynchronous.summarize() if self._asynchronous else {}

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
            seed=self.seed,
            **options,
        )

    def _make_eval_feed(self, data: Any, global_batch_size: int) -> Feed:
        parts = data if isinstance(data, tuple) else (data,)
        return self._make_feed(*parts, global_batch_size=global_batch_size)

    def _build(self, feed: Feed) -> None:
        """Creates every variable that is not there yet, and the compiled steps, once."""
        if self._objective is not None:
            return
        with self.strategy.scope(), tf.variable_creator_scope(self._create_variable):
            self.model._symbolic_build(data_batch=feed.batch_spec)
            self._objective = Objective(self.model)
        if self._is_asynchronous:
            self._asynchronous = AsynchronousSteps(
                self.model, self._objective, self.strategy, max_in_flight=self._max_in_flight
            )
            self._steps = {
                "train": self._asynchronous.train,
                "evaluate": self._asynchronous.evaluate,
                "read_logs": self._asynchronous.read_logs,
                "write_metrics": self._asynchronous.write_metrics,
            }
            return
        self._steps = {
            "train": make_train_step(self.model, self._objective, self.strategy),
            "evaluate": make_eval_step(self.model, self._objective, self.strategy),
            "read_logs": make_read_logs(self.model, self._objective),
            "write_metrics": make_write_metrics(
                self.model, self._objective, self.strategy, is_chief=self.is_chief
            ),
        }
        if self.num_workers > 1:
            self._steps |= {
                "read_sums": make_read_sums(
                    self.model, self._objective, self.strategy, is_chief=self.is_chief
                ),
                "logs_of_sums": make_logs_of_sums(self.model, self._objective),
            }
        if self.num_workers > 1 and isinstance(self.strategy, LocalSgdStrategy):
            self._averager = WeightAverager(self.model, self.strategy, self._workers)

    def _iterate_train(self, feed: Feed, steps_per_epoch: int, total_steps: int) -> Any:
        if self._asynchronous:
            return self._asynchronous.iterate_train(
                feed,
                start_step=self.step,
                steps_per_epoch=steps_per_epoch,
                total_steps=total_steps,
            )
        return feed.iterate_train(
            self.strategy, start_step=self.step, place=self._workers.place_input
        )

    def _read_staleness(self) -> dict[str, float]:
        return self._asynchronous.read_staleness() if self._asynchronous else {}

    def _read_logs(self) -> dict[str, float]:
        """Reads the losses and metrics of all workers."""
        if self.num_workers == 1:
            return self._read_own_logs()
        logs = self._steps["logs_of_sums"](self._workers.sum(self._steps["read_sums"]()))
        return {name: float(value) for name, value in logs.items()}

    def _read_own_logs(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._steps["read_logs"]().items()}

    def _read_metrics(self) -> list[np.ndarray]:
        """Reads the metrics' variables, summed over all workers."""
        assert self._objective is not None
        if self.num_workers == 1:
            return [variable.numpy() for variable in self._list_metric_state()]
        sums = self._workers.sum(self._steps["read_sums"]())
        return [value.numpy() for value in split_sums(self.model, self._objective, sums)]

    def _agree_to_stop(self) -> None:
        """Lets all workers stop where one was asked to, or a callback of one wants it."""
        self._stop_agreed, self.model.stop_training = self._workers.any(
            self._stop_requested, self.model.stop_training
        )

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
        callbacks: Iterable[keras.callbacks.Callback] = (),
        verbose: int | str = 0,
    ) -> dict[str, float]:
        self._build(feed)
        steps = steps or feed.num_steps
        verbose = self._find_verbosity(verbose)
        if callback_list is None:
            callback_list = keras.callbacks.CallbackList(
                list(callbacks),
                add_progbar=verbose != 0,
                model=self.model,
                verbose=verbose,
                epochs=1,
                steps=steps,
            )
        saved = self._read_metrics()
        self._reset_metrics()
        callback_list.on_test_begin()
        if self._asynchronous:
            iterator: Any = self._asynchronous.iterate_eval(feed, steps=steps)
        else:
            iterator = feed.iterate_eval(self.strategy, self._workers.place_input)
        batch = 0
        while steps is None or batch < steps:
            callback_list.on_test_batch_begin(batch)
            try:
                self._steps["evaluate"](iterator)
            except (tf.errors.OutOfRangeError, StopIteration):
                break
            callback_list.on_test_batch_end(batch, {})
            batch += 1
        logs = self._read_logs()
        callback_list.on_test_end(logs)
        self._restore_metrics(saved)
        return logs

    def _list_state(self) -> list[keras.Variable]:
        extra = self._averager.state if self._averager else []
        return [*self.model.variables, *self.model.optimizer.variables, *extra]

    def _must_read_together(self) -> bool:
        """Whether reading a variable takes all workers, so that all of them have to save it."""
        on_read = tf.VariableSynchronization.ON_READ
        return self.num_workers > 1 and any(
            getattr(variable.value, "synchronization", None) == on_read
            for variable in self._list_state()
        )

    def _list_metric_state(self) -> list[keras.Variable]:
        assert self._objective is not None
        return list_metric_variables(self.model, self._objective)

    def _reset_metrics(self) -> None:
        assert self._objective is not None
        for metric in [*self._objective.metrics, *list_metrics(self.model)]:
            metric.reset_state()

    def _restore(self) -> dict[str, Any] | None:
        """Restores the checkpoint that the chief finds whole, on every worker."""
        if self._checkpoints is None:
            return None
        state = self._checkpoints.restore(self._list_state()) if self.is_chief else None
        step = self._workers.ask_chief(state["step"] if state else -1)
        if step >= 0 and not self.is_chief:
            state = self._restore_step_of_chief(step)
        if state is not None:
            self.step = self.resumed_from_step = state["step"]
            self._restore_metrics(state["metrics"])
        return state

    def _restore_step_of_chief(self, step: int) -> dict[str, Any]:
        assert self._checkpoints is not None
        try:
            return self._checkpoints.restore_step(step, self._list_state())
        except (tf.errors.NotFoundError, OSError) as error:
            if self.is_chief:
                raise
            raise TfdistError(
                f"Worker {self._workers.index} does not find the chief's checkpoint of step {step} "
                f"in {self._checkpoints.directory}. Put --run_dir where all workers see it."
            ) from error

    def _restore_metrics(self, values: Sequence[Any]) -> None:
        """Gives the metrics' variables back the values that `_read_metrics` read."""
        self._steps["write_metrics"](
            [
                tf.constant(value, variable.dtype, variable.shape)
                for value, variable in zip(values, self._list_metric_state(), strict=True)
            ]
        )

    def _describe_last_good(self) -> str:
        steps = self._checkpoints.list_steps() if self._checkpoints else []
        return f"The checkpoint of step {steps[-1]} is kept." if steps else "No checkpoint yet."


def _aggregate_state(next_creator: Callable[..., Any], **arguments: Any) -> tf.Variable:
    """Gives state that layers update in a replica a rule to agree by.

    Keras creates moving statistics and seeds without an aggregation, so that replicas drift
    apart and CentralStorageStrategy refuses the update. Floats agree on their mean, others
    on the first replica's value.
    """
    if not arguments.get("trainable", True) and arguments.get("aggregation") in (
        None,
        tf.VariableAggregation.NONE,
    ):
        dtype = arguments.get("dtype")
        floating = dtype is None or tf.as_dtype(dtype).is_floating
        arguments["aggregation"] = (
            tf.VariableAggregation.MEAN if floating else tf.VariableAggregation.ONLY_FIRST_REPLICA
        )
    return next_creator(**arguments)


def _unwrap_inputs(feed: Feed) -> Feed:
    """Leaves only the inputs of a feed's evaluation batches."""

    def make_eval(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return feed.make_eval(context).map(
            lambda batch, num_valid: (keras.utils.unpack_x_y_sample_weight(batch)[0], num_valid)
        )

    return dataclasses.replace(feed, make_eval=make_eval)
