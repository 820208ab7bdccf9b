"""A model's own `fit`, `evaluate` and the like, which run with a trainer in the place of Keras.

A model may override these methods to prepare its data, as the tasks of keras-hub do, and call
Keras's method in the end. The model's method runs as it is written; a route sends the calls of
Keras's to a trainer. Routes replace the methods of `keras.Model` while any of them is open, but
other models, and other threads unless a route is for all of them, still reach Keras.
"""

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras

from tfdist.errors import TfdistError
from tfdist.replacing import find_function, replaced

METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
# What a trainer's `fit` accepts in addition to Keras's, which a model's own `fit` does not know.
_ADDED = ("max_steps", "augmentation", "checkpoint_every", "checkpoint_every_s")
_CHECK = "_assert_compile_called"
_MAKE = "make_train_function"

_of_all_threads: list["Route"] = []
_of_thread = threading.local()


class Route(Protocol):
    """Where the calls of Keras's methods go."""

    def takes(self, model: keras.Model) -> bool:
        """Returns whether it is the route for a model."""

    def call(
        self, name: str, model: keras.Model, args: Sequence[object], kwargs: dict[str, Any]
    ) -> Any:
        """Runs in the place of Keras's method."""

    def refuse(self, name: str, model: keras.Model) -> None:
        """Is called when Keras's method runs although nothing sent the call there."""


@contextlib.contextmanager
def open_route(route: Route, *, for_all_threads: bool = False) -> Iterator[None]:
    """Sends the calls of Keras's methods, in this or in all threads, to a route."""
    routes = _of_all_threads if for_all_threads else _list_own_routes()
    with contextlib.ExitStack() as stack:
        for name in (*METHODS, _CHECK, _MAKE):
            make = {_CHECK: _make_check, _MAKE: _make_maker}.get(name, _make_method)
            method = make(name, find_function(keras.Model, name))
            # In all threads: a model may call its methods from another one.
            stack.enter_context(replaced(keras.Model, name, method, in_all_threads=True))
        routes.append(route)
        stack.callback(routes.remove, route)
        yield


def find_own_method(model: keras.Model, name: str) -> Callable[..., Any] | None:
    """Returns a method that a model's class, or the model itself, overrides; None if it does not.

    Must be called while a route is open.
    """
    is_own = name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name)
    return getattr(model, name) if is_own else None


