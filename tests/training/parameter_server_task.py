"""A task of the cluster that `test_asynchronous.py` starts: `python FILE SCENARIO DIRECTORY`.

A worker runs in a child that its task starts again when a signal has ended it, unless there is
a file `gone` in the directory. The chief runs the scenario and writes what it found as JSON.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import zoo
from tests.training import programs, tables, test_dataset_order
from tests.training.programs import PROGRAMS, DrawsAlways
from tfdist.cluster import resolve_cluster
from tfdist.errors import TfdistError
from tfdist.replacing import replaced
from tfdist.strategies import make_parameter_server, run_server
from tfdist.training.servers import coordination
from tfdist.training.servers.gradient_slots import GradientSlots

BATCH = 16
SCENARIO = sys.argv[1] if __name__ == "__main__" else ""
HERE = pathlib.Path(sys.argv[2] if __name__ == "__main__" else ".")


def make_sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(1.0),
    "momentum": lambda: keras.optimizers.SGD(1.0, momentum=0.5),
    "adam": lambda: keras.optimizers.Adam(0.5),
}


OF_SERVERS = {
    **{
        name: PROGRAMS[name]
        for name in (
            "masks",
            "several optimizers in one",
            "an average of the weights",
            "a loss scale",
            "a constraint",
            "a metric in compute_loss",
            "a table under Adam",
            "a head without a gradient",
            "an optimizer that starts from a number",
            "an optimizer that keeps rows and columns",
        )
    },
    "clipped and decayed": programs.Program(
        lambda: programs.dense(programs.OPTIMIZERS["SGD by value"]())
    ),
    "clipped by variable": programs.Program(
        lambda: programs.dense(keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.05))
    ),
}


class ConstantGradient(keras.layers.Layer):
    """Its output's derivative by each weight is 1, and it keeps a moving mean of ones."""

    def build(self, shape):
        self.large = self.add_weight(shape=(5000,), initializer="zeros", name="large")
        self.small = self.add_weight(shape=(7,), initializer="zeros", name="small")
        self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False, name="mean")

    def call(self, x):
        self.mean.assign(self.mean * 0.9 + 0.1)
        return 0 * x + keras.ops.sum(self.large) + keras.ops.sum(self.small)


class Kill(keras.callbacks.Callback):
    """Kills a task's process after given numbers of steps of an epoch."""

    def __init__(self, task, steps):
        super().__init__()
        self.path, self.steps = HERE / task, steps

    def on_train_batch_end(self, batch, logs=None):
        if batch in self.steps:
            wait_until(self.path.exists)
            pid = int(self.path.read_text())
            self.path.unlink()
            os.kill(pid, signal.SIGKILL)


def wait_until(condition):
    until = time.monotonic() + 1000
    while not condition():
        assert time.monotonic() < until, "timed out"
        time.sleep(0.01)


def build_constant(optimizer):
    inputs = keras.Input((1,))
    model = keras.Model(inputs, ConstantGradient()(inputs))
    model.compile(optimizer, lambda y_true, y_pred: y_pred)
    return model


def train_constant(strategy, name, steps, **options):
    """Trains on a gradient of ones; says how far from all weights equal the result is."""
    trainer = zoo.make_trainer(
        lambda: build_constant(OPTIMIZERS[name]()),
        strategy=strategy,
        checkpoint_dir=options.pop("checkpoint_dir", None),
    )
    x = np.ones((BATCH * max(steps, 60), 1), "f4")  # an epoch of arrays has no more steps
    trainer.fit(
        x, x, global_batch_size=BATCH, max_steps=steps, steps_per_epoch=steps, verbose=0, **options
    )
    large, small, mean = (weight.numpy() for weight in trainer.model.weights)
    return trainer, {
        "iterations": int(trainer.model.optimizer.iterations.numpy()),
        "weights": sorted({float(value) for value in [*large, *small]}),
        "mean": float(mean),
        **trainer.engine.summarize(),
    }


def train_example(strategy, name, **options):
    """Trains a model of the zoo for 20 steps."""
    example = zoo.EXAMPLES[name]
    trainer = zoo.make_trainer(
        lambda: example.build(make_sgd()), strategy=strategy, seed=5, **options
    )
    arguments = {"sample_weight": example.sample_weight, "global_batch_size": BATCH, "verbose": 0}
    history = trainer.fit(*example.data, max_steps=20, **arguments).history
    logs = trainer.evaluate(*example.data, return_dict=True, **arguments)
    return trainer, [w.numpy() for w in trainer.model.weights], history["loss"], logs


