"""A training loop of one's own: functions of a batch, which run on the replicas of a strategy."""

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.distributed_variables import make_variables_ordinary
from tfdist.errors import TfdistError
from tfdist.internals import BaseOptimizer
from tfdist.strategies.base import Strategy
from tfdist.strategies.registry import to_strategy
from tfdist.training.fit.arguments import BatchArguments, TrainerArguments, check_kind
from tfdist.training.fit.engine import opening_scope
from tfdist.training.fit.trainer import Trainer
from tfdist.training.inputs.example_order import find_order
from tfdist.training.inputs.make_adapter import make_data_adapter
from tfdist.training.step.model_variables import make_creator
from tfdist.training.step_options import StepOptions
from tfdist.training.workers.communication import Workers

_PARTS = (keras.Layer, BaseOptimizer, keras.metrics.Metric)
# What is not searched for the models, optimizers and metrics of a function.
# Keys of what a step takes: no argument at all, and the end of those that are numbers.
_NO_ARGUMENT, _NUMBER = "*", "#"
_LIBRARIES = ("builtins", "keras", "numpy", "tensorflow", "tfdist")


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
      seed: as in `Trainer`.
      step_options: how steps are computed; see `tfdist.StepOptions`.

    Attributes:
      strategy: the strategy.
      is_chief: whether this process writes files.

    Raises:
      TfdistError: the strategy is unknown.
    """

    def __init__(
        self,
        *,
        strategy: tf.distribute.Strategy | Strategy | str | None = None,
        seed: int | None = None,
        step_options: StepOptions | None = None,
    ):
        check_kind("step_options", step_options, StepOptions)
        self._seed = TrainerArguments(seed=seed).seed
        self._step_options = step_options or StepOptions()
        self.strategy = to_strategy(strategy)
        make_variables_ordinary()
        self._create_variable = make_creator(self.strategy, self._step_options)
        self.is_chief = Workers(self.strategy).is_chief
        self._num_epochs: dict[Any, int] = {}

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
        return _Step(function, self.strategy, self._step_options)

    def batches(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
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
        if not hasattr(x, "shape") and hasattr(x, "__iter__") and not isinstance(x, (list, dict)):
            yield from x
            return
        epoch = self._num_epochs.get(id(x), 0)
        self._num_epochs[id(x)] = epoch + 1
        adapter = make_data_adapter(
            x,
            y,
            sample_weight,
            global_batch_size=size or 32,
            num_replicas=1,
            shuffle=shuffle,
            order=find_order(self._seed, num_fits=0, by_python=False),
        )
        assert adapter.num_steps is not None
        context = tf.distribute.InputContext()
        for batch, _ in adapter.make_train(context, epoch * adapter.num_steps).take(
            adapter.num_steps
        ):
            yield batch[0] if y is None and isinstance(batch, tuple) else batch


class _Step:
    """A function of a global batch that runs on the replicas of a strategy."""

    def __init__(
        self,
        function: Callable[..., Any],
        strategy: tf.distribute.Strategy,
        step_options: StepOptions,
    ):
        functools.update_wrapper(self, _to_python(function))
        self._name = getattr(function, "__name__", "step")
        self._function = function
        self._strategy, self._step_options = strategy, step_options
        self._trainer: Trainer | None = None

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """Returns the step of an object, if a method was distributed in its class."""
        if owner is None:
            return self
        key = f"_tfdist_step_{id(self)}"
        if key not in vars(owner):
            method = types.MethodType(_to_python(self._function), owner)
            vars(owner)[key] = _Step(method, self._strategy, self._step_options)
        return vars(owner)[key]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if tf.inside_function():
            if self._strategy is tf.distribute.get_strategy():
                return _convert(self._function)(*args, **kwargs)  # a part of another step
            raise TfdistError(
                f"{self._name} is called in a tf.function. Call it in a Python loop: it is "
                "compiled already."
            )
        arguments = _to_rows(args, kwargs)
        if self._trainer is None:
            self._trainer = self._make_trainer()
        program: Any = self._trainer.model
        return program.unpack(self._trainer.run_step(arguments), arguments)

    def _make_trainer(self) -> Trainer:
        parts = _find_parts(self._function)
        if not any(isinstance(part, (keras.Layer, BaseOptimizer)) for part in parts):
            raise TfdistError(
                f"Cannot distribute {self._name}: no Keras model or optimizer was found in it. Use "
                "them as variables of the function, of its class or of its module."
            )
        kind = type(self._name, (_Program,), {})

        def build() -> keras.Model:
            program = kind(self._function, parts)
            optimizers = [part for part in parts if isinstance(part, BaseOptimizer)]
            program.compile(optimizer=optimizers[0] if optimizers else None, jit_compile=False)
            return program

        return Trainer(build, strategy=self._strategy, step_options=self._step_options)


class _Program(keras.Model):
    """The models, optimizers and metrics of a function, which takes the place of `train_step`."""

    def __init__(self, function: Callable[..., Any], parts: list[Any]):
        super().__init__()
        self.parts = [part for part in parts if not isinstance(part, BaseOptimizer)]
        self.optimizers = [part for part in parts if isinstance(part, BaseOptimizer)]
        self._run = _convert(function)
        self._results: dict[tuple[str, ...], Any] = {}  # by the names of the arguments
        self.built = True

    def train_step(self, data: Any) -> dict[str, Any]:
        rows = data[0] if isinstance(data, tuple) and len(data) == 1 else data
        args, kwargs = [], {}
        for key in sorted(rows.keys() - {_NO_ARGUMENT}):
            name = key.removesuffix(_NUMBER)
            value = rows[key] if name == key else rows[key][0]
            if name.startswith("*"):
                args.append(value)
            else:
                kwargs[name] = value
        found = self._results[tuple(sorted(rows))] = self._run(*args, **kwargs)
        leaves = {f"{place:04d}": leaf for place, leaf in enumerate(tf.nest.flatten(found))}
        for leaf in leaves.values():
            if leaf is not None and keras.ops.ndim(leaf):
                raise TfdistError(
                    f"{type(self).__name__} returns a tensor of shape {leaf.shape}. Return numbers "
                    "of the whole batch, such as its mean loss."
                )
        return {key: leaf for key, leaf in leaves.items() if leaf is not None}

    def unpack(self, logs: dict[str, Any], rows: dict[str, Any]) -> Any:
        """Returns logs in the structure that the function has returned for these arguments."""
        results = self._results[tuple(sorted(rows))]
        leaves = [
            None if leaf is None else logs[f"{place:04d}"]
            for place, leaf in enumerate(tf.nest.flatten(results))
        ]
        return tf.nest.pack_sequence_as(results, leaves)


def _to_python(function: Any) -> Any:
    return getattr(function, "python_function", function)


def _convert(function: Any) -> Any:
    """Returns the Python function of a `tf.function`, with its control flow as AutoGraph has it."""
    inner = _to_python(function)
    if inner is function or not getattr(function, "_autograph", True):
        return inner
    return tf.autograph.to_graph(inner)


def _to_rows(args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the arguments, by place or name, with a batch as first dimension.

    A number is repeated for each example, and its key says so: another function is compiled for it.
    Where there is no batch, every replica computes the same.
    """
    values = {**{f"*{place:02d}": value for place, value in enumerate(args)}, **kwargs}
    numbers = {
        key
        for key, value in values.items()
        if not (tf.nest.is_nested(value) or len(getattr(value, "shape", ())))
    }
    batches = tf.nest.flatten([value for key, value in values.items() if key not in numbers])
    count = batches[0].shape[0] if batches else 1
    for key in numbers:
        values[key + _NUMBER] = tf.repeat(tf.convert_to_tensor(values.pop(key))[None], count)
    return values or {_NO_ARGUMENT: tf.zeros([1])}


