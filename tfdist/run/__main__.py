"""`python -m tfdist.run`: runs a Keras script, unchanged, under a strategy.

python -m tfdist.run --strategy=mirrored script.py ARGUMENTS
python -m tfdist.run --workers=2 [--ps=1] script.py ARGUMENTS
"""

import contextlib
import functools
import os
import runpy
import sys
from collections.abc import Iterator, Sequence

from tfdist.announcing import print_message
from tfdist.cli.command import run_command
from tfdist.cli.flags import drop_flags, expand_flag_files, split_command
from tfdist.cli.output import ordinary_output
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.cli.xla_cache import use_xla_cache
from tfdist.errors import TfdistError
from tfdist.launch import run_local_cluster
from tfdist.run.options import ScriptOptions
from tfdist.runs.options import TrainOptions


def main() -> int:
    """Runs the command line and returns the exit status."""
    flags, command = split_command(ScriptOptions, sys.argv[1:])
    return run_command(
        "tfdist.run",
        functools.partial(run_script, flags=flags, command=command),
        flags,
        options_class=ScriptOptions,
        others=(TrainOptions,),
        needs_tensorflow=False,
        is_script=True,
    )


def run_script(options: ScriptOptions, *, flags: Sequence[str], command: Sequence[str]) -> int:
    """Runs a script in this process, or in the processes of a cluster on this machine."""
    if not command:
        raise TfdistError("No script is given. Run python -m tfdist.run [flags] script.py.")
    if not os.path.isfile(command[0]):
        raise TfdistError(f"Cannot find the script {command[0]!r}. Write flags as --name=value.")
    if not (options.run.workers or options.run.ps):
        return _run_here(options, command)
    flags = expand_flag_files(flags)  # or each process would read of a cluster in a file
    flags = drop_flags(flags, {"workers", "ps", "max_restarts", "log_dir"})
    return run_local_cluster(
        workers=options.run.workers or 1,
        ps=options.run.ps,
        command=[sys.executable, "-m", "tfdist.run", *flags, *command],
        run_dir=options.run.log_dir or None,
        max_restarts=options.run.max_restarts,
    ).status


def _run_here(options: ScriptOptions, command: Sequence[str]) -> int:
    use_xla_cache(options.run.xla_cache)
    if not options.run.verbose_tensorflow:
        start_tensorflow_quietly()
    import tensorflow as tf

    from tfdist import devices
    from tfdist.launch.pulse import SERVE, open_pulse
    from tfdist.run.device_settings import keeping_devices
    from tfdist.run.own_steps import OwnSteps
    from tfdist.run.routing import Routing
    from tfdist.run.scope import keeping_scope
    from tfdist.runs import processes
    from tfdist.stopping import ScriptStop
    from tfdist.strategies.servers import run_server
    from tfdist.training.step.model_variables import make_creator

    cluster = processes.join_cluster(options)
    devices.configure_devices(options.strategy.virtual_devices)
    options = processes.resolve_strategy(options, cluster)
    if options.strategy.select().traits.local_updates:
        raise TfdistError(
            f"tfdist.run does not support `strategy={options.strategy.select().name}`, whose "
            "workers have another strategy to communicate. Give a tfdist.Trainer to the script, "
            "or use multi_worker_mirrored."
        )
    if options.strategy.select().traits.has_servers and cluster and not cluster.is_chief:
        open_pulse().show(SERVE)
        return run_server(cluster)
    strategy = processes.build_strategy(options)
    placement, quiet = options.placement.select(), options.run.quiet
    routing = Routing(strategy, options.step, placement, quiet=quiet)
    if routing.workers.is_chief and not quiet:
        described = processes.describe_strategy(strategy, routing.workers, placement)
        places = ", ".join(processes.list_worker_devices(strategy))
        print_message(f"tfdist.run: {described}: {places}.")
    script, *arguments = command
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    creator = make_creator(strategy, options.step)

    @contextlib.contextmanager
    def open_scope() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(strategy.scope())
            if options.strategy.select().traits.has_servers:
                stack.enter_context(tf.variable_creator_scope(creator))
            yield

    def show(text: str) -> None:
        if routing.workers.is_chief:
            print_message(f"tfdist.run: {text}")

    own_steps = OwnSteps(strategy, options.step, show, quiet=quiet)
    with keeping_scope(strategy, open_scope), routing.open(), own_steps.open(), ScriptStop():
        routing.set_seed(options.run.seed)
        # What a task of a cluster prints goes to a log, which is not worth the others' run.
        with contextlib.nullcontext() if cluster else ordinary_output(), keeping_devices(show):
            runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
