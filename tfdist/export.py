"""`python -m tfdist.export`: a finished run as a servable."""

import sys

from tfdist.cli.command import run_command
from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.inference.options import ExportOptions


def main() -> int:
    """Runs the command line and returns the exit status."""
    return run_command("tfdist.export", run_export, options_class=ExportOptions)


def run_export(options: ExportOptions) -> int:
    """Writes the run's model as the next version of a servable.

    Args:
      options: the command's.

    Returns:
      0.

    Raises:
      TfdistError: bad input; nothing was written.
      OSError: `--output` cannot be written.
    """
    from tfdist.tasks.segmentation.inference import assembly
    from tfdist.tasks.segmentation.inference.servable import (
        ENCODED_SIGNATURE,
        TENSOR_SIGNATURE,
        export_servable,
    )

    chosen = options.run
    if not chosen.output:
        raise TfdistError("Cannot export without --output. Give the servable's directory.")
    run = assembly.load_run(chosen.run_dir)
    path = export_servable(run, chosen.output)
    if not chosen.quiet:
        height, width = run.image_size
        print(
            f"{path}: signatures {ENCODED_SIGNATURE} (image_bytes) and {TENSOR_SIGNATURE} "
            f"(images) -> mask, probabilities ({height}x{width}, {run.num_classes} classes)."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
