"""The steps of a script's own training loops: divided over the replicas, or computed whole."""

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import TfdistError, TrainingError, shorten_error
from tfdist.graphs import list_operations
from tfdist.internals import BaseOptimizer, global_seed
from tfdist.replacing import find_function, replaced
from tfdist.strategies.registry import find_traits
from tfdist.training.fit.own_step import LIBRARIES, OwnStep, list_names
from tfdist.training.guard.guard import DRAWS
from tfdist.training.step_options import StepOptions
from tfdist.training.workers.communication import UnlikeWorkersError

# By these names, the code of a step is recognized. A tape alone does not make one.
_UPDATES = {"apply", "apply_gradients", "update_state"}
_TAPE = "GradientTape"
# The script divides the batch by itself.
_DIVIDED = (
    tf.distribute.DistributedValues,
    tf.distribute.DistributedIterator,
    tf.distribute.DistributedDataset,
)
_WHOLE = "It is computed whole: its results are those of one device, and so is its speed."


class OwnSteps:
    """Divides the steps of a script's own loops where they are functions of a batch.

    A step is a `tf.function` that Python calls, and that opens a tape, applies gradients or updates
    metrics. It is divided under the rule of `Loop.distribute`. What that refuses is computed whole,
    as on one device, and one line says why. So is a step that is no `tf.function`: compiled, its
    Python code would run only once.

    Args:
      strategy: the strategy in whose scope the script runs.
      show: prints a line.
      quiet: whether not to say which steps are divided.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step_options: StepOptions,
        show: Callable[[str], None],
        *,
        quiet: bool,
    ):
        self.strategy = strategy
        self.step_options = step_options
        self._show, self._is_quiet = show, quiet
        self._told: set[str] = set()
        self._divided: set[str] = set()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Divides steps, and tells of those that are not divided."""
        traits = find_traits(self.strategy)
        with contextlib.ExitStack() as stack:
            if self.strategy.num_replicas_in_sync > 1:
                apply = self._make_apply(find_function(BaseOptimizer, "apply"))
                stack.enter_context(replaced(BaseOptimizer, "apply", apply, in_all_threads=True))
                if not (traits.has_servers or traits.local_updates):
                    function = self._make_function(find_function(tf, "function"))
                    stack.enter_context(replaced(tf, "function", function, in_all_threads=True))
            yield

    def tell_divided(self, name: str) -> None:
        """Says once that a step is divided."""
        self._divided.add(name)
        if not self._is_quiet:
            self._tell(name, f"is divided over {self.strategy.num_replicas_in_sync} replicas.")

    def tell_whole(self, name: str, reason: str) -> None:
        """Says once that a step is computed as on one device, if it was divided before, too."""
        if name in self._divided:
            self._divided.remove(name)
            self._told.discard(name)
        self._tell(name, f"{reason.rstrip('.')}. {_WHOLE}")

    def tell_draws(self, name: str, operation: str) -> None:
        """Says once that a step draws other numbers than without a strategy."""
        self._tell(
            f"{name} draws",
            f"with TensorFlow's {operation}, whose numbers depend on the graph: they are not those "
            "without tfdist. Draw with keras.random and a SeedGenerator.",
        )

    def _tell(self, name: str, what: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self._show(f"{name} {what}")

    def _make_apply(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(apply)
        def apply_and_tell(optimizer: keras.optimizers.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if tf.distribute.in_cross_replica_context():
                name, place = _find_caller()
                if place or not any(told.startswith(f"{name} (") for told in self._told):
                    self.tell_whole(
                        f"{name} ({place})" if place else name,
                        "applies gradients, but is no tf.function of a batch that Python calls. "
                        "Write @tf.function above one, or use tfdist.Loop",
                    )
            return apply(optimizer, *args, **kwargs)

        return apply_and_tell

    def _make_function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(made: Any, function: Callable[..., Any]) -> Any:
            is_own = not _is_of_library(getattr(function, "__module__", None))
            is_step = not _find_uses(function).isdisjoint(_UPDATES | {_TAPE})
            return _ScriptStep(made, self) if is_own and is_step else made

        @functools.wraps(original)
        def function(func: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            made = original(func, *args, **kwargs)
            return wrap(made, func) if func is not None else lambda f: wrap(made(f), f)

        return function


class _ScriptStep:
    """A script's `tf.function`, which replicas compute where they can divide its batches."""

    def __init__(self, function: Any, steps: OwnSteps, divided: OwnStep | None = None):
        self._function, self._steps = function, steps
        self._divided = divided or OwnStep(
            function, steps.strategy, steps.step_options, returns_tensors=True
        )
        functools.update_wrapper(self, self._divided.function)
        self._may_divide: bool | None = None  # None until it is called
        self._has_run = self._has_looked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_function"], name)

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        if owner is None:
            return self
        key = f"_tfdist_step_{id(self)}"
        if key not in vars(owner):
            function = self._function.__get__(owner, kind)
            vars(owner)[key] = _ScriptStep(function, self._steps, self._divided.bind(owner))
        return vars(owner)[key]

    @tf.autograph.experimental.do_not_convert
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._can_divide(args, kwargs):
            return self._compute_whole(args, kwargs)
        name = _describe(self._divided.function)
        try:
            found = self._divided(*args, **kwargs)
        except (TrainingError, UnlikeWorkersError):
            raise
        except Exception as error:
            # An error of anything else after the first step is the script's own.
            if self._has_run and not isinstance(error, TfdistError):
                raise
            self._may_divide = False
            if not _find_uses(self._divided.function).isdisjoint(_UPDATES):
                reason = _explain(error, self._divided.function, args, kwargs)
                self._steps.tell_whole(name, f"is not divided: {reason}")
            return self._compute_whole(args, kwargs)
        self._has_run = True
        self._steps.tell_divided(name)
        return found

    def _compute_whole(self, args: Sequence[object], kwargs: dict[str, Any]) -> Any:
        found = self._function(*args, **kwargs)
        if not self._has_looked and not tf.inside_function() and global_seed() is not None:
            self._has_looked = True
            graph = self._function.get_concrete_function(*args, **kwargs).graph
            drawing = sorted({node.op for node in list_operations(graph)} & DRAWS)
            if drawing:
                self._steps.tell_draws(_describe(self._divided.function), drawing[0])
        return found

    def _can_divide(self, args: Sequence[object], kwargs: dict[str, Any]) -> bool:
        if self._may_divide is False or tf.inside_function():
            return False
        if not tf.distribute.in_cross_replica_context() or tf.config.functions_run_eagerly():
            return False
        if self._may_divide is None:
            parts = self._divided.find_parts(args, kwargs)
            has_layer = any(isinstance(part, keras.Layer) for part in parts)
            updated = BaseOptimizer, keras.metrics.Metric
            is_step = _TAPE in _find_uses(self._divided.function)
            self._may_divide = has_layer and (is_step or any(isinstance(p, updated) for p in parts))
        is_divided = any(isinstance(v, _DIVIDED) for v in tf.nest.flatten((args, kwargs)))
        return self._may_divide and not is_divided


def _find_uses(function: Any) -> set[str]:
    """Returns the names that the code of a Python function uses."""
    function = getattr(function, "__func__", function)
    return set(list_names(function.__code__)) if isinstance(function, types.FunctionType) else set()


def _describe(function: Any) -> str:
    code = function.__code__
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def _explain(
    error: Exception, function: Any, args: Sequence[object], kwargs: dict[str, Any]
) -> str:
    """Returns why replicas cannot divide a call, in one line."""
    cause = error.__cause__ if isinstance(error, TfdistError) else error
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    arrays = [
        (name, leaf.shape)
        for name, value in given.items()
        for leaf in tf.nest.flatten(value)
        if len(getattr(leaf, "shape", ()))
    ]
    if cause is None or len(arrays) != 1:
        return shorten_error(error)
    ((name, shape),) = arrays
    return (
        f"`{name}` of shape {list(shape)} is no batch of which it can compute a part: "
        f"{shorten_error(cause)}"
    )


def _find_caller() -> tuple[str, str]:
    """Returns the name and place of the function, not of a library, that is running.

    The place is empty if it is traced, because it is then in a file that AutoGraph wrote.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_of_library(frame.f_globals.get("__name__")):
        frame = frame.f_back
    code = frame.f_code
    if "__autograph_generated_file" in code.co_filename:
        return code.co_name.removeprefix("tf__"), ""
    name = "The script" if code.co_name == "<module>" else code.co_name
    return name, f"{code.co_filename}:{code.co_firstlineno}"


def _is_of_library(module: str | None) -> bool:
    return (module or "").split(".")[0] in LIBRARIES
