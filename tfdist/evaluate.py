"""`python -m tfdist.evaluate`: the metrics of a finished run on a data set."""

import sys

import numpy as np

from tfdist.cli.command import run_command
from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.inference.options import EvaluateOptions


def main() -> int:
    """Runs the command line and returns the exit status."""
    return run_command("tfdist.evaluate", run_evaluation, options_class=EvaluateOptions)


def run_evaluation(options: EvaluateOptions) -> int:
    """Scores a run's model on every example of a split, prints the metrics and writes them.

    Args:
      options: the command's.

    Returns:
      0.

    Raises:
      TfdistError: bad input; nothing was written.
      OSError: the metrics cannot be written.
    """
    from tfdist.data.cache import read_examples
    from tfdist.tasks.segmentation.inference import assembly, files, scores

    chosen = options.run
    strategy = assembly.start_devices(options.devices)
    run = assembly.load_run(chosen.run_dir, strategy=strategy)
    predictor = assembly.build_predictor(run, options.windows, strategy)
    source = assembly.build_examples(run, chosen)
    if source.num_classes != run.num_classes:
        raise TfdistError(
            f"Cannot evaluate a model of {run.num_classes} classes on a data set of "
            f"{source.num_classes}. Name another --dataset."
        )
    total = np.zeros((run.num_classes, run.num_classes), np.int64)
    confusions = scores.score_examples(
        predictor,
        read_examples(source, own_size=chosen.full_size),
        ignore_label=run.ignore_label,
    )
    for confusion in files.show_progress(confusions, source.num_examples, quiet=chosen.quiet):
        total += confusion
    result = scores.make_scores(total, run.class_names, num_images=source.num_examples)
    output = chosen.output or f"{run.path}/evaluation/{chosen.split}.json"
    files.write_json(output, {**result, "options": options.to_dict()})
    if not chosen.quiet:
        print(scores.format_scores(result))
        print(f"{source.num_examples} images of {chosen.split}. The metrics are in {output}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