def compare_with_one_device(strategy, name):
    _, expected, expected_losses, expected_logs = train_example(
        tf.distribute.OneDeviceStrategy("CPU:0"), name
    )
    trainer, weights, losses, logs = train_example(strategy, name, max_in_flight=1)
    x = keras.tree.map_structure(lambda array: array[:19], zoo.EXAMPLES[name].data[0])
    ours = keras.tree.flatten(trainer.predict(x, global_batch_size=8))
    theirs = keras.tree.flatten(trainer.model(x, training=False))
    return {
        "weights": zoo.largest_difference(weights, expected),
        "losses": zoo.largest_difference([np.array(losses)], [np.array(expected_losses)]),
        "logs": {key: [logs[key], value] for key, value in expected_logs.items()},
        "predictions": zoo.largest_difference(ours, [output.numpy() for output in theirs]),
    }


def train_still(strategy, **options):
    """Returns the losses of weights that do not move, which only the random layers change."""
    example = zoo.EXAMPLES["random"]
    trainer = zoo.make_trainer(
        lambda: example.build(keras.optimizers.SGD(0.0)), strategy=strategy, **options
    )
    x, y = example.data
    return trainer.fit(x, y, global_batch_size=BATCH, max_steps=12, verbose=0).history["loss"]


def list_bytes(trainer):
    """Returns how many bytes of weights and slots each parameter server holds."""
    num_bytes = [0, 0]
    for variable in [*trainer.model.variables, *trainer.model.optimizer.variables]:
        spec = tf.DeviceSpec.from_string(variable.value.device)
        if spec.job == "ps":
            num_bytes[spec.task] += int(np.prod(variable.shape)) * variable.value.dtype.size
    return num_bytes


def watch_messages(strategy):
    """Returns how many tensors a step of a U-Net sends back, and which jobs update its weights."""
    numbers, jobs = [], set()

    def fetch(self, remote, original=coordination.Coordination.fetch):
        result = original(self, remote)
        numbers.append(len(tf.nest.flatten(result)))
        return result

    def read(self, slots, ticket, original=GradientSlots.read):
        found = original(self, slots, ticket)
        jobs.update(tf.DeviceSpec.from_string(part.device).job for part in found.values())
        return found

    with (
        replaced(coordination.Coordination, "fetch", fetch),
        replaced(GradientSlots, "read", read),
    ):
        trainer, *_ = train_example(strategy, "unet")
    statistics = [v for v in trainer.model.non_trainable_variables if "moving" in v.path]
    return {"tensors": max(numbers), "statistics": len(statistics), "jobs": [*jobs]}


def train_on_a_dataset(strategy):
    """Batches of 12, 12, 12 and 4, which the chief reads; against Keras on one device."""
    example = zoo.EXAMPLES["dense"]
    dataset = tf.data.Dataset.from_tensor_slices(example.data).batch(12)
    trainer = zoo.make_trainer(
        lambda: example.build(make_sgd()), strategy=strategy, max_in_flight=1
    )
    trainer.fit(dataset, epochs=2, verbose=0)
    model = example.build(make_sgd())
    model.fit(dataset, epochs=2, verbose=0, shuffle=False)
    ours, theirs = ([weight.numpy() for weight in m.weights] for m in (trainer.model, model))
    return {
        "weights": zoo.largest_difference(ours, theirs),
        "accuracy": trainer.evaluate(dataset, verbose=0, return_dict=True)["accuracy"],
        "expected": model.evaluate(dataset, verbose=0, return_dict=True)["accuracy"],
    }


def use_single_batches(strategy):
    """Returns the results on one device and on the servers, and how often these trace a step."""
    example = zoo.EXAMPLES["random"]
    found = []
    for options in (
        {"strategy": tf.distribute.OneDeviceStrategy("CPU:0")},
        {"strategy": strategy, "max_in_flight": 1},
    ):
        trainer = zoo.make_trainer(lambda: example.build(make_sgd()), **options)
        results = []
        for rows in (8, 6, 5, 8):
            x, y = (part[:rows] for part in example.data)
            results += keras.tree.flatten(
                [
                    trainer.train_on_batch(x, y),
                    trainer.test_on_batch(x, y),
                    float(np.sum(trainer.predict_on_batch(x))),
                ]
            )
        found.append(results)
    functions = trainer.engine._steps._made.values()
    counts = [function.experimental_get_tracing_count() for function in functions]
    return {"expected": found[0], "found": found[1], "traces": counts}


