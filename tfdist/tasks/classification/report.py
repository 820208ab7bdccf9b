"""Classification's part of a report: which examples it gets right and wrong."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.records.recorded_run import RecordedRun
from tfdist.records.run_directory import RunDirectory
from tfdist.report import Section, make_bars, make_confusion, make_pictures

if TYPE_CHECKING:
    import numpy as np

NUM_EXAMPLES = 6  # of the best and of the worst
_MIN_HEIGHT = 128  # Smaller pictures are enlarged.


def choose_examples(
    logits: "np.ndarray", truth: "np.ndarray", class_names: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Returns the examples with the best and worst logits [examples, classes], as JSON values."""
    import numpy as np

    logits = logits.astype(np.float64)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    probability = shares[np.arange(len(truth)), truth] / shares.sum(-1)
    order = np.argsort(probability, kind="stable")
    chosen = {"worst": order[:NUM_EXAMPLES], "best": order[::-1][:NUM_EXAMPLES]}
    return {
        kind: [
            {
                "index": int(index),
                "truth": class_names[truth[index]],
                "prediction": class_names[int(np.argmax(logits[index]))],
                "probability_of_truth": float(probability[index]),
            }
            for index in indices
        ]
        for kind, indices in chosen.items()
    }


def write_examples(run: RunDirectory, source: Any, examples: Mapping[str, Any]) -> None:
    """Writes the pictures of the result of `choose_examples`."""
    import numpy as np
    import tensorflow as tf

    for kind, chosen in examples.items():
        indices = [example["index"] for example in chosen]
        images = source.load_batch(tf.constant(indices, tf.int64))[0].numpy()
        for number, image in enumerate(np.clip(images, 0, 255).astype(np.uint8)):
            enlarge = max(1, _MIN_HEIGHT // image.shape[0])
            large = np.kron(image, np.ones((enlarge, enlarge, 1), np.uint8))
            run.write_png(_name_picture(kind, number), large)


def make_sections(run: RecordedRun) -> Sequence[Section]:
    """Returns the accuracy of every class, the confusion matrix, and examples; all at the end."""
    accuracies = run.summary.get("per_class_accuracy") or {}
    confusion = run.summary.get("confusion")
    sections = [
        Section("Accuracy of each class, validation", make_bars(accuracies) if accuracies else ""),
        Section(
            "Confusion matrix of the validation data",
            make_confusion(confusion, list(accuracies)) if confusion else "",
        ),
    ]
    for kind, chosen in (run.summary.get("examples") or {}).items():
        pictures = (
            (run.read(_name_picture(kind, number)), _describe(example))
            for number, example in enumerate(chosen)
        )
        sections.append(Section(f"The {kind} validation examples", make_pictures(pictures)))
    return sections


def _name_picture(kind: str, number: int) -> str:
    return f"samples/{kind}_{number + 1}.png"


def _describe(example: Mapping[str, Any]) -> str:
    truth, predicted = example["truth"], example["prediction"]
    share = f"{example['probability_of_truth']:.1%}"
    return f"{truth}: {share}" + (f", predicted as {predicted}" if truth != predicted else "")
