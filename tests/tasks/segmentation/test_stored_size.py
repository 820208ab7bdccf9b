"""Training images that are kept at a larger size than the model's."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.pipeline import make_train_dataset
from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.registry import make_source
from tfdist.tasks.segmentation.task import Segmentation
from tfdist.training.inputs.example_order import ExampleOrder
from tfdist.training.inputs.make_adapter import make_data_adapter

OPTIONS = {"image_size": (16, 24), "train_examples": 6, "val_examples": 2}


def make_data(**options):
    task = Segmentation(**OPTIONS, **options)
    return task, task.make_data(seed=3, quiet=True)


def test_examples_have_the_size_of_the_model():
    _, data = make_data(stored_size=(32, 48))
    _, plain = make_data()
    assert data.train.element_spec == data.val.element_spec == plain.train.element_spec
    assert data.info["class_names"] == plain.info["class_names"]
    images, masks = data.train.load_batch(tf.range(6, dtype=tf.int64))
    assert (images.shape, masks.shape) == ((6, 16, 24, 3), (6, 16, 24))
    large = make_source(
        "shapes", split="train", image_size=(32, 48), num_examples=6, seed=3, quiet=True
    )
    means = large.load_batch(tf.range(6, dtype=tf.int64))[0].numpy()
    means = means.reshape([6, 16, 2, 24, 2, 3]).mean((2, 4))
    assert np.abs(images - means).mean() < 4  # two ways to reduce an image
    assert data.train.make_fingerprint() != plain.train.make_fingerprint()


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_batches_are_made_from_the_stored_images(num_replicas):
    task, data = make_data(stored_size=(32, 48), scale=(1.0, 3.0))
    options = {"global_batch_size": 4, "augmentation": task.make_augmentation(data.info)}
    dataset = make_train_dataset(data.train, seed=1, num_replicas=num_replicas, **options)
    parts = list(dataset.take(num_replicas).as_numpy_iterator())
    images, masks = (np.concatenate(leaves) for leaves in zip(*parts, strict=True))
    order = ExampleOrder(seed=1)
    adapter = make_data_adapter(data.train, order=order, num_replicas=num_replicas, **options)
    assert adapter.batch_spec[0].shape.as_list() == [None, *images.shape[1:]]
    whole = adapter.read_train(tf.zeros([], tf.int64))
    np.testing.assert_array_equal(images, whole[0])
    np.testing.assert_array_equal(masks, whole[1])


@pytest.mark.parametrize("size", [(32,), (8, 48), (32, 48, 3)])
def test_a_size_below_that_of_the_model_is_refused(size):
    with pytest.raises(TfdistError, match=r"`stored_size=.*` must be"):
        Segmentation(**OPTIONS, stored_size=size).check()
