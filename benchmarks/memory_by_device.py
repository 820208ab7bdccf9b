"""Counts the memory of each device when a model is divided, from the allocations of a step.

    python -m benchmarks.memory_by_device [--image_size=128] [--base_filters=32] [--batch=16] \\
        [--limit_mib=0]

Trains the U-Net on one device, and by layers, shards and strips on two virtual devices, each in
its own process. Virtual devices share an allocator, so TensorFlow knows only their sum. But its
profiler records every allocation from 256 KiB on with the operation that made it, and the
partitioned graph says on which device that operation runs. A tensor that is sent to another device
is counted on both, from when it was made until it is freed, but not weights, which strips read on
each device. Prints a Markdown table.

With a limit for each device, TensorFlow's allocator refuses what exceeds the sum over the devices
that take part, and the count shows whether one device alone exceeds its own. Some kernels for CPUs
crash when the allocator refuses.
"""

import argparse
import collections
import json
import os
import pathlib
import sys
import tempfile
from typing import Any, NamedTuple

from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.launch.call import call_in_cluster

SETUPS = ("none", "layers", "shards", "strips")
NUM_DEVICES = 2
TIMEOUT_S = 600.0
# Operations that may return their input's memory.
_PASSING = {"Identity", "Relu", "Reshape", "Cast", "AddV2", "Add", "Mul", "Sub", "Squeeze"}


