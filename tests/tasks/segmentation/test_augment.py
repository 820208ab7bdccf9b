import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.seeds import hash_uniform
from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.augment import Augmentation
from tfdist.tasks.segmentation.shapes import make_shapes

FULL = Augmentation(flip=True, scale=(0.5, 2.0), color=0.4, ignore_label=255)


@pytest.fixture(scope="module")
def batch():
    return make_batch((24, 40))


def make_batch(size):
    images, masks = make_shapes("train", size, 8).load_batch(tf.range(8, dtype=tf.int64))
    seeds = tf.stack([tf.fill([8], tf.constant(7, tf.int64)), tf.range(8, dtype=tf.int64)], 1)
    return images, masks, seeds


@pytest.mark.parametrize("size", [1, 3, 5, 8])
def test_result_does_not_depend_on_the_batch(batch, size):
    images, masks, seeds = batch
    whole = FULL.augment_batch((images, masks), seeds)
    augment = tf.function(FULL.augment_batch)
    for start in range(0, 8, size):
        part = slice(start, start + size)
        image, mask = augment((images[part], masks[part]), seeds[part])
        np.testing.assert_array_equal(image, whole[0][part])
        np.testing.assert_array_equal(mask, whole[1][part])


def test_call_is_a_batch_of_one(batch):
    images, masks, seeds = batch
    whole = FULL.augment_batch((images, masks), seeds)
    image, mask = FULL(images[5], masks[5], seeds[5])
    np.testing.assert_array_equal(image, whole[0][5])
    np.testing.assert_array_equal(mask, whole[1][5])


@pytest.mark.parametrize("ignore_label", [None, 0, 255])
def test_masks_hold_labels_and_images_stay_in_range(ignore_label):
    images, masks = make_shapes("train", (24, 40), 200).load_batch(tf.range(200, dtype=tf.int64))
    seeds = tf.stack([tf.zeros([200], tf.int64), tf.range(200, dtype=tf.int64)], 1)
    augmentation = Augmentation(scale=(0.5, 2.0), color=0.4, ignore_label=ignore_label)
    images, masks = augmentation.augment_batch((images, masks), seeds)
    assert images.dtype == tf.float32
    assert masks.dtype == tf.int32
    assert float(tf.reduce_min(images)) >= 0
    assert float(tf.reduce_max(images)) <= 255
    allowed = {0, 1, 2, 3} | ({255} if ignore_label == 255 else set())
    assert set(np.unique(masks)) == allowed


@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation(flip=False),
        Augmentation(flip=False, scale=(0.5, 1.0)),  # Without an ignore label: never below 1.
    ],
)
def test_nothing_to_do_changes_nothing(batch, augmentation):
    images, masks, seeds = batch
    same = augmentation.augment_batch((images, masks), seeds)
    np.testing.assert_array_equal(same[0], images)
    np.testing.assert_array_equal(same[1], masks)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_flip_mirrors_image_and_mask_together(batch, channels):
    images, masks, seeds = batch
    images = tf.concat([images, images], axis=-1)[..., :channels]
    new_images, new_masks = Augmentation(flip=True).augment_batch((images, masks), seeds)
    flipped = [not np.array_equal(a, b) for a, b in zip(images, new_images, strict=True)]
    assert 0 < sum(flipped) < 8
    for i, is_flipped in enumerate(flipped):
        step = -1 if is_flipped else 1
        np.testing.assert_array_equal(new_images[i], images[i, :, ::step])
        np.testing.assert_array_equal(new_masks[i], masks[i, :, ::step])


@pytest.mark.parametrize("scale", [(1.0, 2.5), (0.4, 1.0)])
def test_mask_stays_on_its_image(scale):
    """The image's red is the mask itself, so that both must move alike."""
    masks = make_shapes("train", (48, 32), 32).load_batch(tf.range(32, dtype=tf.int64))[1]
    masks = tf.cast(masks > 0, tf.int32)
    images = tf.repeat(tf.cast(masks, tf.float32)[..., None] * 255.0, 3, axis=-1)
    seeds = tf.stack([tf.zeros([32], tf.int64), tf.range(32, dtype=tf.int64)], 1)
    augmentation = Augmentation(scale=scale, ignore_label=2)
    images, masks = augmentation.augment_batch((images, masks), seeds)
    red = images.numpy()[..., 0]
    # Where the nearest pixel is 0, bilinear weights leave at most 3/4 to the others.
    np.testing.assert_array_less(red[masks == 0], 192)
    np.testing.assert_array_less(63, red[masks == 1])
    np.testing.assert_array_equal(red[masks == 2], 127.5)
    assert np.any(masks == 2) == (scale[0] < 1)


