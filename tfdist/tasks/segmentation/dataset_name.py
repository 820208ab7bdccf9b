"""What the name of a data set needs besides, which is known before anything is read."""

from tfdist.errors import TfdistError
from tfdist.tasks.data import find_dataset


def check_dataset(dataset: str, *, data_dir: str | None, num_classes: int | None) -> str:
    """Returns the kind of a data set, shapes, folder or tfds; checks that it has what it needs."""
    kind, _ = find_dataset(dataset, data_dir=data_dir, holds="SPLIT/images and SPLIT/masks")
    if kind == "folder" and num_classes is None:
        raise TfdistError(
            "Cannot read `dataset=folder` without `num_classes`. Give the number of classes in "
            "the masks."
        )
    return kind
