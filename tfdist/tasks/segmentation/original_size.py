"""Measures how large training images were before they were resized."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdist.errors import TfdistError
from tfdist.tasks.images.reading import find_size
from tfdist.tasks.segmentation.folder import FolderSource
from tfdist.tasks.segmentation.tfds_source import TfdsSource

_SAMPLE = 32
_MAX_RATIO = 1.5  # between large and small sides of images that count as equally large


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
