"""`python -m tfdist.train`: trains a segmentation model under any strategy.

TensorFlow is imported when a run starts, so that `--help` and a mistyped flag answer at once.
"""

import contextlib
import json
import math
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from tfdist.cli.command import run_command
from tfdist.cluster import find_launch_dir
from tfdist.launch.progress import summarize_record
from tfdist.runs.options import TrainOptions
from tfdist.runs.stopping import EXIT_TERMINATED, StopSignals, watch_for_maintenance

if TYPE_CHECKING:
    import keras

    from tfdist.data.pipeline import BatchAugmentation
    from tfdist.runs.utilization import Utilization
    from tfdist.tasks.base import Task
    from tfdist.tasks.sources import SourceData
    from tfdist.training.callbacks import Throughput
    from tfdist.training.run_directory import RunDirectory
    from tfdist.training.trainer import Trainer

_INPUT_LIMIT = 0.03  # of the time: what waits longer for its data is limited by them


def main() -> int:
    """Runs the command line and returns the exit status."""
    return run_command("tfdist.train", run_training)


def run_training(options: TrainOptions) -> int:
    """Trains, or continues, a run and fills its directory.

    Args:
      options: the run.

    Returns:
      0, at once after `--dry_run`; after a checkpoint 130 for Ctrl-C and 143 for SIGTERM; 143
      for a worker or parameter server whose chief is gone before the run was finished.

    Raises:
      TfdistError: bad input; nothing was written.
      TrainingError: the loss is not finite.
    """
    if options.run.dry_run:
        from tfdist.runs.dry_run import describe_dry_run

        print(describe_dry_run(options))
        return 0
    from tfdist import assembly
    from tfdist.data.pipeline import steps_per_epoch
    from tfdist.runs import processes
    from tfdist.runs.batch_size.choice import find_batch_size, recall_batch_size
    from tfdist.runs.utilization import Utilization
    from tfdist.strategies.servers import run_server
    from tfdist.tasks.sources import to_sources
    from tfdist.training.callbacks import Throughput
    from tfdist.training.run_directory import find_run_directory
    from tfdist.training.trainer import Trainer

    started = time.perf_counter()
    options.check()
    options = assembly.resolve_options(options)
    run = find_run_directory(options.run.run_dir)
    cluster = processes.join_cluster(options)
    assembly.configure_process(options)
    options = processes.resolve_strategy(options, cluster)
    options = recall_batch_size(options, run)
    chosen = options.strategy.select()
    if chosen.traits.has_servers and cluster and not cluster.is_chief:
        run_server(cluster)
        return 0 if run.is_finished else EXIT_TERMINATED
    strategy = processes.build_strategy(options)
    task = options.task.select()
    data = to_sources(task.make_data(seed=options.training.seed, quiet=options.run.quiet))
    augmentation = task.make_augmentation(data.info)
    options = find_batch_size(options, data=data, num_replicas=strategy.num_replicas_in_sync)
    training = options.training
    epoch_steps = steps_per_epoch(data.train.num_examples, training.global_batch_size)
    total_steps = training.max_steps or training.epochs * epoch_steps
    trainer = Trainer(
        assembly.make_build_model(task, training, data.info, total_steps=total_steps),
        strategy=strategy,
        checkpoint_dir=run.checkpoints,
        keep_checkpoints=options.run.keep_checkpoints,
        seed=training.seed,
        step_options=options.step,
    )
    trainer.prepare(data.train, global_batch_size=training.global_batch_size)
    with contextlib.ExitStack() as held:
        if trainer.is_chief:
            held.enter_context(
                run.claim(
                    {
                        **options.to_dict(),
                        "versions": _list_versions(),
                        "devices": _list_devices(strategy),
                        "cluster": dict(cluster.tasks) if cluster else None,
                    },
                    result=options.select_result(),
                )
            )
        trainer.workers.wait_for_all()
        signals = held.enter_context(
            StopSignals(trainer.request_stop, grace_period_s=options.run.grace_period_s)
        )
        watch_for_maintenance()
        throughput = Throughput(trainer, training.global_batch_size)
        # The chief of parameter servers cannot measure the workers' devices.
        utilization = (
            None if chosen.traits.has_servers else Utilization(trainer, training.global_batch_size)
        )
        callbacks = (
            _make_callbacks(options, task, run, trainer, throughput, utilization)
            if trainer.is_chief
            else []
        )
        _fit(options, trainer, data, augmentation, callbacks, total_steps)
        if trainer.progress.was_stopped:
            print(
                f"Stopped after step {trainer.step} of {total_steps}. "
                "The same command continues the run.",
                file=sys.stderr,
            )
            return signals.exit_status
        _finish(options, task, run, trainer, data, throughput, utilization, started)
        return 0


