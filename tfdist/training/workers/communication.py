"""The processes that train together, and what they communicate besides gradients."""

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.devices import measure_peak_memory_per_device
from tfdist.errors import TfdistError
from tfdist.launch.pulse import STEP, open_pulse
from tfdist.strategies.registry import find_traits

_SUM = "_tfdist_sum"  # of a strategy


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


def _hash(text: str) -> int:
    """Returns a number for a text, which a float64 can hold."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())
