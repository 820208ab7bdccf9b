"""Steps that run several a call have the results that they have one by one."""

import keras
import numpy as np
import pytest

from tests import zoo
from tfdist import StepOptions, Trainer
from tfdist.training.step import loops
from tfdist.training.step.model_variables import hash_weights

EXAMPLES, BATCH, SIZE = 205, 8, 6  # 26 steps an epoch, of which the last has 5 examples


def _make_dense():
    return keras.Sequential([keras.Input([6]), keras.layers.Dense(8, "relu"), _classify()])


def _make_recurrent():
    return keras.Sequential([keras.Input([5, 4]), keras.layers.LSTM(6), _classify()])


def _make_attentive():
    inputs = keras.Input([5, 8])
    x = keras.layers.MultiHeadAttention(2, 4, dropout=0.1)(inputs, inputs)
    x = keras.layers.GaussianNoise(0.1)(keras.layers.LayerNormalization()(x + inputs))
    return keras.Model(inputs, _classify()(keras.layers.GlobalAveragePooling1D()(x)))


def _make_convolutional():
    return keras.Sequential(
        [
            keras.Input([8, 8, 3]),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Flatten(),
            _classify(),
        ]
    )


def _classify():
    return keras.layers.Dense(10)


def _train(make, *, strategy="one_device", jit_compile=True, loop=1, execution=1):
    """Returns a hash of the weights, the history, and the losses that callbacks saw."""

    def build():
        keras.utils.set_random_seed(3)
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            "adam",
            loss,
            metrics=["accuracy"],
            jit_compile=jit_compile,
            steps_per_execution=execution,
        )
        return model

    random = np.random.default_rng(0)
    x = random.normal(size=[EXAMPLES, *make().input_shape[1:]]).astype("f4")
    y = random.integers(0, 10, EXAMPLES)
    options = StepOptions(steps_per_loop=loop)
    trainer = Trainer(build, strategy=zoo.STRATEGIES[strategy](), step_options=options)
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append((batch, logs["loss"]))
    )
    trainer.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[look])
    optimizer = [variable.numpy().tolist() for variable in trainer.model.optimizer.variables]
    return hash_weights(trainer.model), optimizer, trainer.history.history, seen


@pytest.fixture
def programs(monkeypatch):
    """The programs that are made."""
    made = []
    make = loops.Program.__init__

    def note(program, size):
        make(program, size)
        made.append(program)

    monkeypatch.setattr(loops.Program, "__init__", note)
    return made


@pytest.mark.parametrize("make", [_make_dense, _make_recurrent, _make_attentive])
def test_steps_of_one_program_have_the_bits_of_single_ones(make, programs):
    single = _train(make)
    assert not programs
    assert _train(make, loop=SIZE) == single
    (program,) = programs
    assert program.is_used
    *results, seen = _train(make, execution=SIZE)
    assert results == list(single[:-1])
    ends = [loss for batch, loss in single[-1] if batch % SIZE == SIZE - 1 or batch == 25]
    assert [loss for _, loss in seen] == ends
    assert programs[-1].is_used


def test_a_program_that_rounds_otherwise_is_not_used(programs, monkeypatch):
    single = _train(_make_dense)
    check = loops.Program._check

    def check_another(program, read, run, variables):
        def run_another():
            found = run()
            for variable in variables:
                if variable.dtype.is_floating:
                    variable.assign(variable * (1 + 1e-6))
            return found

        return check(program, read, run_another, variables)

    monkeypatch.setattr(loops.Program, "_check", check_another)
    assert _train(_make_dense, loop=SIZE) == single
    assert not programs[0].is_used


def test_convolutions_are_no_part_of_a_program(programs):
    """In a loop, XLA may round them otherwise."""
    assert _train(_make_convolutional, loop=SIZE) == _train(_make_convolutional)
    assert not programs[0].is_used


@pytest.mark.parametrize("strategy", ["one_device", "mirrored-2", "central_storage-2"])
def test_an_execution_is_one_call(strategy, monkeypatch):
    single = _train(_make_dense, strategy=strategy, jit_compile=False)
    sizes = []
    run = loops.run_steps

    def note(step, num_steps, results):
        sizes.append(num_steps)
        return run(step, num_steps, results)

    monkeypatch.setattr("tfdist.training.step.steps.run_steps", note)
    *results, _ = _train(_make_dense, strategy=strategy, jit_compile=False, execution=SIZE)
    assert results == list(single[:-1])
    assert sizes
