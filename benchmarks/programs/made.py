"""Small synthetic data, with the shapes of the data that programs download."""

import random
import string
import wave
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WORDS = (
    *("the", "a", "movie", "film", "plot", "actor", "was", "is", "not", "very", "good", "bad"),
    *("great", "awful", "long", "short", "and", "of", "this", "in", "with", "story", "music"),
    *("scene", "end", "never", "always", "watch", "again", "time", "love", "hate", "fun", "dull"),
)


def make_images(count: int, shape: Sequence[int], classes: int, *, seed: int):
    """Returns images: uint8 [count, *shape], and matching labels: uint8 [count]."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    rng.shuffle(labels)
    patterns = np.random.default_rng(7).integers(0, 160, (classes, *shape))
    images = patterns[labels] + rng.integers(0, 96, (count, *shape))
    return images.astype("uint8"), labels.astype("uint8")


def make_sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_images(
    directory: Path, names: Iterable[str], shape: Sequence[int], *, classes: int = 4, seed: int = 0
) -> None:
    """Writes images of shape [height, width, channels], in the format that their names imply."""
    import PIL.Image

    names = list(names)
    directory.mkdir(parents=True, exist_ok=True)
    images, _ = make_images(len(names), shape, classes, seed=seed)
    for name, image in zip(names, images, strict=True):
        PIL.Image.fromarray(image.squeeze()).save(directory / name)


def write_labels_as_images(
    directory: Path, names: Iterable[str], size: Sequence[int], *, classes: int, first: int = 0
) -> None:
    """Writes images whose pixels are class numbers."""
    import PIL.Image

    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    for name in names:
        labels = rng.integers(first, first + classes, size).astype("uint8")
        PIL.Image.fromarray(labels).save(directory / name)


def write_sounds(directory: Path, names: Iterable[str], *, samples: int, rate: int = 16000) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(5)
    for index, name in enumerate(names):
        tone = 6000 * np.sin(np.arange(samples) * (0.02 + 0.01 * (index % 5)))
        with wave.open(str(directory / name), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes((tone + rng.normal(0, 900, samples)).astype("<i2").tobytes())


def write_reviews(directory: Path, *, per_class: int) -> None:
    """Writes the directories of the Large Movie Review Dataset."""
    rng = random.Random(0)
    for part in ("train", "test"):
        for kind in ("pos", "neg"):
            for index in range(per_class):
                word = "great" if kind == "pos" else "awful"
                text = make_sentence(rng, rng.randint(20, 60)) + " " + word
                write_lines(directory / "aclImdb" / part / kind / f"{index}_7.txt", [text])


def write_pairs(path: Path, count: int, *, columns: int) -> None:
    """Writes sentences and their translations, separated by tabs."""
    rng = random.Random(0)
    lines = []
    for _ in range(count):
        source = make_sentence(rng, rng.randint(2, 5))
        target = source[::-1].replace("e", "i")
        lines.append("\t".join([source, target, "made"][:columns]))
    write_lines(path, lines)


def write_census(directory: Path, *, rows: int) -> None:
    """Writes the two files of the census income data."""
    rng = random.Random(0)

    def make_row(index: int, end: str) -> str:
        age = rng.randint(18, 80)
        education = rng.choice(["Bachelors", "HS-grad", "Masters"])
        income = ">50K" if age + 10 * (education == "Masters") > 50 else "<=50K"
        return ", ".join(
            [
                str(age),
                rng.choice(["Private", "State-gov", "Self-emp"]),
                str(rng.randint(10_000, 400_000)),
                education,
                str(rng.randint(5, 16)),
                rng.choice(["Married", "Single", "Divorced"]),
                rng.choice(["Sales", "Tech", "Craft"]),
                rng.choice(["Husband", "Wife", "Own-child"]),
                rng.choice(["White", "Black", "Other"]),
                rng.choice(["Male", "Female"]),
                str(rng.choice([0, 0, 2000, 7000])),
                str(rng.choice([0, 0, 1800])),
                str(rng.randint(20, 60)),
                rng.choice(["United-States", "Cuba", "India"]),
                income + end,
            ]
        )

    write_lines(directory / "adult.data", [make_row(i, "") for i in range(rows)])
    write_lines(directory / "adult.test", [make_row(i, ".") for i in range(rows // 2)])


def write_heart(path: Path, *, rows: int) -> None:
    """Writes the table of patients in the heart disease data."""
    rng = random.Random(0)
    header = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,target"
    lines = [header]
    for _ in range(rows):
        age = rng.randint(30, 75)
        lines.append(
            f"{age},{rng.randint(0, 1)},{rng.randint(0, 4)},{rng.randint(95, 180)},"
            f"{rng.randint(150, 350)},{rng.randint(0, 1)},{rng.randint(0, 2)},"
            f"{rng.randint(90, 190)},{rng.randint(0, 1)},{rng.randint(0, 40) / 10},"
            f"{rng.randint(1, 3)},{rng.randint(0, 3)},"
            f"{rng.choice(['fixed', 'normal', 'reversible'])},{int(age > 52)}"
        )
    write_lines(path, lines)


class MadeTfds:
    """A stand-in for `tensorflow_datasets` that loads synthetic data.

    Args:
      shape: the shape of an image.
      classes: the number of classes.
      counts: the number of examples in each returned data set, in order; the last number repeats.
    """

    def __init__(self, shape: Sequence[int], classes: int, counts: Sequence[int]):
        self.shape, self.classes, self.counts = tuple(shape), classes, list(counts)
        self.loaded = 0

    def load(
        self,
        name: str,
        split: Any = None,
        with_info: bool = False,
        as_supervised: bool = False,
        **_: Any,
    ) -> Any:
        def make() -> Any:
            import tensorflow as tf

            count = self.counts[min(self.loaded, len(self.counts) - 1)]
            self.loaded += 1
            images, labels = make_images(count, self.shape, self.classes, seed=self.loaded)
            labels = labels.astype("int64")
            parts = (images, labels) if as_supervised else {"image": images, "label": labels}
            return tf.data.Dataset.from_tensor_slices(parts)

        if split is None:
            data: Any = {part: make() for part in ("trainA", "trainB", "testA", "testB")}
        elif isinstance(split, (list, tuple)):
            data = [make() for _ in split]
        else:
            data = make()
        return (data, _Info(self)) if with_info else data


class _Info:
    """Describes synthetic data, as `tfds.core.DatasetInfo` does."""

    def __init__(self, made: MadeTfds):
        label = type("Label", (), {"num_classes": made.classes, "int2str": lambda _, i: f"n-{i}"})
        image = type("Image", (), {"shape": made.shape})
        self.features = {"image": image(), "label": label()}
        split = type("Split", (), {"num_examples": made.counts[0]})
        self.splits = {"train": split(), "test": split()}


def combine(*makers: Callable[[Path], None]) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        for maker in makers:
            maker(directory)

    return make


def make_name(rng: random.Random, letters: int) -> str:
    return "".join(rng.choice(string.ascii_lowercase[:8]) for _ in range(letters))
