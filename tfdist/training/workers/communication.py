"""The processes that train together, and what they communicate besides gradients."""

import atexit
import base64
import contextlib
import functools
import hashlib
import json
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.devices import measure_peak_memory_per_device
from tfdist.errors import TfdistError, TrainingError, shorten_error
from tfdist.internals import context
from tfdist.launch.pulse import STEP, open_pulse
from tfdist.strategies.registry import find_traits
from tfdist.training.workers.program import describe_call, describe_program

_MEETINGS = ("fit", "evaluate", "predict")  # before each of these, workers compare their programs
# In TensorFlow's coordination service.
_ENDED, _FAILED, _IN_CALL = "tfdist/ended", "tfdist/failed", "tfdist/in_call"
_ANSWER_MS, _ALIKE_MS = 2000, 5000  # workers fail at about the same step if they fail alike
_SUM = "_tfdist_sum"  # of a strategy
_MISMATCH = "Shape mismatch in the collective instance"
# The errors that TensorFlow raises when a peer is lost.
LOST_PEER = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)


class UnlikeWorkersError(TfdistError):
    """Workers that must be alike have different data, weights or settings."""


class Workers:
    """The workers of a strategy; a single process if the strategy has no others.

    Every method that communicates must be called by all workers, in the same order.

    Attributes:
      index: the index of this worker; 0 is the chief.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        channel = strategy.channel if find_traits(strategy).local_updates else strategy
        self.count, self.index = _find_place(channel)
        self.pulse = open_pulse()
        self._channel = channel
        # Under local SGD, each worker has its own strategy, which does not know the others.
        self._has_own_strategy = channel is not strategy
        self.num_replicas = strategy.num_replicas_in_sync * (
            self.count if self._has_own_strategy else 1
        )
        local = channel.num_replicas_in_sync // self.count
        own = range(self.index * local, (self.index + 1) * local)
        # Processes may have different numbers of logical replicas.
        self._own = getattr(channel.extended, "replicas", own)
        # One for all of a strategy: sums by traces of other shapes on other workers hang.
        if _SUM not in vars(channel):
            vars(channel)[_SUM] = tf.function(self.sum_in_graph, reduce_retracing=True)
        self._sum = vars(channel)[_SUM]

    @property
    def replicas(self) -> range:
        """The replicas of this process among those of all workers."""
        if not self._has_own_strategy:
            return self._own
        each = self.num_replicas // self.count
        return range(self.index * each, (self.index + 1) * each)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files of the run."""
        return self.index == 0

    def sum(self, values: np.ndarray | tf.Tensor) -> np.ndarray:
        """Returns the sum of the workers' vectors: [n], of the same n and dtype on each."""
        if self.count == 1 or not values.shape[0]:  # TensorFlow crashes on an empty vector
            return np.asarray(values)
        with self.pulse.at(STEP):
            return self._sum(tf.convert_to_tensor(values)).numpy()

    def sum_in_graph(self, values: tf.Tensor) -> tf.Tensor:
        """Returns `sum` as a tensor, for several workers; called in a `tf.function`."""

        def reduce(values: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            # A worker counts once, regardless of its number of replicas.
            if len(self._own) > 1:
                first = tf.equal(context.replica_id_in_sync_group, self._own.start)
                values = tf.where(first, values, tf.zeros_like(values))
            values = tf.identity(values)  # on this replica's device, which the sum looks for
            return context.all_reduce(tf.distribute.ReduceOp.SUM, values)

        reduced = self._channel.run(reduce, args=(values,))
        return self._channel.experimental_local_results(reduced)[0]

    def any(self, *flags: bool) -> list[bool]:
        """Returns, for each flag, whether it is set on any worker."""
        return [bool(number) for number in self.sum(np.array(flags, "f8"))]

    def wait_for_all(self) -> None:
        """Waits until every worker has called this."""
        self.any(False)

    def meet(self, name: str, program: Mapping[str, Any]) -> None:
        """Checks that all workers call the same method or step, with the same program.

        Args:
          program: what must be the same on all workers, by a name for the user.
        """
        table = np.zeros([2, self.count])
        table[:, self.index] = _hash(name), _hash(json.dumps(program, sort_keys=True))
        names, programs = self.sum(table.ravel()).reshape(table.shape)
        if np.any(names != names[0]):
            chief, *others = self.share_json(name)
            worker = next(place for place, other in enumerate(others) if other != chief)
            raise UnlikeWorkersError(
                f"Worker {worker + 1} calls `{others[worker]}` while the chief calls `{chief}`. "
                "Call the same on every worker, in the same order."
            )
        if np.any(programs != programs[0]):
            self._refuse_different_programs(program)

    def _refuse_different_programs(self, program: Mapping[str, Any]) -> None:
        chief, *others = self.share_json(program)
        for worker, other in enumerate(others, start=1):
            for name in {**chief, **other}:
                ours, theirs = (json.dumps(p.get(name)) for p in (chief, other))
                if ours != theirs:
                    raise UnlikeWorkersError(
                        f"{name} is {theirs} on worker {worker} and {ours} on the chief. Run the "
                        "same program on every worker, and set one seed for all that it draws."
                    )

    def ask_chief(self, number: int) -> int:
        """Returns the chief's number."""
        mine = number if self.is_chief else 0
        return int(self.sum(np.array([mine], "f8"))[0])

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Returns the rows [rows, ...] of all workers, in order; their numbers may differ."""
        if self.count == 1:
            return rows
        if rows.dtype == object:
            texts = [base64.b64encode(bytes(text)).decode() for text in rows.reshape(-1)]
            found = [base64.b64decode(text) for part in self.share_json(texts) for text in part]
            return np.array(found, object).reshape(-1, *rows.shape[1:])
        # As integers, whose sums keep all bits and for which there is a sum whatever the type.
        row_bytes = rows.dtype.itemsize * math.prod(rows.shape[1:])
        kind = next(kind for kind in ("i8", "i4", "u1") if row_bytes % np.dtype(kind).itemsize == 0)
        values = np.frombuffer(np.ascontiguousarray(rows).tobytes(), kind)
        lengths = np.zeros(self.count, "f8")
        lengths[self.index] = len(rows)
        ends = np.cumsum(self.sum(lengths)).astype(int)
        width = row_bytes // np.dtype(kind).itemsize
        table = np.zeros((ends[-1], width), "i4" if kind == "u1" else kind)
        table[ends[self.index] - len(rows) : ends[self.index]] = values.reshape(len(rows), width)
        table = self.sum(table.reshape(-1)).astype(kind)
        whole = np.frombuffer(bytearray(table.tobytes()), rows.dtype)
        return whole.reshape(ends[-1], *rows.shape[1:])

    def share_json(self, value: object) -> list[Any]:
        """Returns every worker's value, in the order of the workers."""
        text = np.frombuffer(json.dumps(value).encode(), "u1").astype("f8")
        lengths = self.gather(np.array([len(text)], "f8")).astype(int)
        texts = np.split(self.gather(text), np.cumsum(lengths)[:-1])
        return [json.loads(text.astype("u1").tobytes()) for text in texts]

    def measure_peak_memory(self) -> dict[str, int]:
        """Returns the peak memory of each device of each worker, in bytes.

        Returns:
          Device -> bytes, as `measure_peak_memory_per_device` returns them. With several workers,
          a device is named like `worker 0/CPU`; the chief is worker 0.
        """
        peaks = measure_peak_memory_per_device()
        if self.count == 1:
            return peaks
        # Only numbers can be gathered: the worker, its GPU or -1 for its CPU, and the bytes.
        rows = [
            (self.index, int(name.partition(":")[2] or -1), peak) for name, peak in peaks.items()
        ]
        return {
            f"worker {int(worker)}/{'CPU' if gpu < 0 else f'GPU:{int(gpu)}'}": int(peak)
            for worker, gpu, peak in self.gather(np.array(rows, "f8"))
        }

    def place_input(self, context: tf.distribute.InputContext) -> tf.distribute.InputContext:
        """Returns a pipeline's input context among all workers, of which it may know only one."""
        if not self._has_own_strategy:
            return context
        return tf.distribute.InputContext(
            num_input_pipelines=self.count,
            input_pipeline_id=self.index,
            num_replicas_in_sync=self.num_replicas,
        )


def _find_place(channel: tf.distribute.Strategy) -> tuple[int, int]:
    """Returns the number of workers, and the index of this process among them."""
    if not find_traits(channel).has_workers:
        return 1, 0
    resolver = channel.cluster_resolver
    cluster: dict[str, Sequence[Any]] = resolver.cluster_spec().as_dict()
    chiefs = len(cluster.get("chief", ()))
    count = chiefs + len(cluster.get("worker", ()))
    if count < 2:
        return 1, 0
    return count, resolver.task_id + (chiefs if resolver.task_type == "worker" else 0)


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
    last_words = _LastWords.of(workers.index)
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
        last_words.keep(_describe(error))
        raise
    finally:
        last_words.speak_first()


def _explain_mismatch(
    error: tf.errors.OpError, workers: Workers, name: str
) -> UnlikeWorkersError | None:
    """Returns the error for a collective whose other side is in another call; None for others."""
    if _MISMATCH not in error.message:
        return None
    with contextlib.suppress(tf.errors.OpError):
        context.context().set_config_key_value(f"{_IN_CALL}/{workers.index}", name)
    others = [worker for worker in range(workers.count) if worker != workers.index]
    calls = {worker: _read_key(f"{_IN_CALL}/{worker}", workers) for worker in others}
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
    heard = {worker: _hear(worker, workers) for worker in range(workers.count)}
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


def _hash(text: str) -> int:
    """Returns a number for a text, which a float64 can hold."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())


class _LastWords:
    """Tells the other workers how this process's program ends, unless it is killed."""

    def __init__(self, worker: int):
        self._worker, self._key = worker, f"{_ENDED}/{worker}"
        self._reason: str | None = None
        self._in_use = threading.Lock()
        self._thread: int | None = None
        self._calls = 0

    @classmethod
    @functools.cache
    def of(cls, worker: int) -> "_LastWords":
        """Returns those of this process."""
        return cls(worker)

    def keep(self, reason: str | None) -> None:
        """Takes the error that a method has raised; "" to tell nothing, None if there is none."""
        self._reason = reason

    def speak_first(self) -> None:
        """Makes the process tell before all else at its exit, which may forget the last error."""
        atexit.unregister(self._tell)
        atexit.register(self._tell)

    @contextlib.contextmanager
    def waking_others(self, count: int) -> Iterator[None]:
        """Lets no other worker wait for ever if a method fails here alone, and the script goes on.

        A second thread that would use the workers at the same time fails, too: its steps could meet
        those of another thread elsewhere.
        """
        if self._thread == threading.get_ident():  # `fit` evaluates
            yield
            return
        if not self._in_use.acquire(blocking=False):
            reason = (
                "Two threads train, evaluate or predict on several workers at the same time, and "
                "their steps would get mixed. Let one begin when the other has ended."
            )
            self._abandon(reason)
            raise TfdistError(reason)
        self._thread = threading.get_ident()
        self._calls += 1
        try:
            yield
        except Exception as error:
            if not isinstance(error, LOST_PEER) and not self._have_failed(count):
                self._abandon(_describe(error))
            raise
        finally:
            self._thread = None
            self._in_use.release()

    def _have_failed(self, count: int) -> bool:
        """Returns whether all other workers fail in the same call, too, or soon do."""
        keys = [f"{_FAILED}/{self._calls}/{worker}" for worker in range(count)]
        service = context.context()
        try:
            service.set_config_key_value(keys[self._worker], "failed")
            for key in keys:
                service.get_config_key_value(key, _ALIKE_MS)
        except tf.errors.OpError:
            return False
        return True

    def _abandon(self, reason: str) -> None:
        """Makes what the workers compute together fail for all of them, now and later."""
        with contextlib.suppress(tf.errors.OpError):
            context.context().set_config_key_value(self._key, f"ended {reason}")
        context.context().abort_collective_ops(tf.errors.UNAVAILABLE, reason)

    def _tell(self) -> None:
        error = getattr(sys, "last_value", None)
        reason = self._reason
        if reason is None and error is not None:
            reason = _describe(error)
        if reason != "":
            with contextlib.suppress(tf.errors.OpError):
                context.context().set_config_key_value(self._key, f"ended {reason or ''}")


def _describe(error: BaseException) -> str:
    """Returns an error's class and message; TensorFlow's classes hide those of Python's errors."""
    text = shorten_error(error)
    return text if isinstance(error, tf.errors.OpError) else f"{type(error).__name__}: {text}"


def _hear(worker: int, workers: Workers) -> str | None:
    """Returns why the program of a worker ended, "" without an error, None if nothing is known."""
    told = _read_key(f"{_ENDED}/{worker}", workers)
    return None if told is None else told.partition(" ")[2]


def _read_key(key: str, workers: Workers) -> str | None:
    """Returns what a worker has told the others; None if it does not do so soon."""
    try:
        timeout_ms = max(_ANSWER_MS // workers.count, 10)
        return str(context.context().get_config_key_value(key, timeout_ms))
    except tf.errors.OpError:
        return None


def _find_peer(message: str) -> str:
    """Returns the task that an error of TensorFlow is about."""
    # The coordination service's list names the lost task, other text may name who reported it.
    unhealthy = re.search(r"unhealthy[^/]*/job:(\w+)/replica:\d+/task:(\d+)", message)
    task = unhealthy or re.search(
        r"(?:target|task|from) (?:name: )?/job:(\w+)/(?:replica:\d+/)?task:(\d+)", message
    )
    return f"{task[1]} {task[2]}" if task else "another worker"
