"""`python -m tfdist.predict`: masks, overlays and statistics of images of any size."""

import dataclasses
import sys
from typing import TYPE_CHECKING

from tfdist.cli.command import EXIT_FAILED, run_command
from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.inference.options import PredictOptions
from tfdist.tasks.segmentation.task import parse_label_map

if TYPE_CHECKING:
    from tfdist.tasks.segmentation.inference.prediction import Prediction


def main() -> int:
    """Runs the command line and returns the exit status."""
    return run_command("tfdist.predict", run_prediction, options_class=PredictOptions)


def run_prediction(options: PredictOptions) -> int:
    """Predicts the images that `--output` does not hold yet.

    Args:
      options: the command's.

    Returns:
      0, or 1 if a file could not be read: it was reported and left out.

    Raises:
      TfdistError: bad input; nothing was written.
      OSError: `--output` cannot be written.
    """
    from tfdist.tasks.segmentation.inference import assembly, files, prediction
    from tfdist.tasks.segmentation.inference.scores import format_scores
    from tfdist.tasks.segmentation.pictures import make_palette

    chosen = options.run
    if not chosen.images or not chosen.output:
        missing = "--output" if chosen.images else "--images"
        raise TfdistError(f"Cannot predict without {missing}. Give --images and --output.")
    images = files.list_images(chosen.images)
    masks = files.find_masks(images, chosen.masks) if chosen.masks else None
    label_map = parse_label_map(chosen.label_map)
    strategy = assembly.start_devices(options.devices)
    run = assembly.load_run(chosen.run_dir, strategy=strategy)
    label_map = label_map or parse_label_map(run.task.label_map)
    predictor = assembly.build_predictor(run, options.windows, strategy)
    directory = files.PredictionDirectory(chosen.output, make_palette(run.num_classes))
    windows = options.windows
    directory.open(
        {"images": chosen.images, "model_sha256": run.model_sha256}
        | {
            item.name: getattr(windows, item.name)
            for item in dataclasses.fields(windows)
            if item.metadata.get("result", True)
        }
    )
    problems: list[TfdistError] = []

    def report(error: TfdistError) -> None:
        problems.append(error)
        print(f"{'' if chosen.quiet else chr(10)}tfdist: {error}", file=sys.stderr)

    predictions: list[Prediction] = []
    for result in files.show_progress(
        prediction.predict_files(
            predictor,
            images,
            directory,
            masks=masks,
            ignore_label=run.ignore_label,
            label_map=label_map,
            report=report,
        ),
        len(images),
        quiet=chosen.quiet,
    ):
        predictions.append(result)
    predictions.sort(key=lambda result: result.name)
    prediction.write_statistics(directory, predictions, run.class_names)
    if masks is not None:
        scores = prediction.write_scores(directory, predictions, run.class_names)
        if not chosen.quiet:
            print(format_scores(scores))
    if not chosen.quiet:
        print(
            f"{len(predictions)} of {len(images)} images are in {chosen.output}: masks/, "
            f"overlays/, classes.csv{', metrics.csv, metrics.json' if masks else ''}."
        )
    return EXIT_FAILED if problems else 0


if __name__ == "__main__":
    sys.exit(main())
