"""Finds, prepares and reads data sets of TensorFlow Datasets."""

import contextlib
import importlib.resources.abc
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdist.data.fingerprint import make_header
from tfdist.data.tf_data import set_options
from tfdist.errors import TfdistError, make_unknown_name_error

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

_OTHER_NAMES_OF_VAL = ("validation", "test")


def make_builder(
    name: str,
    data_dir: str | None,
    *,
    features: Sequence[str],
    advice: str,
    known: Sequence[str] = (),
) -> Any:
    """Returns the `tfds.core.DatasetBuilder` of a data set.

    Args:
      data_dir: the directory of the data sets; ~/tensorflow_datasets by default.
      features: the features that its examples must have, `image` among them.

    Raises:
      TfdistError: tensorflow_datasets is missing or has no such data set; a feature is missing;
        the images are not uint8.
    """
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
        valid = [*tfds.list_builders(with_community_datasets=False), *known]
        if base not in valid:
            raise make_unknown_name_error(
                "data set tfds:", base, set(valid), where_all=advice
            ) from error
        raise TfdistError(f"Cannot load tfds:{name}: {_first_line(error)} {advice}") from error
    except Exception as error:
        raise TfdistError(f"Cannot load tfds:{name}: {_first_line(error)} {advice}") from error
    found = builder.info.features or {}
    for feature in features:
        if feature not in found:
            raise TfdistError(
                f"Cannot use tfds:{name}: it has no {feature}, only {', '.join(found)}. {advice}"
            )
    if tf.as_dtype(found["image"].dtype) != tf.uint8:  # others would be cut to 0..255
        raise TfdistError(
            f"Cannot use tfds:{name}: its images are {tf.as_dtype(found['image'].dtype).name}, "
            f"not uint8. {advice}"
        )
    return builder


def prepare(
    builder: "tfds.core.DatasetBuilder",
    name: str,
    download_config: "tfds.download.DownloadConfig | None" = None,
) -> None:
    """Downloads and prepares a data set unless it is already prepared."""
    try:
        with _lend_importlib_resources():
            builder.download_and_prepare(download_config=download_config)
    except Exception as error:
        # Whatever went wrong (network, disk, checksum), the user has to fix it.
        raise TfdistError(
            f"Cannot prepare tfds:{name} in {str(builder.data_dir)!r}: "
            f"{type(error).__name__}: {_first_line(error)} Check the network, or set "
            "`data_dir` to a directory where it is already prepared."
        ) from error


def find_split(
    builder: "tfds.core.DatasetBuilder",
    name: str,
    split: str,
    *,
    aliases: Mapping[str, str] | None = None,
) -> str:
    """Returns the data set's own name of a split; "val" stands for val, validation or test.

    Args:
      aliases: tfdist's name of a split -> the data set's name, where they differ.

    Raises:
      TfdistError: there is no such split, or it has no examples.
    """
    splits = builder.info.splits
    wanted = [(aliases or {}).get(split, split)]
    if split == "val":
        wanted += _OTHER_NAMES_OF_VAL
    found = next((candidate for candidate in wanted if candidate in splits), None)
    if found is None:
        raise TfdistError(
            f"Cannot find the split {split!r} of tfds:{name}: its splits are {', '.join(splits)}. "
            "Name one of them."
        )
    if splits[found].num_examples < 1:
        raise TfdistError(
            f"Cannot use the split {found!r} of tfds:{name}: it has no examples. Name another one."
        )
    return found


def read_in_order(
    builder: "tfds.core.DatasetBuilder", split: str, *, features: Sequence[str], num_examples: int
) -> Iterator[tuple[Any, ...]]:
    """Yields the given features of a split's first examples as arrays, in the stored order.

    An image of one channel becomes one of three equal channels.

    Args:
      features: `image` first.
    """
    import tensorflow_datasets as tfds

    dataset = builder.as_dataset(
        split=split,
        shuffle_files=False,
        read_config=tfds.ReadConfig(
            interleave_cycle_length=1, try_autocache=False, shuffle_seed=None
        ),
    ).take(num_examples)
    chosen = dataset.map(
        lambda example: tuple(example[feature] for feature in features),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    ).prefetch(tf.data.AUTOTUNE)
    for image, *others in set_options(chosen).as_numpy_iterator():
        yield np.repeat(image, 3, axis=-1) if image.shape[-1] == 1 else image, *others


def describe_split(
    builder: "tfds.core.DatasetBuilder", split: str, *, num_examples: int, spec: Any
) -> dict[str, Any]:
    """Returns a fingerprint that consists of the data set's full name and its splits' sizes."""
    splits = builder.info.splits
    return {
        **make_header(kind="tfds", num_examples=num_examples, element_spec=spec),
        "name": builder.info.full_name,
        "split": split,
        "split_sizes": {name: int(splits[name].num_examples) for name in sorted(splits)},
    }


@contextlib.contextmanager
def _lend_importlib_resources() -> Iterator[None]:
    """Lets importlib.resources stand in for the package importlib_resources if that is missing.

    tensorflow_datasets 4.9.10 imports importlib_resources to prepare a data set but
    requires it for Python < 3.9 only (tensorflow/datasets#11212). Remove this once it is fixed.
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


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = (lines or [type(error).__name__])[0][:300]
    return line if line.endswith(".") else line + "."