def run_own_first(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a trainer's method run the model's own method of the same name, if there is one.

    Where that calls Keras's, the trainer's method runs. `inner` of the result is that method.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        route = TrainerRoute(trainer)
        with open_route(route):
            own = find_own_method(trainer.model, name)
            if own is None:
                return method(trainer, *args, **kwargs)
            route.added[name], kwargs = _split_arguments(own, kwargs)
            found = own(*args, **kwargs)
        if name not in route.called:
            _check_unused(trainer, name, route.added[name])
        return found

    call.inner = method  # type: ignore[attr-defined]
    return call


class TrainerRoute:
    """Sends the calls of Keras's methods to a trainer.

    Attributes:
      added: method -> the arguments that the model's own method does not know.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._others: dict[int, Any] = {}
        self.added: dict[str, dict[str, Any]] = {}
        self.called: set[str] = set()

    def takes(self, model: keras.Model) -> bool:
        trainer = self._trainer
        if model is getattr(trainer, "model", None):
            return True
        # Another model of the same strategy: Keras would divide its batches in its own way.
        return self._is_divided and model._distribute_strategy is trainer.strategy

    def call(
        self, name: str, model: keras.Model, args: Sequence[object], kwargs: dict[str, Any]
    ) -> Any:
        trainer = self._trainer
        if model is not trainer.model:
            if id(model) not in self._others:
                self._others[id(model)] = trainer.make_other(model)
            return call_inner(self._others[id(model)], name, args, kwargs)
        self.called.add(name)
        return call_inner(trainer, name, args, {**kwargs, **self.added.get(name, {})})

    def refuse(self, name: str, model: keras.Model) -> None:
        if not self._is_divided:
            return
        if name not in METHODS:
            raise TfdistError(
                f"Cannot divide {name} of {type(model).__name__}, of Keras. Call fit or "
                "train_on_batch instead."
            )
        raise TfdistError(
            f"Cannot divide {name} of {type(model).__name__}: it calls a method that was "
            f"looked up before the trainer was made. Call keras.Model.{name}(model, ...) "
            f"instead, or super().{name}(...) in a class."
        )

    @property
    def _is_divided(self) -> bool:
        engine = getattr(self._trainer, "engine", None)
        return engine is not None and engine.is_divided


def call_inner(trainer: Any, name: str, args: Sequence[object], kwargs: Any) -> Any:
    """Calls a trainer's method in the place of Keras's, without the model's own."""
    is_cached = kwargs.pop("_use_cached_eval_dataset", False)  # Keras's `fit` validates
    if is_cached and trainer.validate_cached is not None:
        logs = trainer.validate_cached(is_stopped=lambda: False)
        is_named = kwargs.get("return_dict")
        return logs if is_named else trainer.model._flatten_metrics_in_order(logs)
    return getattr(type(trainer), name).inner(trainer, *args, **kwargs)


def _split_arguments(
    own: Callable[..., Any], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments that a model's own method does not know, and those that it knows."""
    parameters = inspect.signature(own).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    added = {n: kwargs[n] for n in _ADDED if n in kwargs and n not in parameters}
    known = {name: value for name, value in kwargs.items() if name not in added}
    size = known.pop("global_batch_size", None) if "global_batch_size" not in parameters else None
    if size is not None:
        is_free = known.get("batch_size") is None and (takes_all or "batch_size" in parameters)
        if is_free:
            known["batch_size"] = size
        else:
            added["global_batch_size"] = size
    return added, known


def _check_unused(trainer: Any, name: str, added: dict[str, Any]) -> None:
    """Says what had no effect, because a model's own method never called Keras's."""
    own = f"{type(trainer.model).__name__}.{name}"
    asked = [*(["checkpoint_dir"] if trainer.recovery and name == "fit" else []), *added]
    if asked:
        raise TfdistError(
            f"{own} never called keras.Model.{name}, so {', '.join(asked)} had no effect. Call "
            f"super().{name}(...) in it, or leave out {', '.join(asked)}."
        )
    if trainer.engine.is_divided and name in ("fit", "train_on_batch"):
        warnings.warn(
            f"{own} never called keras.Model.{name}: the strategy had no part in it.", stacklevel=3
        )


def _list_own_routes() -> list[Route]:
    if not hasattr(_of_thread, "routes"):
        _of_thread.routes, _of_thread.inside = [], set()
    return _of_thread.routes


def _find_route(model: keras.Model) -> Route | None:
    routes = [*_of_all_threads, *_list_own_routes()]
    return next((route for route in reversed(routes) if route.takes(model)), None)


def _make_method(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what replaces a method, and sends its calls to the route of the model."""

    @functools.wraps(original)
    def method(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        route = _find_route(model)
        if route is None:
            return original(model, *args, **kwargs)
        inside: set[tuple[int, str]] = _of_thread.inside
        key = (id(model), name)
        is_nested = key in inside  # a callback may call the method that calls it
        inside.add(key)
        try:
            if not model.compiled and not name.startswith("predict"):
                return original(model, *args, **kwargs)
            return route.call(name, model, args, kwargs)
        finally:
            if not is_nested:
                inside.discard(key)

    return method


def _make_check(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what replaces a check that Keras's methods begin with."""

    @functools.wraps(original)
    def check(model: keras.Model, method: str | None = None) -> None:
        route = _find_route(model)
        if route is not None and method in METHODS and (id(model), method) not in _of_thread.inside:
            route.refuse(method, model)
        original(model, method)

    return check


def _make_maker(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what replaces `make_train_function`: a route may refuse the function that it makes.

    Keras's function would divide a batch in its own way.
    """

    @functools.wraps(original)
    def make(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        before = model.train_function
        original(model, *args, **kwargs)
        made, route = model.train_function, _find_route(model)
        replicas = getattr(model._distribute_strategy, "num_replicas_in_sync", 1)
        if route is None or made is before or replicas == 1:
            return made

        def train_function(iterator: Iterator[Any]) -> Any:
            route.refuse("train_function", model)
            return made(iterator)

        model.train_function = train_function
        return train_function

    return make
