"""What the processes of the cluster tests run: `python -m tests.training.cluster_tasks NAME DIR`.

Each writes what it found to DIR/worker-<index>.json, and the chief its arrays to DIR.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tests import zoo
from tests.training.programs import PROGRAMS, DrawsAlways, X, Y, build_lazily, dense
from tests.training.test_outputs import Outputs, compiled, list_values
from tests.training.test_outputs import X as ROWS
from tfdist import strategies
from tfdist.errors import TfdistError, TrainingError
from tfdist.training.kinds import local_sgd as local
from tfdist.training.step.model_variables import hash_weights

STEPS = 20
BATCH = 16
UNEVEN_BATCH = 15  # two workers hold 8 and 7 of it
MODELS = tuple(zoo.EXAMPLES)
PROGRAMS_OF_WORKERS = ("several optimizers in one", "an average that overwrites")


def make_sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)


def make_plain_sgd():
    return keras.optimizers.SGD(0.05)


def make_momentum_sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def make_adam():
    return keras.optimizers.Adam(1e-3)


def make_lamb():
    return keras.optimizers.Lamb(1e-3)


def set_precision(name):
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)


def make_trainer(model_name, optimizer, strategy, **options):
    example = zoo.EXAMPLES[model_name]
    return zoo.make_trainer(
        lambda: example.build(optimizer()), strategy=strategy, seed=5, **options
    )


def train(model_name, optimizer, strategy, batch=BATCH, **options):
    """Trains and evaluates: (trainer, history, logs)."""
    example = zoo.EXAMPLES[model_name]
    (x, y), weight = example.data, example.sample_weight
    trainer = make_trainer(model_name, optimizer, strategy, **options)
    history = trainer.fit(
        x, y, sample_weight=weight, global_batch_size=batch, max_steps=STEPS, verbose=0
    )
    logs = trainer.evaluate(
        x, y, sample_weight=weight, global_batch_size=batch, verbose=0, return_dict=True
    )
    return trainer, history.history, logs


def read_weights(trainer):
    return [weight.numpy() for weight in trainer.model.weights]


class Task:
    """One process's strategy and findings."""

    def __init__(self, directory, strategy):
        self.directory = Path(directory)
        self.strategy = strategy
        self.found = {}

    def compare(self, key, model_name, optimizer, batch=BATCH, **options):
        trainer, history, logs = train(model_name, optimizer, self.strategy, batch, **options)
        self.found[key] = {"sha": hash_weights(trainer.model), "history": history, "logs": logs}
        if trainer.is_chief:
            np.savez(self.directory / f"{key}.npz", *read_weights(trainer))
        return trainer


def run_two(task):
    """Everything that two workers must do as one device does."""
    for name in MODELS:
        task.compare(name, name, make_sgd)
    check_evaluation(task)
    check_single_batches(task)
    check_callbacks(task)
    check_programs(task)
    task.found["refusals"] = list_refusals(task)
    set_precision("float64")
    task.compare("adam", "unet", make_adam)
    # In float32, the rounding of the inputs may move these weights by 1e-4 on one device.
    task.compare("uneven", "unet", make_sgd, UNEVEN_BATCH)
    task.compare("adam_uneven", "unet", make_adam, UNEVEN_BATCH)


def run_three(task):
    """16 examples over three workers are 6, 5 and 5."""
    task.compare("unet", "unet", make_sgd)
    task.compare("random", "random", make_sgd)
    set_precision("float64")
    task.compare("adam", "unet", make_adam)


def check_evaluation(task):
    """The last global batch of 17 has one row: nothing for the second worker."""
    example = zoo.EXAMPLES["two_inputs"]
    x, y = keras.tree.map_structure(lambda t: t[:17], example.data)
    trainer = make_trainer("two_inputs", make_sgd, task.strategy)
    task.found["evaluated"] = trainer.evaluate(
        x, y, global_batch_size=BATCH, verbose=0, return_dict=True
    )
    outputs = trainer.predict(x, global_batch_size=BATCH)
    task.found["predicted"] = keras.tree.map_structure(lambda t: t.tolist(), outputs)


def check_single_batches(task):
    """Batches with examples for all workers, and with one example for all of them."""
    task.found["single batches"] = use_single_batches(task.strategy)
    trainer = zoo.make_trainer(compiled(Outputs), strategy=task.strategy)
    task.found["kinds of outputs"] = [
        repr(list_values(trainer.predict(ROWS[:rows], batch_size=4))) for rows in (1, 5)
    ]


def use_single_batches(strategy):
    found = []
    model = zoo.make_trainer(lambda: dense(between=DrawsAlways()), strategy=strategy)
    for rows in (8, 7, 1):
        found.append(model.train_on_batch(X[:rows], Y[:rows], return_dict=True))
        found.append(model.test_on_batch(X[:rows], Y[:rows], return_dict=True))
        found.append({"outputs": np.asarray(model.predict_on_batch(X[:rows])).tolist()})
    return found


