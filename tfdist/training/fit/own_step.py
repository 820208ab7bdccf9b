"""The steps of a training loop of one's own: functions of a global batch."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Batch
from tfdist.data.rows import check_sizes
from tfdist.errors import TfdistError
from tfdist.internals import BaseOptimizer
from tfdist.training.fit.trainer import Trainer
from tfdist.training.step_options import StepOptions
from tfdist.training.workers.communication import Workers
from tfdist.training.workers.taking_part import taking_part

_METRICS = "metrics"
_VARIABLES = (keras.Variable, tf.Variable, keras.random.SeedGenerator)
_PARTS = (keras.Layer, BaseOptimizer, keras.metrics.Metric)
# What is not searched for the models, optimizers and metrics of a function.
LIBRARIES = ("builtins", "keras", "numpy", "tensorflow", "tfdist")
# Keys of what a step takes: no argument at all, and the end of those that are scalars.
_NO_ARGUMENT, _NUMBER = "*", "#"


class OwnStep:
    """A function of a global batch that runs on the replicas of a strategy.

    Args:
      function: see `Loop.distribute`.
      strategy: the strategy.
      constants: arguments that every call has, by place or name; see `_split_arguments`.
      converts: whether AutoGraph converts the control flow; by default that of a `tf.function`.
      steps: every step with models is added to it.
      on_ready: called with a step once all its variables exist, before it is computed.
      returns_tensors: whether results are tensors, as those of a `tf.function`, else numbers.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        strategy: tf.distribute.Strategy,
        step_options: StepOptions,
        *,
        constants: Mapping[str, Any] | None = None,
        converts: bool | None = None,
        steps: "list[OwnStep] | None" = None,
        on_ready: "Callable[[OwnStep], None] | None" = None,
        returns_tensors: bool = False,
    ):
        self.function = getattr(function, "python_function", function)
        if converts is None:
            converts = function is not self.function and getattr(function, "_autograph", True)
        self._converts = converts
        functools.update_wrapper(self, self.function)
        self._name = getattr(self.function, "__name__", "step")
        self._strategy, self._step_options = strategy, step_options
        self._constants = dict(constants or {})
        self._key = _identify(self._constants)
        self._returns_tensors = returns_tensors
        self._trainer: Trainer | None = None
        self._steps, self._on_ready = steps, on_ready
        self._saved_metrics: tuple[Mapping[str, Any], dict[int, np.ndarray]] = {}, {}
        if steps is not None:
            steps.append(self)
        self._others: dict[Any, OwnStep] = {}  # with other constants

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        """Returns the step of an object, if a method was distributed in its class."""
        if owner is None:
            return self
        key = f"_tfdist_step_{id(self)}"
        if key not in vars(owner):
            vars(owner)[key] = self.bind(owner)
        return vars(owner)[key]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if tf.inside_function():
            if self._strategy is tf.distribute.get_strategy():
                return self._convert()(*args, **kwargs)  # a part of another step
            raise TfdistError(
                f"{self._name} is called in a tf.function. Call it in a Python loop: it is "
                "compiled already."
            )
        data, constants = _split_arguments(args, kwargs)
        if constants and (key := _identify(constants)) != self._key:
            if key not in self._others:
                other = self._others[key] = self._copy(self.function, constants)
                other._saved_metrics = self._saved_metrics
            return self._others[key](*args, **kwargs)
        rows = _to_rows(data)
        if self._trainer is None:
            workers = Workers(self._strategy)
            if workers.count > 1:  # they create variables together
                with taking_part(workers, self._name):
                    workers.meet(self._name, {})
            self._trainer = self._make_ready(rows)
        program: Any = self._trainer.model
        return program.unpack(self._trainer.run_step(rows), rows, self._returns_tensors)

    def find_parts(
        self, args: Sequence[object] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Returns the models, layers, optimizers and metrics that a call uses, each once."""
        _, constants = _split_arguments(args, kwargs or {})
        return _find_parts(self.function, self._constants | constants)

    @property
    def name(self) -> str:
        """The name of the function."""
        return self._name

    def find_stateful(self) -> list[Any]:
        """Returns everything with variables that the function uses, each once."""
        return _find_parts(self.function, self._constants, kinds=(*_PARTS, *_VARIABLES))

    def list_variables(self) -> dict[str, Any]:
        """Returns the variables of everything that the function uses, as far as they exist."""
        variables: list[Any] = []
        for part in self.find_stateful():
            if isinstance(part, keras.random.SeedGenerator):
                part = part.state
            variables += [part] if isinstance(part, _VARIABLES) else part.variables
        if self._trainer is not None:
            variables += self._trainer.engine.list_state()
        named: dict[str, Any] = {}
        for variable in {id(v): v for v in variables}.values():
            # Keras gives each variable a path of its own; those of TensorFlow may be alike.
            name = getattr(variable, "path", None) or f"{self._name}/{variable.name}"
            while name in named and not hasattr(variable, "path"):
                name += "_"
            if name in named:
                raise make_alike_error(name)
            named[name] = variable
        return named

    def read_metrics(self) -> dict[str, np.ndarray]:
        """Returns each replica's part of the metrics, by name; all workers must call it."""
        if self._trainer is None:
            return {}
        steps = self._trainer.engine.steps
        # By their paths: two steps may have one name.
        names = [f"{_METRICS}/{v.path}" for v in steps.steps.metrics.list_variables()]
        return dict(zip(names, steps.read_states(), strict=True))

    def write_metrics(self, saved: Mapping[str, np.ndarray]) -> None:
        """Sets the metrics to what `read_metrics` returned, if that is saved.

        Before the first step, there is only their sum; it takes its parts if it is as now by then.
        """
        if self._trainer is None:
            self._saved_metrics = saved, self._read_values()
        elif (names := self.read_metrics().keys()) <= saved.keys():
            self._trainer.engine.steps.write_states([saved[name] for name in names])

    def compare_weights(self) -> None:
        """Checks that all workers have the same weights; all must call it."""
        if self._trainer is not None:
            self._trainer.engine.compare_weights()

    def bind(self, owner: object) -> "OwnStep":
        """Returns the step of an object in whose class the function is a method."""
        return self._copy(types.MethodType(self.function, owner))

    def _copy(
        self, function: Callable[..., Any], constants: Mapping[str, Any] | None = None
    ) -> "OwnStep":
        return OwnStep(
            function,
            self._strategy,
            self._step_options,
            constants=constants,
            converts=self._converts,
            steps=self._steps,
            on_ready=self._on_ready,
            returns_tensors=self._returns_tensors,
        )

    def _convert(self) -> Callable[..., Any]:
        """Returns the function, with its control flow as AutoGraph has it."""
        if not self._converts:
            return self.function
        if not isinstance(self.function, types.MethodType):
            return tf.autograph.to_graph(self.function)
        converted = tf.autograph.to_graph(self.function.__func__)
        return types.MethodType(converted, self.function.__self__)

    def _make_ready(self, rows: dict[str, Any]) -> Trainer:
        """Returns the trainer, with the values that metrics have before its first step.

        From then on, each replica has its own part of them.
        """
        now = self._read_values()
        trainer = self._make_trainer()
        if self._on_ready is None and not any(np.any(value) for value in now.values()):
            return trainer
        trainer.prepare_step(rows)
        self._trainer = trainer
        if self._on_ready is not None:
            self._on_ready(self)
        saved, then = self._saved_metrics
        if saved and now.keys() == then.keys() and all((now[k] == then[k]).all() for k in now):
            self.write_metrics(saved)
            return trainer
        steps = trainer.engine.steps
        variables, states = steps.steps.metrics.list_variables(), steps.read_states()
        steps.write_states(
            [
                now[id(variable)][None] if id(variable) in now else state
                for variable, state in zip(variables, states, strict=True)
            ]
        )
        return trainer

    def _read_values(self) -> dict[int, np.ndarray]:
        """Returns the values of the metrics' variables that exist, by the ids of these."""
        metrics = [part for part in self.find_parts() if isinstance(part, keras.metrics.Metric)]
        return {id(v): np.asarray(v.numpy()) for metric in metrics for v in metric.variables}

    def _make_trainer(self) -> Trainer:
        parts = self.find_parts()
        if not any(isinstance(part, (keras.Layer, BaseOptimizer)) for part in parts):
            raise TfdistError(
                f"Cannot distribute {self._name}: no Keras model or optimizer was found in it. Use "
                "them as variables of the function, of its class or of its module."
            )
        kind = type(self._name, (_Program,), {})

        def build() -> keras.Model:
            program = kind(self._convert(), parts, self._constants)
            optimizers = [part for part in parts if isinstance(part, BaseOptimizer)]
            program.compile(optimizer=optimizers[0] if optimizers else None, jit_compile=False)
            return program

        return Trainer(build, strategy=self._strategy, step_options=self._step_options)


class _Program(keras.Model):
    """The models, optimizers and metrics of a function, which takes the place of `train_step`."""

    keeps_shapes = True  # as `tf.function`; see `Steps`

    def __init__(
        self, function: Callable[..., Any], parts: list[Any], constants: Mapping[str, Any]
    ):
        super().__init__()
        self.parts = [part for part in parts if not isinstance(part, BaseOptimizer)]
        self.optimizers = [part for part in parts if isinstance(part, BaseOptimizer)]
        self._run = function
        self.__dict__["constants"] = constants  # not an attribute that Keras tracks
        self._results: dict[tuple[str, ...], Any] = {}  # by the names of the arguments
        self.built = True

    def train_step(self, data: Batch) -> dict[str, Any]:
        rows = data[0] if isinstance(data, tuple) and len(data) == 1 else data
        given = dict(self.constants)
        for key in rows.keys() - {_NO_ARGUMENT}:
            name = key.removesuffix(_NUMBER)
            given[name] = rows[key] if name == key else rows[key][0]
        args = [given[name] for name in sorted(given) if name.startswith("*")]
        kwargs = {name: given[name] for name in given if not name.startswith("*")}
        found = self._results[tuple(sorted(rows))] = self._run(*args, **kwargs)
        leaves = {f"result_{place}": leaf for place, leaf in enumerate(tf.nest.flatten(found))}
        for leaf in leaves.values():
            if leaf is not None and keras.ops.ndim(leaf):
                raise TfdistError(
                    f"{type(self).__name__} returns a tensor of shape {leaf.shape}. Return numbers "
                    "of the whole batch, such as its mean loss."
                )
        return {key: leaf for key, leaf in leaves.items() if leaf is not None}

    def unpack(self, logs: dict[str, Any], rows: dict[str, Any], as_tensors: bool) -> Any:
        """Returns logs in the structure that the function has returned for these arguments."""
        results = self._results[tuple(sorted(rows))]

        def find(place: int, leaf: tf.Tensor | None) -> Any:
            if leaf is None:
                return None
            number = logs[f"result_{place}"]
            return tf.constant(number, tf.as_dtype(leaf.dtype)) if as_tensors else number

        leaves = [find(place, leaf) for place, leaf in enumerate(tf.nest.flatten(results))]
        return tf.nest.pack_sequence_as(results, leaves)


def _split_arguments(
    args: Sequence[object], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments that are data, by place or name, and the others, which are constants.

    As for `tf.function`, models and what is Python's own (numbers, texts, None) are constants: each
    is traced by itself.
    """
    values = {**{f"*{place:02d}": value for place, value in enumerate(args)}, **kwargs}
    data = {key: value for key, value in values.items() if _is_data(value)}
    return data, {key: value for key, value in values.items() if key not in data}


def _identify(constants: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns a key for constants, which lasts as long as these do."""

    def identify(value: object) -> Any:
        if isinstance(value, (str, bool, int, float, type(None))):
            return type(value), value
        if isinstance(value, (list, tuple)):
            return type(value), *map(identify, value)
        if isinstance(value, dict):
            return dict, *((key, identify(value[key])) for key in sorted(value))
        return id(value)

    return tuple((name, identify(value)) for name, value in sorted(constants.items()))


def _is_data(value: object) -> bool:
    leaves = tf.nest.flatten(value)
    arrays = [
        hasattr(leaf, "shape") and not isinstance(leaf, (keras.Variable, tf.Variable, *_PARTS))
        for leaf in leaves
    ]
    others = [leaf for leaf, is_array in zip(leaves, arrays, strict=True) if not is_array]
    return any(arrays) and all(
        isinstance(leaf, (int, float)) and not isinstance(leaf, bool) for leaf in others
    )


def _to_rows(values: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments, by place or name, with a batch as first dimension.

    A scalar is repeated for each example, and its key says so: another function is compiled for it.
    Where there is no batch, every replica computes the same.

    Raises:
      TfdistError: the arguments have different numbers of examples.
    """
    numbers = {
        key
        for key, value in values.items()
        if not (tf.nest.is_nested(value) or len(getattr(value, "shape", ())))
    }
    batches = tf.nest.flatten([value for key, value in values.items() if key not in numbers])
    count = batches[0].shape[0] if batches else 1
    check_sizes({batch.shape[0] for batch in batches})
    for key in numbers:
        values[key + _NUMBER] = tf.repeat(tf.convert_to_tensor(values.pop(key))[None], count)
    return values or {_NO_ARGUMENT: tf.zeros([1])}


def _find_parts(*values: Any, kinds: tuple[type, ...] = _PARTS) -> list[Any]:
    """Returns the objects of some kinds that values use, each once."""
    found: dict[int, Any] = {}
    seen: dict[int, Any] = {}  # held, so that no id is used twice
    waiting = list(values)
    while waiting:
        value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, kinds):
            found[id(value)] = value
        elif isinstance(value, OwnStep):
            waiting.append(value.function)
        else:
            waiting += _list_inside(value)
    return list(found.values())


def _list_inside(value: object) -> list[Any]:
    """Returns the objects that a function or an object of the user's uses."""
    value = getattr(value, "python_function", value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        if value.__module__.split(".")[0] in LIBRARIES:
            return []
        cells = [c.cell_contents for c in value.__closure__ or () if _is_filled(c)]
        names = list_names(value.__code__)
        return cells + [value.__globals__[name] for name in names if name in value.__globals__]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set)):
        return list(value)
    is_library = type(value).__module__.split(".")[0] in LIBRARIES
    if is_library or inspect.ismodule(value) or inspect.isclass(value):
        return []
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the variable has no value yet
        return False


def list_names(code: types.CodeType) -> list[str]:
    """Returns the names that code uses, those of functions within it included."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return [*code.co_names, *(name for c in inner for name in list_names(c))]


def make_alike_error(name: str) -> TfdistError:
    """Returns the error for two variables of one name, which a checkpoint could not tell apart."""
    return TfdistError(
        f"Cannot save the loop: two variables are named {name!r}. Give the models, layers, "
        "optimizers and metrics that its steps use different names."
    )