def draw_while_evaluating(strategy):
    """Returns how far the servers are from one device, and what is said where a layer counts."""
    data = {"x": programs.X, "y": programs.Y, "batch_size": 8, "verbose": 0}
    before, after = [], []
    for options in (
        {"strategy": tf.distribute.OneDeviceStrategy("CPU:0")},
        {"strategy": strategy, "max_in_flight": 1},
        {"strategy": strategy, "max_in_flight": 3},
    ):
        trainer = zoo.make_trainer(lambda: programs.dense(between=DrawsAlways()), **options)
        before.append([trainer.predict(programs.X, batch_size=8, verbose=0) for _ in range(2)])
        validation = {"validation_data": (programs.X, programs.Y), "validation_batch_size": 8}
        history = trainer.fit(**data, epochs=3, shuffle=False, **validation).history
        after.append([np.array(history["val_loss"]), *(w.numpy() for w in trainer.model.weights)])
    counting = zoo.make_trainer(
        lambda: programs.dense(between=DrawsAlways(counts=True)), strategy=strategy
    )
    try:
        counting.evaluate(**data)
        refused = ""
    except TfdistError as error:
        refused = str(error)
    return {
        "before": [zoo.largest_difference(each, before[0]) for each in before],
        "between two predictions": zoo.largest_difference(before[1][:1], before[1][1:]),
        "after": zoo.largest_difference(after[1], after[0]),
        "refused": refused,
    }


def continue_a_run(strategy):
    """Stops after 23 of 50 steps, then continues, to the same count and sum."""
    directory = str(HERE / "continued")
    trainer = None

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 22:
                self.model.stop_training = True

    trainer, _ = train_constant(
        strategy, "momentum", 60, checkpoint_dir=directory, callbacks=[Stop()]
    )
    stopped_at = trainer.step
    trainer, found = train_constant(strategy, "momentum", 50, checkpoint_dir=directory)
    return {"stopped_at": stopped_at, "resumed_from": trainer.progress.resumed_from_step, **found}


def run_exactness(strategy):
    results = {"models": {name: compare_with_one_device(strategy, name) for name in zoo.EXAMPLES}}
    trainer, *_ = train_example(strategy, "dense", max_in_flight=4)
    results["asynchronous"] = {
        "logged": list(trainer.history.history),
        **trainer.engine.summarize(),
    }
    trainer = zoo.make_trainer(
        lambda: zoo.EXAMPLES["unet"].build(keras.optimizers.Adam()), strategy=strategy
    )
    x, y = zoo.EXAMPLES["unet"].data
    trainer.engine.prepare(x, y)
    results["bytes"] = list_bytes(trainer)
    results["messages"] = watch_messages(strategy)
    results["dataset"] = train_on_a_dataset(strategy)
    results["single batches"] = use_single_batches(strategy)
    results["drawn while evaluating"] = draw_while_evaluating(strategy)
    results["still"] = [
        train_still(strategy, max_in_flight=4),
        train_still(tf.distribute.OneDeviceStrategy("CPU:0")),
    ]
    return results


def compare_program(strategy, program, **options_of_servers):
    """Trains a program on one device and on the servers; returns how far apart they end."""
    found, logs = [], []
    for options in (
        {"strategy": tf.distribute.OneDeviceStrategy("CPU:0")},
        {"strategy": strategy, "max_in_flight": 1, **options_of_servers},
    ):
        trainer = zoo.make_trainer(program.build, **options)
        trainer.fit(program.make_dataset(), epochs=2, verbose=0)
        found.append([weight.numpy() for weight in trainer.model.weights])
        logs.append(trainer.evaluate(program.make_dataset(), verbose=0, return_dict=True))
    return {"weights": zoo.largest_difference(*found), "logs": logs}


def record_calls(function, calls):
    def call(**options):
        calls.append(options)
        return function(**options)

    return call


def build_recurrent():
    def between(x):
        sequences = keras.layers.Reshape((2, 2))(x)
        return keras.layers.BatchNormalization()(keras.layers.LSTM(3, seed=0)(sequences))

    keras.utils.set_random_seed(0)
    return programs.dense(between=between)


def run_programs(strategy):
    found = {name: compare_program(strategy, program) for name, program in OF_SERVERS.items()}
    blocks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.raw_ops, "BlockLSTM", record_calls(tf.raw_ops.BlockLSTM, blocks))
        recurrent = programs.Program(build_recurrent)
        found["fused"] = compare_program(strategy, recurrent, fused_layers=True)
    found["blocks"] = len(blocks)
    found["refused"] = []
    for program in (
        PROGRAMS["a spectral norm"],
        programs.Program(build_frozen),
        PROGRAMS["own steps"],
        PROGRAMS["a maximum"],
        programs.Program(lambda: programs.dense(between=programs.Draws())),
    ):
        try:
            compare_program(strategy, program)
        except TfdistError as error:
            found["refused"].append(str(error))
    with strategy.scope():
        bare = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    rows = np.arange(20.0, dtype="float32").reshape(5, 4)
    outputs = zoo.make_trainer(bare).predict(rows)
    found["order"] = {
        f"{name}, steps_per_epoch={steps}": [
            test_dataset_order.fit_twice(trained, name, steps_per_epoch=steps)
            for trained in (
                test_dataset_order.build_sum(),
                zoo.make_trainer(test_dataset_order.build_sum, strategy=strategy, max_in_flight=1),
            )
        ]
        for name in test_dataset_order.DATASETS
        for steps in ((None, 3) if "unknown" not in name else (None,))
    }
    found["unknown"] = [
        test_dataset_order.fit_unknown(trained)
        for trained in (
            zoo.make_trainer(test_dataset_order.build_drawing, strategy=strategy, max_in_flight=2),
            zoo.make_trainer(test_dataset_order.build_drawing, strategy=strategy, max_in_flight=1),
            test_dataset_order.build_drawing(),
        )
    ]
    found["bare"] = float(np.max(np.abs(outputs - rows @ bare.get_weights()[0])))
    return found