def check_callbacks(task):
    """A callback of one worker stops both; all see the same logs."""
    x, y = zoo.EXAMPLES["dense"].data
    trainer = make_trainer("dense", make_sgd, task.strategy)
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, min_delta=10)
    history = trainer.fit(
        x, y, validation_data=(x, y), global_batch_size=BATCH, epochs=9, callbacks=[stop]
    )
    task.found["early"] = {"step": trainer.step, "history": history.history}
    trainer = make_trainer("dense", make_sgd, task.strategy)

    def stop_one(batch, logs):
        if trainer.step == 4 and not trainer.is_chief:
            trainer.model.stop_training = True

    stop = keras.callbacks.LambdaCallback(on_train_batch_end=stop_one)
    trainer.fit(x, y, global_batch_size=BATCH, epochs=9, callbacks=[stop])
    task.found["stopped_by_one"] = trainer.step


def check_programs(task):
    """Trains programs on one device and on the workers; notes how far apart they end."""
    task.found["programs"] = {}
    for name in PROGRAMS_OF_WORKERS:
        program, found = PROGRAMS[name], []
        for options in ({}, {"strategy": task.strategy}):
            trainer = zoo.make_trainer(program.build, **options)
            trainer.fit(program.make_dataset(), epochs=2, verbose=0)
            found.append(read_weights(trainer))
        task.found["programs"][name] = zoo.largest_difference(*found)
    alone, together = (
        zoo.make_trainer(build_lazily, **options).predict(X[:7], batch_size=4)
        for options in ({}, {"strategy": task.strategy})
    )
    task.found["predicted_first"] = zoo.largest_difference([together], [alone])


def list_refusals(task):
    """Returns what is said to workers that would not train alike."""
    tf.random.set_seed(None)
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    number = 0 if make_trainer("dense", make_sgd, task.strategy).is_chief else 1
    change = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (2 + epoch))
    refusals = {}
    for name, dataset, callbacks in (
        ("order", data.shuffle(32).batch(8), []),
        ("rows", data.take(24 + 8 * number).batch(8), []),
        ("rows of a batch", data.take(20 + 4 * number).batch(8), []),
        ("learning rate", data.batch(8), [] if number else [change]),
    ):
        trainer = zoo.make_trainer(PROGRAMS["a sum"].build, strategy=task.strategy)
        try:
            trainer.fit(dataset, epochs=2, callbacks=callbacks, verbose=0)
        except TfdistError as error:
            refusals[name] = str(error)
    return refusals


def check_resume(task, model_name, optimizer, prefix="", **given):
    """Stopped at step 5, on the second worker's request, and continued."""
    x, y = zoo.EXAMPLES[model_name].data
    options = {"global_batch_size": BATCH, "epochs": 3, "verbose": 0, "validation_data": (x, y)}

    def make(name):
        path = str(task.directory / f"{prefix}{name} checkpoints")
        return make_trainer(model_name, optimizer, task.strategy, checkpoint_dir=path, **given)

    whole = make("whole")
    expected = whole.fit(x, y, **options).history
    stopped = make("stopped")

    def stop_one(batch, logs):
        if stopped.step == 5 and not stopped.is_chief:
            stopped.request_stop()

    stop = keras.callbacks.LambdaCallback(on_train_batch_end=stop_one)
    stopped.fit(x, y, callbacks=[stop], **options)
    continued = make("stopped")
    history = continued.fit(x, y, **options).history
    task.found["resume"] = {
        "stopped": [stopped.step, stopped.progress.was_stopped],
        "resumed_from_step": continued.progress.resumed_from_step,
        "shas": [hash_weights(whole.model), hash_weights(continued.model)],
        "histories": [expected, history],
    }


def run_two_of_two(task):
    """Two workers of two replicas each, as with two GPUs: 16 examples are 4, 4, 4 and 4."""
    assert task.strategy.num_replicas_in_sync == 4
    task.compare("convolutional", "convolutional", make_sgd)
    check_evaluation(task)
    check_single_batches(task)
    check_resume(task, "convolutional", make_adam)


def make_two_replicas_a_worker():
    """Builds the strategy over two logical CPUs a worker, where TensorFlow would take one."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    strategy = tf.distribute.MultiWorkerMirroredStrategy
    extended = sys.modules[strategy.__module__].CollectiveAllReduceExtended
    extended._initialize_local_devices = lambda self, resolver, worker: (
        (f"{worker}/device:CPU:0", f"{worker}/device:CPU:1"),
        "CPU",
    )
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    options = tf.distribute.experimental.CommunicationOptions()
    return strategy(communication_options=options)


def run_shards(task):
    """Four replicas of two workers keep a part of the optimizer's state each."""
    check_resume(task, "unet", make_adam, shard_optimizer=True)
    set_precision("float64")
    trainer = task.compare("adam", "unet", make_adam, UNEVEN_BATCH, shard_optimizer=True)
    task.compare("tables", "transformer", make_adam, shard_optimizer=True)
    task.compare("whole", "dense", make_lamb, shard_optimizer=True)
    optimizer_bytes = trainer.engine.summarize_placement()["optimizer_bytes"]
    parts = [p for slot in trainer.model.optimizer._momentums for p in slot.value.parts.values()]
    own = sum(part.shape.num_elements() * part.dtype.size for part in parts)
    shares = trainer.engine.workers.gather(np.array([2.0 * own]))
    task.found["bytes"] = {"planned": optimizer_bytes, "of workers": shares.tolist()}


