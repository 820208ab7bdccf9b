"""A training loop of one's own: functions of a batch, which run on the replicas of a strategy."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.aliases import KerasData
from tfdist.distributed_variables import make_variables_ordinary
from tfdist.errors import TfdistError
from tfdist.strategies.base import Strategy
from tfdist.strategies.logical_replicas import read_numerics
from tfdist.strategies.registry import to_strategy
from tfdist.training.checkpoint.recovery import Recovery
from tfdist.training.fit.arguments import BatchArguments, FitArguments, TrainerArguments, check_kind
from tfdist.training.fit.engine import opening_scope
from tfdist.training.fit.loop_progress import LoopProgress
from tfdist.training.fit.own_step import OwnStep
from tfdist.training.inputs.example_order import find_order
from tfdist.training.inputs.make_adapter import check_order, make_data_adapter
from tfdist.training.step.model_variables import make_creator
from tfdist.training.step_options import StepOptions, find_default_options
from tfdist.training.workers.communication import Workers


class Loop:
    """Runs the steps of your own training loop under a `tf.distribute` strategy.

    A step is a function of a global batch: it opens a tape, applies gradients, updates metrics and
    returns numbers. Each replica computes its share of the batch, under the rule of `Trainer` for
    a model's own `train_step`: the result is that of one device, or the step is refused.

    Example:

        loop = tfdist.Loop(strategy="mirrored")
        with loop.scope():
            model = keras.Sequential([keras.layers.Dense(10)])
            optimizer = keras.optimizers.Adam()
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        @loop.distribute
        def train_step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        for epoch in range(3):
            for x, y in loop.batches(x_train, y_train, batch_size=64):
                loss = train_step(x, y)

    Args:
      strategy: as in `Trainer`.
      checkpoint_dir: the directory of the checkpoints from which `epochs` continues; None for none.
        All workers must see it.
      keep_checkpoints: how many of the newest checkpoints to keep.
      checkpoint_every: batches between checkpoints, besides one after each epoch.
      seed: as in `Trainer`.
      step_options: how steps are computed; by default, as the flags of `tfdist.run` say, or as
        `tfdist.StepOptions` does.

    Attributes:
      strategy: the strategy.
      is_chief: whether this process writes files.
      state: a dictionary of your own, of what JSON can hold, which is saved and restored as well.

    Raises:
      TfdistError: the strategy is unknown.
    """

    def __init__(
        self,
        *,
        strategy: tf.distribute.Strategy | Strategy | str | None = None,
        checkpoint_dir: str | None = None,
        keep_checkpoints: int = 3,
        checkpoint_every: int | None = None,
        seed: int | None = None,
        step_options: StepOptions | None = None,
    ):
        check_kind("step_options", step_options, StepOptions)
        given = TrainerArguments(
            checkpoint_dir=checkpoint_dir or None, keep_checkpoints=keep_checkpoints, seed=seed
        )
        self._seed = given.seed
        self._step_options = step_options or find_default_options()
        self.strategy = to_strategy(strategy)
        make_variables_ordinary()
        self._create_variable = make_creator(self.strategy, self._step_options)
        workers = Workers(self.strategy)
        self.is_chief = workers.is_chief
        self.state: dict[str, Any] = {}
        recovery = None
        if given.checkpoint_dir:
            recovery = Recovery(given.checkpoint_dir, keep=given.keep_checkpoints, workers=workers)
        self._steps: list[OwnStep] = []
        self._progress = LoopProgress(
            recovery,
            workers,
            every=FitArguments(checkpoint_every=checkpoint_every).checkpoint_every or None,
            steps=self._steps,
            state=self.state,
            numerics=lambda: read_numerics(self.strategy),
        )

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Opens the scope in which models, optimizers and metrics must be created."""
        with opening_scope(self.strategy, self._create_variable):
            yield

    def distribute(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of a global batch that runs on the replicas' shares of it.

        The function is compiled, as by `tf.function`: Python code in it runs when it is traced.

        Args:
          function: takes tensors whose first dimension is the batch, or numbers, and returns
            numbers of the batch, such as its loss, or a structure of them; or nothing. It may be
            a method, also in the class's body, and a `tf.function`. What it does without a batch,
            every replica does alike.

        Returns:
          A function with the same arguments, of the global batch, and the same results, of the
          global batch, as Python numbers. Under several workers, all of them must call it.

        Raises:
          TfdistError: the function uses no model or optimizer; or, when it is called, the strategy
            cannot divide it.
        """
        return OwnStep(
            function,
            self.strategy,
            self._step_options,
            steps=self._steps,
            on_ready=self._progress.claim_first if self._progress.is_saved else None,
        )

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the numbers of the epochs, and continues from the newest checkpoint, if any.

        The program that continues must be the same. In the epoch of the checkpoint, `batches`
        yields what was not read yet; before the first of these batches, all variables of the
        steps, `state`, and the generators of Keras, NumPy and Python get the checkpoint's values.
        At SIGTERM under `tfdist.run`, and after `request_stop`, the program ends with status 143
        after the next batch and its checkpoint.

        Yields:
          The numbers of the epochs that are left, the first of all being 0. A second loop over
          `epochs` has its own.

        Raises:
          TfdistError: the checkpoint is of another program or other data, or cannot be read.
        """
        yield from self._progress.iterate_epochs(count)

    def request_stop(self) -> None:
        """Ends the program after the next batch of `batches`, and its checkpoint.

        Without a `checkpoint_dir`, it ends after the epoch of `epochs`.
        """
        self._progress.request_stop()

    def batches(
        self,
        x: KerasData,
        y: KerasData = None,
        sample_weight: KerasData = None,
        *,
        batch_size: int | None = None,
        shuffle: bool | str = True,
    ) -> Iterator[Any]:
        """Yields the global batches of an epoch, in the order of `fit`.

        Args:
          x, y, sample_weight: arrays as in Keras; or in `x` anything that yields batches, such as
            a `tf.data.Dataset` of global batches, which is read as it is.
          batch_size: examples per batch, over all replicas; 32 by default.
          shuffle: as in `Trainer.fit`.

        Yields:
          A tensor, or tuples `(x, y)` or `(x, y, sample_weight)`, as far as these were given. The
          last batch may be smaller.

        Raises:
          TfdistError: the arrays do not fit one another.
        """
        size = BatchArguments(batch_size=batch_size).size
        is_iterable = not hasattr(x, "shape") and hasattr(x, "__iter__")
        is_batched = is_iterable and not isinstance(x, (list, tuple, dict))
        if is_batched and not (self._progress.is_saved and isinstance(x, tf.data.Dataset)):
            if self._progress.is_saved:
                raise TfdistError(
                    f"Cannot continue a loop over a {type(x).__name__}: give `batches` arrays or a "
                    "tf.data.Dataset, or the loop no checkpoint_dir."
                )
            yield from x
            return
        if is_batched:
            check_order(x)
        adapter = make_data_adapter(
            x,
            y,
            sample_weight,
            global_batch_size=size or 32,
            num_replicas=1,
            shuffle=shuffle,
            order=find_order(self._seed, num_fits=0, by_python=False),
        )
        this_pass = self._progress.begin_pass(x, adapter)
        if this_pass is None:
            return
        context, first = tf.distribute.InputContext(), this_pass.first
        if is_batched:
            dataset = adapter.make_train(context, first)
        else:
            assert adapter.num_steps is not None
            dataset = adapter.make_train(context, this_pass.number * adapter.num_steps + first)
            dataset = dataset.take(adapter.num_steps - first)
        for number, (batch, _) in enumerate(dataset, first):
            yield batch[0] if not is_batched and y is None and isinstance(batch, tuple) else batch
            self._progress.end_batch(number)
