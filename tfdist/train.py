"""`python -m tfdist.train`: trains a task under any strategy.

TensorFlow is imported only when a run starts, so that `--help` and flag errors appear at once.
"""

import contextlib
import sys
import time

from tfdist.announcing import announce, announcing
from tfdist.cli.command import run_command
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.cli.xla_cache import AUTO, use_xla_cache
from tfdist.cluster import find_tf_config
from tfdist.data.progress import print_line
from tfdist.runs.options import TrainOptions
from tfdist.stopping import EXIT_TERMINATED


def main() -> int:
    """Runs the command line and returns the exit status."""
    return run_command(
        "tfdist.train", run_training, options_class=TrainOptions, needs_tensorflow=False
    )


def run_training(options: TrainOptions) -> int:
    """Starts or continues a run and fills its directory.

    Returns:
      0 for a finished run or a dry run; 130 after Ctrl-C and 143 after SIGTERM, once a checkpoint
      is written; 143 for a worker or parameter server whose chief ended before the run did.

    Raises:
      TfdistError: bad input; nothing was written.
      TrainingError: the loss is not finite.
    """
    options.check()  # what needs no TensorFlow, before it is loaded
    with contextlib.ExitStack() as stack:
        if not (options.run.quiet or options.run.dry_run):
            stack.enter_context(announcing(_show))
        if options.step.jit_compile or options.run.xla_cache != AUTO:
            use_xla_cache(options.run.xla_cache, deterministic=options.training.deterministic)
        announce("Loading TensorFlow")
        if not options.run.verbose_tensorflow:
            start_tensorflow_quietly()
        return _run(options)


def _show(text: str) -> None:
    """Prints what begins, in the process that prints the progress."""
    config = find_tf_config()  # set when the process has joined its cluster
    if config is None or config.is_chief:
        print_line(f"{text} ...")


def _run(options: TrainOptions) -> int:
    if options.run.dry_run:
        from tfdist.runs.dry_run import describe_dry_run

        print(describe_dry_run(options))
        return 0
    from tfdist.auto.choice import choose_strategy
    from tfdist.launch.pulse import SERVE, open_pulse
    from tfdist.runs.plan import make_plan
    from tfdist.runs.training import TrainingRun
    from tfdist.strategies.servers import run_server

    started = time.perf_counter()
    plan = make_plan(options)
    if plan.traits.has_servers and plan.cluster and not plan.cluster.is_chief:
        open_pulse().show(SERVE)
        run_server(plan.cluster)
        return 0 if plan.run.is_finished else EXIT_TERMINATED
    plan, data = choose_strategy(plan)
    return TrainingRun(plan, started=started, data=data).train()


if __name__ == "__main__":
    sys.exit(main())
