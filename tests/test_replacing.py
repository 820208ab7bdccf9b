"""Functions of other libraries are replaced in one context, and nothing is left replaced."""

import importlib
import pathlib
import re
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import patches, replacing
from tfdist.replacing import find_function, replaced, wrapped_in_subclasses


class Base:
    def act(self):
        return "Base"

    @property
    def size(self):
        return 1


class Derived(Base):
    pass


library = types.ModuleType("library")
library.double = lambda value: 2 * value


@pytest.fixture(autouse=True)
def _own_owners_are_listed(monkeypatch):
    owners = {"act": [Base], "size": [Base], "double": [library]}
    monkeypatch.setattr(patches, "_OWNERS", {**patches._OWNERS, **owners})


def test_what_is_not_listed_is_not_replaced():
    with pytest.raises(LookupError, match="Dense.build is not in tfdist/patches.py"):
        replacing.replace_always(keras.layers.Dense, "build", None)
    with (
        pytest.raises(LookupError, match="Dense.build"),
        replaced(keras.layers.Dense(1), "build", None),
    ):
        pass


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda p: f"{p.by} {p.names.split()[0]}")
def test_what_is_listed_exists_and_is_replaced_where_it_says(patch):
    source = pathlib.Path(importlib.import_module(f"tfdist.{patch.by}").__file__).read_text()
    assert re.search("replac|wrapped_in_subclasses", source)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    objects = [model, model.layers[0], model.layers[0].kernel]
    owners = (
        [patch.owner, *(o for o in objects if isinstance(o, patch.owner))]
        if isinstance(patch.owner, type)
        else [patch.owner]
    )
    for name in patch.names.split():
        is_added = patch.when == "always" and patch.owner.__name__.startswith("Distributed")
        assert is_added or any(hasattr(owner, name) for owner in owners), name


def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(timeout=1000)
    return found[0]


def test_another_thread_calls_the_original():
    with replaced(Base, "act", lambda _: "replaced"), replaced(library, "double", lambda v: v):
        assert (Base().act(), library.double(3)) == ("replaced", 3)
        assert in_thread(lambda: (Base().act(), library.double(3))) == ("Base", 6)


def test_a_function_can_be_replaced_for_the_whole_process():
    with replaced(library, "double", lambda v: 10 * v, in_all_threads=True):
        assert in_thread(lambda: library.double(3)) == 30
        with replaced(library, "double", lambda v: v):
            assert (library.double(3), in_thread(lambda: library.double(3))) == (3, 30)
        with replaced(library, "double", lambda v: 0, in_all_threads=True):
            assert in_thread(lambda: library.double(3)) == 0
        assert library.double(3) == 30
    assert library.double(3) == 6


def test_a_property_and_an_inherited_method_are_replaced():
    with (
        replaced(Base, "size", property(lambda _: 2)),
        replaced(Derived, "act", lambda _: "derived"),
    ):
        assert (Derived().size, Derived().act(), Base().act()) == (2, "derived", "Base")
    assert (Derived().size, Derived().act(), "act" in vars(Derived)) == (1, "Base", False)


def test_a_replacement_calls_the_one_around_it():
    def wrap(original):
        return lambda owner: f"({original(owner)})"

    with wrapped_in_subclasses(Base, act=wrap), wrapped_in_subclasses(Base, act=wrap):
        assert Derived().act() == "((Base))"
        assert in_thread(lambda: find_function(Derived, "act")(Derived())) == "Base"


def test_the_original_returns_with_the_last_context():
    original = Base.act
    is_open, may_close = threading.Event(), threading.Event()

    def hold():
        with replaced(Base, "act", lambda _: "held"):
            is_open.set()
            may_close.wait(timeout=1000)
            return Base().act()

    found = []
    thread = threading.Thread(target=lambda: found.append(hold()))
    thread.start()
    is_open.wait(timeout=1000)
    with replaced(Base, "act", lambda _: "replaced"):
        assert Base().act() == "replaced"
    assert Base().act() == "Base"
    may_close.set()
    thread.join(timeout=1000)
    assert found == ["held"]
    assert Base.act is original


def test_a_failed_context_restores_the_original():
    original = Base.act
    with pytest.raises(ZeroDivisionError), replaced(Base, "act", lambda _: 1 / 0):
        Base().act()
    assert Base.act is original


def test_the_replicas_of_a_strategy_inherit_what_is_replaced():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with replaced(library, "double", lambda value: 10 * value):
        found = strategy.run(lambda: library.double(tf.constant(1)))
    assert [int(v) for v in strategy.experimental_local_results(found)] == [10, 10]


X = np.random.default_rng(0).random((24, 4))
Y = X.sum(1, keepdims=True)


def make_model():
    initializer = keras.initializers.GlorotUniform
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, kernel_initializer=initializer(1)),
            keras.layers.Dropout(0.3, seed=3),
            keras.layers.Dense(1, kernel_initializer=initializer(2)),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


def train(strategy):
    trained = tfdist.Trainer(make_model, strategy=strategy) if strategy else make_model()
    trained.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    model = trained.model if strategy else trained
    return np.concatenate([weight.numpy().ravel() for weight in model.weights])


@pytest.mark.usefixtures("float64")
def test_trainers_and_keras_train_at_the_same_time_in_threads():
    originals = [keras.metrics.Mean.update_state, keras.random.SeedGenerator.next]
    alone = train(None)
    found, errors = [], []

    def run(strategy):
        try:
            found.append(train(strategy))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(s,)) for s in ("mirrored", None) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=1000)
    assert not errors
    assert len(found) == 4
    for weights in found:
        np.testing.assert_allclose(weights, alone, rtol=0, atol=1e-10)
    assert originals == [keras.metrics.Mean.update_state, keras.random.SeedGenerator.next]
