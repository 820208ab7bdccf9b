"""Batch normalization against Keras's, and replicas against one device."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.models import batch_norm
from tfdist.models.layers import NORMS, FusedBatchNormalization, make_norm

CHANNELS = 5
KEY_BASES = itertools.count(1_000_000, 1_000)


@pytest.fixture(params=["of TensorFlow", "of XLA"], autouse=True)
def kernel(request, monkeypatch):
    """The kernel on CPUs, and the one on GPUs, which runs on CPUs, too."""
    if request.param == "of XLA":
        monkeypatch.setattr(batch_norm, "_is_for_xla", lambda x: x.dtype != tf.float64)


def make_mirrored(replicas):
    class Mirrored(tf.distribute.MirroredStrategy):
        # All strategies of a process number their collectives' groups from the same base, so that
        # those of the second one fail against the first one's. TensorFlow's tests do the same.
        _collective_key_base = next(KEY_BASES)

    return Mirrored([f"CPU:{i}" for i in range(replicas)])


def make_central_storage():
    return tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=["CPU:0", "CPU:1"], parameter_device="CPU:0"
    )


# Each with the sizes of the replicas' batches.
STRATEGIES = {
    "one_device": (lambda: tf.distribute.OneDeviceStrategy("CPU:0"), (11,)),
    "mirrored_2": (lambda: make_mirrored(2), (6, 5)),
    "mirrored_3": (lambda: make_mirrored(3), (6, 5, 5)),
    "central_storage_2": (make_central_storage, (6, 5)),
}


def make_arrays(shape, dtype="float32", mean=3.0, std=2.0, seed=0):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=shape) * std + mean).astype(dtype)
    return x, rng.normal(size=shape).astype(dtype)


def make_layer(cls=FusedBatchNormalization, *, rank=4, **kwargs):
    """A layer whose weights are neither zeros nor ones."""
    layer = cls(**kwargs)
    layer.build((None,) * (rank - 1) + (CHANNELS,))
    rng = np.random.default_rng(1)
    layer.set_weights([rng.uniform(0.5, 1.5, w.shape) for w in layer.weights])
    return layer


def run_step(layer, x, upstream):
    """Output, gradients of x and of the trainable weights, in training mode."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
    variables = [v.value for v in layer.trainable_variables]
    dx, *dweights = tape.gradient(y, [x, *variables], output_gradients=upstream)
    return y, dx, dweights


def run_distributed_step(strategy, layer, x, upstream, sizes, steps=1):
    """`run_step` on every replica's part of x; the weights' gradients are summed.

    As in training, each replica differentiates the mean of its own rows, and its part of them is
    the weight of what comes of it.
    """
    starts = np.cumsum([0, *sizes])
    shares = np.maximum(sizes, 1e-9) / np.sum(sizes)
    of_rows = np.repeat(shares, sizes).astype(x.dtype)
    per_row = of_rows.reshape(-1, *[1] * (x.ndim - 1))

    def part(of):
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                of[starts[context.replica_id_in_sync_group] :][
                    : sizes[context.replica_id_in_sync_group]
                ]
            )
        )

    @tf.function
    def step(x, upstream):
        return strategy.run(run_step, (layer, x, upstream))

    def join(value):
        return np.concatenate([v.numpy() for v in strategy.experimental_local_results(value)])

    for _ in range(steps):
        y, dx, dweights = step(part(x), part(upstream / per_row))
    sums = [
        sum(
            share * gradient.numpy()
            for share, gradient in zip(
                shares, strategy.experimental_local_results(gradients), strict=True
            )
        )
        for gradients in dweights
    ]
    return join(y), join(dx) * per_row, sums


