"""Random layers draw for a row of the global batch the same numbers on every replica."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import zoo
from tfdist.training.inputs.data_adapter import take_next
from tfdist.training.inputs.make_adapter import make_data_adapter
from tfdist.training.replicas.batch_share import make_part
from tfdist.training.replicas.random_layers import RowDraws, Rows, hide_rows

IMAGES = np.random.default_rng(3).uniform(0, 255, (14, 6, 5, 3)).astype("f4")
LAYERS = {
    "dropout": lambda: keras.layers.Dropout(0.5, seed=1),
    "dropout_by_channel": lambda: keras.layers.Dropout(0.5, (None, 1, 1, 3), seed=1),
    "dropout_shared_by_rows": lambda: keras.layers.Dropout(0.5, (1, 6, 5, 3), seed=1),
    "spatial_dropout_1d": lambda: _flat(keras.layers.SpatialDropout1D(0.5, seed=1)),
    "spatial_dropout_2d": lambda: keras.layers.SpatialDropout2D(0.5, seed=1),
    "gaussian_noise": lambda: keras.layers.GaussianNoise(1.0, seed=1),
    "gaussian_dropout": lambda: keras.layers.GaussianDropout(0.5, seed=1),
    "alpha_dropout": lambda: keras.layers.AlphaDropout(0.5, seed=1),
    "flip": lambda: keras.layers.RandomFlip(seed=1),
    "rotation": lambda: keras.layers.RandomRotation(0.2, seed=1),
    "translation": lambda: keras.layers.RandomTranslation(0.3, 0.3, seed=1),
    "zoom": lambda: keras.layers.RandomZoom(0.3, seed=1),
    "crop": lambda: keras.layers.RandomCrop(4, 4, seed=1),
    "contrast": lambda: keras.layers.RandomContrast(0.5, seed=1),
    "brightness": lambda: keras.layers.RandomBrightness(0.5, seed=1),
    "grayscale": lambda: keras.layers.RandomGrayscale(0.5, seed=1),
    "erasing": lambda: keras.layers.RandomErasing(0.5, seed=1),
    "gaussian_blur": lambda: keras.layers.RandomGaussianBlur(0.5, seed=1),
    "color_jitter": lambda: keras.layers.RandomColorJitter(
        brightness_factor=0.3, contrast_factor=0.3, seed=1
    ),
    "perspective": lambda: keras.layers.RandomPerspective(1.0, seed=1),
}


class Draw(keras.layers.Layer):
    """Adds what a function of `keras.random` draws, of a shape made from the input's."""

    def __init__(self, draw, dtype="float32"):
        super().__init__(dtype=dtype)
        self.draw = draw
        self.generator = keras.random.SeedGenerator(5)

    def call(self, x, training=False):
        return keras.ops.cast(self.draw(keras.ops.shape(x), self.generator), "float64")


def _flat(layer):
    return keras.Sequential([keras.layers.Reshape((6, 15)), layer])


for dtype in ("float16", "bfloat16", "float32", "float64"):
    LAYERS |= {
        f"uniform {dtype}": lambda d=dtype: Draw(
            lambda shape, seed: keras.random.uniform(shape, dtype=d, seed=seed)
        ),
        f"normal {dtype}": lambda d=dtype: Draw(
            lambda shape, seed: keras.random.normal(shape, dtype=d, seed=seed)
        ),
        f"truncated {dtype}": lambda d=dtype: Draw(
            lambda shape, seed: keras.random.truncated_normal(shape[:3], dtype=d, seed=seed)
        ),
    }
for dtype in ("int32", "int64"):
    LAYERS[f"randint {dtype}"] = lambda d=dtype: Draw(
        lambda shape, seed: keras.random.randint(shape, 0, 99, dtype=d, seed=seed)
    )
LAYERS["weights"] = lambda: Draw(
    lambda shape, seed: keras.random.normal((1, 8), seed=seed) + keras.ops.zeros((shape[0], 1))
)
LAYERS["folded"] = lambda: Draw(
    lambda shape, seed: keras.ops.reshape(
        keras.random.normal((shape[0] * 6, 5), seed=seed), (-1, 30)
    )
)


BATCHES = (7, 6)  # over three replicas: of a size that is not known in advance, and known


@functools.cache
def run_layers(strategy_name, batch):
    """Returns two steps' training outputs of every layer."""
    strategy = zoo.STRATEGIES[strategy_name]()
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        inputs = keras.Input(IMAGES.shape[1:])
        model = keras.Model(inputs, {name: make()(inputs) for name, make in LAYERS.items()})
    draws = RowDraws()
    adapter = make_data_adapter(
        IMAGES, global_batch_size=batch, num_replicas=replicas, shuffle=False
    )
    iterator = adapter.iterate_train(strategy, start_step=0)

    def replica_run(x, place):
        x = hide_rows(x)
        part = make_part(x, place)
        with draws.of(Rows(part.first, part.rows) if replicas > 1 else None):
            return model(x, training=True)

    @tf.function(autograph=False)
    def run():
        with draws.intercept():
            return strategy.run(replica_run, args=take_next(strategy, iterator))

    steps = [keras.tree.map_structure(strategy.experimental_local_results, run()) for _ in range(2)]
    return {name: [np.concatenate([p.numpy() for p in s[name]]) for s in steps] for name in LAYERS}


@pytest.mark.thorough(keep=len(LAYERS))
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_replicas_draw_their_rows_of_what_one_device_draws(batch, name):
    expected = run_layers("one_device", batch)[name]
    found = run_layers("mirrored-3", batch)[name]
    np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(*expected)  # each step draws anew
