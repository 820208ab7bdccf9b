"""A checkpoint is restored to what it was made of, and to nothing else."""

import dataclasses
import json

import keras
import numpy as np
import pytest

from tests import zoo
from tfdist import Trainer
from tfdist.errors import TfdistError
from tfdist.training.checkpoint.recovery import Recovery
from tfdist.training.checkpoint.structure import Structure, describe_structure, find_difference
from tfdist.training.workers.communication import Workers

X, Y = np.ones([8, 4], "f4"), np.ones([8, 4], "f4")


def make_dense(optimizer=None, names=(None, None), units=4):
    inputs = keras.Input([4])
    hidden = keras.layers.Dense(units, name=names[0])(inputs)
    model = keras.Model(inputs, keras.layers.Dense(4, name=names[1])(hidden))
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def describe(model, *, with_class=True, extra=()):
    variables = [*model.variables, *model.optimizer.variables, *extra]
    named = {f"v{index}": variable for index, variable in enumerate(variables)}
    return describe_structure(named, optimizer=model.optimizer if with_class else None)


def test_says_whose_a_variable_is():
    inputs = keras.Input([4])
    outputs = keras.layers.BatchNormalization(name="norm")(inputs)
    model = keras.Model(inputs, outputs)
    sgd = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9), momentum=0.9)
    model.compile(keras.optimizers.LossScaleOptimizer(sgd), "mse")
    model.optimizer.build(model.trainable_variables)
    found = describe(model, extra=[keras.Variable(np.zeros(3))])
    assert found.optimizer == "LossScaleOptimizer(SGD)"
    names = [name.lower() for name in found.list_optimizer_names()]  # Keras 3.13: SGD
    assert names == ["loss_scale_optimizer", "sgd"]
    records = list(found.variables.values())
    assert [r.path for r in records if r.trainable] == ["norm/gamma", "norm/beta"]
    assert [r.role for r in records[:4]] == ["model"] * 4
    assert {r.role for r in records[4:-1]} == {"optimizer"}
    assert (records[-1].role, records[-1].shape) == ("strategy", (3,))
    assert Structure.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize("with_class", [True, False])
def test_names_that_keras_has_counted_on_are_the_same(with_class):
    first, second = (describe(make_dense(), with_class=with_class) for _ in range(2))
    assert first != second
    assert find_difference(first, second) is None
    assert find_difference(first, dataclasses.replace(second, optimizer=None)) is None


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        (
            lambda: make_dense(keras.optimizers.RMSprop(0.1), names=("first", "second")),
            "it has the optimizer SGD, this run has RMSprop",
        ),
        (
            lambda: make_dense(names=("first", "third")),
            "it has the model's second/kernel, float32[4, 4], "
            "where this run has the model's third/kernel, float32[4, 4]",
        ),
        (
            lambda: make_dense(names=("second", "first")),
            "it has the model's first/kernel, float32[4, 4], "
            "where this run has the model's second/kernel, float32[4, 4]",
        ),
        (
            lambda: make_dense(names=("first", "second"), units=5),
            "it has the model's first/kernel, float32[4, 4], "
            "where this run has the model's first/kernel, float32[4, 5]",
        ),
    ],
)
def test_names_the_first_difference(changed, difference):
    saved = describe(make_dense(names=("first", "second")))
    assert find_difference(saved, describe(changed())) == difference


def test_numbers_that_a_user_has_given_are_told_apart():
    saved, here = (describe(make_dense(names=names)) for names in (("h_1", "h_2"), ("h_2", "h_1")))
    assert "it has the model's h_1/kernel" in find_difference(saved, here)


def test_optimizers_are_told_apart_by_name_where_the_class_is_unknown():
    adam = describe(make_dense(keras.optimizers.Adam()), with_class=False)
    adam_w = describe(make_dense(keras.optimizers.AdamW()), with_class=False)
    said = find_difference(adam, adam_w).replace("adamw", "adam_w")  # as Keras 3.13 names it
    assert said == "it has the optimizer adam, this run has adam_w"


def test_a_variable_too_many_is_named():
    model = make_dense()
    more = describe(model, extra=[keras.Variable(np.zeros(3))])
    assert "the strategy's variable" in find_difference(more, describe(model))
    assert "it has no more variables, where" in find_difference(describe(model), more)


def fit(directory, build_model, max_steps, strategy="one_device"):
    trainer = Trainer(
        build_model, strategy=zoo.STRATEGIES[strategy](), checkpoint_dir=str(directory)
    )
    trainer.fit(X, Y, global_batch_size=8, max_steps=max_steps, verbose=0)
    return trainer


def test_another_optimizer_is_refused_in_one_line(path_with_spaces):
    fit(path_with_spaces, make_dense, 2)
    with pytest.raises(TfdistError, match="Cannot continue from the checkpoint of step 2") as error:
        fit(path_with_spaces, lambda: make_dense(keras.optimizers.RMSprop(0.1)), 4)
    assert "optimizer" in str(error.value)
    assert "another `run_dir` or checkpoint_dir" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.smoke
def test_the_same_program_continues_under_another_strategy(path_with_spaces):
    for step, strategy in enumerate(["one_device", "mirrored-2", "central_storage-2"], start=1):
        trainer = fit(path_with_spaces, make_dense, step, strategy)
        assert trainer.progress.resumed_from_step == (step - 1 or None)


def test_the_class_of_an_optimizer_that_has_a_name(tmp_path):
    def make(optimizer):
        model = make_dense(optimizer)
        return model, [*model.variables, *model.optimizer.variables]

    recovery = Recovery(str(tmp_path), keep=1, workers=Workers(zoo.STRATEGIES["one_device"]()))
    model, variables = make(keras.optimizers.Adam(name="mine"))
    recovery.save(step=1, variables=variables, state={}, arrays={}, optimizer=model.optimizer)
    recovery.wait()
    model, variables = make(keras.optimizers.AdamW(name="mine"))
    with pytest.raises(TfdistError, match="it has the optimizer Adam, this run has AdamW"):
        recovery.restore(variables, optimizer=model.optimizer)
    model, variables = make(keras.optimizers.Adam(name="other"))
    found = recovery.restore(variables, optimizer=model.optimizer)
    assert found is not None
