"""What a worker raises when another one does not take part in a call."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.errors import TrainingError
from tfdist.internals import context
from tfdist.training.workers.communication import UnlikeWorkersError, Workers
from tfdist.training.workers.last_words import LOST_PEER, LastWords, describe, hear, read_key
from tfdist.training.workers.program import describe_call, describe_program

_MEETINGS = ("fit", "evaluate", "predict")  # before each of these, workers compare their programs
_IN_CALL = "tfdist/in_call"  # in TensorFlow's coordination service
_MISMATCH = "Shape mismatch in the collective instance"


def explain_lost_worker(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a trainer's method say what happened when another worker does not take part.

    The method raises a `TrainingError` when a worker is lost or has ended its program, and a
    `TfdistError` when it has called another method.
    """

    @functools.wraps(method)
    def explained(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        workers: Workers = trainer.engine.workers
        if workers.count == 1:
            return method(trainer, *args, **kwargs)
        # The user knows a step of a loop by the name of its function.
        is_step = method.__name__ == "run_step"
        name = type(trainer.model).__name__ if is_step else method.__name__
        with taking_part(workers, name, find_step=lambda: int(trainer.step)):
            program = {}
            if name in _MEETINGS or trainer.compares_next:
                program = describe_call(method, (trainer, *args), kwargs)
                program |= describe_program(trainer.model)
            workers.meet(name, program)
            return method(trainer, *args, **kwargs)

    return explained


@contextlib.contextmanager
def taking_part(
    workers: Workers, name: str, *, find_step: Callable[[], int] = lambda: 0
) -> Iterator[None]:
    """Says what happened when another worker does not take part in a call.

    Args:
      name: what is called.
      find_step: returns the number of updates made.

    Raises:
      TrainingError: a worker is lost, or has ended its program.
      UnlikeWorkersError: a worker takes part in another call.
    """
    last_words = LastWords.of(workers.index)
    last_words.keep(None)
    try:
        with last_words.waking_others(workers.count):
            try:
                yield
            except tf.errors.InvalidArgumentError as error:  # before this one waits for others
                unlike = _explain_mismatch(error, workers, name)
                if unlike is None:
                    raise
                raise unlike from error
    except LOST_PEER as error:
        last_words.keep("")  # the lost worker is to be named, not this one
        raise _explain_lost(error, workers, name, find_step) from error
    except Exception as error:
        last_words.keep(describe(error))
        raise
    finally:
        last_words.speak_first()


@contextlib.contextmanager
def building_alike(workers: Workers) -> Iterator[None]:
    """Says what happened when workers build different models, whose initial values they share.

    Raises:
      TrainingError: a worker is lost, or has ended its program.
      UnlikeWorkersError: variables have other shapes on another worker.
    """
    if workers.count == 1:
        yield
        return
    with taking_part(workers, "Trainer"):
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            if _MISMATCH not in error.message:
                raise
            shapes = " and ".join(dict.fromkeys(re.findall(r"shape (\[[^\]]*\])", error.message)))
            raise UnlikeWorkersError(
                f"Workers build different models: a variable has the shapes {shapes}. Build the "
                "same models on all workers, in the same order."
            ) from error


def _explain_mismatch(
    error: tf.errors.OpError, workers: Workers, name: str
) -> UnlikeWorkersError | None:
    """Returns the error for a collective whose other side is in another call; None for others."""
    if _MISMATCH not in error.message:
        return None
    with contextlib.suppress(tf.errors.OpError):
        context.context().set_config_key_value(f"{_IN_CALL}/{workers.index}", name)
    others = [worker for worker in range(workers.count) if worker != workers.index]
    calls = {worker: read_key(f"{_IN_CALL}/{worker}", workers.count) for worker in others}
    if all(call == name for call in calls.values()):
        return None
    told = [
        f"worker {each} is in `{call}`" for each, call in calls.items() if call not in (None, name)
    ]
    other = told[0] if told else "another worker is not"  # or has not told yet
    return UnlikeWorkersError(
        f"Worker {workers.index} is in `{name}` while {other}. "
        "Call the same on every worker, in the same order, also in callbacks."
    )


def _explain_lost(
    error: tf.errors.OpError, workers: Workers, name: str, find_step: Callable[[], int]
) -> TrainingError:
    heard = {worker: hear(worker, workers.count) for worker in range(workers.count)}
    for worker, reason in heard.items():
        if reason:
            return TrainingError(
                f"The program of worker {worker} failed while worker {workers.index} was in "
                f"`{name}`: {reason.rstrip('.')}. Start all workers again once it is mended."
            )
    ended = [worker for worker, reason in heard.items() if reason is not None]
    if ended:
        return TrainingError(
            f"The program of worker {ended[0]} ended while worker {workers.index} was in "
            f"`{name}`, which all workers must call and finish. See the output of worker "
            f"{ended[0]}."
        )
    peer = _find_peer(error.message)
    if name != "fit":
        return TrainingError(
            f"Lost {peer} while worker {workers.index} was in `{name}`, which all workers must "
            "call. See the message of the lost worker, or call it on every worker."
        )
    return TrainingError(
        f"Lost {peer} after step {find_step()}. Start all workers again with the same command: the "
        "run continues from its last checkpoint."
    )


def _find_peer(message: str) -> str:
    """Returns the task that an error of TensorFlow is about."""
    # The coordination service's list names the lost task, other text may name who reported it.
    unhealthy = re.search(r"unhealthy[^/]*/job:(\w+)/replica:\d+/task:(\d+)", message)
    task = unhealthy or re.search(
        r"(?:target|task|from) (?:name: )?/job:(\w+)/(?:replica:\d+/)?task:(\d+)", message
    )
    return f"{task[1]} {task[2]}" if task else "another worker"