def assert_near(actual, expected, tolerance):
    """Within `tolerance` of the largest expected value."""
    actual, expected = (np.asarray(tf.cast(v, tf.float64)) for v in (actual, expected))
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("synchronized", [False, True])
@pytest.mark.parametrize("shape", [(7, CHANNELS), (3, 4, CHANNELS), (2, 3, 4, 4, CHANNELS)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 3e-6), ("float64", 1e-13)])
def test_any_rank_equals_keras(shape, dtype, tolerance, synchronized):
    x, upstream = map(tf.constant, make_arrays(shape, dtype))
    ours = make_layer(dtype=dtype, synchronized=synchronized, rank=len(shape))
    theirs = make_layer(keras.layers.BatchNormalization, dtype=dtype, rank=len(shape))
    actual, expected = (run_step(layer, x, upstream) for layer in (ours, theirs))
    tf.nest.map_structure(lambda a, b: assert_near(a, b, tolerance), actual, expected)
    for a, b in zip(ours.weights, theirs.weights, strict=True):
        assert a.path.split("/")[-1] == b.path.split("/")[-1]
        assert_near(a, b, tolerance)
    assert_near(ours(x, training=False), theirs(x, training=False), tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        ("float32", 3e-6),
        ("float64", 1e-13),
        ("mixed_bfloat16", 2e-2),
        ("bfloat16", 2e-2),
        ("mixed_float16", 3e-3),
    ],
)
def test_images_equal_keras(dtype, tolerance):
    compute_dtype = keras.DTypePolicy(dtype).compute_dtype
    arrays = make_arrays((4, 6, 5, CHANNELS))
    x, upstream = (tf.cast(a, compute_dtype) for a in arrays)
    ours = make_layer(dtype=dtype)
    # In mixed precision, Keras's own sums over the batch are not float32 throughout: the truth is
    # float32, on the same rounded values.
    exact = "float64" if dtype == "float64" else "float32"
    theirs = make_layer(keras.layers.BatchNormalization, dtype=exact)
    theirs.set_weights([w.numpy().astype(exact) for w in ours.weights])
    actual = run_step(ours, x, upstream)
    expected = run_step(theirs, tf.cast(x, exact), tf.cast(upstream, exact))
    assert actual[0].dtype == compute_dtype
    tf.nest.map_structure(lambda a, b: assert_near(a, b, tolerance), actual, expected)
    for a, b in zip(ours.weights, theirs.weights, strict=True):
        assert_near(a, b, tolerance if dtype == "bfloat16" else 3e-6)


@pytest.mark.parametrize("synchronized", [False, True])
def test_without_center_and_scale(synchronized):
    x, upstream = map(tf.constant, make_arrays((4, 3, 3, CHANNELS)))
    options = {"center": False, "scale": False}
    ours = make_layer(synchronized=synchronized, **options)
    theirs = make_layer(keras.layers.BatchNormalization, **options)
    assert len(ours.weights) == 2
    for a, b in zip(run_step(ours, x, upstream), run_step(theirs, x, upstream), strict=True):
        tf.nest.map_structure(lambda a, b: assert_near(a, b, 3e-6), a, b)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_synchronized_replicas_equal_one_device(name, dtype, tolerance):
    make_strategy, sizes = STRATEGIES[name]
    x, upstream = make_arrays((sum(sizes), 4, 3, CHANNELS), dtype)
    # Replicas that see different distributions, so that local statistics would not do.
    x[: sizes[0]] *= 3
    whole = make_layer(keras.layers.BatchNormalization, dtype=dtype)
    expected = run_step(whole, tf.constant(x), tf.constant(upstream))
    strategy = make_strategy()
    with strategy.scope():
        layer = make_layer(dtype=dtype, synchronized=True)
    actual = run_distributed_step(strategy, layer, x, upstream, sizes)
    tf.nest.map_structure(lambda a, b: assert_near(a, b, tolerance), actual, expected)
    for a, b in zip(layer.weights, whole.weights, strict=True):
        assert_near(a, b, tolerance)


@pytest.mark.parametrize("name", STRATEGIES)
def test_local_statistics_of_each_replica(name):
    make_strategy, sizes = STRATEGIES[name]
    x, upstream = make_arrays((sum(sizes), 4, 3, CHANNELS))
    x[: sizes[0]] *= 3
    strategy = make_strategy()
    with strategy.scope():
        layer = make_layer()
    y, dx, dweights = run_distributed_step(strategy, layer, x, upstream, sizes)
    splits = np.cumsum(sizes)[:-1]
    alone = [
        run_step(make_layer(), tf.constant(a), tf.constant(b))
        for a, b in zip(np.split(x, splits), np.split(upstream, splits), strict=True)
    ]
    assert_near(y, np.concatenate([a[0] for a in alone]), 1e-6)
    assert_near(dx, np.concatenate([a[1] for a in alone]), 1e-6)
    for i, actual in enumerate(dweights):
        assert_near(actual, sum(a[2][i] for a in alone), 1e-6)
    # The moving statistics, however, are those of the global batch.
    whole = make_layer(keras.layers.BatchNormalization)
    whole(x, training=True)
    for a, b in zip(layer.weights, whole.weights, strict=True):
        assert_near(a, b, 1e-6)


