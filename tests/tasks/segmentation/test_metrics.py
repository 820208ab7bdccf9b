import numpy as np
import pytest
import tensorflow as tf

from tfdist.tasks.segmentation.metrics import SegmentationMetrics

RNG = np.random.default_rng(2)


def _expect(truth, predicted, classes, ignore):
    valid = truth != ignore
    t, p = truth[valid], predicted[valid]
    iou, dice = [], []
    for c in range(classes):
        both, either = ((t == c) & (p == c)).sum(), ((t == c) | (p == c)).sum()
        if either:
            iou.append(both / either)
            dice.append(2 * both / ((t == c).sum() + (p == c).sum()))
    return (t == p).mean(), np.mean(iou), np.mean(dice)


@pytest.mark.parametrize("shape", [(4, 7, 5), (4, 7, 5, 1)])
def test_equals_the_definitions(shape):
    truth = RNG.integers(0, 4, shape)
    truth[truth == 2] = 1  # a class that never occurs
    logits = RNG.normal(size=(4, 7, 5, 4)).astype("f4")
    logits[..., 2:] -= 100  # and is never predicted, nor is the ignored one
    metric = SegmentationMetrics(4, ignore_label=3, class_names=["a", "b", "c", "d"])
    metric.update_state(truth[:1], logits[:1])
    metric.update_state(truth[1:], logits[1:])
    result = {name: float(value) for name, value in metric.result().items()}
    accuracy, iou, dice = _expect(truth.reshape(4, 7, 5), logits.argmax(-1), 4, 3)
    assert result["pixel_accuracy"] == pytest.approx(accuracy)
    assert result["mean_iou"] == pytest.approx(iou)
    assert result["mean_dice"] == pytest.approx(dice)
    assert result["iou/c"] == 0
    metric.reset_state()
    assert float(metric.result()["mean_iou"]) == 0


def test_counts_more_pixels_than_float32_can():
    metric = SegmentationMetrics(2)
    metric.confusion.assign(tf.constant([[2**24, 0], [0, 2**24]], tf.int64))
    metric.update_state(np.zeros((1, 1, 1), "i4"), np.array([[[[1.0, 0.0]]]]))
    assert int(metric.confusion.numpy()[0, 0]) == 2**24 + 1


def test_refuses_sample_weights():
    with pytest.raises(ValueError, match="takes no sample_weight"):
        SegmentationMetrics(2).update_state([0], [[1.0, 0.0]], sample_weight=[1.0])
