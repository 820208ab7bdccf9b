"""`tfds:NAME`: data sets of TensorFlow Datasets that have segmentation masks."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.source import SequentialSource
from tfdist.errors import TfdistError
from tfdist.tasks.images import tfds
from tfdist.tasks.images.reading import read_all
from tfdist.tasks.segmentation.examples import ImagesAndMasks
from tfdist.tasks.segmentation.folder import resize_example


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfdsInfo:
    """What TensorFlow Datasets does not say about a data set's masks.

    Attributes:
      first_label: the value of class 0 in the masks.
      splits: pairs of tfdist's name and the data set's name of a split, where they differ.
      ignore_label: the ignore label as stored in the masks, or None.
    """

    class_names: tuple[str, ...]
    first_label: int = 0
    splits: tuple[tuple[str, str], ...] = ()
    ignore_label: int | None = None


KNOWN_DATASETS = {
    "oxford_iiit_pet": TfdsInfo(
        class_names=("pet", "background", "outline"), first_label=1, splits=(("val", "test"),)
    )
}
_FEATURES = ("image", "segmentation_mask")
_ADVICE = "Name one with an image and a segmentation_mask, such as tfds:oxford_iiit_pet."


def make_tfds(
    name: str,
    split: str,
    image_size: tuple[int, int],
    *,
    data_dir: str | None = None,
    num_classes: int | None = None,
    ignore_label: int | None = None,
    class_names: tuple[str, ...] | None = None,
    max_examples: int | None = None,
    download_config: Any = None,
) -> "TfdsSource":
    """Returns a source of a TensorFlow Datasets data set with `image` and `segmentation_mask`.

    The data set is downloaded and prepared if it is not yet in `data_dir`. For the data sets
    in `KNOWN_DATASETS`, the classes are known and their labels start at 0 (the 1, 2, 3 of
    oxford_iiit_pet become 0, 1, 2); for any other, give `num_classes`.

    Args:
      name: such as "oxford_iiit_pet" or "oxford_iiit_pet:4.0.0".
      split: such as "train"; "val" stands for the data set's val, validation or test.
      data_dir: the directory of the data sets, maybe gs://; ~/tensorflow_datasets by default.
      max_examples: the maximum number of examples; the first in the stored order are used.

    Raises:
      TfdistError: tensorflow_datasets is missing; there is no such data set or split; the
        data set has no segmentation_mask, or cannot be downloaded or prepared; the number
        of classes is unknown. Reading the examples also raises it, if a label is out of
        range.
    """
    builder = _make_builder(name, data_dir)
    info = KNOWN_DATASETS.get(builder.name)
    if info is not None:
        num_classes = num_classes or len(info.class_names)
        class_names = class_names or info.class_names
        ignore_label = info.ignore_label if ignore_label is None else ignore_label
    if num_classes is None:
        raise TfdistError(
            f"Cannot tell how many classes tfds:{name} has: TensorFlow Datasets does not say. "
            "Set `num_classes`."
        )
    if class_names is not None and len(class_names) != num_classes:
        raise TfdistError(
            f"Cannot name {num_classes} classes of tfds:{name} with {len(class_names)} names "
            f"({', '.join(class_names)}). Give one name per class."
        )
    tfds.prepare(builder, name, download_config)
    stored_split = tfds.find_split(
        builder, name, split, aliases=dict(info.splits) if info else None
    )
    num_examples = builder.info.splits[stored_split].num_examples
    if max_examples is not None:
        num_examples = min(num_examples, max_examples)
    return TfdsSource(
        num_examples=num_examples,
        image_size=(int(image_size[0]), int(image_size[1])),
        num_classes=num_classes,
        class_names=class_names,
        ignore_label=ignore_label,
        builder=builder,
        split=stored_split,
        first_label=info.first_label if info else 0,
    )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TfdsSource(ImagesAndMasks, SequentialSource):
    """See `make_tfds`. Reads in the stored order; `cache_source` adds random access."""

    builder: Any
    split: str
    first_label: int

    def read_examples(
        self, *, original_size: bool = False
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields every example, in the stored order, and checks its labels."""
        examples = tfds.read_in_order(
            self.builder, self.split, features=_FEATURES, num_examples=self.num_examples
        )

        def read(item: tuple[int, tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
            index, (image, mask) = item
            labels = self._read_labels(mask, index)
            if original_size:
                return image, labels.astype(np.uint8)
            with tf.device("CPU:0"):
                return resize_example(image, labels, self.image_size)

        yield from read_all(read, enumerate(examples))

    def make_fingerprint(self) -> dict[str, Any]:
        """Returns the data set's full name, the sizes of its splits, and its first label."""
        found = tfds.describe_split(
            self.builder, self.split, num_examples=self.num_examples, spec=self.element_spec
        )
        return {**found, "first_label": self.first_label}

    def get_fingerprint(self) -> str:
        """Returns the data set's full name and split, and how its labels are mapped."""
        return (
            f"tfds {self.builder.info.full_name} {self.split} {self.first_label} "
            f"{self.num_classes} {self.ignore_label} {self.builder.info.splits[self.split]}"
        )

    def _read_labels(self, mask: np.ndarray, index: int) -> np.ndarray:
        stored = mask[..., 0].astype(np.int32) if mask.ndim == 3 else mask.astype(np.int32)
        labels = stored - self.first_label
        if self.ignore_label is not None:
            labels = np.where(stored == self.ignore_label, self.ignore_label, labels)
        wrong = (labels < 0) | (labels >= self.num_classes)
        if self.ignore_label is not None:
            wrong &= labels != self.ignore_label
        if wrong.any():
            last = self.first_label + self.num_classes - 1
            raise TfdistError(
                f"Cannot use example {index} of the split {self.split!r} of tfds:"
                f"{self.builder.name}: its mask holds {stored[wrong][0]}, but classes are "
                f"{self.first_label} to {last}. Set `num_classes` or `ignore_label` to match."
            )
        return labels.astype(np.uint8)


def is_prepared(name: str, data_dir: str | None) -> bool:
    """Returns whether a data set is already prepared, so that `make_tfds` downloads nothing."""
    return _make_builder(name, data_dir).is_prepared()


def _make_builder(name: str, data_dir: str | None) -> Any:
    return tfds.make_builder(
        name, data_dir, features=_FEATURES, advice=_ADVICE, known=list(KNOWN_DATASETS)
    )
