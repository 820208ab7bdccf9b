"""What the finished run of any task can do: be evaluated, predict, and be exported.

A task that has more to offer names commands of its own in `Task.commands`.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfdist.cli.arguments import find_flag
from tfdist.cli.command import EXIT_BAD_INPUT, run_command
from tfdist.cli.flags import expand_flag_files, name_flags
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.errors import TfdistError
from tfdist.imports import import_named
from tfdist.options import CommandOptions, OptionGroup, inherit, option
from tfdist.runs.options import TrainOptions
from tfdist.strategies.base import devices_option
from tfdist.strategies.options import StrategyOptions
from tfdist.strategies.registry import AUTO, STRATEGIES
from tfdist.tasks.registry import find_task
from tfdist.tasks.segmentation.task import Segmentation

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.tasks.finished import FinishedRun


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(OptionGroup):
    """Where it runs."""

    strategy: str = option(
        AUTO,
        "how the work is distributed over this machine's devices",
        choices=(AUTO, *(name for name, kind in STRATEGIES.items() if kind.traits.is_local)),
        result=False,
    )
    devices: tuple[str, ...] = devices_option()
    virtual_devices: int = inherit(StrategyOptions, "virtual_devices")


@dataclass(frozen=True, kw_only=True)
class FinishedRunOptions(OptionGroup):
    """What a command needs that uses a trained model."""

    run_dir: str = option("runs/default", "a finished run of tfdist.train", metavar="DIR")
    quiet: bool = option(False, "print nothing but errors", result=False)
    verbose_tensorflow: bool = option(False, "show TensorFlow's own messages", result=False)


@dataclass(frozen=True, kw_only=True)
class EvaluateRunOptions(FinishedRunOptions):
    """What it reads and writes."""

    split: str = option("val", "the part of the data", choices=("train", "val"))
    global_batch_size: int = option(32, "examples a step, over all replicas", minimum=1)
    output: str | None = option(
        None, "the metrics as JSON; RUN_DIR/evaluation/SPLIT.json by default", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(CommandOptions):
    """What `python -m tfdist.evaluate` takes for a task without an evaluation of its own.

    Attributes:
      run, devices: the groups.
    """

    run: EvaluateRunOptions = EvaluateRunOptions()
    devices: DeviceOptions = DeviceOptions()


@dataclass(frozen=True, kw_only=True)
class PredictRunOptions(FinishedRunOptions):
    """What it reads and writes."""

    examples: str | None = option(
        None, "inputs: .npy, or .npz with an array for each input", metavar="FILE"
    )
    global_batch_size: int = option(32, "examples a step, over all replicas", minimum=1)
    output: str | None = option(None, "the model's outputs, as .npy or .npz", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class PredictOptions(CommandOptions):
    """What `python -m tfdist.predict` takes for a task without a prediction of its own.

    Attributes:
      run, devices: the groups.
    """

    run: PredictRunOptions = PredictRunOptions()
    devices: DeviceOptions = DeviceOptions()


@dataclass(frozen=True, kw_only=True)
class ExportRunOptions(FinishedRunOptions):
    """What it reads and writes."""

    output: str | None = option(
        None, "holds the versions: 1, 2, ...; each export adds one", metavar="DIR"
    )


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CommandOptions):
    """What `python -m tfdist.export` takes.

    Attributes:
      run: the only group.
    """

    run: ExportRunOptions = ExportRunOptions()


@dataclass(frozen=True)
class Command:
    """What a command does for a task.

    Attributes:
      options_class: what it takes; its group `run` derives from `FinishedRunOptions`.
      run: options in, exit status out.
    """

    options_class: type[CommandOptions]
    run: Callable[[Any], int]


def run_task_command(name: str, arguments: Sequence[str] | None = None) -> int:
    """Runs `evaluate`, `predict` or `export` as the task of the run that is named has it.

    Args:
      name: the command.
      arguments: the command line without the program; `sys.argv` by default.

    Returns:
      The exit status.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        run_dir = find_flag(expand_flag_files(arguments), "run_dir")
        task = find_task(_read_task(run_dir or FinishedRunOptions().run_dir))
        command: Command = import_named("task", task.commands[name])
    except TfdistError as error:
        print(f"tfdist: {name_flags(error)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return run_command(
        f"tfdist.{name}",
        command.run,
        arguments,
        options_class=command.options_class,
        others=(TrainOptions,),
    )


