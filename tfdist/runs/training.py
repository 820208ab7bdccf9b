"""A run of `tfdist.train`: its trainer, its callbacks, and the files it writes."""

import contextlib
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

import tfdist
from tfdist.announcing import announce
from tfdist.cluster import find_launch_dir
from tfdist.launch.progress import summarize_record
from tfdist.reading import parse_object
from tfdist.records.durable_files import read_file, temporary_directory
from tfdist.runs import callbacks, processes
from tfdist.runs.about import describe_start, find_commit
from tfdist.runs.batch_size.choice import find_batch_size
from tfdist.runs.display import make_display
from tfdist.runs.events import write_confusion
from tfdist.runs.flops import Utilization
from tfdist.runs.goodput import GoodputLog, read_goodput, summarize_goodput
from tfdist.runs.plan import Plan, count_steps, read_data
from tfdist.runs.trackers import Trackers
from tfdist.stopping import StopSignals, watch_for_maintenance
from tfdist.strategies.logical_replicas import describe_change
from tfdist.tasks.data import SourceData
from tfdist.training.checkpoint.files import CheckpointStore
from tfdist.training.checkpoint.initial_weights import InitialWeights
from tfdist.training.fit.averaging import make_averaging
from tfdist.training.fit.trainer import Trainer
from tfdist.training.replicas.reduction import count_gradient_bytes
from tfdist.training.step.model_variables import hash_weights

_INPUT_LIMIT = 0.03  # the input fraction above which the input limits the speed


