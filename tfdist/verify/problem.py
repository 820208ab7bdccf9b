"""The problems that comparisons train: with one of tfdist's models, or a user's."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from tfdist.errors import TfdistError
from tfdist.imports import import_named
from tfdist.runs.options import TrainOptions
from tfdist.strategies.options import make_strategy_options
from tfdist.tasks.registry import make_task_options, select_task
from tfdist.training.fit.trainer import Trainer
from tfdist.training.options import TrainingOptions
from tfdist.verify.options import VerifiedModelOptions, VerifyOptions

if TYPE_CHECKING:
    import tensorflow as tf

_PLAIN_RATE = 0.05
_USER_EXAMPLES = 40
_SHAPES_EXAMPLES = 45


@dataclass(frozen=True)
class Problem:
    """A model, its data, and how it is trained.

    Attributes:
      train: the data, as positional arguments of `Trainer.fit`.
      evaluation: the data, as positional arguments of `Trainer.evaluate`.
    """

    build_model: Callable[[], keras.Model]
    train: tuple[Any, ...]
    evaluation: tuple[Any, ...]
    augmentation: Any
    global_batch_size: int
    seed: int
    precision: str

    def reset_process(self) -> None:
        """Resets Keras, so that the next model has the same weights and names as the first one.

        Must be called outside any strategy's scope.
        """
        policy = keras.config.dtype_policy()
        keras.utils.clear_session(free_memory=False)
        keras.config.set_dtype_policy(policy)
        keras.utils.set_random_seed(self.seed)

    def fit(self, trainer: Trainer, **options: Any) -> None:
        """Trains on the data, with further options of `Trainer.fit`."""
        x, y, sample_weight = (*self.train, None, None)[:3]
        trainer.fit(
            x,
            y,
            sample_weight=sample_weight,
            global_batch_size=self.global_batch_size,
            augmentation=self.augmentation,
            verbose=0,
            **options,
        )

    def evaluate(self, trainer: Trainer) -> dict[str, float]:
        """Returns the losses and metrics of the evaluation's data."""
        x, y, sample_weight = (*self.evaluation, None, None)[:3]
        return trainer.evaluate(
            x,
            y,
            sample_weight=sample_weight,
            global_batch_size=self.global_batch_size,
            verbose=0,
            return_dict=True,
        )

    def make_linear(self, *, workers: int) -> "Problem":
        """Returns the problem with plain gradient descent and equal batches for all workers."""

        def build_plain() -> keras.Model:
            model = self.build_model()
            model.optimizer = keras.optimizers.SGD(_PLAIN_RATE)
            return model

        share = -(-self.global_batch_size // workers)
        return replace(self, build_model=build_plain, global_batch_size=share * workers)


def make_problem(options: VerifyOptions, *, norm: str | None = None) -> Problem:
    """Returns the problem that the options describe.

    Args:
      norm: another normalization for tfdist's own models.

    Raises:
      TfdistError: the model or the data is missing or does not fit.
    """
    chosen = options.model if norm is None else replace(options.model, norm=norm)
    common: dict[str, Any] = {
        "global_batch_size": chosen.global_batch_size,
        "seed": chosen.seed,
        "precision": chosen.precision,
    }
    if not chosen.is_own and not chosen.task:
        build_model = _import_function("model", chosen.model)
        arrays = _find_data(chosen, build_model)
        return Problem(build_model, arrays, arrays, None, **common)
    from tfdist.runs import processes  # not needed for a user's model

    train_options = make_train_options(options, norm=chosen.norm)
    training = train_options.training
    task = select_task(chosen) if chosen.task else train_options.task.select()
    data = task.make_data(seed=training.seed, quiet=True)
    build_model = processes.make_build_model(
        task, training, data.info, total_steps=options.verification.steps
    )
    augmentation = task.make_augmentation(data.info)
    train, val = (part if isinstance(part, tuple) else (part,) for part in (data.train, data.val))
    return Problem(build_model, train, val, augmentation, **common)


def make_train_options(
    options: VerifyOptions,
    *,
    strategy: str = "one_device",
    norm: str | None = None,
    virtual_devices: int = 0,
    logical_replicas: int = 0,
) -> TrainOptions:
    """Returns the options of `tfdist.train` for the same training."""
    chosen, base = options.model, TrainOptions()
    own = {"model": chosen.model} if chosen.is_own else {}
    return TrainOptions(
        strategy=make_strategy_options(
            strategy=strategy, virtual_devices=virtual_devices, logical_replicas=logical_replicas
        ),
        placement=options.placement,
        task=make_task_options(
            image_size=chosen.image_size,
            train_examples=_SHAPES_EXAMPLES,
            val_examples=_SHAPES_EXAMPLES // 2,
            base_filters=chosen.base_filters,
            depth=chosen.depth,
            norm=norm or chosen.norm,
            loss=chosen.loss,
            **own,
        ),
        training=TrainingOptions(
            global_batch_size=chosen.global_batch_size,
            optimizer=chosen.optimizer,
            learning_rate=chosen.learning_rate,
            clip_norm=chosen.clip_norm,
            precision=chosen.precision,
            seed=chosen.seed,
        ),
        run=replace(base.run, quiet=True),
    )


def _import_function(flag: str, name: str) -> Callable[[], Any]:
    function: Any = import_named(flag, name)
    if not callable(function):
        raise TfdistError(f"`{flag}={name}` is a {type(function).__name__}, not a function.")
    return function


def _find_data(chosen: VerifiedModelOptions, build_model: Callable[[], Any]) -> tuple[Any, ...]:
    if chosen.make_data:
        make_data: Any = _import_function("make_data", chosen.make_data)
    else:
        module = importlib.import_module(chosen.model.partition(":")[0])
        make_data = getattr(module, "make_data", None)
    if make_data is None:
        return _make_up_data(build_model())
    data = make_data()
    if not isinstance(data, tuple) or len(data) not in (2, 3):
        raise TfdistError(
            f"make_data returned {type(data).__name__}, not (x, y) or (x, y, sample_weight)."
        )
    return data


def _make_up_data(model: keras.Model) -> tuple[Any, Any]:
    """Returns random arrays of the shapes of a model's inputs and its only output."""
    try:
        inputs, (output,) = model.inputs, model.outputs
    except (AttributeError, TypeError, ValueError):
        raise TfdistError(
            "Cannot make up data for this model: it does not have one output of a known shape. "
            "Put a function make_data that returns (x, y) in its module, or give --make_data."
        ) from None
    rng = np.random.default_rng(0)
    loss = model._compile_loss and model._compile_loss._user_loss
    name = (loss if isinstance(loss, str) else getattr(loss, "name", type(loss).__name__)) or ""

    def draw(tensor: "tf.Tensor", *, below: int | None = None) -> np.ndarray:
        shape = [_USER_EXAMPLES, *(size or 16 for size in tensor.shape[1:])]
        if below is not None:
            return rng.integers(0, below, shape[:-1] if below > 1 else shape).astype("int32")
        if "int" in keras.backend.standardize_dtype(tensor.dtype):
            return rng.integers(0, 2, shape).astype("int32")
        return rng.normal(size=shape).astype("float32")

    x = [draw(tensor) for tensor in inputs]
    if "sparse" in name:
        y = draw(output, below=output.shape[-1])
    elif "crossentropy" in name:
        y = rng.integers(0, 2, draw(output).shape).astype("float32")
    else:
        y = draw(output)
    structure = x[0] if len(x) == 1 else {t.name: part for t, part in zip(inputs, x, strict=True)}
    return structure, y