def _find_parts(function: Any) -> list[Any]:
    """Returns the models, layers, optimizers and metrics that a function uses, each once."""
    found: dict[int, Any] = {}
    seen: dict[int, Any] = {}  # held, so that no id is used twice
    waiting = [_to_python(function)]
    while waiting:
        value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, _PARTS):
            found[id(value)] = value
        elif isinstance(value, _Step):
            waiting.append(value._function)
        else:
            waiting += _list_inside(value)
    return list(found.values())


def _list_inside(value: Any) -> list[Any]:
    """Returns the objects that a function or an object of the user's uses."""
    value = _to_python(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        if value.__module__.split(".")[0] in _LIBRARIES:
            return []
        cells = [c.cell_contents for c in value.__closure__ or () if _is_filled(c)]
        names = _list_names(value.__code__)
        return cells + [value.__globals__[name] for name in names if name in value.__globals__]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set)):
        return list(value)
    is_library = type(value).__module__.split(".")[0] in _LIBRARIES
    if is_library or inspect.ismodule(value) or inspect.isclass(value):
        return []
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the variable has no value yet
        return False


def _list_names(code: types.CodeType) -> list[str]:
    """Returns the names that code uses, those of functions within it included."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return [*code.co_names, *(name for c in inner for name in _list_names(c))]
