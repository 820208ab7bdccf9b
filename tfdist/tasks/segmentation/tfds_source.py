"""`tfds:NAME`: data sets of TensorFlow Datasets that have segmentation masks."""

import contextlib
import dataclasses
import importlib.resources.abc
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.cache import SequentialSource
from tfdist.data.dataset_options import set_options
from tfdist.data.fingerprint import make_header
from tfdist.errors import TfdistError, make_unknown_name_error
from tfdist.tasks.segmentation.examples import ImagesAndMasks
from tfdist.tasks.segmentation.folder import resize_example


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfdsInfo:
    """What TensorFlow Datasets does not say about a data set's masks.

    Attributes:
      class_names: one for each class, in order.
      first_label: the mask's value of class 0.
      splits: our name of a split -> theirs, where they differ.
      ignore_label: as stored in the mask, or None.
    """

    class_names: tuple[str, ...]
    first_label: int = 0
    splits: tuple[tuple[str, str], ...] = ()
    ignore_label: int | None = None


KNOWN_DATASETS = {
    "oxford_iiit_pet": TfdsInfo(
        class_names=("pet", "background", "outline"),
        first_label=1,
        splits=(("val", "test"),),
    ),
}
_OTHER_NAMES_OF_VAL = ("validation", "test")
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
    """Returns a data set of TensorFlow Datasets with `image` and `segmentation_mask`.

    It is downloaded and prepared when it is not in `data_dir` yet. For the data sets in
    `KNOWN_DATASETS` the classes are known and their labels start at 0 (the 1, 2, 3 of
    oxford_iiit_pet become 0, 1, 2); for any other give `num_classes`.

    Args:
      name: such as "oxford_iiit_pet" or "oxford_iiit_pet:4.0.0".
      split: such as "train"; "val" is what the data set has of val, validation or test.
      image_size: (height, width) in pixels of the examples.
      data_dir: where data sets are, which may be gs://; by default ~/tensorflow_datasets.
      num_classes: labels are 0 .. num_classes - 1.
      ignore_label: one more label that is allowed in the masks, or None.
      class_names: one for each class.
      max_examples: take only this many, the first in the stored order.
      download_config: a `tfds.download.DownloadConfig`.

    Raises:
      TfdistError: tensorflow_datasets is missing or has no such data set; it has no
        segmentation_mask; it cannot be downloaded or prepared; no such split; the
        number of classes is not known. Reading the examples raises it for a label out
        of range.
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
            f"({', '.join(class_names)}). Give one name a class."
        )
    _prepare(builder, name, download_config)
    stored_split = _find_split(builder, name, split, info)
    num_examples = builder.info.splits[stored_split].num_examples
    if max_examples is not None:
        num_examples = min(num_examples, max_examples)
    if num_examples < 1:
        raise TfdistError(
            f"Cannot use the split {stored_split!r} of tfds:{name}: it has no example. Name "
            "another split."
        )
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
    """See `make_tfds`. It is read in the stored order; `cache_source` gives random access."""

    builder: Any
    split: str
    first_label: int

    def read_examples(self, *, own_size: bool = False) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields every example, in the stored order.

        Raises:
          TfdistError: a label out of range.
        """
        import tensorflow_datasets as tfds

        dataset = self.builder.as_dataset(
            split=self.split,
            shuffle_files=False,
            read_config=tfds.ReadConfig(
                interleave_cycle_length=1, try_autocache=False, shuffle_seed=None
            ),
        ).take(self.num_examples)
        pairs = dataset.map(
            lambda example: (example["image"], example["segmentation_mask"]),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        ).prefetch(tf.data.AUTOTUNE)
        for index, (image, mask) in enumerate(set_options(pairs).as_numpy_iterator()):
            labels = self._read_labels(mask, index)
            if image.shape[-1] == 1:
                image = np.repeat(image, 3, axis=-1)
            if own_size:
                yield image, labels.astype(np.uint8)
            else:
                yield resize_example(image, labels, self.image_size)

    def make_fingerprint(self) -> dict[str, Any]:
        """Returns the data set's full name, its splits' sizes, and what its labels become."""
        splits = self.builder.info.splits
        return {
            **make_header(
                kind="tfds", num_examples=self.num_examples, element_spec=self.element_spec
            ),
            "name": self.builder.info.full_name,
            "split": self.split,
            "split_sizes": {name: int(splits[name].num_examples) for name in sorted(splits)},
            "first_label": self.first_label,
        }

    def get_fingerprint(self) -> str:
        """Returns the data set's full name and split, and what becomes of its labels."""
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
    """Returns whether a data set is there already, so that `make_tfds` downloads nothing.

    Raises:
      TfdistError: see `make_tfds`.
    """
    return _make_builder(name, data_dir).is_prepared()


def _make_builder(name: str, data_dir: str | None) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise TfdistError(
            f"Cannot read tfds:{name}: {error}. Run `pip install tensorflow-datasets`."
        ) from error
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        base = name.partition("/")[0].partition(":")[0]
        known = [*tfds.list_builders(with_community_datasets=False), *KNOWN_DATASETS]
        if base not in known:
            raise make_unknown_name_error(
                "data set tfds:", base, set(known), where_all=_ADVICE
            ) from error
        raise TfdistError(f"Cannot load tfds:{name}: {_first_line(error)} {_ADVICE}") from error
    except Exception as error:
        raise TfdistError(f"Cannot load tfds:{name}: {_first_line(error)} {_ADVICE}") from error
    features = builder.info.features or {}
    for feature in ("image", "segmentation_mask"):
        if feature not in features:
            raise TfdistError(
                f"Cannot use tfds:{name}: it has no {feature}, only {', '.join(features)}. "
                f"{_ADVICE}"
            )
    return builder


def _prepare(builder: Any, name: str, download_config: Any) -> None:
    try:
        with _lend_importlib_resources():
            builder.download_and_prepare(download_config=download_config)
    except Exception as error:
        # Whatever went wrong - network, disk, checksum - is the user's to mend.
        raise TfdistError(
            f"Cannot prepare tfds:{name} in {str(builder.data_dir)!r}: "
            f"{type(error).__name__}: {_first_line(error)} Check the network, or name with "
            "`data_dir` a directory where it is prepared already."
        ) from error


@contextlib.contextmanager
def _lend_importlib_resources() -> Iterator[None]:
    """Makes the standard library's module answer for the package, if that is absent.

    tensorflow_datasets 4.9.10 imports importlib_resources to prepare a data set but
    requires it for Python < 3.9 only (tensorflow/datasets#11212). Goes when it does.
    """
    name = "importlib_resources"
    if importlib.util.find_spec(name) is not None:
        yield
        return
    sys.modules[name] = importlib.resources
    try:
        yield
    finally:
        del sys.modules[name]


def _find_split(builder: Any, name: str, split: str, info: TfdsInfo | None) -> str:
    found = list(builder.info.splits)
    wanted = [dict(info.splits).get(split, split)] if info else [split]
    if split == "val":
        wanted += _OTHER_NAMES_OF_VAL
    for candidate in wanted:
        if candidate in found:
            return candidate
    raise TfdistError(
        f"Cannot find the split {split!r} of tfds:{name}: its splits are {', '.join(found)}. "
        "Name one of them."
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = (lines or [type(error).__name__])[0][:300]
    return line if line.endswith(".") else line + "."