def start_devices(options: DeviceOptions) -> "tf.distribute.Strategy":
    """Sets the devices of a process that uses a finished run, and returns its strategy."""
    from tfdist import devices
    from tfdist.strategies.registry import choose_local_strategy, make_strategy

    devices.configure_virtual_devices(options.virtual_devices)
    devices.configure_memory_growth()
    name = choose_local_strategy() if options.strategy == AUTO else options.strategy
    return make_strategy(name, devices=list(options.devices) or None)


def run_evaluation(options: EvaluateOptions) -> int:
    """Evaluates a run's model on a part of its data, prints the metrics and writes them."""
    import keras

    from tfdist.tasks.sources import to_sources
    from tfdist.training.durable_files import make_directories, write_atomically
    from tfdist.training.trainer import Trainer

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
    output = chosen.output or f"{run.path}/evaluation/{chosen.split}.json"
    make_directories(output.rpartition("/")[0] or ".")
    write_atomically(output, json.dumps({**logs, "options": options.to_dict()}, indent=1))
    if not chosen.quiet:
        for name, value in logs.items():
            print(f"{name} {value:.4f}")
        print(f"The metrics are in {output}.")
    return 0


def run_prediction(options: PredictOptions) -> int:
    """Writes what a run's model makes of the examples in a file."""
    import keras
    import numpy as np

    from tfdist.training.trainer import Trainer

    chosen = options.run
    if not chosen.examples or not chosen.output:
        raise TfdistError("Cannot predict without `examples` and `output`. Give both.")
    try:
        read = np.load(chosen.examples)
    except (OSError, ValueError) as error:
        raise TfdistError(f"`examples={chosen.examples}`: {error}") from error
    x = read if isinstance(read, np.ndarray) else dict(read)
    run, _ = _load(options)
    outputs = Trainer(run.model).predict(x, batch_size=chosen.global_batch_size)
    leaves = keras.tree.flatten(outputs)
    if len(leaves) == 1:
        np.save(chosen.output, leaves[0])
    else:
        names = keras.tree.flatten(run.model.output_names)
        np.savez(chosen.output, **dict(zip(names, leaves, strict=True)))
    if not chosen.quiet:
        print(f"The outputs of {len(leaves[0])} examples are in {chosen.output}.")
    return 0


def run_export(options: ExportOptions) -> int:
    """Writes the run's model as the next version of a servable, by Keras's own export."""
    import tensorflow as tf

    from tfdist.tasks.finished import read_finished

    chosen = options.run
    if not chosen.output:
        raise TfdistError("Cannot export without `output`. Give the servable's directory.")
    run = read_finished(chosen.run_dir)
    gfile = tf.io.gfile
    there = gfile.listdir(chosen.output) if gfile.exists(chosen.output) else []
    versions = [int(name.rstrip("/")) for name in there if name.rstrip("/").isdigit()]
    path = f"{chosen.output}/{max(versions, default=0) + 1}"
    run.model.export(path, verbose=False)
    if not chosen.quiet:
        print(f"{path}: the signature serve takes what the model takes.")
    return 0


EVALUATE = Command(EvaluateOptions, run_evaluation)
PREDICT = Command(PredictOptions, run_prediction)
EXPORT = Command(ExportOptions, run_export)


def _load(
    options: EvaluateOptions | PredictOptions,
) -> "tuple[FinishedRun, tf.distribute.Strategy]":
    from tfdist.tasks.finished import read_finished

    strategy = start_devices(options.devices)
    with strategy.scope():
        return read_finished(options.run.run_dir), strategy


def _read_task(run_dir: str) -> str:
    """Returns the name of a run's task; segmentation where there is no run."""
    path = f"{run_dir.rstrip('/')}/options.json"
    try:
        if "://" in path:
            start_tensorflow_quietly()
            import tensorflow as tf

            with tf.io.gfile.GFile(path) as file:
                values = json.loads(file.read())
        else:
            with open(path, encoding="utf-8") as file:
                values = json.load(file)
        return str(values["task"]["task"])
    except Exception:  # The command itself says what is wrong.
        return Segmentation.name
