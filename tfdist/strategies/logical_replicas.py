"""Strategies whose replicas do not depend on the devices: K of them, wherever they run.

Floating-point addition depends on the order, and what a replica computes depends on its share of
the batch. With K logical replicas, both are the same however many devices and processes there are:
the batch has K shares, and everything that is summed over replicas is summed along one binary tree
over them. A process holds consecutive replicas, each on a logical device of its own. It sums the
subtrees that it has whole. Processes exchange these, and each computes the rest of the tree.

```
        (0+1)+(2+3)          K = 4 on three processes: the first one holds 0 and 1, and sends 0+1;
        /         \\          the others send 2 and 3.
      0+1         2+3
      / \\         / \\
     0   1       2   3
```
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Nested
from tfdist.cluster import ClusterConfig
from tfdist.devices import configure_logical_replicas, describe_arithmetic, share_replicas
from tfdist.errors import TfdistError
from tfdist.internals import (
    CollectiveAllReduceExtended,
    CollectiveKeys,
    CollectiveReplicaLauncher,
    SyncOnReadVariable,
)
from tfdist.replacing import replaced
from tfdist.strategies.process_sums import gather_small

Node = tuple[int, int]
"""The first replica of a subtree, and the one after its last."""

_MAX_PACK_BYTES = 4 << 20
_FIRST_GROUP = 1 << 20


def split_node(node: Node) -> tuple[Node, Node]:
    """Returns the two children of a node of the tree.

    The left one has the largest power of two of replicas, so a subtree does not depend on how many
    replicas come after it.

    >>> split_node((0, 6)), split_node((4, 6))
    (((0, 4), (4, 6)), ((4, 5), (5, 6)))
    """
    first, last = node
    middle = first + (1 << ((last - first - 1).bit_length() - 1))
    return (first, middle), (middle, last)


def list_whole_subtrees(replicas: range, count: int) -> list[Node]:
    """Returns the largest subtrees of the tree over `count` replicas that some of them make up.

    >>> list_whole_subtrees(range(1, 4), 4)
    [(1, 2), (2, 4)]
    """

    def visit(node: Node) -> list[Node]:
        if replicas.start <= node[0] and node[1] <= replicas.stop:
            return [node]
        if node[1] - node[0] == 1 or node[1] <= replicas.start or replicas.stop <= node[0]:
            return []
        left, right = split_node(node)
        return [*visit(left), *visit(right)]

    return visit((0, count))


def sum_subtree(node: Node, known: Mapping[Node, Any]) -> Any:
    """Returns the sum of a subtree, given those of the subtrees below it, or some of them."""
    if node in known:
        return known[node]
    left, right = (sum_subtree(child, known) for child in split_node(node))
    # TensorFlow joins and reorders additions, but not sums of a list.
    return tf.raw_ops.AddN(inputs=[left, right])


def sum_along_tree(values: Sequence[Any]) -> Any:
    """Returns the sum of a value for each replica, along the tree."""
    leaves = {(index, index + 1): value for index, value in enumerate(values)}
    return sum_subtree((0, len(values)), leaves)


class TreeReduction(tf.distribute.ReductionToOneDevice):
    """Sums over the logical replicas of a single process, along the tree."""

    def __init__(self) -> None:
        super().__init__(accumulation_fn=sum_along_tree)


class SharedTreeReduction(TreeReduction):
    """Sums over the logical replicas of several processes, along the tree.

    Args:
      shares: the replicas of each process.
      index: the place of this process among them.
      launcher: launches what the processes exchange.
    """

    def __init__(self, shares: Sequence[range], index: int, launcher: CollectiveReplicaLauncher):
        super().__init__()
        self._count = shares[-1].stop
        self._own = shares[index]
        self._subtrees = [list_whole_subtrees(share, self._count) for share in shares]
        self._index = index
        self._launcher = launcher

    @property
    def _num_between_graph_workers(self) -> int:
        return len(self._subtrees)

    def reduce_implementation(
        self,
        reduce_op: tf.distribute.ReduceOp,
        per_replica_value: tf.distribute.DistributedValues,
        destinations: tf.distribute.DistributedValues | str,
        options: tf.distribute.experimental.CommunicationOptions | None,
    ) -> Any:
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: tf.distribute.experimental.CommunicationOptions | None,
    ) -> list[Any]:
        totals = self._sum([value.values for value, _ in value_destination_pairs])
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            totals = [_divide(total, self._count) for total in totals]
        pairs = zip(totals, value_destination_pairs, strict=True)
        return [self.broadcast(total, destinations) for total, (_, destinations) in pairs]

    def _gather_implementation(
        self,
        per_replica_value: tf.distribute.DistributedValues,
        destinations: tf.distribute.DistributedValues | str,
        axis: int,
        options: tf.distribute.experimental.CommunicationOptions | None,
    ) -> Any:
        with tf.device(self._launcher._device):
            own = tf.concat(per_replica_value.values, axis)
            return self.broadcast(self._launcher.all_gather(own, axis, options), destinations)

    def _sum(self, values: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns the sum of each value over the replicas of all processes."""
        sums: list[Any] = [None] * len(values)
        packs: dict[tf.DType, list[list[int]]] = {}
        with tf.device(self._launcher._device):
            for place, parts in enumerate(values):
                if isinstance(parts[0], tf.IndexedSlices):
                    sums[place] = self._join(parts)
                else:
                    found = packs.setdefault(parts[0].dtype, [[]])
                    if sum(_count_bytes(values[i][0]) for i in found[-1]) > _MAX_PACK_BYTES:
                        found.append([])
                    found[-1].append(place)
            for pack in [pack for found in packs.values() for pack in found]:
                for place, total in zip(
                    pack, self._sum_pack([values[i] for i in pack]), strict=True
                ):
                    sums[place] = total
        return sums

    def _sum_pack(self, values: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """Returns the sums of dense values of one type, which take one message."""
        own = self._subtrees[self._index]
        most = max(map(len, self._subtrees))
        rows = []
        for parts in values:
            # A single value is that of all replicas of this process.
            each = parts if len(parts) > 1 else [parts[0]] * len(self._own)
            leaves = {
                (replica, replica + 1): tf.convert_to_tensor(part)
                for replica, part in zip(self._own, each, strict=True)
            }
            sums = [tf.reshape(sum_subtree(node, leaves), [-1]) for node in own]
            rows.append(tf.stack([*sums, *[tf.zeros_like(sums[0])] * (most - len(own))]))
        sizes = [tf.shape(row)[1] for row in rows]
        table = rows[0] if len(rows) == 1 else tf.concat(rows, 1)
        tables = None if tf.executing_eagerly() else gather_small(self._launcher, table)
        if tables is None:
            # As soon as it is known, in any order.
            with replaced(self._launcher, "_get_ordering_token", lambda: None):
                tables = self._launcher._all_gather(table, None)
        table = tf.reshape(tables, [len(self._subtrees) * most, -1])
        columns = [table] if len(rows) == 1 else tf.split(table, sizes, 1)
        totals = []
        for parts, column in zip(values, columns, strict=True):
            known = {
                node: column[process * most + place]
                for process, nodes in enumerate(self._subtrees)
                for place, node in enumerate(nodes)
            }
            total = sum_subtree((0, self._count), known)
            shape = parts[0].shape
            if shape.is_fully_defined():
                totals.append(tf.reshape(total, shape))
            else:
                totals.append(tf.ensure_shape(tf.reshape(total, tf.shape(parts[0])), shape))
        return totals

    def _join(self, parts: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
        """Returns the rows of all replicas, one after the other."""
        own = tf.IndexedSlices(
            tf.concat([part.values for part in parts], 0),
            tf.concat([part.indices for part in parts], 0),
            parts[0].dense_shape,
        )
        return self._launcher.all_reduce_indexed_slices(own)


def _divide(total: Nested[tf.Tensor], count: int) -> Any:
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(total.values / count, total.indices, total.dense_shape)
    return total / count


def _count_bytes(value: tf.Tensor) -> int:
    return (value.shape.num_elements() or 0) * value.dtype.size


class LogicalInputContext(tf.distribute.InputContext):
    """What an input pipeline feeds: the replicas of its process."""

    def __init__(self, replicas: range, count: int, *, workers: int, index: int):
        super().__init__(workers, index, count)
        self.replicas = replicas


class LogicalExtended(CollectiveAllReduceExtended):
    """What runs the logical replicas of a process.

    Args:
      shares: the replicas of each process.
      devices: a device for each replica of this process.
      resolver: knows the processes; None for one.

    Attributes:
      numerics: name -> what the bits depend on, besides the program and the data.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        shares: Sequence[range],
        *,
        threads: int,
        devices: Sequence[str],
        options: tf.distribute.experimental.CommunicationOptions,
        resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
    ):
        self._shares, self._count, self._own_devices = shares, shares[-1].stop, devices
        self.numerics = describe_numerics(self._count, threads)
        if resolver is None:
            self.replicas = shares[0]
            super().__init__(strategy, None, options, devices=tuple(devices))
            self._cross_device_ops = TreeReduction()
            return
        super().__init__(strategy, resolver, options)
        # TensorFlow numbers groups of devices as it meets them, which processes of one device and
        # of several do differently.
        self._collective_keys = CollectiveKeys(group_key_start=_FIRST_GROUP)
        first = self.worker_devices[0]
        launcher = CollectiveReplicaLauncher(
            self._collective_keys.get_group_key([first]),
            self._num_workers,
            self._collective_keys,
            first,
            self._communication_options,
        )
        self._cross_device_ops = SharedTreeReduction(shares, self._id_in_cluster, launcher)

    def _initialize_local_devices(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
        worker_device: str,
    ) -> tuple[tuple[str, ...], str]:
        own = self._own_devices
        self.replicas = self._shares[self._id_in_cluster]
        return tuple(f"{worker_device}/device:{name}" for name in own), own[0].partition(":")[0]

    def _make_input_context(self) -> LogicalInputContext:
        return LogicalInputContext(
            self.replicas, self._count, workers=self._num_workers, index=self._id_in_cluster
        )

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._count

    def _get_cross_device_ops(self, value: object) -> TreeReduction:
        return self._cross_device_ops

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self.replicas.start + replica_id

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group - self.replicas.start


class LogicalMirroredStrategy(tf.distribute.MirroredStrategy):
    """A MirroredStrategy over logical replicas; see `LogicalExtended`."""

    def __init__(self, shares: Sequence[range], **arguments: Any):
        options = tf.distribute.experimental.CommunicationOptions()
        extended = LogicalExtended(self, shares, options=options, **arguments)
        tf.distribute.Strategy.__init__(self, extended)


class LogicalMultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """A MultiWorkerMirroredStrategy over logical replicas; see `LogicalExtended`."""

    def __init__(self, shares: Sequence[range], **arguments: Any):
        tf.distribute.Strategy.__init__(self, LogicalExtended(self, shares, **arguments))


def make_mirrored_replicas(
    count: int, threads: int, devices: Sequence[str] = ()
) -> tf.distribute.MirroredStrategy:
    """Builds a MirroredStrategy over logical replicas, which are parts of devices."""
    parts = configure_logical_replicas(count, threads=threads, devices=devices)
    return LogicalMirroredStrategy([range(count)], threads=threads, devices=parts)


def make_worker_replicas(
    count: int,
    threads: int,
    config: ClusterConfig | None,
    options: tf.distribute.experimental.CommunicationOptions,
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Builds a MultiWorkerMirroredStrategy over logical replicas, which the workers share."""
    workers, index = (1, 0) if config is None else (config.num_workers, config.worker_index)
    if workers > count:
        raise TfdistError(
            f"`logical_replicas={count}` are too few for {workers} workers. Start at most {count} "
            "workers, or give a larger number, with which training ends with other bits."
        )
    shares = share_replicas(count, workers)
    parts = configure_logical_replicas(len(shares[index]), threads=threads)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver() if workers > 1 else None
    return LogicalMultiWorkerMirroredStrategy(
        shares, threads=threads, devices=parts, options=options, resolver=resolver
    )


def make_central_replicas(
    count: int, threads: int, devices: Sequence[str], parameter_device: str
) -> tf.distribute.experimental.CentralStorageStrategy:
    """Builds a CentralStorageStrategy over logical replicas, with variables on one device."""
    parts = configure_logical_replicas(count, threads=threads, devices=devices)
    strategy = tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=list(parts), parameter_device=parameter_device
    )
    extended = strategy.extended
    extended._cross_device_ops = TreeReduction()
    extended.numerics = describe_numerics(count, threads)
    create = extended._create_variable

    def create_variable(next_creator: Callable[..., tf.Variable], **arguments: Any) -> Any:
        if arguments.get("synchronization") != tf.VariableSynchronization.ON_READ:
            return create(next_creator, **arguments)
        # Each replica adds to a copy of its own, as with other strategies: the order of a metric's
        # additions is part of its bits.
        with tf.device(parameter_device):
            copies = [next_creator(**arguments) for _ in range(count)]
        return SyncOnReadVariable(strategy, copies, arguments["aggregation"])

    extended._create_variable = create_variable
    return strategy


def describe_numerics(count: int, threads: int) -> dict[str, Any]:
    """Returns name -> what the bits of logical replicas depend on."""
    return {
        "logical_replicas": count,
        "threads_per_replica": threads,
        "arithmetic": describe_arithmetic(),
    }


def describe_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns one line about what may change the bits of a run that continues; empty if nothing.

    >>> describe_change({"logical_replicas": 4}, {"logical_replicas": 2})
    'Not the same bits as before, but equal within rounding: logical_replicas was 4 and is 2.'
    """
    changes = [
        f"{name} was {before.get(name, 'none')} and is {now.get(name, 'none')}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    text = "; ".join(changes)
    return f"Not the same bits as before, but equal within rounding: {text}." if changes else ""


def read_numerics(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Returns what the bits of a strategy's results depend on; nothing without logical replicas."""
    found = getattr(strategy.extended, "numerics", {})
    return {**found, "precision": keras.config.dtype_policy().name} if found else {}
