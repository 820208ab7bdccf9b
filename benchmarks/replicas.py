"""What it costs to train several replicas together, part by part.

    python -m benchmarks.replicas [--rounds=3]

Trains the network of the other benchmarks with one core per replica and prints a Markdown table:
with and without synchronized batch normalization, with gradients in packs or compressed, and
without communication, which is the fastest that the machine allows. Also measures by themselves
the all-reduce of the gradients and the 36 small all-reduces of batch normalization. Times are
medians over rounds, each of which measures every case.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.benchmark.options import MeasuredModelOptions
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.launch.call import call_in_cluster
from tfdist.launch.machine import describe_machine

BATCH = 16
WARMUP_STEPS = 4
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration to measure.

    Attributes:
      strategy: a strategy of `tfdist.train`, or `none` for independent processes.
      processes: the number of processes; several have one core each.
      cores: the number of cores that a single process may use.
      norm: batch normalization, `sync_batch` or `batch`.
      bytes_per_pack, compress_gradients, precision: see `tfdist.train`.
    """

    strategy: str = "multi_worker_mirrored"
    processes: int = 2
    cores: int = 2
    norm: str = "sync_batch"
    bytes_per_pack: int = 4 * 2**20
    compress_gradients: bool = False
    precision: str = "float32"

    @property
    def batch(self) -> int:
        """The global batch size; for independent processes, that of each process."""
        return BATCH // 2 if self.cores == 1 else BATCH

    @property
    def images(self) -> int:
        """The number of images that all processes see in a step."""
        return self.batch * self.processes if self.strategy == "none" else self.batch


CASES = {
    "one process, one core, half the batch": Case(strategy="none", processes=1, cores=1),
    "two such processes, independent": Case(strategy="none", cores=1),
    "two workers, `--norm=batch`": Case(norm="batch"),
    "two workers": Case(),
    "two workers, `--bytes_per_pack=0`": Case(bytes_per_pack=0),
    "two workers, `--compress_gradients`": Case(compress_gradients=True),
    "one process, two cores": Case(strategy="none", processes=1),
    "mirrored on 2 virtual devices, `--norm=batch`": Case(
        strategy="mirrored", processes=1, norm="batch"
    ),
    "mirrored on 2 virtual devices": Case(strategy="mirrored", processes=1),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps per round")
    parser.add_argument("--precision", default="float32")
    flags = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    for number in range(flags.rounds):
        for name in list(CASES)[:: 1 if number % 2 == 0 else -1]:
            case = dataclasses.replace(CASES[name], precision=flags.precision)
            task = {"case": dataclasses.asdict(case), "steps": flags.steps}
            command = [sys.executable, "-m", "benchmarks.replicas", "measure"]
            finding = call_in_cluster(task, command, workers=case.processes, timeout_s=TIMEOUT_S)
            found[name].append(finding)
            print(name, finding, sep="; ", file=sys.stderr, flush=True)
    print(f"{describe_machine()}, {flags.precision}, medians of {flags.rounds} rounds\n")
    print("| | examples/s | step, ms | all-reduce alone, ms | 36 small all-reduces alone, ms |")
    print("|---|---|---|---|---|")
    for name, findings in found.items():
        step_s = _find_median(findings, "step_s")
        rate = "-" if step_s is None else f"{CASES[name].images / step_s:.2f}"
        cells = [format_ms(_find_median(findings, key)) for key in KEYS]
        print(f"| {name} | {rate} | {' | '.join(cells)} |")
    return int(any("error" in finding for findings in found.values() for finding in findings))


KEYS = ("step_s", "gradients_s", "moments_s")


def _find_median(findings: list[dict[str, Any]], key: str) -> float | None:
    values = [finding[key] for finding in findings if finding.get(key)]
    return statistics.median(values) if values else None


def format_ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"


def measure(directory: str) -> int:
    """Measures the case in `task.json`, in each of its processes; the first writes the result."""
    task = json.loads((Path(directory) / "task.json").read_text())
    case = Case(**task["case"])
    if case.cores == 1 and case.processes == 1:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    is_first = True
    if case.strategy == "none":
        cluster = json.loads(os.environ.pop("TF_CONFIG", "{}"))
        is_first = cluster.get("task", {}).get("index", 0) == 0
    start_tensorflow_quietly()
    from tfdist.benchmark.measuring import build_model, make_batches
    from tfdist.runs import processes
    from tfdist.runs.clock import Clock
    from tfdist.runs.options import TrainOptions
    from tfdist.strategies.options import make_strategy_options
    from tfdist.training.fit.trainer import Trainer
    from tfdist.training.options import TrainingOptions
    from tfdist.training.step_options import StepOptions

    split = case.strategy == "mirrored"
    options = TrainOptions(
        strategy=make_strategy_options(
            strategy="one_device" if case.strategy == "none" else case.strategy,
            devices=("CPU:0", "CPU:1") if split else (),
            virtual_devices=2 if split else 0,
            **({} if split else {"bytes_per_pack": case.bytes_per_pack}),
        ),
        training=TrainingOptions(precision=case.precision),
    )
    is_clustered = case.strategy not in ("none", "mirrored")
    config = processes.join_cluster(options) if is_clustered else None
    processes.configure_process(options)
    model_options = MeasuredModelOptions(norm=case.norm, global_batch_size=case.batch)
    x, y = make_batches(model_options)
    trainer = Trainer(
        lambda: build_model(model_options),
        strategy=processes.build_strategy(options),
        step_options=StepOptions(compress_gradients=case.compress_gradients),
    )
    clock, steps = Clock(), WARMUP_STEPS + task["steps"]
    trainer.fit(x, y, global_batch_size=case.batch, max_steps=steps, callbacks=[clock], verbose=0)
    found = {
        "step_s": 1 / clock.measure_rate(WARMUP_STEPS, steps),
        "gradients_s": trainer.engine.measure_all_reduce(),
        "moments_s": _measure_small_sums(trainer)
        if trainer.engine.workers.num_replicas > 1
        else None,
    }
    if config:
        is_first = config.is_chief
    if is_first:
        (Path(directory) / "result.json").write_text(json.dumps(found))
    return 0


def _measure_small_sums(trainer: Any) -> float:
    """Returns the seconds of the all-reduces by which batches are normalized over replicas."""
    import tensorflow as tf

    from tfdist.models.layers import FusedBatchNormalization

    layers = [x for x in trainer.model.layers if isinstance(x, FusedBatchNormalization)]
    # Forward, a row per replica with a count, means and variances; backward, two sums.
    sizes = [2 * (2 * layer.gamma.shape[0] + 1) for layer in layers]
    sizes += [2 * layer.gamma.shape[0] for layer in reversed(layers)]

    def reduce() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        last = tf.reduce_sum(layers[0].gamma.value) * 0.0
        for size in sizes:  # each waits for the previous one, as layers do
            values = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.fill([size], last))
            last = values[0]
        return last

    @tf.function(autograph=False)
    def run() -> Any:
        return trainer.strategy.experimental_local_results(trainer.strategy.run(reduce))

    times = []
    for _ in range(11):
        began = time.perf_counter()
        for result in run():
            float(result)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


if __name__ == "__main__":
    sys.exit(measure(sys.argv[2]) if sys.argv[1:2] == ["measure"] else main())
