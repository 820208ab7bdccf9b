"""A replica's loss terms are Keras's losses, taken apart."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.training.objective import measure_loss

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 3, (6, 5)).astype("i4")
LOGITS = RNG.normal(size=(6, 5, 3)).astype("f4")
WEIGHTS = RNG.uniform(0.5, 2, (6, 5)).astype("f4")


@pytest.mark.parametrize(
    "reduction", ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"]
)
@pytest.mark.parametrize("sample_weight", [None, WEIGHTS])
@pytest.mark.parametrize("ignore_class", [None, 1])
def test_total_over_count_is_the_keras_loss(reduction, sample_weight, ignore_class):
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction, ignore_class=ignore_class
    )
    term = measure_loss(loss, LABELS, tf.constant(LOGITS), sample_weight)
    ours = term.total if term.normalizer is None else term.total / term.normalizer
    np.testing.assert_allclose(ours, loss(LABELS, LOGITS, sample_weight), rtol=1e-6)


def test_a_weight_per_example_weighs_all_of_its_values():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    per_example = np.array([0, 1, 2, 0, 0, 1], "f4")
    term = measure_loss(loss, LABELS, tf.constant(LOGITS), per_example)
    spread = np.repeat(per_example[:, None], 5, 1)
    np.testing.assert_allclose(
        term.total / term.normalizer, loss(LABELS, LOGITS, spread), rtol=1e-6
    )


def test_parts_of_a_batch_add_up_to_the_whole():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    parts = [
        measure_loss(loss, LABELS[rows], tf.constant(LOGITS[rows]))
        for rows in (slice(0, 1), slice(1, 6))
    ]
    ours = sum(part.total for part in parts) / sum(part.normalizer for part in parts)
    np.testing.assert_allclose(ours, loss(LABELS, LOGITS), rtol=1e-6)


def test_a_loss_of_one_number_is_a_mean_over_its_examples():
    class Opaque(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return tf.reduce_mean(y_pred)

    term = measure_loss(Opaque(), LABELS, tf.constant(LOGITS))
    np.testing.assert_allclose(term.total / term.normalizer, LOGITS.mean(), rtol=1e-5)
    assert float(term.normalizer) == 6


def test_an_infinite_value_that_is_masked_counts_nowhere():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1)
    logits = LOGITS.copy()
    logits[LABELS == 1] = np.nan
    term = measure_loss(loss, LABELS, tf.constant(logits))
    assert np.isfinite(term.total)
