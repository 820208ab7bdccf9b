"""The table of data sets, by the names that `--dataset` accepts."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tfdist.data.cache import cache_source
from tfdist.data.source import SequentialSource, Source
from tfdist.errors import TfdistError, make_unknown_name_error
from tfdist.tasks.segmentation.folder import leave_out_bad, make_folder
from tfdist.tasks.segmentation.label_map import LabelMap
from tfdist.tasks.segmentation.original_size import measure_original_size
from tfdist.tasks.segmentation.shapes import make_shapes
from tfdist.tasks.segmentation.tfds_source import make_tfds

DEFAULT_IMAGE_SIZE = (128, 128)

# Training would draw `shapes` again in every epoch; kept in memory, they are drawn once.
# The limit is on the delay at the start.
_SHAPES_CACHE_LIMIT_BYTES = 128 * 2**20


def make_source(
    dataset: str,
    *,
    split: str,
    image_size: tuple[int, int] | None = None,
    data_dir: str | None = None,
    num_classes: int | None = None,
    ignore_label: int | None = None,
    label_map: LabelMap | None = None,
    class_names: tuple[str, ...] | None = None,
    num_examples: int | None = None,
    val_fraction: float = 0.0,
    seed: int = 0,
    on_bad_example: str = "fail",
    cache: str = "auto",
    cache_dir: str | None = None,
    measure_size: bool = False,
    quiet: bool = False,
) -> Source:
    """Returns a source of (image, mask) examples by its name.

    Args:
      dataset: "shapes", "folder" or "tfds:NAME".
      split: such as "train" or "val".
      image_size: (height, width) in pixels, by default 128 x 128.
      data_dir: the directory of "folder" or "tfds:NAME".
      num_classes: the number of classes; for "folder", and for unknown data sets of TFDS.
      ignore_label: the label of pixels that losses and metrics ignore, or None; likewise.
      label_map: for "folder" only; see `make_folder`.
      class_names: one name per class; for "folder" and "tfds:NAME".
      num_examples: the number of examples of "shapes", the maximum for the others.
      val_fraction: for "folder" only; see `make_folder`.
      seed: the seed of "shapes".
      on_bad_example: for "folder": "fail", or "skip", which reads every file once at the start
        and leaves out those that cannot be used.
      cache: see `cache_source`.
      cache_dir: see `cache_source`.
      measure_size: whether `info` has the `original_size` that `measure_original_size` returns.
      quiet: whether to hide the progress bar.

    Raises:
      TfdistError: the name is unknown; an argument that the data set requires is missing;
        an argument is for "folder" only; a size is not positive; or `make_shapes`,
        `make_folder`, `make_tfds` or `cache_source` raises it.
    """
    request = _Request(
        dataset=dataset,
        split=split,
        image_size=DEFAULT_IMAGE_SIZE if image_size is None else image_size,
        data_dir=data_dir,
        num_classes=num_classes,
        ignore_label=ignore_label,
        label_map=label_map,
        class_names=class_names,
        num_examples=num_examples,
        val_fraction=val_fraction,
        seed=seed,
        on_bad_example=on_bad_example,
        cache=cache,
    )
    source, where = _make_uncached(request)
    if measure_size:
        measured = {"original_size": measure_original_size(source)}
        source = dataclasses.replace(source, measured=measured)  # type: ignore[call-arg]
    return cache_source(source, where, directory=cache_dir, quiet=quiet)


def make_examples(dataset: str, **options: Any) -> Source | SequentialSource:
    """Returns a data set to read once, in order, with `tfdist.data.cache.read_examples`.

    Args:
      dataset: see `make_source`.
      **options: the arguments of `make_source`, except those about the cache.

    Raises:
      TfdistError: see `make_source`.
    """
    return _make_uncached(_Request(dataset=dataset, cache="none", **options))[0]


def _make_uncached(request: "_Request") -> tuple[Source | SequentialSource, str]:
    """Returns the requested source, and where to cache it."""
    height, width = request.image_size
    if min(height, width) < 1:
        raise TfdistError(f"Cannot make images of {height}x{width} pixels. Set `image_size`.")
    if request.num_examples is not None and request.num_examples < 1:
        raise TfdistError(
            f"Cannot take {request.num_examples} examples of the split {request.split!r}: give "
            "at least 1."
        )
    kind, colon, name = request.dataset.partition(":")
    if kind not in _FACTORIES or (kind == "tfds") != bool(colon and name):
        valid = ["tfds:NAME" if key == "tfds" else key for key in _FACTORIES]
        raise make_unknown_name_error("`dataset`", request.dataset, valid)
    if request.label_map and kind != "folder":
        raise TfdistError(
            f"Cannot map the labels of `dataset={request.dataset}`: `label_map` is only for "
            "`dataset=folder`. Leave it out."
        )
    if request.val_fraction and kind != "folder":
        raise TfdistError(
            f"`val_fraction={request.val_fraction:g}` is only for `dataset=folder`. Leave it out."
        )
    return _FACTORIES[kind](request)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    dataset: str
    split: str
    image_size: tuple[int, int] = DEFAULT_IMAGE_SIZE
    data_dir: str | None = None
    num_classes: int | None = None
    ignore_label: int | None = None
    label_map: LabelMap | None = None
    class_names: tuple[str, ...] | None = None
    num_examples: int | None = None
    val_fraction: float = 0.0
    seed: int = 0
    on_bad_example: str = "fail"
    cache: str


def _make_shapes(request: _Request) -> tuple[Source | SequentialSource, str]:
    source = make_shapes(request.split, request.image_size, request.num_examples, request.seed)
    if request.cache != "auto":
        return source, request.cache
    size_bytes = source.num_examples * request.image_size[0] * request.image_size[1] * 4
    return source, "memory" if size_bytes <= _SHAPES_CACHE_LIMIT_BYTES else "none"


def _make_folder(request: _Request) -> tuple[Source | SequentialSource, str]:
    if not request.data_dir:
        raise TfdistError(
            "Cannot read `dataset=folder` without `data_dir`. Give the directory that holds "
            "SPLIT/images and SPLIT/masks."
        )
    if request.num_classes is None:
        raise TfdistError(
            "Cannot read `dataset=folder` without `num_classes`. Give the number of classes in "
            "the masks."
        )
    source = make_folder(
        request.data_dir,
        request.split,
        request.image_size,
        request.num_classes,
        ignore_label=request.ignore_label,
        label_map=request.label_map,
        class_names=request.class_names,
        max_examples=request.num_examples,
        val_fraction=request.val_fraction,
    )
    if request.on_bad_example == "skip":
        source = leave_out_bad(source)
    return source, request.cache


def _make_tfds(request: _Request) -> tuple[Source | SequentialSource, str]:
    source = make_tfds(
        request.dataset.partition(":")[2],
        request.split,
        request.image_size,
        data_dir=request.data_dir,
        num_classes=request.num_classes,
        ignore_label=request.ignore_label,
        class_names=request.class_names,
        max_examples=request.num_examples,
    )
    return source, request.cache


_FACTORIES: dict[str, Callable[[_Request], tuple[Source | SequentialSource, str]]] = {
    "shapes": _make_shapes,
    "folder": _make_folder,
    "tfds": _make_tfds,
}
