"""`python -m tfdist.plan`: predicts memory, speed and price of every strategy.

    python -m tfdist.plan --hardware=a100 --workers=4 -- --global_batch_size=256 ...

The flags of tfdist.train follow `--`. Nothing is trained, except with `--calibrate`.
"""

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.cli.arguments import split_at_dashes
from tfdist.cli.command import run_command
from tfdist.cli.flags import expand_flag_files, parse_flags
from tfdist.cli.inputs import check_inputs
from tfdist.errors import TfdistError
from tfdist.plan.hardware import load_hardware
from tfdist.plan.options import PlanOptions
from tfdist.records.durable_files import write_output
from tfdist.runs.options import TrainOptions


def main() -> int:
    """Runs the command line and returns the exit status."""
    given, train_flags = split_at_dashes(sys.argv[1:])
    return run_command(
        "tfdist.plan",
        functools.partial(run_plan, arguments=train_flags),
        given,
        options_class=PlanOptions,
        others=(TrainOptions,),
        check=functools.partial(check_plan, arguments=train_flags),
        is_text=True,
    )


def check_plan(options: PlanOptions, *, arguments: Sequence[str]) -> None:
    """Checks the options of a plan.

    Raises:
      TfdistError: one of them is wrong, or a file cannot be written.
    """
    options.machine.parse_sweep()
    load_hardware(options.machine.hardware)
    train = parse_flags(TrainOptions, expand_flag_files(arguments))
    train.check()
    check_inputs(train)
    for path in filter(None, (options.run.html, options.run.calibrate)):
        if not Path(path).absolute().parent.is_dir():
            raise TfdistError(f"Cannot write {path}: there is no such directory. Make it first.")


def run_plan(options: PlanOptions, *, arguments: Sequence[str]) -> int:
    """Prints the plan of a training command.

    Returns:
      0.

    Raises:
      TfdistError: bad input.
    """
    from tfdist.plan.answer import format_answer, to_json

    arguments = expand_flag_files(arguments)
    train = parse_flags(TrainOptions, arguments)
    if options.run.calibrate:
        from tfdist.plan.calibrate import calibrate

        calibrate(options, train, arguments)
        return 0
    answer = make_answer(options, train, arguments)
    if options.run.html:
        from tfdist.plan.page import format_page

        write_output(options.run.html, format_page(answer))
    if options.run.json:
        print(json.dumps(to_json(answer), indent=2))
    elif not options.run.quiet:
        print(format_answer(answer))
    return 0


def make_answer(options: PlanOptions, train: TrainOptions, arguments: Sequence[str]) -> Any:
    """Returns the estimates of all setups, and the one to use.

    Raises:
      TfdistError: the hardware is unknown, or the model cannot be planned.
    """
    import dataclasses

    from tfdist.plan.answer import Answer, estimate_all
    from tfdist.plan.recommend import recommend
    from tfdist.plan.setup import list_setups, list_sweep
    from tfdist.plan.simulation import simulate
    from tfdist.plan.subject import make_workload
    from tfdist.plan.training_command import make_command

    machine = options.machine
    hardware = load_hardware(machine.hardware)
    speed = machine.input_examples_per_second or hardware.examples_per_s
    hardware = dataclasses.replace(hardware, examples_per_s=speed)
    workload = dataclasses.replace(
        make_workload(train, hardware), example_core_s=machine.input_core_ms / 1e3
    )
    devices = machine.devices_per_worker or hardware.devices_per_machine
    sweep = machine.parse_sweep()
    if sweep:
        setups = list_sweep(hardware, *sweep, devices=devices)
    else:
        setups = list_setups(hardware, workload, workers=machine.workers, devices=devices)
    estimates = estimate_all(
        [setup.split(workload.micro_batches) for setup in setups],
        workload,
        hardware,
        batch_per_replica=machine.batch_per_replica,
        price_per_hour=machine.price_per_hour,
    )
    found = recommend(estimates, batch=workload.global_batch_size)
    best = found.best
    command = ""
    if best is not None:
        command = make_command(
            best.setup, train, arguments, hardware, batch_per_replica=machine.batch_per_replica
        )
    simulated = {}
    if options.simulation.simulate and best is not None:
        simulated = simulate(options.simulation, best, workload, hardware)
    return Answer(workload, hardware, estimates, found, command, simulated)


if __name__ == "__main__":
    sys.exit(main())
