import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tfdist.errors import TfdistError
from tfdist.tasks.images.reading import resize_image
from tfdist.tasks.segmentation.inference.windows import make_weights, plan_starts

IMAGES = [
    np.random.default_rng(i).integers(0, 256, (*size, 3), np.uint8)
    for i, size in enumerate([(40, 28), (16, 16), (9, 21)])
]


def predict(run, **options):
    predictor = tfdist.Predictor(run.model, window=run.image_size, **options)
    return [p for _, p in predictor.predict_probabilities(enumerate(IMAGES))]


@pytest.fixture(scope="module")
def run(run_dir):
    return tfdist.load_run(run_dir)


@pytest.fixture(scope="module")
def expected(run):
    return predict(run)


def test_blends_the_models_own_probabilities(run, expected):
    image = IMAGES[0]
    total, weight = np.zeros((40, 28, 4)), np.zeros((40, 28, 1))
    for top in plan_starts(40, 16, 0.5):
        for left in plan_starts(28, 16, 0.5):
            area = np.s_[top : top + 16, left : left + 16]
            logits = run.model(image[area][None].astype(np.float32), training=False)
            weights = make_weights((16, 16))[..., None]
            total[area] += tf.nn.softmax(logits)[0].numpy() * weights
            weight[area] += weights
    np.testing.assert_allclose(expected[0], total / weight, atol=1e-5)


@pytest.mark.smoke
def test_what_fits_a_window_is_the_models_answer(run, expected):
    logits = run.model(IMAGES[1][None].astype(np.float32), training=False)
    np.testing.assert_allclose(expected[1], tf.nn.softmax(logits)[0], atol=1e-6)
    assert expected[2].shape == (9, 21, 4)


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    ("name", "global_batch_size"),
    [(name, size) for size in (5, 4) for name in zoo.REPLICAS_FIRST],
)
def test_neither_strategy_nor_batch_changes_the_result(name, global_batch_size, run_dir, expected):
    strategy = zoo.STRATEGIES[name]()
    run = tfdist.load_run(run_dir, strategy=strategy)
    found = predict(run, strategy=strategy, global_batch_size=global_batch_size)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_tta_averages_with_the_mirror_image(run, expected):
    mirrored = tfdist.Predictor(run.model, window=run.image_size).predict_probabilities(
        [(None, image[:, ::-1]) for image in IMAGES]
    )
    for found, one, (_, other) in zip(predict(run, tta=True), expected, mirrored, strict=True):
        np.testing.assert_allclose(found, (one + other[:, ::-1]) / 2, atol=1e-5)


def test_zoom_keeps_the_images_size(run):
    predictor = tfdist.Predictor(run.model, window=run.image_size, zoom=0.5)
    mask = predictor.predict_mask(IMAGES[0])
    assert mask.shape == (40, 28)
    assert mask.dtype == np.uint8


def test_zooms_each_axis_by_its_own_factor_or_every_image_to_a_window(run):
    window = run.image_size
    image = IMAGES[0]
    model_size = resize_image(image, window)[None].astype(np.float32)
    whole = tf.nn.softmax(run.model(model_size))[0]
    expected = tf.image.resize(whole, (40, 28))
    for zoom in (None, (16 / 40, 16 / 28)):
        predictor = tfdist.Predictor(run.model, window=window, zoom=zoom)
        ((_, found),) = predictor.predict_probabilities([(None, image)])
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"zoom": 0.0}, "`zoom` above 0"), ({"global_batch_size": 0}, "`global_batch_size`")],
)
def test_refuses_what_cannot_be(run, options, message):
    with pytest.raises(TfdistError, match=message):
        tfdist.Predictor(run.model, window=run.image_size, **options)


def test_images_of_another_dtype_are_refused_instead_of_cut(run):
    predictor = tfdist.Predictor(run.model, window=run.image_size)
    with pytest.raises(TfdistError, match="image of uint16"):
        predictor.predict_mask(IMAGES[1].astype(np.uint16) * 4)
