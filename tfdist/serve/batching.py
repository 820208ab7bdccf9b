"""Puts requests that arrive at about the same time into one batch.

TensorFlow has a batcher of its own, `tf.raw_ops.BatchFunction`. It is not used here because, in
TensorFlow 2.21, one request of another shape fails the whole batch, a waiting request occupies a
thread and cannot be taken back, and the threads remain when a model is unloaded.
"""

import asyncio
import collections
import functools
from collections.abc import Callable, Collection, Hashable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfdist.errors import shorten_error
from tfdist.serve.options import BatchingOptions
from tfdist.serve.servable import Arrays, RequestError, Servable, Signature

Outputs = dict[str, np.ndarray]


@dataclass(eq=False)
class _Part:
    """Up to `max_batch_size` rows of a request."""

    servable: Servable
    signature: Signature
    inputs: Arrays
    outputs: frozenset[str]
    num_rows: int
    due: float
    answer: asyncio.Future[Outputs] = field(repr=False)


class Batcher:
    """Queues parts of requests, and runs them in batches; for one event loop.

    Requests share a batch if they are for the same signature and outputs of the same version, and
    the shapes of their rows are equal.

    Args:
      observe: called with the number of rows of every batch.
    """

    def __init__(
        self,
        options: BatchingOptions,
        executor: Executor,
        *,
        num_threads: int,
        observe: Callable[[int], None] = lambda rows: None,
    ):
        self._options = options
        self._executor = executor
        self._free_threads = num_threads
        self._observe = observe
        self._queues: dict[Hashable, collections.deque[_Part]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.num_waiting = 0

    @property
    def capacity(self) -> int:
        """The number of rows that may wait."""
        return self._options.max_batch_size * self._options.max_enqueued_batches

    def check_space(self, num_rows: int) -> None:
        """Refuses rows without space for them; a request of any size enters an empty queue."""
        if self.num_waiting and self.num_waiting + num_rows > self.capacity:
            raise RequestError("The queue is full. Try again later.", status=503)

    async def run(
        self,
        servable: Servable,
        signature: Signature,
        inputs: Arrays,
        *,
        outputs: Collection[str] = (),
    ) -> Outputs:
        """Returns the outputs of a signature for the rows of one request.

        Args:
          outputs: the outputs that are needed; see `Servable.run`.

        Raises:
          RequestError: the queue is full, or the model cannot compute these inputs.
        """
        num_rows = len(next(iter(inputs.values()))) if signature.is_batched else 1
        self.check_space(num_rows)
        loop = asyncio.get_running_loop()
        size = self._options.max_batch_size
        due = loop.time() + self._options.batch_timeout_micros / 1e6
        shapes = tuple((name, array.shape[1:]) for name, array in sorted(inputs.items()))
        needed = frozenset(outputs)
        key: Hashable = (id(servable), signature.name, shapes, needed)
        if not signature.is_batched:
            size, due, key = 1, loop.time(), object()
        parts = []
        for start in range(0, num_rows, size):
            rows = min(size, num_rows - start)
            some = _take(inputs, start, rows) if rows < num_rows else inputs
            answer = loop.create_future()
            parts.append(_Part(servable, signature, some, needed, rows, due, answer))
        self._queues.setdefault(key, collections.deque()).extend(parts)
        self.num_waiting += num_rows
        self._start_batches()
        try:
            answers = await asyncio.gather(*(part.answer for part in parts))
        finally:
            for part in parts:
                part.answer.cancel()  # what a request no longer waits for is not computed
        return answers[0] if len(answers) == 1 else _join(answers)

    def _start_batches(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        while self._free_threads and self._queues:
            key = min(self._queues, key=self._find_due)
            wait_s = self._find_due(key) - loop.time()
            if wait_s > 0:
                self._timer = loop.call_later(wait_s, self._start_batches)
                return
            if parts := self._pop_batch(key):
                self._free_threads -= 1
                job = loop.run_in_executor(self._executor, self._compute, parts)
                job.add_done_callback(functools.partial(self._finish, parts))

    def _find_due(self, key: Hashable) -> float:
        """Returns when a queue's next batch is due: at once if it is full."""
        parts = self._queues[key]
        is_full = sum(part.num_rows for part in parts) >= self._options.max_batch_size
        return 0.0 if is_full else parts[0].due

    def _pop_batch(self, key: Hashable) -> list[_Part]:
        parts, rows = self._queues[key], 0
        batch: list[_Part] = []
        while parts and (not batch or rows + parts[0].num_rows <= self._options.max_batch_size):
            part = parts.popleft()
            self.num_waiting -= part.num_rows
            if not part.answer.done():
                batch.append(part)
                rows += part.num_rows
        if not parts:
            del self._queues[key]
        return batch

    def _compute(self, parts: list[_Part]) -> list[Outputs | Exception]:
        self._observe(sum(part.num_rows for part in parts))
        try:
            return self._compute_together(parts)
        except Exception as error:
            if len(parts) == 1:
                return [error]
        # One of the requests is at fault: the others must not fail with it.
        answers: list[Outputs | Exception] = []
        for part in parts:
            try:
                answers.append(_run(part, part.inputs))
            except Exception as error:
                answers.append(error)
        return answers

    def _compute_together(self, parts: list[_Part]) -> list[Outputs | Exception]:
        if not parts[0].signature.is_batched:
            return [_run(parts[0], parts[0].inputs)]
        rows = sum(part.num_rows for part in parts)
        inputs = _join([part.inputs for part in parts]) if len(parts) > 1 else parts[0].inputs
        size = next((s for s in self._options.allowed_batch_sizes if s >= rows), rows)
        if size > rows:
            padding = {name: array[:1].repeat(size - rows, 0) for name, array in inputs.items()}
            inputs = _join([inputs, padding])
        outputs = _run(parts[0], inputs)
        if any(len(output) != size for output in outputs.values()):
            raise RequestError("The model's outputs do not have a row for each instance.")
        answers: list[Outputs | Exception] = []
        start = 0
        for part in parts:
            answers.append(_take(outputs, start, part.num_rows))
            start += part.num_rows
        return answers

    def _finish(self, parts: list[_Part], job: asyncio.Future) -> None:
        self._free_threads += 1
        for part, answer in zip(parts, job.result(), strict=True):
            if part.answer.done():
                continue
            if isinstance(answer, Exception):
                part.answer.set_exception(_to_request_error(answer))
            else:
                part.answer.set_result(answer)
        self._start_batches()


def _run(part: _Part, inputs: Arrays) -> Outputs:
    """Returns what a part asks for, for these inputs."""
    return part.servable.run(part.signature.name, inputs, outputs=part.outputs)


def _take(arrays: Arrays, start: int, num_rows: int) -> Outputs:
    return {name: array[start : start + num_rows] for name, array in arrays.items()}


def _join(parts: Iterable[Arrays]) -> Outputs:
    parts = list(parts)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _to_request_error(error: Exception) -> Exception:
    is_input = isinstance(error, tf.errors.InvalidArgumentError | ValueError | TypeError)
    if is_input and not isinstance(error, RequestError):
        return RequestError(f"The model cannot compute this request: {shorten_error(error)}")
    return error
