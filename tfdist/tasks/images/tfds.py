"""Data sets of TensorFlow Datasets: found, prepared, and read in their stored order."""

import contextlib
import importlib.resources.abc
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.data.dataset_options import set_options
from tfdist.data.fingerprint import make_header
from tfdist.errors import TfdistError, make_unknown_name_error

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
      name: such as "oxford_iiit_pet" or "oxford_iiit_pet:4.0.0".
      data_dir: where data sets are; by default ~/tensorflow_datasets.
      features: what its examples must have.
      advice: a sentence that ends errors.
      known: more names to suggest for a mistyped one.

    Raises:
      TfdistError: tensorflow_datasets is missing, or has no such data set; it has no such feature.
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
    return builder


def prepare(builder: Any, name: str, download_config: Any = None) -> None:
    """Downloads and prepares a data set where it is not there yet.

    Raises:
      TfdistError: it cannot be downloaded or prepared.
    """
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


def find_split(
    builder: Any, name: str, split: str, *, aliases: Mapping[str, str] | None = None
) -> str:
    """Returns the data set's name of a split; "val" is its val, validation or test.

    Args:
      builder: of the data set.
      name: of the data set.
      split: such as "train".
      aliases: our name of a split -> theirs, where they differ.

    Raises:
      TfdistError: no such split, or it has no example.
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
            f"Cannot use the split {found!r} of tfds:{name}: it has no example. Name another split."
        )
    return found


def read_in_order(
    builder: Any, split: str, *, features: Sequence[str], num_examples: int
) -> Iterator[tuple[Any, ...]]:
    """Yields some features of the first examples of a split, in the stored order, as arrays."""
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
    yield from set_options(chosen).as_numpy_iterator()


def describe_split(builder: Any, split: str, *, num_examples: int, spec: Any) -> dict[str, Any]:
    """Returns a fingerprint: the data set's full name, and the sizes of its splits."""
    splits = builder.info.splits
    return {
        **make_header(kind="tfds", num_examples=num_examples, element_spec=spec),
        "name": builder.info.full_name,
        "split": split,
        "split_sizes": {name: int(splits[name].num_examples) for name in sorted(splits)},
    }


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


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = (lines or [type(error).__name__])[0][:300]
    return line if line.endswith(".") else line + "."