def build_frozen():
    model = programs.dense()
    model.trainable = False
    return model


def list_refusals(strategy):
    """Returns what is said of steps that parameter servers' workers cannot compute."""
    refusals = []
    for optimizer, options in (
        (make_sgd(), {"micro_batches": 2}),
        (make_sgd(), {"jit_compile": True}),
        (make_sgd(), {"rematerialize": True}),
        (keras.optimizers.LossScaleOptimizer(make_sgd()), {}),
    ):
        try:
            zoo.make_trainer(lambda o=optimizer: zoo.build_linear(o), strategy=strategy, **options)
        except TfdistError as error:
            refusals.append(str(error))
    return refusals


def run_updates(strategy):
    results = {name: train_constant(strategy, name, 60)[1] for name in OPTIMIZERS}
    results["continued"] = continue_a_run(strategy)
    results["refused"] = list_refusals(strategy)
    results["killed"] = {
        name: train_constant(strategy, name, 80, callbacks=[Kill("worker-1", (10, 45))])[1]
        for name in OPTIMIZERS
    }
    (HERE / "gone").touch()
    # The last one: TensorFlow waits for the worker, and so might the end of the process.
    results["gone"] = train_constant(strategy, "adam", 60, callbacks=[Kill("worker-1", (10,))])[1]
    return results


def train_with_late_writes(strategy, in_flight):
    """Every step is computed once more, after the next ones: as by a worker taken for lost.

    The gradient of step n is n; returns the sum of the updates.
    """
    given, taken = [], []
    schedule, fetch = coordination.Coordination.schedule, coordination.Coordination.fetch

    def note(self, function, *arguments):
        given.append((function, arguments))
        return schedule(self, function, *arguments)

    def fetch_and_repeat(self, remote):
        result = fetch(self, remote)
        for function, arguments in taken[-in_flight:]:
            fetch(self, schedule(self, function, *arguments))
        taken.append(given[len(taken)])
        return result

    def build():
        inputs = keras.Input((1,))
        outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(inputs)
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(1.0), lambda y_true, y_pred: y_pred)
        return model

    coordination.Coordination.schedule = note
    coordination.Coordination.fetch = fetch_and_repeat
    try:
        trainer = zoo.make_trainer(build, strategy=strategy, max_in_flight=in_flight)
        x = np.repeat(np.arange(12, dtype="f4"), BATCH)[:, None]
        trainer.fit(x, x, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    finally:
        coordination.Coordination.schedule = schedule
        coordination.Coordination.fetch = fetch
    return trainer.model.weights[0].numpy().item()


def run_tables(strategy):
    return tables.run_tables(strategy, HERE, Kill("ps-1", (2,)))


def run_continued_table(strategy):
    return tables.run_continued_table(strategy, HERE)


def run_late(strategy):
    return [train_with_late_writes(strategy, in_flight) for in_flight in (1, 3)]


def run_lost_server(strategy):
    try:
        train_constant(strategy, "sgd", 200, callbacks=[Kill("ps-1", (10,))])
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error)}
    return {}


def run_lost_workers(strategy):
    coordination._LOOK_EVERY_S, coordination._WITHOUT_WORKERS_S = 0.2, 2.0
    (HERE / "gone").touch()
    try:
        train_constant(strategy, "sgd", 200, callbacks=[Kill("worker-0", (10,))])
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error)}
    return {}


def serve():
    """Runs the server in a child, and again after it was killed."""
    while True:
        child = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "IN_CHILD": "1"})
        status = child.wait()
        if status >= 0 or (HERE / "gone").exists() or config.role == "ps":
            break
    while status < 0:
        time.sleep(1)  # the launcher would end the others
    return status


if __name__ == "__main__":
    config = resolve_cluster()
    if config.role == "chief":
        found = globals()[f"run_{SCENARIO}"](make_parameter_server())
        (HERE / "found.json").write_text(json.dumps(found))
    elif "IN_CHILD" in os.environ:
        written = HERE / f"{config.task_name}.writing"
        written.write_text(str(os.getpid()))
        written.rename(HERE / config.task_name)
        sys.exit(run_server())
    else:
        sys.exit(serve())