class Allocation(NamedTuple):
    """An allocation, or the end of one if `operation` is None."""

    time: int
    address: int
    num_bytes: int
    operation: str | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--image_size", type=int, default=128, help="height and width in pixels")
    parser.add_argument("--base_filters", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--limit_mib", type=int, default=0, help="of each device; 0 for none")
    flags = parser.parse_args()
    command = [sys.executable, "-m", "benchmarks.memory_by_device", "measure"]
    print("| placement | variables, MiB | most in a step, MiB | both, of one device's |")
    print("|---|---|---|---|", flush=True)
    whole = None
    for setup in SETUPS:
        found = call_in_cluster({"setup": setup, **vars(flags)}, command, timeout_s=TIMEOUT_S)
        if "error" in found and flags.limit_mib:
            print(f"| {setup} | does not fit | | |", flush=True)
            print(f"{setup}: {found['error']}", file=sys.stderr)
            continue
        if "error" in found:
            raise SystemExit(f"{setup}: {found['error']}")
        totals = [sum(pair) for pair in zip(found["variables"], found["step"], strict=True)]
        whole = whole or (totals[0] if setup == "none" else None)
        cells = [
            ", ".join(f"{number / 2**20:.1f}" for number in found[key] if number)
            for key in ("variables", "step")
        ]
        shares = ", ".join(f"{total / whole:.2f}" for total in totals if total) if whole else ""
        print(f"| {setup} | {' | '.join(cells)} | {shares} |", flush=True)
    return 0


def measure(directory: str) -> int:
    """Measures the setup that `task.json` names."""
    task = json.loads((pathlib.Path(directory) / "task.json").read_text())
    num_devices = 1 if task["setup"] == "none" else NUM_DEVICES
    if task["limit_mib"]:
        os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
        os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(task["limit_mib"] * num_devices)
    start_tensorflow_quietly()
    import tensorflow as tf
    from tensorflow.python.eager import context

    import tfdist
    from tfdist.benchmark.measuring import build_model, make_batches
    from tfdist.benchmark.options import MeasuredModelOptions

    tfdist.set_virtual_devices(NUM_DEVICES)
    options = MeasuredModelOptions(
        image_size=(task["image_size"], task["image_size"]),
        base_filters=task["base_filters"],
        global_batch_size=task["batch"],
    )
    x, y = (part[: task["batch"]] for part in make_batches(options))
    placements = {
        "layers": tfdist.placement.Layers(),
        "shards": tfdist.placement.Shards(),
        "strips": tfdist.placement.Strips(),
    }
    trainer = tfdist.Trainer(
        lambda: build_model(options),
        strategy="one_device",
        placement=placements.get(task["setup"]),
    )
    context.context().enable_graph_collection()
    trainer.fit(x, y, batch_size=task["batch"], verbose=0)
    graphs = context.context().export_run_metadata().partition_graphs
    context.context().disable_graph_collection()
    with tempfile.TemporaryDirectory() as logs:
        tf.profiler.experimental.start(logs)
        trainer.fit(x, y, batch_size=task["batch"], epochs=2, verbose=0)
        tf.profiler.experimental.stop()
        allocations = read_allocations(pathlib.Path(logs))
    variables = [0] * NUM_DEVICES
    for variable in [*trainer.model.variables, *trainer.model.optimizer.variables]:
        value = variable.value
        for part in getattr(value, "parts", [value]):
            variables[_get_device(part.device)] += part.dtype.size * part.shape.num_elements()
    found = {"variables": variables, "step": count_peaks(allocations, graphs)}
    most = max(map(sum, zip(*found.values(), strict=True))) / 2**20
    if 0 < task["limit_mib"] < most:
        raise SystemExit(f"a device holds {most:.1f} MiB, more than its limit")
    (pathlib.Path(directory) / "result.json").write_text(json.dumps(found))
    return 0


def read_allocations(logs: pathlib.Path) -> list[Allocation]:
    """Returns the allocations in a profile, in the order of time."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    found = []
    for path in logs.glob("plugins/profile/*/*.xplane.pb"):
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        for plane in space.planes:
            for line in plane.lines:
                for event in line.events:
                    name = plane.event_metadata[event.metadata_id].name
                    if name not in ("MemoryAllocation", "MemoryDeallocation"):
                        continue
                    stats = {plane.stat_metadata[s.metadata_id].name: s for s in event.stats}
                    operation = ""
                    if "tf_op" in stats:
                        stat = stats["tf_op"]
                        operation = stat.str_value or plane.stat_metadata[stat.ref_value].name
                    found.append(
                        Allocation(
                            line.timestamp_ns * 1000 + event.offset_ps,
                            _get_number(stats["addr"]),
                            _get_number(stats["allocation_bytes"]),
                            operation if name == "MemoryAllocation" else None,
                        )
                    )
    return sorted(found)


def count_peaks(allocations: list[Allocation], graphs: Any) -> list[int]:
    """Returns the most bytes that each device holds at a time.

    Args:
      allocations: the allocations of some steps.
      graphs: the graphs that ran, of one device each.
    """
    makers = {a.operation for a in allocations if a.operation}
    devices: dict[str, set[int]] = collections.defaultdict(set)
    for graph in sorted(graphs, key=lambda graph: len(graph.node)):
        for node in graph.node:
            devices[node.name] = {_get_device(node.device)}
    for graph in graphs:
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            if node.op == "_Send":
                target = _get_device(node.attr["recv_device"].s.decode())
                for name in find_makers(nodes, node.input[0], makers):
                    devices[name].add(target)
    held: dict[int, tuple[int, set[int]]] = {}
    now, most = [0] * NUM_DEVICES, [0] * NUM_DEVICES
    for allocation in allocations:
        if allocation.operation is None:
            num_bytes, places = held.pop(allocation.address, (0, set()))
            num_bytes = -num_bytes
        else:
            num_bytes = allocation.num_bytes
            places = devices.get(allocation.operation) or {0}
            held[allocation.address] = (num_bytes, places)
        for place in places:
            now[place] += num_bytes
            most[place] = max(most[place], now[place])
    return most


def find_makers(nodes: dict[str, Any], tensor: str, makers: set[str]) -> list[str]:
    """Returns the operations that may have allocated a tensor.

    An operation that allocated nothing passes one of its inputs on; which one is not known, so all
    count.
    """
    found, left, seen = [], [tensor], set()
    while left:
        name = left.pop().removeprefix("^").partition(":")[0]
        if name in seen or name not in nodes:
            continue
        seen.add(name)
        if name in makers:
            found.append(name)
        elif nodes[name].op in _PASSING:
            left += nodes[name].input
    return found


def _get_device(name: str) -> int:
    """Returns the number of a device, as in `/device:CPU:1`."""
    return int(name.rpartition(":")[2])


def _get_number(stat: Any) -> int:
    return stat.int64_value or stat.uint64_value


if __name__ == "__main__":
    sys.exit(measure(sys.argv[2]) if sys.argv[1:2] == ["measure"] else main())
