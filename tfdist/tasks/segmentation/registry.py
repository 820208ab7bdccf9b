"""The table of data sets by name, as `--dataset` gives it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tfdist.data.cache import cache_source
from tfdist.data.source import SequentialSource, Source
from tfdist.errors import TfdistError, make_unknown_name_error
from tfdist.tasks.segmentation.folder import leave_out_bad, make_folder
from tfdist.tasks.segmentation.label_map import LabelMap
from tfdist.tasks.segmentation.shapes import make_shapes
from tfdist.tasks.segmentation.tfds_source import make_tfds

DEFAULT_IMAGE_SIZE = (128, 128)

# Drawing `shapes` costs about as much as one pass of training reads; kept in memory it
# costs it once. Not for so many that starting up would be felt.
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
    quiet: bool = False,
) -> Source:
    """Returns a source of (image, mask) examples by its name.

    Args:
      dataset: "shapes", "folder" or "tfds:NAME".
      split: such as "train" or "val".
      image_size: (height, width) in pixels, by default 128 x 128.
      data_dir: of "folder" and "tfds:NAME".
      num_classes: of "folder" and of the data sets of TFDS that are not known here.
      ignore_label: as above; label that neither loss nor metrics see, or None.
      label_map: of "folder"; see `make_folder`.
      class_names: as above.
      num_examples: the size of "shapes", a cap for the others.
      val_fraction: of "folder"; see `make_folder`.
      seed: of "shapes".
      on_bad_example: of "folder": "fail", or "skip", which reads every file once at the start
        and leaves out those that cannot be used.
      cache: see `cache_source`.
      cache_dir: see `cache_source`.
      quiet: show no progress bar.

    Raises:
      TfdistError: an unknown name, something missing that the data set needs, a label map
        for another data set than "folder", a size that is not positive, and what
        `make_shapes`, `make_folder`, `make_tfds` and `cache_source` raise.
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
    return cache_source(source, where, directory=cache_dir, quiet=quiet)


def make_examples(dataset: str, **options: Any) -> Source | SequentialSource:
    """Returns a data set to read once, in order, with `tfdist.data.cache.read_examples`.

    Args:
      dataset: see `make_source`.
      **options: those of `make_source` that are not about the cache.

    Raises:
      TfdistError: see `make_source`.
    """
    return _make_uncached(_Request(dataset=dataset, cache="none", **options))[0]


def _make_uncached(request: "_Request") -> tuple[Source | SequentialSource, str]:
    """Returns what a request asks for, and where it is to be cached."""
    height, width = request.image_size
    if min(height, width) < 1:
        raise TfdistError(f"Cannot make images of {height}x{width} pixels. Set `image_size`.")
    if request.num_examples is not None and request.num_examples < 1:
        raise TfdistError(
            f"Cannot take {request.num_examples} examples of the split {request.split!r}: at "
            "least 1 is needed."
        )
    kind, colon, name = request.dataset.partition(":")
    if kind not in _FACTORIES or (kind == "tfds") != bool(colon and name):
        valid = ["tfds:NAME" if key == "tfds" else key for key in _FACTORIES]
        raise make_unknown_name_error("`dataset`", request.dataset, valid)
    if request.label_map and kind != "folder":
        raise TfdistError(
            f"Cannot map the labels of `dataset={request.dataset}`: `label_map` is for "
            "`dataset=folder`. Leave it out."
        )
    if request.val_fraction and kind != "folder":
        raise TfdistError(
            f"`val_fraction={request.val_fraction:g}` is for `dataset=folder`. Leave it out."
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
