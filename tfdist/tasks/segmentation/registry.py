"""The table of data sets, by the names that `--dataset` accepts."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tfdist.data.cache import cache_source
from tfdist.data.source import SequentialSource, Source
from tfdist.errors import TfdistError
from tfdist.tasks.images.pixels import PixelFormat
from tfdist.tasks.images.reading import find_size
from tfdist.tasks.segmentation.dataset_name import check_dataset
from tfdist.tasks.segmentation.folder import FolderSource, leave_out_bad, make_folder
from tfdist.tasks.segmentation.label_map import LabelMap
from tfdist.tasks.segmentation.shapes import ShapesSource, make_shapes
from tfdist.tasks.segmentation.tfds_source import TfdsSource, make_tfds

DEFAULT_IMAGE_SIZE = (128, 128)
_OF_BOTH = ("ignore_label", "class_names")
_OF_TFDS = (*_OF_BOTH, "data_dir", "num_classes")
_OF_FOLDER = (*_OF_BOTH, "label_map", "val_fraction", "value_range", "tile", "pixels")

# Training would draw `shapes` again in every epoch; kept in memory, they are drawn once.
# The limit is on the delay at the start.
_SHAPES_CACHE_LIMIT_BYTES = 128 * 2**20

_SAMPLE = 32  # images that are measured
_MAX_RATIO = 1.5  # between large and small sides of images that count as equally large


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Which examples to read, and how.

    Attributes:
      split: such as "train" or "val".
      image_size: (height, width) in pixels; None for 128 x 128.
      data_dir: the directory of "folder" or "tfds:NAME".
      num_classes: the number of classes; for "folder", and for unknown data sets of TFDS.
      ignore_label: the label of pixels that losses and metrics ignore, or None; likewise.
      label_map, val_fraction, value_range, tile, pixels: for "folder" only; see `make_folder`.
      class_names: one name per class; for "folder" and "tfds:NAME".
      num_examples: the number of examples of "shapes", the maximum for the others.
      seed: the seed of "shapes".
      on_bad_example: for "folder": "fail", or "skip", which reads every file once at the start
        and leaves out those that cannot be used.
    """

    split: str
    image_size: tuple[int, int] | None = None
    data_dir: str | None = None
    num_classes: int | None = None
    ignore_label: int | None = None
    label_map: LabelMap | None = None
    class_names: tuple[str, ...] | None = None
    num_examples: int | None = None
    val_fraction: float = 0.0
    seed: int = 0
    value_range: tuple[float, ...] = ()
    tile: int = 0
    pixels: PixelFormat | None = None
    on_bad_example: str = "fail"

    @property
    def size(self) -> tuple[int, int]:
        """The (height, width) of the examples."""
        return self.image_size or DEFAULT_IMAGE_SIZE

    def select(self, *names: str) -> dict[str, Any]:
        """Returns the options of these names, and the maximum number of examples."""
        values = {name: getattr(self, name) for name in names}
        return {**values, "max_examples": self.num_examples}


def make_source(
    dataset: str,
    *,
    cache: str = "auto",
    cache_dir: str | None = None,
    measure_size: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Source:
    """Returns a source of (image, mask) examples by its name.

    Args:
      dataset: "shapes", "folder" or "tfds:NAME".
      cache: see `cache_source`.
      measure_size: whether `info` has the `original_size` that `measure_original_size` returns.
      **options: see `DatasetOptions`.

    Raises:
      TfdistError: the name is unknown; an argument that the data set requires is missing;
        an argument is for "folder" only; a size is not positive; or `make_shapes`,
        `make_folder`, `make_tfds` or `cache_source` raises it.
    """
    source = make_examples(dataset, **options)
    if measure_size:
        measured = {"original_size": measure_original_size(source)}
        source = dataclasses.replace(source, measured=measured)  # type: ignore[call-arg]
    if cache == "auto" and isinstance(source, ShapesSource):
        size_bytes = source.num_examples * math.prod(source.image_size) * 4
        cache = "memory" if size_bytes <= _SHAPES_CACHE_LIMIT_BYTES else "none"
    return cache_source(source, cache, directory=cache_dir, quiet=quiet)


def measure_original_size(source: Any) -> tuple[int, int] | None:
    """Returns the median (height, width) in pixels of a sample of the original images.

    Images that cannot be read are left out: the training itself reports them. That of tiles is
    their own size.

    Args:
      source: a source of images and masks; one that draws its images has no other size.

    Returns:
      None if the sizes differ so much that the median says little.
    """
    sizes = np.array(list(_read_sizes(source)))
    if not len(sizes):
        return None
    low, high = np.percentile(sizes, [10, 90], axis=0)
    if (high > _MAX_RATIO * low).any():
        return None
    height, width = np.median(sizes, axis=0)
    return round(height), round(width)


def _read_sizes(source: Any) -> Iterator[tuple[int, int]]:
    if isinstance(source, FolderSource) and source.tile:
        yield source.tile, source.tile
    elif isinstance(source, FolderSource):
        step = -(-len(source.pairs) // _SAMPLE)
        for path, _ in source.pairs[::step]:
            with contextlib.suppress(TfdistError):
                yield find_size(path)
    elif isinstance(source, TfdsSource):
        for image, _ in itertools.islice(source.read_examples(original_size=True), _SAMPLE):
            yield image.shape[:2]
    else:
        yield source.image_size


def make_examples(dataset: str, **options: Any) -> Source | SequentialSource:
    """Returns a data set to read once, in order, with `tfdist.data.cache.read_examples`."""
    chosen = DatasetOptions(**options)
    height, width = chosen.size
    if min(height, width) < 1:
        raise TfdistError(f"Cannot make images of {height}x{width} pixels. Set `image_size`.")
    if chosen.num_examples is not None and chosen.num_examples < 1:
        raise TfdistError(
            f"Cannot take {chosen.num_examples} examples of the split {chosen.split!r}: give "
            "at least 1."
        )
    kind = check_dataset(dataset, data_dir=chosen.data_dir, num_classes=chosen.num_classes)
    if chosen.label_map and kind != "folder":
        raise TfdistError(
            f"Cannot map the labels of `dataset={dataset}`: `label_map` is only for "
            "`dataset=folder`. Leave it out."
        )
    if chosen.val_fraction and kind != "folder":
        raise TfdistError(
            f"`val_fraction={chosen.val_fraction:g}` is only for `dataset=folder`. Leave it out."
        )
    return _FACTORIES[kind](dataset.partition(":")[2], chosen)


def _make_shapes(name: str, chosen: DatasetOptions) -> Source:
    return make_shapes(chosen.split, chosen.size, chosen.num_examples, chosen.seed)


def _make_folder(name: str, chosen: DatasetOptions) -> Source:
    assert chosen.data_dir
    assert chosen.num_classes is not None
    options = chosen.select(*_OF_FOLDER)
    source = make_folder(chosen.data_dir, chosen.split, chosen.size, chosen.num_classes, **options)
    return leave_out_bad(source) if chosen.on_bad_example == "skip" else source


def _make_tfds(name: str, chosen: DatasetOptions) -> SequentialSource:
    return make_tfds(name, chosen.split, chosen.size, **chosen.select(*_OF_TFDS))


_FACTORIES: dict[str, Callable[[str, DatasetOptions], Source | SequentialSource]] = {
    "shapes": _make_shapes,
    "folder": _make_folder,
    "tfds": _make_tfds,
}
