"""Train any Keras 3 model under any `tf.distribute` strategy.

The names below are loaded on first use, so that `import tfdist` and `--help` do not
wait for TensorFlow.
"""

from tfdist._lazy import lazy_exports

__version__ = "0.1.0"

__all__ = ["TfdistError", "Trainer", "data", "strategies"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "TfdistError": "tfdist.errors:TfdistError",
        "Trainer": "tfdist.training.trainer:Trainer",
        "data": "tfdist.data",
        "strategies": "tfdist.strategies",
    },
)
