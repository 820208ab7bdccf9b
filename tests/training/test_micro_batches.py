"""Gradient accumulation changes the memory of a step, never its result."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import zoo
from tests.training.programs import PROGRAMS
from tfdist import models
from tfdist.errors import TfdistError
from tfdist.models.layers import FusedBatchNormalization
from tfdist.tasks.segmentation.losses import make_loss
from tfdist.training.replicas.random_layers import list_seed_generators

STEPS = 4
BATCH = 15  # 8 and 7 rows over two replicas, in parts of 2 and 3
SGD = lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)  # noqa: E731
ADAM = lambda: keras.optimizers.Adam(1e-3)  # noqa: E731


def _build_unet(optimizer):
    model = models.make_model(
        "unet", image_size=(16, 16), num_classes=3, base_filters=4, depth=1, seed=3, norm="group"
    )
    model.compile(optimizer, make_loss("cross_entropy", ignore_label=zoo.IGNORE_LABEL))
    return model


EXAMPLES = {name: zoo.EXAMPLES[name] for name in ("dense", "two_inputs", "transformer", "random")}
EXAMPLES["unet"] = zoo.Example(_build_unet, zoo.EXAMPLES["unet"].data)


def _train(example, strategy_name, make_optimizer, micro_batches):
    trainer = zoo.make_trainer(
        lambda: example.build(make_optimizer()),
        strategy=zoo.STRATEGIES[strategy_name](),
        micro_batches=micro_batches,
    )
    history = trainer.fit(
        *example.data,
        sample_weight=example.sample_weight,
        global_batch_size=BATCH,
        max_steps=STEPS,
        verbose=0,
    )
    assert trainer.engine.count_traces()["train"] == 1
    weights = [weight.numpy() for weight in trainer.model.weights]
    seeds = [generator.state.numpy().tolist() for generator in list_seed_generators(trainer.model)]
    return weights, seeds, history.history


def _compare(example, strategy_name, make_optimizer, tolerance):
    expected, expected_seeds, expected_history = _train(example, strategy_name, make_optimizer, 1)
    found, seeds, history = _train(example, strategy_name, make_optimizer, 3)
    assert seeds == expected_seeds
    assert zoo.largest_difference(found, expected) < tolerance
    assert history.keys() == expected_history.keys()
    for name, values in expected_history.items():
        np.testing.assert_allclose(history[name], values, rtol=20 * tolerance, err_msg=name)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("model_name", "strategy_name"),
    [*((name, "mirrored-2") for name in EXAMPLES), ("random", "one_device")],
)
def test_parts_end_where_the_whole_batch_ends(model_name, strategy_name):
    _compare(EXAMPLES[model_name], strategy_name, SGD, 1e-5)


@pytest.mark.thorough
def test_with_adam_in_float64_too(float64):
    _compare(EXAMPLES["unet"], "mirrored-2", ADAM, 1e-10)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-2"])
def test_a_row_that_no_example_chose_has_one_gradient(strategy_name):
    """Adam squares what it is given: a row for each part would be another step."""
    program = PROGRAMS["positions"]
    found = []
    for micro_batches in (1, 3):
        trainer = zoo.make_trainer(
            program.build, strategy=zoo.STRATEGIES[strategy_name](), micro_batches=micro_batches
        )
        trainer.fit(*program.data, batch_size=8, verbose=0)
        found.append([weight.numpy() for weight in trainer.model.weights])
    assert zoo.largest_difference(*found) < 1e-5


def test_central_storage_shares_its_variables_with_the_parts():
    _compare(EXAMPLES["two_inputs"], "central_storage-2", SGD, 1e-5)


def test_a_loss_of_the_user_s_own_is_a_mean_over_the_examples():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(4, kernel_initializer=zoo.seeded(1))

        def call(self, x):
            return self.layer(x)

        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            return tf.reduce_mean(tf.square(y_pred - tf.cast(y, tf.float32)[:, None]))

    def build(optimizer):
        model = Own()
        model.compile(optimizer)
        return model

    _compare(zoo.Example(build, zoo.EXAMPLES["dense"].data), "mirrored-2", SGD, 1e-5)


def test_a_sum_and_a_weighted_mean_are_those_of_the_global_batch():
    """Losses whose normalizers are none, and the weights that come with the examples."""

    def build(optimizer):
        inputs = keras.Input((12,))
        make = keras.losses.SparseCategoricalCrossentropy
        losses = {name: make(True, reduction=name) for name in ("sum", "mean_with_sample_weight")}
        hidden = keras.layers.Dense(4, "tanh", kernel_initializer=zoo.seeded(1))(inputs)
        outputs = {
            n: keras.layers.Dense(4, kernel_initializer=zoo.seeded(2))(hidden) for n in losses
        }
        model = keras.Model(inputs, outputs)
        model.compile(optimizer, losses, loss_weights=dict.fromkeys(losses, 0.3))
        return model

    x, y = zoo.EXAMPLES["dense"].data
    weight = zoo.EXAMPLES["dense"].sample_weight
    names = ("sum", "mean_with_sample_weight")
    labels, weights = dict.fromkeys(names, y), dict.fromkeys(names, weight)
    _compare(zoo.Example(build, (x, labels), weights), "mirrored-2", SGD, 1e-5)


def _fit(build, data, batch=BATCH):
    trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES["mirrored-2"](), micro_batches=3)
    trainer.fit(*data, global_batch_size=batch, max_steps=1, verbose=0)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("layer", [keras.layers.BatchNormalization, FusedBatchNormalization])
def test_refuses_a_layer_that_sees_the_rows_together(layer):
    def build(trainable):
        model = keras.Sequential(
            [
                keras.layers.Input((12,)),
                layer(name="moments", trainable=trainable),
                keras.layers.Dense(4),
            ]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    data = zoo.EXAMPLES["dense"].data
    _fit(lambda: build(False), data=data)
    with pytest.raises(
        TfdistError, match=f"3 micro-batches: the layer 'moments' .{layer.__name__}"
    ):
        _fit(lambda: build(True), data=data)


def test_refuses_more_parts_than_rows():
    example = EXAMPLES["two_inputs"]
    build = lambda: example.build(SGD())  # noqa: E731
    with pytest.raises(TfdistError, match="2 of 5 examples into 3 .*batches=2` or fewer.*size=6"):
        _fit(build, batch=5, data=example.data)
    dataset = tf.data.Dataset.from_tensor_slices(example.data).batch(5)
    with pytest.raises(TfdistError, match="batch of 2 examples into 3 micro-batches"):
        _fit(build, data=(dataset,))


def test_sparse_examples_are_refused():
    def build():
        inputs = keras.Input((8,), sparse=True)
        model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        return model

    x = tf.sparse.from_dense(np.eye(8, dtype="float32"))
    data = tf.data.Dataset.from_tensor_slices((x, np.ones((8, 1), "float32"))).batch(4)
    trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES["one_device"](), micro_batches=2)
    with pytest.raises(TfdistError, match=r"Cannot split sparse tensors.*tf.sparse.to_dense"):
        trainer.fit(data)
