"""Train any Keras 3 model under any `tf.distribute` strategy.

The names below are loaded on first use, so that `import tfdist` and `--help` do not
wait for TensorFlow.
"""

from tfdist._lazy import lazy_exports

__version__ = "0.1.0"

__all__ = [
    "Predictor",
    "TfdistError",
    "Trainer",
    "TrainingError",
    "data",
    "load_run",
    "models",
    "strategies",
    "tasks",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Predictor": "tfdist.tasks.segmentation.inference.predictor:Predictor",
        "TfdistError": "tfdist.errors:TfdistError",
        "Trainer": "tfdist.training.trainer:Trainer",
        "TrainingError": "tfdist.errors:TrainingError",
        "data": "tfdist.data",
        "load_run": "tfdist.assembly:load_run",
        "models": "tfdist.models",
        "strategies": "tfdist.strategies",
        "tasks": "tfdist.tasks",
    },
)
