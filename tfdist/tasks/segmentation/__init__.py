"""Segmentation: images and masks, networks, losses, metrics, prediction and pictures."""

from tfdist._lazy import lazy_exports

_HERE = "tfdist.tasks.segmentation"
_EXPORTS = {
    "Augmentation": f"{_HERE}.augment:Augmentation",
    "Predictor": f"{_HERE}.inference.predictor:Predictor",
    "DatasetOptions": f"{_HERE}.registry:DatasetOptions",
    "SegmentationMetrics": f"{_HERE}.metrics:SegmentationMetrics",
    "TrainedRun": f"{_HERE}.inference.run:TrainedRun",
    "count_classes": f"{_HERE}.class_weights:count_classes",
    "count_pixels_with_class": f"{_HERE}.class_weights:count_pixels_with_class",
    "make_class_weights": f"{_HERE}.class_weights:make_class_weights",
    "make_folder": f"{_HERE}.folder:make_folder",
    "make_loss": f"{_HERE}.losses:make_loss",
    "make_shapes": f"{_HERE}.shapes:make_shapes",
    "make_source": f"{_HERE}.registry:make_source",
    "make_tfds": f"{_HERE}.tfds_source:make_tfds",
}

__all__ = list(_EXPORTS)

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