class TrainingRun:
    """A run in this process, ready to train.

    Args:
      started: when the command began, by `time.perf_counter`.

    Raises:
      TfdistError: the data, the model or the batch do not suit one another or the strategy.
    """

    def __init__(self, plan: Plan, *, started: float, data: SourceData | None = None):
        self._plan, self._run, self._task = plan, plan.run, plan.task
        self._started = started
        options = plan.options
        if plan.cluster is not None:
            announce("Waiting for the other tasks of the cluster")
        strategy = processes.build_strategy(options)
        self._data = data or read_data(plan)
        self._augmentation = plan.task.make_augmentation(self._data.info)
        replicas = strategy.num_replicas_in_sync
        self._options = find_batch_size(options, data=self._data, num_replicas=replicas)
        training = self._options.training
        _, self._total_steps = count_steps(training, self._data.train.num_examples)
        began = bool(CheckpointStore(self._run.checkpoints).list_steps())
        initial = None if began or not training.init_from else InitialWeights(training.init_from)
        announce(f"Building the model: {plan.task.describe_model()}")
        self._trainer = Trainer(
            processes.make_build_model(
                plan.task, training, self._data.info, total_steps=self._total_steps, initial=initial
            ),
            strategy=strategy,
            checkpoint_dir=self._run.checkpoints,
            keep_checkpoints=options.run.keep_checkpoints,
            seed=training.seed,
            step_options=options.step,
            placement=options.placement.select(),
        )
        if initial is not None and self._trainer.is_chief and not options.run.quiet:
            print(initial.describe(), flush=True)
        self._trainer.engine.prepare(self._data.train, global_batch_size=training.global_batch_size)
        self._throughput = callbacks.Throughput(self._trainer, training.global_batch_size)
        self._goodput = GoodputLog(self._run, self._trainer) if self._trainer.is_chief else None
        self._report = callbacks.WriteReport(self._run.path, self._task)
        self._samples = callbacks.DrawSamples(
            plan.task, self._run, self._trainer, self._data, every=options.run.sample_every
        )
        # The chief of parameter servers cannot measure the workers' devices.
        self._utilization = (
            None
            if plan.traits.has_servers
            else Utilization(self._trainer, training.global_batch_size)
        )

    def train(self) -> int:
        """Trains until the end or a stop, and returns the exit status."""
        trainer, options = self._trainer, self._options
        with contextlib.ExitStack() as held:
            if trainer.is_chief:
                before = self._run.read_options() or {}
                description = self._describe(before)
                versions = description["versions"]
                if change := describe_change({**versions, **before.get("versions", {})}, versions):
                    print(change, file=sys.stderr)
                held.enter_context(
                    self._run.claim(
                        description,
                        result=options.select_result(),
                        may_increase=options.list_growing(),
                    )
                )
            trainer.engine.workers.wait_for_all()
            signals = held.enter_context(
                StopSignals(trainer.request_stop, grace_period_s=options.run.grace_period_s)
            )
            watch_for_maintenance()
            self._fit()
            if trainer.progress.was_stopped:
                print(
                    f"Stopped after step {trainer.step} of {self._total_steps}. "
                    "The same command continues the run.",
                    file=sys.stderr,
                )
                return signals.exit_status
            self._finish()
            return 0

    def _describe(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of `options.json`, given that of an earlier start."""
        # A finished command that is repeated changes nothing.
        is_repeated = (
            self._run.is_finished and before.get("result") == self._options.select_result()
        )
        kept = before if is_repeated else {}
        versions = {
            "tfdist": tfdist.__version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        }
        cluster = self._plan.cluster
        return {
            **self._options.to_dict(),
            "versions": kept.get("versions", versions),
            "commit": kept.get("commit", find_commit()),
            "about": kept.get("about") or self._describe_start_of_run(before.get("about")),
            "devices": processes.list_worker_devices(self._trainer.strategy),
            "cluster": dict(cluster.tasks) if cluster else None,
        }

    def _describe_start_of_run(self, before: Any) -> dict[str, Any]:
        data = self._data
        return describe_start(
            self._trainer.model,
            model_name=self._task.describe_model(),
            dataset=getattr(self._task, "dataset", "") or self._options.task.task,
            sizes={"training": data.train.num_examples, "validation": data.val.num_examples},
            before=before,
        )

    def _fit(self) -> None:
        """Trains until the end or a stop; the chief has claimed the run directory."""
        training, trainer = self._options.training, self._trainer
        verbose = 1 if trainer.is_chief and not self._options.run.quiet else 0
        if verbose:
            print(self._describe_start(), flush=True)
        checkpoint_every, checkpoint_every_s = self._options.parse_checkpoint_every()
        trainer.fit(
            self._data.train,
            validation_data=self._data.val,
            global_batch_size=training.global_batch_size,
            epochs=training.epochs,
            max_steps=training.max_steps,
            augmentation=self._augmentation,
            callbacks=[
                *make_averaging(training),
                self._samples,
                *(self._make_callbacks() if trainer.is_chief else []),
            ],
            checkpoint_every=checkpoint_every,
            checkpoint_every_s=checkpoint_every_s,
            verbose=verbose,
        )

    def _make_callbacks(self) -> list[keras.callbacks.Callback]:
        """Returns the chief's callbacks, which fill the run directory and show the progress."""
        trainer, run, task, options = self._trainer, self._run, self._task, self._options
        result = options.select_result()
        made = [
            make_display(trainer, self._throughput, total_steps=self._total_steps),
            self._throughput,
            *([self._goodput] if self._goodput else []),
            *([self._utilization] if self._utilization else []),
            callbacks.MetricsLog(
                run,
                trainer,
                self._throughput,
                log_every=options.run.log_every,
                trackers=Trackers(options.run.track, run, result, quiet=options.run.quiet),
            ),
            callbacks.CurvesLog(run, trainer, total_steps=self._total_steps),
            self._report,
            callbacks.MarkBest(trainer, task.monitor, is_higher_better=task.is_higher_better),
        ]
        if patience := options.training.early_stopping:
            mode = "max" if task.is_higher_better else "min"
            made.append(keras.callbacks.EarlyStopping(task.monitor, patience=patience, mode=mode))
        if options.run.tensorboard:
            log = callbacks.TensorBoardLog
            made.append(
                log(run, trainer, hyperparameters=result, write_more=self._samples.write_events)
            )
        if steps := options.parse_profile():
            made.append(callbacks.Profile(run, trainer, first=steps[0], last=steps[1]))
        if launch_dir := find_launch_dir():
            made.append(callbacks.ReportSteps(trainer, launch_dir))
        return made

    def _finish(self) -> None:
        """Writes the model and the summary of a finished run, and prints where they are.

        A run that was already finished keeps its model and its summary.
        """
        trainer, run = self._trainer, self._run
        announce("Evaluating and saving the best model")
        speed = self._measure_speed()
        before = self._read_summary(speed) if self._throughput.first_step_s is None else None
        summary = self._save_best_model(is_kept=before is not None) | speed
        if trainer.is_chief and before is not None:
            summary |= before
        elif trainer.is_chief:
            run.write_summary(summary)
            self._report.write()
            if self._options.run.tensorboard and "confusion" in summary:
                write_confusion(run.tensorboard, summary, step=trainer.step)
        elif not self._options.run.quiet:
            print(f"weights_sha256 {summary['weights_sha256']}", flush=True)
        trainer.engine.workers.wait_for_all()
        if trainer.is_chief and not self._options.run.quiet:
            files = ", ".join([*self._task.pictures, "report.html", "model.keras", "summary.json"])
            print(f"{self._describe_result(summary)}. Everything is in {run.path}: {files}.")

    def _describe_result(self, summary: Mapping[str, Any]) -> str:
        return f"{self._task.describe_result(summary)}, {_describe_speed(summary)}"

    def _read_summary(self, speed: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns a finished run's summary; None if it lacks more than other versions do."""
        if not (self._run.is_finished and tf.io.gfile.exists(self._run.model)):
            return None
        found = parse_object(read_file(f"{self._run.path}/summary.json"))
        try:
            self._describe_result({**speed, **(found or {})})
        except (LookupError, TypeError, ValueError, AttributeError):  # it was changed
            return None
        return found

    def _save_best_model(self, *, is_kept: bool) -> dict[str, Any]:
        """Saves the best model, unless it is kept, and pictures; returns entries of the summary."""
        trainer, task, training = self._trainer, self._task, self._options.training
        final_hash, of_strategy = hash_weights(trainer.model), trainer.engine.summarize()
        history = trainer.history.history
        recovery, state = trainer.recovery, trainer.engine.list_state()
        best_step = (
            recovery.restore_best(state, optimizer=trainer.model.optimizer) if recovery else None
        )
        metrics = task.evaluate(trainer, self._data, global_batch_size=training.global_batch_size)
        with temporary_directory() as directory:
            # Saving may need all workers, which do not know whether the chief already has a model.
            path = f"{directory}/model.keras" if is_kept else self._run.model
            trainer.save(path, convert=task.to_portable)
        if trainer.is_chief and not is_kept:
            self._run.copy_model()
        task.write_pictures(self._run, trainer, self._data, metrics)
        peaks = trainer.engine.workers.measure_peak_memory()
        return {
            "task": self._options.task.task,
            "strategy": self._options.strategy.strategy,
            "replicas": trainer.engine.workers.num_replicas,
            "global_batch_size": training.global_batch_size,
            "steps": trainer.step,
            "epochs": len(trainer.history.epoch),
            "loss": history["loss"][-1] if history.get("loss") else None,
            **metrics,
            "info": dict(self._data.info),
            "best_step": best_step,
            "resumed_from_step": trainer.progress.resumed_from_step,
            "peak_memory_bytes": max(peaks.values()),
            "peak_memory_bytes_per_device": peaks,
            "weights_sha256": final_hash,
            **({"numerics": numerics} if (numerics := trainer.engine.numerics) else {}),
            **of_strategy,
            **trainer.engine.summarize_placement(),
        }

    def _measure_speed(self) -> dict[str, Any]:
        """Returns the summary's entries about the speed; all workers must call it."""
        throughput, trainer = self._throughput, self._trainer
        launch_dir = find_launch_dir()
        rate = throughput.examples_per_second
        return {
            "examples_per_second": round(rate, 2),
            "check_s": _round(trainer.engine.check_s, 1),
            "first_step_s": _round(throughput.first_step_s, 1),
            "input_fraction": _round(throughput.input_fraction, 4),
            "host_fraction": _round(throughput.host_fraction, 4),
            "all_reduce_fraction": self._measure_all_reduce_fraction(rate),
            "gradient_bytes": count_gradient_bytes(
                trainer.model, is_compressed=self._options.step.compress_gradients
            ),
            **(self._utilization.summarize(rate) if self._utilization else {}),
            "seconds": round(time.perf_counter() - self._started, 1),
            **(summarize_goodput(read_goodput(self._run)) if self._goodput else {}),
            **(summarize_record(launch_dir) if launch_dir else {}),
        }

    def _measure_all_reduce_fraction(self, examples_per_second: float) -> float | None:
        """Returns the time of the gradients' all-reduce alone, as a fraction of a step."""
        seconds = self._trainer.engine.measure_all_reduce()
        if seconds is None or not examples_per_second:
            return None
        size = self._options.training.global_batch_size
        return round(seconds * examples_per_second / size, 4)

    def _describe_start(self) -> str:
        trainer, training, data = self._trainer, self._options.training, self._data
        described = processes.describe_strategy(
            trainer.strategy, trainer.engine.workers, self._options.placement.select()
        )
        return (
            f"{described}, {training.precision}: {data.train.num_examples} training and "
            f"{data.val.num_examples} validation examples, "
            f"{self._total_steps} steps of {training.global_batch_size}."
        )


def _describe_speed(summary: Mapping[str, Any]) -> str:
    text = f"{summary['examples_per_second']} examples/s"
    if "mfu" in summary:
        gigaflops, share = summary["flops_per_second"] / 1e9, summary["mfu"]
        text += f" ({gigaflops:.3g} GFLOP/s, {share:.0%} of its fastest convolution alone)"
    device, peak = max(summary["peak_memory_bytes_per_device"].items(), key=lambda item: item[1])
    text += f", at most {math.ceil(peak / 2**20)} MiB of memory ({device})"
    waited, host = summary["input_fraction"], summary["host_fraction"]
    if waited is None or host is None:
        return text
    text += f"; of the time, {waited:.0%} input, {host:.0%} host, the rest computation"
    if summary["all_reduce_fraction"]:
        text += f", of which all-reduce at most {summary['all_reduce_fraction']:.0%}"
    if waited > _INPUT_LIMIT:
        text += ": the input limits the speed (see --cache, --profile)"
    return text


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
