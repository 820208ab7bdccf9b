"""Train any Keras 3 model under any `tf.distribute` strategy.

The names below are loaded on first use, so that `import tfdist` and `--help` do not
wait for TensorFlow.
"""

import sys

from tfdist._lazy import lazy_exports

if sys.platform == "win32":
    raise ImportError(
        "tfdist does not run on Windows itself. Use WSL2 "
        "(https://learn.microsoft.com/windows/wsl/install) and install it there."
    )

__version__ = "0.1.0"

__all__ = [
    "Data",
    "Loop",
    "Predictor",
    "StepOptions",
    "Task",
    "TfdistError",
    "Trainer",
    "TrainingError",
    "data",
    "load_run",
    "models",
    "option",
    "placement",
    "set_virtual_devices",
    "strategies",
    "tasks",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Data": "tfdist.tasks.data:Data",
        "Loop": "tfdist.training.fit.own_loop:Loop",
        "Predictor": "tfdist.tasks.segmentation.inference.predictor:Predictor",
        "StepOptions": "tfdist.training.step_options:StepOptions",
        "TfdistError": "tfdist.errors:TfdistError",
        "Task": "tfdist.tasks.base:Task",
        "Trainer": "tfdist.training.fit.trainer:Trainer",
        "TrainingError": "tfdist.errors:TrainingError",
        "data": "tfdist.data",
        "load_run": "tfdist.tasks.segmentation.inference.run:load_run",
        "models": "tfdist.models",
        "option": "tfdist.options:option",
        "placement": "tfdist.placement",
        "set_virtual_devices": "tfdist.devices:set_virtual_devices",
        "strategies": "tfdist.strategies",
        "tasks": "tfdist.tasks",
    },
)
