import numpy as np
import pytest

from tfdist.tasks.classification.report import choose_examples


def test_examples_are_ordered_by_the_probability_of_their_class():
    logits = np.array([[0.0, 2.0], [1000.0, 0.0], [0.0, 1.0]], "float32")
    chosen = choose_examples(logits, np.array([0, 0, 1]), ["cat", "dog"])
    assert [example["index"] for example in chosen["worst"]] == [0, 2, 1]
    assert [example["index"] for example in chosen["best"]] == [1, 2, 0]
    worst = chosen["worst"][0]
    assert (worst["truth"], worst["prediction"]) == ("cat", "dog")
    assert worst["probability_of_truth"] == pytest.approx(1 / (1 + np.exp(2)))
    assert chosen["best"][0]["probability_of_truth"] == 1


def test_of_many_examples_six_are_chosen():
    logits = np.random.default_rng(0).normal(size=(50, 3))
    chosen = choose_examples(logits, np.zeros(50, int), list("abc"))
    assert [len(examples) for examples in chosen.values()] == [6, 6]
