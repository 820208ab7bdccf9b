"""The trainer and what it is made of."""

from tfdist._lazy import lazy_exports

__all__ = ["SegmentationMetrics", "Trainer", "make_loss"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "SegmentationMetrics": "tfdist.training.metrics:SegmentationMetrics",
        "Trainer": "tfdist.training.trainer:Trainer",
        "make_loss": "tfdist.training.losses:make_loss",
    },
)
