"""Evaluation, prediction and export for the finished runs of any task.

A task can replace these commands with its own in `Task.commands`.
"""

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfdist.cli.arguments import find_flag, is_set
from tfdist.cli.command import run_command
from tfdist.cli.flags import expand_flag_files, name_flags
from tfdist.cli.inputs import check_paths
from tfdist.cli.output import lenient_output
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.errors import TfdistError
from tfdist.imports import import_named
from tfdist.named_code import TRUST, check_recorded_code
from tfdist.options import CommandOptions
from tfdist.reading import parse_object, parse_options
from tfdist.records.durable_files import read_file
from tfdist.runs.options import TrainOptions
from tfdist.strategies.registry import AUTO
from tfdist.tasks.command_options import (
    SAVED_MODEL,
    DeviceOptions,
    EvaluateOptions,
    ExportOptions,
    ExportRunOptions,
    FinishedRunOptions,
    PredictOptions,
    check_file_name,
    check_installed,
)
from tfdist.tasks.finished_files import check_finished, writing_output
from tfdist.tasks.registry import find_task
from tfdist.tasks.segmentation.task import Segmentation

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.tasks.finished import FinishedRun


@dataclass(frozen=True)
class Command:
    """What a command does for a task.

    Attributes:
      options_class: the class of its options, whose group `run` derives from `FinishedRunOptions`.
      check: raises a TfdistError if the options are wrong. It runs before TensorFlow is imported,
        so what it needs must not import TensorFlow.
    """

    options_class: type[CommandOptions]
    run: Callable[[Any], int]
    check: Callable[[Any], None] = lambda options: None


def run_task_command(name: str, arguments: Sequence[str] | None = None) -> int:
    """Runs a command as the task of the run in `--run_dir` defines it; returns its exit status."""
    with lenient_output():
        return _run_task_command(name, sys.argv[1:] if arguments is None else arguments)


def _run_task_command(name: str, arguments: Sequence[str]) -> int:
    try:
        expanded = expand_flag_files(arguments)
        run_dir = find_flag(expanded, "run_dir") or FinishedRunOptions().run_dir
        chosen = _read_task(run_dir)
        if not is_set(expanded, "trust_task"):
            check_recorded_code(
                {"task": chosen}, where=f"The run in `run_dir={run_dir}`", cure=TRUST
            )
        task = find_task(chosen)
        command: Command = import_named("task", task.commands[name])
    except TfdistError as error:
        print(f"tfdist: {name_flags(error, EvaluateOptions)}", file=sys.stderr)
        return error.exit_status

    def check(options: Any) -> None:
        command.check(options)
        path = os.path.expanduser(options.run.run_dir)
        if "://" not in path:
            check_finished(path)
            if name == "evaluate":
                _check_data(path, options)

    return run_command(
        f"tfdist.{name}",
        command.run,
        arguments,
        options_class=command.options_class,
        others=(TrainOptions,),
        check=check,
    )


def start_devices(options: DeviceOptions) -> "tf.distribute.Strategy":
    """Configures the devices of this process and returns the strategy that uses them."""
    from tfdist import devices
    from tfdist.strategies.registry import choose_local_strategy, make_strategy

    devices.set_virtual_devices(options.virtual_devices)
    devices.configure_memory_growth()
    name = choose_local_strategy() if options.strategy == AUTO else options.strategy
    return make_strategy(name, devices=list(options.devices) or None)


def run_evaluation(options: EvaluateOptions) -> int:
    """Evaluates a run's model on a part of its data, prints the metrics and writes them."""
    import keras

    from tfdist.tasks.data import to_sources
    from tfdist.training.fit.trainer import Trainer

    chosen = options.run
    run, strategy = _load(options)
    data = to_sources(run.task.make_data(seed=run.options.training.seed, quiet=chosen.quiet))
    with strategy.scope():
        run.task.compile_model(run.model, keras.optimizers.SGD(), data.info)
    logs = Trainer(run.model).evaluate(
        data.train if chosen.split == "train" else data.val,
        global_batch_size=chosen.global_batch_size,
        verbose=0,
        return_dict=True,
    )
    text = "\n".join(f"{name} {value:.4f}" for name, value in logs.items())
    return report_evaluation(options, run.path, logs, f"{text}\n")