def run_parts(task):
    """Steps that are not one forward and one backward pass in float32, and one all-reduce."""
    trainer = task.compare("micro", "random", make_sgd, UNEVEN_BATCH, micro_batches=3)
    task.found["collectives"] = count_collectives(trainer)
    task.compare("loops", "two_inputs", make_sgd, UNEVEN_BATCH, steps_per_loop=3)
    compressed = task.compare("compressed", "two_inputs", make_sgd, compress_gradients=True)
    seconds = [part.engine.measure_all_reduce() for part in (trainer, compressed)]
    task.found["all_reduce_takes_time"] = min(seconds) > 0
    check_loss_scaling(task)
    task.strategy = strategies.LocalSgdStrategy(task.strategy, strategies.LocalSgd(sync_every=1))
    task.compare("micro_local", "random", make_plain_sgd, micro_batches=3)
    scaled = keras.optimizers.LossScaleOptimizer(make_sgd())
    try:
        zoo.make_trainer(lambda: zoo.build_linear(scaled), strategy=task.strategy)
    except TfdistError as error:
        task.found["refused"] = str(error)


def count_collectives(trainer):
    """Returns the all-reduces of a training step."""
    (function,) = trainer.engine._steps.steps.train._list_all_concrete_functions()
    definition = function.graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    return sum(node.op.startswith(("CollectiveReduce", "CollectiveGather")) for node in nodes)


def check_loss_scaling(task):
    """Two gradients overflow, on the second worker alone; then one does not."""
    keras.config.set_dtype_policy("mixed_float16")
    x, y = (part[:16].copy() for part in zoo.EXAMPLES["dense"].data)
    trainer = zoo.make_trainer(lambda: zoo.build_linear(make_sgd()), strategy=task.strategy)
    y[14:16] = 0
    for steps, size in ((2, 1000.0), (1, 1.0)):
        x[14], x[15] = size, -size  # one of them is taken for another class
        trainer.fit(x, y, global_batch_size=16, shuffle=False, max_steps=steps, verbose=0)
    optimizer = trainer.model.optimizer
    task.found["loss_scaling"] = {
        "scale": float(optimizer.dynamic_scale.numpy()),
        "iterations": int(optimizer.iterations.numpy()),
        "sha": hash_weights(trainer.model),
    }
    keras.config.set_dtype_policy("float32")


def run_killed(task):
    """Trains until the second worker is killed from outside."""
    x, y = zoo.EXAMPLES["dense"].data
    trainer = make_trainer("dense", make_sgd, task.strategy)

    def say(batch, logs):
        if trainer.step == 5 and not trainer.is_chief:
            (task.directory / "ready").touch()
        time.sleep(0.02)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=say)
    try:
        trainer.fit(x, y, global_batch_size=BATCH, epochs=10_000, verbose=0, callbacks=[callback])
    except TrainingError as error:
        print(f"said: {error}", flush=True)
        raise


def run_local_sgd(task):
    """Averaging at every step is synchronous training; less often, all still end alike."""
    local.BYTES_PER_PACK = 500  # several packs
    task.strategy = remake(task, sync_every=1)
    for name in MODELS:
        task.compare(name, name, make_plain_sgd)
    check_single_batches(task)
    task.strategy = remake(task, sync_every=1, outer_momentum=0.9)
    task.compare("outer", "dense", make_plain_sgd)
    check_evaluation(task)
    for average in (True, False):
        task.strategy = remake(
            task, sync_every=2, average_optimizer=average, outer_momentum=0.5 * (not average)
        )
        check_resume(task, "dense", make_sgd, f"{average} ")
        task.found[f"resume {average}"] = task.found.pop("resume")
    task.strategy = remake(task, sync_every=8)
    task.compare("rarely", "dense", make_sgd)


def remake(task, **options):
    """Returns another local SGD over the same channel: there is one in a process."""
    return strategies.LocalSgdStrategy(task.strategy.channel, strategies.LocalSgd(**options))


TASKS = {
    "two": (run_two, strategies.make_multi_worker_mirrored),
    "three": (run_three, strategies.make_multi_worker_mirrored),
    "two_of_two": (run_two_of_two, make_two_replicas_a_worker),
    "shards": (run_shards, make_two_replicas_a_worker),
    "parts": (
        run_parts,
        functools.partial(strategies.make_multi_worker_mirrored, bytes_per_pack=500),
    ),
    "killed": (run_killed, strategies.make_multi_worker_mirrored),
    "local_sgd": (run_local_sgd, strategies.make_local_sgd),
}


def main(name, directory):
    run, make_strategy = TASKS[name]
    task = Task(directory, make_strategy())
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    run(task)
    (task.directory / f"worker-{index}.json").write_text(json.dumps(task.found))


if __name__ == "__main__":
    tf.get_logger().setLevel("ERROR")
    main(*sys.argv[1:])