def _fit(
    options: TrainOptions,
    trainer: "Trainer",
    data: "SourceData",
    augmentation: "BatchAugmentation | None",
    callbacks: "list[keras.callbacks.Callback]",
    total_steps: int,
) -> None:
    """Trains in a run directory that is this process's own, until the end or a stop."""
    training = options.training
    verbose = 1 if trainer.is_chief and not options.run.quiet else 0
    if verbose:
        print(_describe_run(options, trainer, data, total_steps))
    checkpoint_every, checkpoint_every_s = options.parse_checkpoint_every()
    trainer.fit(
        data.train,
        validation_data=data.val,
        global_batch_size=training.global_batch_size,
        epochs=training.epochs,
        max_steps=training.max_steps,
        augmentation=augmentation,
        callbacks=callbacks,
        checkpoint_every=checkpoint_every,
        checkpoint_every_s=checkpoint_every_s,
        verbose=verbose,
    )


def _finish(
    options: TrainOptions,
    task: "Task",
    run: "RunDirectory",
    trainer: "Trainer",
    data: "SourceData",
    throughput: "Throughput",
    utilization: "Utilization | None",
    started: float,
) -> None:
    """Writes what a finished run leaves, and says where.

    A run that was finished before keeps its model and its summary.
    """
    before = _read_summary(run) if throughput.first_step_s is None else None
    summary = _save_best_model(options, task, run, trainer, data, is_kept=before is not None)
    launch_dir = find_launch_dir()
    rate = throughput.examples_per_second
    summary |= {
        "examples_per_second": round(rate, 2),
        "check_s": _round(trainer.engine.check_s, 1),
        "first_step_s": _round(throughput.first_step_s, 1),
        "share_of_input": _round(throughput.share_of_input, 4),
        "share_of_host": _round(throughput.share_of_host, 4),
        "share_of_all_reduce": _measure_share_of_all_reduce(options, trainer, rate),
        **(utilization.summarize(rate) if utilization else {}),
        "seconds": round(time.perf_counter() - started, 1),
        **(summarize_record(launch_dir) if launch_dir else {}),
    }
    if trainer.is_chief and before is not None:
        summary |= before
    elif trainer.is_chief:
        run.write_summary(summary)
    elif not options.run.quiet:
        print(f"weights_sha256 {summary['weights_sha256']}", flush=True)
    trainer.workers.wait_for_all()
    if trainer.is_chief and not options.run.quiet:
        files = ", ".join([*task.pictures, "model.keras", "summary.json"])
        print(
            f"{task.describe_result(summary)}, {_describe_speed(summary)}. "
            f"Everything is in {run.path}: {files}."
        )


def _make_callbacks(
    options: TrainOptions,
    task: "Task",
    run: "RunDirectory",
    trainer: "Trainer",
    throughput: "Throughput",
    utilization: "Utilization | None",
) -> "list[keras.callbacks.Callback]":
    """Returns what fills the run directory and shows the progress, on the chief."""
    from tfdist.training import callbacks
    from tfdist.training.progress import ReportSteps

    made = [
        callbacks.ProgressBar(),
        throughput,
        *([utilization] if utilization else []),
        callbacks.MetricsLog(run, trainer, throughput, log_every=options.run.log_every),
        callbacks.MarkBest(trainer, task.monitor, is_higher_better=task.is_higher_better),
    ]
    if options.run.tensorboard:
        made.append(callbacks.TensorBoardLog(run, trainer))
    if steps := options.parse_profile():
        made.append(callbacks.Profile(run, trainer, first=steps[0], last=steps[1]))
    if launch_dir := find_launch_dir():
        made.append(ReportSteps(trainer, launch_dir))
    return made


def _measure_share_of_all_reduce(
    options: TrainOptions, trainer: "Trainer", examples_per_second: float
) -> float | None:
    """Returns what the sum of the gradients would take of a step if nothing else ran meanwhile."""
    seconds = trainer.engine.measure_all_reduce()
    if seconds is None or not examples_per_second:
        return None
    return round(seconds * examples_per_second / options.training.global_batch_size, 4)


