"""Maps the values or colors that a mask stores to the classes that they stand for."""

from collections.abc import Mapping

import numpy as np

from tfdist.errors import TfdistError

# A value, 0 to 65535, or a color, "#rrggbb" -> a class; `parse_label_map` in task.py makes it.
LabelMap = Mapping[int | str, int]

_MAX_NAMED = 3


class UnknownColorError(ValueError):
    """Raised if a mask has a color that stands for no class; the message names the color."""


def check_label_map(label_map: LabelMap, num_classes: int, ignore_label: int | None) -> None:
    """Checks that each class of a label map is in 0 .. num_classes - 1 or the ignore label."""
    for found, label in label_map.items():
        if not 0 <= label < num_classes and label != ignore_label:
            ignored = "" if ignore_label is None else f" or {ignore_label} (ignored)"
            raise TfdistError(
                f"Cannot map {found} to class {label}: classes are 0 to {num_classes - 1}"
                f"{ignored}. Change `label_map`, `num_classes` or `ignore_label`."
            )


def is_of_colors(label_map: LabelMap) -> bool:
    """Returns whether a label map maps colors rather than values."""
    return any(isinstance(found, str) for found in label_map)


def map_values(values: np.ndarray, label_map: LabelMap) -> np.ndarray:
    """Returns the classes of a mask's values, uint8 [height, width]; unmapped ones are classes.

    Args:
      values: uint8 [height, width].
    """
    table = np.arange(256, dtype=np.uint8)
    for found, label in label_map.items():
        if int(found) < len(table):
            table[int(found)] = label
    return table[values]


def map_colors(colors: np.ndarray, label_map: LabelMap) -> np.ndarray:
    """Returns the classes of a mask's colors, uint8 [height, width, 3]: uint8 [height, width]."""
    known = {int(str(found)[1:], 16): label for found, label in label_map.items()}
    names = np.array(sorted(known), np.int32)
    codes = colors.astype(np.int32) @ np.array([1 << 16, 1 << 8, 1], np.int32)
    places = np.minimum(np.searchsorted(names, codes), len(names) - 1)
    unknown = np.unique(codes[names[places] != codes])
    if unknown.size:
        named = ", ".join(f"#{code:06x}" for code in unknown[:_MAX_NAMED])
        more = unknown.size - _MAX_NAMED
        raise UnknownColorError(f"{named} and {more} more" if more > 0 else named)
    return np.array([known[name] for name in sorted(known)], np.uint8)[places]
