"""`python -m tfdist.serve`: serves a servable over HTTP."""

import importlib.util
import os
import sys
import tempfile

from tfdist.cli.command import run_command
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.errors import TfdistError
from tfdist.runs.options import TrainOptions
from tfdist.serve.model_files import check_versions, export_run, find_versions
from tfdist.serve.options import ServeOptions
from tfdist.tasks.finished_files import check_finished

_EXTRA = ("starlette", "uvicorn", "prometheus_client", "orjson", "PIL")


def main() -> int:
    """Runs the command line and returns the exit status."""
    return run_command(
        "tfdist.serve",
        run_serving,
        options_class=ServeOptions,
        others=(TrainOptions,),
        needs_tensorflow=False,
    )


def run_serving(options: ServeOptions) -> int:
    """Serves a model, tunes its batches, or writes TensorFlow Serving's configuration."""
    run_dir, model = options.model.run_dir, options.model.model
    if not (run_dir or model):
        raise TfdistError("Cannot serve without a model. Give either `run_dir` or `model`.")
    if run_dir and model:
        raise TfdistError(
            f"Cannot serve both `run_dir={run_dir}` and `model={model}`. Leave one of them out."
        )
    if options.tf_serving.write_tf_serving:
        from tfdist.serve.tf_serving import write_tf_serving_files

        return write_tf_serving_files(options)
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise TfdistError(
            f"Cannot serve: the package {missing[0]} is missing. Install tfdist[serve]."
        )
    if options.model.run_dir and "://" not in options.model.run_dir:
        check_finished(os.path.expanduser(options.model.run_dir))
    if options.model.model and "://" not in options.model.model:
        check_versions(options.model.model, find_versions(options.model.model))
    if not options.run.verbose_tensorflow:
        start_tensorflow_quietly()
    from tfdist import devices
    from tfdist.records.pattern_paths import check_saved_model_path
    from tfdist.serve.server import run_server
    from tfdist.serve.tuning import make_tuning

    devices.set_virtual_devices(options.model.virtual_devices)
    devices.configure_memory_growth()
    chosen = devices.resolve_devices(options.model.devices, purpose="a server")
    work = make_tuning(options) if options.run.tune else None
    if options.model.model:
        check_saved_model_path("model", options.model.model)
        return run_server(options, options.model.model, chosen, work)
    with tempfile.TemporaryDirectory(prefix="tfdist-serve-") as directory:
        if status := export_run(options.model, directory):
            return status
        return run_server(options, directory, chosen, work)


if __name__ == "__main__":
    sys.exit(main())
