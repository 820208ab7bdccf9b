"""Keeps a strategy's scope open for a whole script: in its threads, and whatever it calls."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.announcing import print_message
from tfdist.errors import TfdistError
from tfdist.internals import GraphStack, loss_module
from tfdist.replacing import find_function, replace_always, replaced
from tfdist.strategies.registry import find_traits

OpenScope = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def keeping_scope(strategy: tf.distribute.Strategy, open_scope: OpenScope) -> Iterator[None]:
    """Opens a strategy's scope, in this thread and in each one that starts meanwhile.

    Args:
      strategy: the strategy. It also takes the place of those that the script builds.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            # The scope is in TensorFlow's default graph, which `clear_session` would throw away.
            (GraphStack, "reset", lambda graphs: None),
            (
                threading.Thread,
                "start",
                _start_in_scope(find_function(threading.Thread, "start"), open_scope),
            ),
        ):
            stack.enter_context(replaced(owner, name, value, in_all_threads=True))
        stack.enter_context(_computing_whole(strategy))
        stack.enter_context(_taking_the_place(strategy))
        stack.enter_context(open_scope())
        yield


@contextlib.contextmanager
def _computing_whole(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Lets a script compute losses and apply gradients outside of `fit`, as on one device.

    Keras divides a loss by the number of replicas, which here compute nothing of it.
    """

    is_outside = tf.distribute.in_cross_replica_context
    average = find_function(tf.nn, "compute_average_loss")
    add = find_function(tf.nn, "scale_regularization_loss")

    def in_step(scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda v: v if is_outside() else scale(v)

    @functools.wraps(average)
    def compute_average_loss(
        per_example_loss: tf.Tensor,
        sample_weight: tf.Tensor | None = None,
        global_batch_size: int | None = None,
    ) -> Any:
        if global_batch_size is None and is_outside():
            global_batch_size = tf.shape(per_example_loss)[0]
        return average(per_example_loss, sample_weight, global_batch_size)

    @functools.wraps(add)
    def scale_regularization_loss(regularization_loss: tf.Tensor) -> Any:
        return tf.reduce_sum(regularization_loss) if is_outside() else add(regularization_loss)

    with contextlib.ExitStack() as stack:
        for function in (compute_average_loss, scale_regularization_loss):
            place = tf.nn, function.__name__, function
            stack.enter_context(replaced(*place, in_all_threads=True))
        if strategy.num_replicas_in_sync > 1:
            for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
                scale = in_step(find_function(loss_module, name))
                stack.enter_context(replaced(loss_module, name, scale, in_all_threads=True))
        yield


def _start_in_scope(start: Callable[[Any], None], open_scope: OpenScope) -> Callable[[Any], None]:
    @functools.wraps(start)
    def start_in_scope(thread: threading.Thread) -> None:
        run = thread.run

        def run_in_scope() -> None:
            with open_scope():
                run()

        # TensorFlow's own threads, such as those of replicas, enter what they need.
        code = [type(thread), getattr(thread, "_target", None)]
        if not any((getattr(c, "__module__", None) or "").startswith("tensorflow.") for c in code):
            thread.run = run_in_scope  # type: ignore[method-assign]
        start(thread)

    return start_in_scope


@contextlib.contextmanager
def _taking_the_place(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Gives a script the strategy of the launch when it builds one of a similar kind.

    TensorFlow does not mix strategies. One of replicas may be any other of replicas, because the
    results are equal.

    Raises:
      TfdistError: the script builds a strategy that this one cannot stand for.
    """
    kinds = [
        tf.distribute.MirroredStrategy,
        tf.distribute.MultiWorkerMirroredStrategy,
        tf.distribute.experimental.CentralStorageStrategy,
        tf.distribute.OneDeviceStrategy,
        tf.distribute.TPUStrategy,
        tf.distribute.ParameterServerStrategy,
    ]
    of_replicas, traits = kinds[:3], find_traits(strategy)
    named: set[str] = set()

    def new(kind: type, *args: Any, **kwargs: Any) -> Any:
        is_similar = kind in of_replicas and not (traits.has_servers or traits.local_updates)
        if not (is_similar or isinstance(strategy, kind)):
            raise TfdistError(
                f"Cannot build {kind.__name__} in a script that runs under "
                f"{type(strategy).__name__}. Leave it out, or start the script by itself."
            )
        if kind.__name__ not in named:
            named.add(kind.__name__)
            text = f"tfdist.run: the script's {kind.__name__} is the {type(strategy).__name__} of "
            print_message(f"{text}the command, with {strategy.num_replicas_in_sync} replicas.")
        return strategy

    def make_init(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if self is not strategy:
                original(self, *args, **kwargs)

        return init

    set_strategy = find_function(tf.distribute, "experimental_set_strategy")

    def set_other(other: tf.distribute.Strategy | None) -> None:
        if other is not strategy and other is not None:
            set_strategy(other)

    with contextlib.ExitStack() as stack:
        places: list[tuple[Any, str, Any]] = [
            (tf.distribute, "experimental_set_strategy", set_other),
            *((kind, "__init__", make_init(find_function(kind, "__init__"))) for kind in kinds),
            *((kind, "__new__", new) for kind in kinds),
        ]
        for kind in kinds:
            stack.callback(replace_always, kind, "__new__", _make_any)
        for place in places:
            stack.enter_context(replaced(*place, in_all_threads=True))
        yield


def _make_any(kind: type, *args: Any, **kwargs: Any) -> Any:
    """Does what `object.__new__` does in a class that has no other.

    A class that once had one takes no arguments without it, in Python 3.11.
    """
    return object.__new__(kind)