@pytest.mark.parametrize("synchronized", [False, True])
@pytest.mark.parametrize("replicas", [2, 3])
def test_moving_statistics_are_the_same_on_every_replica(replicas, synchronized):
    sizes = (6, 5, 5)[:replicas]
    x, upstream = make_arrays((sum(sizes), 4, 3, CHANNELS))
    strategy = make_mirrored(replicas)
    with strategy.scope():
        layer = make_layer(synchronized=synchronized)
    before = layer.moving_mean.numpy()
    run_distributed_step(strategy, layer, x, upstream, sizes, steps=3)
    assert np.abs(layer.moving_mean.numpy() - before).min() > 0
    for variable in layer.non_trainable_variables:
        first, *others = strategy.experimental_local_results(variable.value)
        assert len(others) == replicas - 1
        for other in others:
            np.testing.assert_array_equal(first.numpy(), other.numpy())


@pytest.mark.parametrize("replicas", [1, 2])
def test_large_mean_keeps_its_digits(replicas):
    sizes = (8, 8)[:replicas]
    x, upstream = make_arrays((sum(sizes), 16, 16, CHANNELS), mean=1000.0, std=1.0)
    strategy = make_mirrored(replicas)
    with strategy.scope():
        layer = make_layer(synchronized=True)
    # The moving mean starts near 1: it says nothing yet of where the values lie.
    y, dx, _ = run_distributed_step(strategy, layer, x, upstream, sizes)
    exact = make_layer(keras.layers.BatchNormalization, dtype="float64")
    exact.set_weights(make_layer().get_weights())
    expected = run_step(exact, tf.constant(x, tf.float64), tf.constant(upstream, tf.float64))
    # Float32 has three digits left of such values; how many of them the kernel of one replica keeps
    # depends on the CPU that it sums on.
    assert_near(y, expected[0], 3e-4)
    assert_near(dx, expected[1], 3e-4)
    assert_near(layer.moving_variance, exact.moving_variance, 1e-5)


@pytest.mark.parametrize("synchronized", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
def test_empty_replica_counts_for_nothing(dtype, tolerance, synchronized):
    x, upstream = make_arrays((6, 4, 3, CHANNELS), dtype)
    whole = make_layer(keras.layers.BatchNormalization, dtype=dtype)
    expected = run_step(whole, tf.constant(x), tf.constant(upstream))
    strategy = make_mirrored(2)
    with strategy.scope():
        layer = make_layer(synchronized=synchronized, dtype=dtype)
    actual = run_distributed_step(strategy, layer, x, upstream, (0, 6))
    tf.nest.map_structure(lambda a, b: assert_near(a, b, tolerance), actual, expected)
    assert_near(layer.moving_variance, whole.moving_variance, tolerance)


def test_not_trainable_means_inference():
    x, _ = make_arrays((4, 3, 3, CHANNELS))
    layer = make_layer(synchronized=True)
    layer.trainable = False
    before = layer.get_weights()
    np.testing.assert_array_equal(layer(x, training=True), layer(x, training=False))
    for a, b in zip(layer.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_unknown_channels_are_refused():
    with pytest.raises(ValueError, match=r"Cannot build bn: .* \(None, 3, None\) is unknown"):
        FusedBatchNormalization(name="bn").build((None, 3, None))


@pytest.mark.parametrize("kind", NORMS)
def test_saved_norm_loads_the_same(kind, path_with_spaces):
    inputs = keras.Input((None, None, 6))
    model = keras.Model(inputs, make_norm(kind, channels=6, name="norm")(inputs))
    x, _ = make_arrays((4, 3, 3, 6))
    model(x, training=True)
    model.save(path_with_spaces / "model.keras")
    loaded = keras.saving.load_model(path_with_spaces / "model.keras")
    assert loaded.get_layer("norm").get_config() == model.get_layer("norm").get_config()
    np.testing.assert_array_equal(loaded(x), model(x))


@pytest.mark.parametrize(("channels", "groups"), [(64, 32), (48, 16), (7, 1)])
def test_group_count_divides_the_channels(channels, groups):
    assert make_norm("group", channels=channels).groups == groups


def test_unknown_norm_lists_the_valid_ones():
    with pytest.raises(ValueError, match=r"'btch'\. Valid: sync_batch, batch, group, none"):
        make_norm("btch", channels=3)