def report_evaluation(options: Any, path: str, result: Mapping[str, Any], text: str) -> int:
    """Writes the metrics of an evaluation, and prints a text about them and where they are."""
    from tfdist.records.durable_files import write_output

    chosen = options.run
    output = chosen.output or f"{path}/evaluation/{chosen.split}.json"
    with writing_output(output):
        write_output(output, json.dumps({**result, "options": options.to_dict()}, indent=1))
    if not chosen.quiet:
        print(f"{text}The metrics are in {output}.")
    return 0


def check_prediction(options: PredictOptions) -> None:
    """Checks that the examples and the output are given."""
    if not options.run.examples or not options.run.output:
        raise TfdistError("Cannot predict without `examples` and `output`. Give both.")


def run_prediction(options: PredictOptions) -> int:
    """Writes the outputs of a run's model for the examples in a file."""
    import keras
    import numpy as np

    from tfdist.training.fit.trainer import Trainer

    chosen = options.run
    check_prediction(options)
    assert chosen.examples
    assert chosen.output
    try:
        read = np.load(chosen.examples)
    except (OSError, ValueError) as error:
        raise TfdistError(f"Cannot read `examples={chosen.examples}`: {error}") from error
    x = read if isinstance(read, np.ndarray) else dict(read)
    run, _ = _load(options)
    outputs = Trainer(run.model).predict(x, batch_size=chosen.global_batch_size, verbose=0)
    leaves = keras.tree.flatten(outputs)
    if len(leaves) == 1:
        np.save(chosen.output, leaves[0])
    else:
        names = keras.tree.flatten(run.model.output_names)
        np.savez(chosen.output, **dict(zip(names, leaves, strict=True)))
    if not chosen.quiet:
        print(f"The outputs of {len(leaves[0])} examples are in {chosen.output}.")
    return 0


def check_export(options: ExportOptions) -> None:
    """Checks the name of the output, and that the packages for its format are there."""
    output, file_format = options.run.find_output(), options.run.format
    if file_format != SAVED_MODEL:
        check_file_name(output, file_format)
        check_installed(file_format)


def run_export(options: ExportOptions, *, write: Callable[[ExportRunOptions, str], str]) -> int:
    """Writes the run's model as a file, or as a new version whose servable `write` makes."""
    from tfdist.records.pattern_paths import check_saved_model_path
    from tfdist.tasks.exporting.command import run_file_export
    from tfdist.tasks.exporting.versions import write_version

    chosen, said = options.run, ""
    output = chosen.find_output()
    if chosen.format != SAVED_MODEL:
        return run_file_export(chosen)
    check_saved_model_path("output", output)

    def write_chosen(path: str) -> None:
        nonlocal said
        said = write(chosen, path)

    path = write_version(output, write_chosen)
    if not chosen.quiet:
        print(f"{path}: {said}")
    return 0


def _write_servable(options: ExportRunOptions, path: str) -> str:
    from tfdist.tasks.finished import read_finished

    run = read_finished(options.run_dir, trust_task=options.trust_task)
    run.model.export(path, verbose=False)
    return "the signature serve accepts the model's inputs."


EVALUATE = Command(EvaluateOptions, run_evaluation)
PREDICT = Command(PredictOptions, run_prediction, check_prediction)
EXPORT = Command(ExportOptions, functools.partial(run_export, write=_write_servable), check_export)


def _load(
    options: EvaluateOptions | PredictOptions,
) -> "tuple[FinishedRun, tf.distribute.Strategy]":
    from tfdist.tasks.finished import read_finished

    strategy = start_devices(options.devices)
    with strategy.scope():
        run = read_finished(options.run.run_dir, trust_task=options.run.trust_task)
        return run, strategy


def _check_data(path: str, options: Any) -> None:
    """Checks that the files of the run's data, or of the options', are on this machine."""
    given = {name: getattr(options.run, name, None) for name in ("dataset", "data_dir")}
    try:
        recorded = parse_options(read_file(f"{path}/options.json"))
        if not options.run.trust_task:
            check_recorded_code(recorded or {}, where=path, cure=TRUST)
        task = TrainOptions.from_dict(recorded or {}).task
        task = dataclasses.replace(task, **{name: value for name, value in given.items() if value})
    except Exception:  # The command itself reports what is wrong.
        return
    check_paths(task)


def _read_task(run_dir: str) -> str:
    """Returns the name of a run's task, or of segmentation if the run cannot be read."""
    path = f"{run_dir.rstrip('/')}/options.json"
    try:
        if "://" in path:
            start_tensorflow_quietly()
        values: Any = parse_object(read_file(path))
        return str(values["task"]["task"])
    except Exception:  # The command itself reports what is wrong.
        return Segmentation.name