def test_color_leaves_the_mask(batch):
    images, masks, seeds = batch
    new_images, new_masks = Augmentation(flip=False, color=0.3).augment_batch(
        (images, masks), seeds
    )
    np.testing.assert_array_equal(new_masks, masks)
    changes = np.abs(new_images.numpy() - images.numpy()).mean(axis=(1, 2, 3))
    assert np.all(changes > 0.5)


def test_refuses_impossible_settings():
    with pytest.raises(TfdistError, match=r"scale images by \(2.0, 1.0\)"):
        Augmentation(scale=(2.0, 1.0))
    with pytest.raises(TfdistError, match=r"change colors by 1\.5"):
        Augmentation(color=1.5)


def test_hash_is_uniform_and_each_row_its_own():
    seeds = tf.stack([tf.zeros([500], tf.int64), tf.range(500, dtype=tf.int64)], 1)
    draws = hash_uniform(seeds, 40).numpy()
    assert draws.shape == (500, 40)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.01
    assert abs(draws.std() - 12**-0.5) < 0.01
    correlations = np.corrcoef(draws.T) - np.eye(40)
    assert np.abs(correlations).max() < 0.25
    np.testing.assert_array_equal(hash_uniform(seeds[123:124], 40)[0], draws[123])
    assert len(np.unique(draws)) > 19_900


@pytest.fixture(scope="module")
def large():
    return make_batch((48, 80))


def test_larger_examples_without_a_zoom_are_reduced_to_means(large):
    images, masks, seeds = large
    augmentation = Augmentation(flip=False, size=(24, 40))
    found, labels = augmentation.augment_batch((images, masks), seeds)
    means = tf.reduce_mean(tf.reshape(images, [8, 24, 2, 40, 2, 3]), [2, 4])
    np.testing.assert_allclose(found, means, atol=1e-2)
    blocks = tf.reshape(masks, [8, 24, 2, 40, 2])
    is_of_block = tf.reduce_any(labels[:, :, None, :, None] == blocks, [2, 4])
    assert bool(tf.reduce_all(is_of_block))


def test_a_zoom_of_larger_examples_has_their_details(large):
    images, _, seeds = large
    noise = tf.random.stateless_uniform(images.shape, [1, 2], maxval=255.0)
    masks = tf.cast(noise[..., 0] > 127.5, tf.int32)
    small = tf.reduce_mean(tf.reshape(noise, [8, 24, 2, 40, 2, 3]), [2, 4])
    zoom = {"flip": False, "scale": (2.0, 2.0)}
    sharp, labels = Augmentation(**zoom, size=(24, 40)).augment_batch((noise, masks), seeds)
    blurred, _ = Augmentation(**zoom).augment_batch((small, masks[:, ::2, ::2]), seeds)
    assert sharp.shape == blurred.shape
    assert np.std(sharp) > 1.3 * np.std(blurred)
    # A pixel above the middle gray has the label 1, unless it is the mean of unlike pixels.
    agree = (sharp[..., 0] > 127.5) == (labels == 1)
    assert np.mean(agree) > 0.75


@pytest.mark.parametrize("size", [1, 3])
def test_reduced_examples_do_not_depend_on_the_batch(large, size):
    images, masks, seeds = large
    augmentation = Augmentation(scale=(0.5, 2.0), color=0.4, ignore_label=255, size=(20, 30))
    whole = augmentation.augment_batch((images, masks), seeds)
    augment = tf.function(augmentation.augment_batch)
    image, mask = augment((images[:size], masks[:size]), seeds[:size])
    assert image.shape == (size, 20, 30, 3)
    np.testing.assert_array_equal(image, whole[0][:size])
    np.testing.assert_array_equal(mask, whole[1][:size])
