"""Using a finished run: prediction on images of any size, its scores, and servables."""

from tfdist._lazy import lazy_exports

__all__ = ["Predictor", "TrainedRun"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Predictor": "tfdist.inference.predictor:Predictor",
        "TrainedRun": "tfdist.inference.run:TrainedRun",
    },
)