def _describe_speed(summary: dict[str, Any]) -> str:
    text = f"{summary['examples_per_second']} examples/s"
    if "share_of_peak" in summary:
        gigaflops, share = summary["flops_per_second"] / 1e9, summary["share_of_peak"]
        text += f" ({gigaflops:.3g} GFLOP/s, {share:.0%} of its fastest convolution alone)"
    device, peak = max(summary["peak_memory_bytes_per_device"].items(), key=lambda item: item[1])
    text += f", at most {math.ceil(peak / 2**20)} MiB of memory ({device})"
    waited, host = summary["share_of_input"], summary["share_of_host"]
    if waited is None or host is None:
        return text
    text += f"; of the time, {waited:.0%} input, {host:.0%} host, the rest computation"
    if summary["share_of_all_reduce"]:
        text += f", of which all-reduce at most {summary['share_of_all_reduce']:.0%}"
    if waited > _INPUT_LIMIT:
        text += ": the data are the limit (--cache, --profile)"
    return text


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _save_best_model(
    options: TrainOptions,
    task: "Task",
    run: "RunDirectory",
    trainer: "Trainer",
    data: "SourceData",
    *,
    is_kept: bool,
) -> dict[str, Any]:
    """Saves the best model, its pictures and what is known of it.

    Args:
      options, task, run, trainer, data: of the run.
      is_kept: whether the model that is there stays, byte for byte.
    """
    from tfdist.training.model_variables import hash_weights

    final_hash, of_strategy = hash_weights(trainer.model), trainer.engine.summarize()
    history = trainer.history.history
    best_step = trainer.restore_best_checkpoint()
    metrics = task.evaluate(trainer, data, global_batch_size=options.training.global_batch_size)
    with tempfile.TemporaryDirectory() as directory:
        # Saving may take all workers, who do not know whether the chief has the model already.
        path = f"{directory}/model.keras" if is_kept else run.model
        trainer.save(path, convert=task.to_portable)
    if trainer.is_chief and not is_kept:
        run.copy_model()
    task.write_pictures(run, trainer, data, history)
    peaks = trainer.workers.measure_peak_memory()
    return {
        "task": options.task.task,
        "strategy": options.strategy.strategy,
        "replicas": trainer.workers.num_replicas,
        "global_batch_size": options.training.global_batch_size,
        "steps": trainer.step,
        "epochs": len(trainer.history.epoch),
        "loss": history["loss"][-1] if history.get("loss") else None,
        **metrics,
        "info": dict(data.info),
        "best_step": best_step,
        "resumed_from_step": trainer.progress.resumed_from_step,
        "peak_memory_bytes": max(peaks.values()),
        "peak_memory_bytes_per_device": peaks,
        "weights_sha256": final_hash,
        **of_strategy,
    }


def _read_summary(run: "RunDirectory") -> dict[str, Any] | None:
    """Returns what a run that was finished before left, None if a part of it is missing."""
    import tensorflow as tf

    if not (run.is_finished and tf.io.gfile.exists(run.model)):
        return None
    with tf.io.gfile.GFile(f"{run.path}/summary.json") as file:
        try:
            return json.loads(file.read())
        except json.JSONDecodeError:
            return None


def _describe_run(
    options: TrainOptions, trainer: "Trainer", data: "SourceData", total_steps: int
) -> str:
    strategy, workers = trainer.strategy, trainer.workers.count
    # What TensorFlow calls it is not what it is documented as.
    name = type(strategy).__name__.replace("CollectiveAllReduce", "MultiWorkerMirrored")
    return (
        f"{name} over {f'{workers} workers, ' if workers > 1 else ''}"
        f"{trainer.workers.num_replicas} x "
        f"{'/'.join(sorted({d.split(':')[0] for d in _list_devices(strategy)}))}, "
        f"{options.training.precision}: {data.train.num_examples} training and "
        f"{data.val.num_examples} validation examples, "
        f"{total_steps} steps of {options.training.global_batch_size}."
    )


def _list_versions() -> dict[str, str]:
    import keras
    import tensorflow as tf

    import tfdist

    return {"tfdist": tfdist.__version__, "tensorflow": tf.__version__, "keras": keras.__version__}


def _list_devices(strategy: Any) -> list[str]:
    return [name.rpartition("device:")[2] for name in strategy.extended.worker_devices]


if __name__ == "__main__":
    sys.exit(main())
