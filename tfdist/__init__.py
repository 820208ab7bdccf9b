"""Train any Keras 3 model under any `tf.distribute` strategy.

The names below are loaded on first use, so that `import tfdist` and `--help` do not
wait for TensorFlow.
"""

from tfdist._lazy import lazy_exports

__version__ = "0.1.0"

__all__ = ["Predictor", "TfdistError", "Trainer", "data", "load_run", "strategies"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Predictor": "tfdist.inference.predictor:Predictor",
        "TfdistError": "tfdist.errors:TfdistError",
        "Trainer": "tfdist.training.trainer:Trainer",
        "data": "tfdist.data",
        "load_run": "tfdist.assembly:load_run",
        "strategies": "tfdist.strategies",
    },
)
