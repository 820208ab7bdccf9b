"""A training loop of one's own continues from its checkpoint with the same bits."""

import os
import random
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tfdist.errors import TfdistError
from tfdist.launch import run_local_cluster

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 4)).astype("f4"), RNG.normal(size=(24, 1)).astype("f4")
DATASET = "dataset"


class LostError(Exception):
    pass


def train(
    strategy, directory=None, *, lost_after=None, data="arrays", rows=24, lazy=False, every=2
):
    """Trains in two phases, and returns what it ends with; the program is lost after a batch."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    loop = tfdist.Loop(
        strategy=zoo.STRATEGIES[strategy](), checkpoint_dir=directory, checkpoint_every=every
    )
    with loop.scope():
        first = [] if lazy else [keras.Input((4,))]
        model = keras.Sequential(
            [
                *first,
                keras.layers.Dense(6, "relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )
        optimizer = keras.optimizers.Adam(1e-2)
        metric, of_test = keras.metrics.MeanAbsoluteError(), keras.metrics.MeanSquaredError()
        noise = keras.random.SeedGenerator(2)
        count = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
    loss_fn = keras.losses.MeanSquaredError()

    @loop.distribute
    def train_step(x, y, scale):
        x += 0.1 * keras.random.normal(tf.shape(x), seed=noise)
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = loss_fn(y, outputs) * scale
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metric.update_state(y, outputs)
        count.assign_add(1.0)
        return loss

    @loop.distribute
    def test_step(x, y):
        of_test.update_state(y, model(x, training=False))

    batches = {"batch_size": 8}
    x, y = X[:rows], Y[:rows]
    train_data, test_data = (x, y), (x[:16], y[:16])
    if data == DATASET:
        batches = {}
        both = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(22, seed=3).batch(8)
        train_data, test_data = (both,), (both.take(2),)
    given = 0
    found = loop.state
    found.setdefault("losses", [])
    for phase, epochs in enumerate((2, 1)):
        for _ in loop.epochs(epochs):
            metric.reset_state()
            of_test.reset_state()
            optimizer.learning_rate = 1e-2 / (1 + len(found["losses"]))
            for x, y in loop.batches(*train_data, **batches):
                scale = np.float32(np.random.rand() + random.random() + phase)
                found["losses"].append(train_step(x, y, scale))
                given += 1
                if given == lost_after:
                    raise LostError
            found["losses"].append(float(metric.result()))
            for x, y in loop.batches(*test_data, **batches, shuffle=False):
                test_step(x, y)
                given += 1
                if given == lost_after:
                    raise LostError
            found["losses"].append(float(of_test.result()))
    values = [w.tobytes() for w in model.get_weights()]
    values += [np.asarray(v).tobytes() for v in optimizer.variables]
    return found["losses"], values, float(count)


def lose_and_continue(points, directory, *args, **kwargs):
    for point in points:
        with pytest.raises(LostError):
            train(*args, directory, lost_after=point, **kwargs)
    return train(*args, directory, **kwargs)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("mirrored-2", {}),
        # Two sizes of batches have two traces.
        ("one_device", {"lazy": True, "data": DATASET, "rows": 22}),
        ("one_device", {}),
        ("mirrored-2", {"lazy": True, "data": DATASET}),
        ("mirrored-3", {"every": 1, "rows": 22}),
        ("central_storage-2", {"every": None}),
    ],
)
def test_a_loop_that_is_lost_ends_with_the_same_bits(strategy, options, tmp_path):
    expected = train(strategy, **options)
    # In the first epoch's training and evaluation, at an epoch's end, and in the second phase.
    assert lose_and_continue([3, 2, 7], str(tmp_path), strategy, **options) == expected


def measure(directory, *, in_class=False, lost_after=None):
    """Two objects whose steps have one name; their metrics are sums that grow with the batches."""
    keras.utils.clear_session(free_memory=False)
    loop = tfdist.Loop(
        strategy=zoo.STRATEGIES["mirrored-2"](), checkpoint_dir=directory, checkpoint_every=1
    )

    def update(self, x, training):
        self.metric.update_state(tf.abs(self.model(x, training=training)) * 0.0 + x[:, :1])

    class Measured:
        step = loop.distribute(update) if in_class else update

        def __init__(self, name):
            with loop.scope():
                self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
                self.metric = keras.metrics.Sum(name=name)
            if not in_class:
                self.step = loop.distribute(self.step)

    first, second = Measured("first"), Measured("second")
    found = []
    for _ in loop.epochs(1):
        for number, x in enumerate(loop.batches(X, batch_size=8), 1):
            first.step(x, training=False)
            second.step(2 * x, training=True)
            if number == lost_after:
                raise LostError
        found = [float(each.metric.result()) for each in (first, second)]
    return found


def test_steps_of_one_name_keep_their_own_metrics(tmp_path):
    expected = measure(str(tmp_path / "whole"))
    assert expected[0] == pytest.approx(expected[1] / 2)
    with pytest.raises(LostError):
        measure(str(tmp_path / "lost"), lost_after=2)
    assert measure(str(tmp_path / "lost")) == expected


def test_models_that_come_after_the_first_epoch_has_begun_are_refused(tmp_path):
    with pytest.raises(TfdistError, match=r"self.update = loop.distribute\(self.update\)"):
        measure(str(tmp_path), in_class=True)


def test_another_program_or_other_data_are_refused(tmp_path):
    directory = str(tmp_path)
    with pytest.raises(LostError):
        train("one_device", directory, lost_after=3)
    with pytest.raises(TfdistError, match="Cannot continue after step 2"):
        train("one_device", directory, data=DATASET)
    loop = tfdist.Loop(strategy="one_device", checkpoint_dir=directory)
    with loop.scope():
        other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="other")])

    @loop.distribute
    def step(x):
        return tf.reduce_mean(other(x))

    def run():
        for _ in loop.epochs(2):
            for x in loop.batches(X, batch_size=8):
                step(x)

    with pytest.raises(
        TfdistError, match="the checkpoint has no variable 'sequential_1/other/kernel'"
    ):
        run()


def test_data_that_cannot_be_read_again_are_refused(tmp_path):
    loop = tfdist.Loop(strategy="one_device", checkpoint_dir=str(tmp_path))
    for _ in loop.epochs(1):
        with pytest.raises(TfdistError, match="a loop over a generator: give `batches` arrays"):
            next(loop.batches(x for x in [X]))
        unseeded = tf.data.Dataset.from_tensor_slices(X).shuffle(22).batch(8)
        with pytest.raises(TfdistError, match="shuffled or sampled without a seed"):
            next(loop.batches(unseeded))


def test_data_that_are_new_in_each_epoch_are_refused(tmp_path):
    def read(directory, make):
        loop = tfdist.Loop(strategy="one_device", checkpoint_dir=str(tmp_path / directory), seed=1)
        return [x.numpy() for _ in loop.epochs(2) for x in loop.batches(make(), batch_size=8)]

    views = read("views", lambda: X[:])
    np.testing.assert_array_equal(np.concatenate(views), np.concatenate(read("same", lambda: X)))
    with pytest.raises(TfdistError, match=r"call 1 of `batches` in epoch 1 has other data"):
        read("other", lambda: np.random.permutation(X))
    with pytest.raises(TfdistError, match="call 1 of `batches` in epoch 1 has other data"):
        read("made", lambda: tf.data.Dataset.from_tensor_slices(X).shuffle(22, seed=1).batch(8))
    loop = tfdist.Loop(strategy="one_device", checkpoint_dir=str(tmp_path / "before"))
    with pytest.raises(TfdistError, match="`batches` is called before `epochs`"):
        next(loop.batches(X))


SCRIPT = """
import hashlib, sys, time, keras, numpy as np, tensorflow as tf, tfdist
keras.utils.set_random_seed(1)
loop = tfdist.Loop(checkpoint_dir=sys.argv[1])
with loop.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(1e-2)
@loop.distribute
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((y - model(x, training=True)) ** 2)
    weights = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    return loss
rng = np.random.default_rng(0)
x, y = rng.normal(size=(64, 4)).astype("f4"), rng.normal(size=(64, 1)).astype("f4")
for epoch in loop.epochs(4):
    for batch in loop.batches(x, y, batch_size=8):
        step(*batch)
        print("step", flush=True)
        time.sleep(float(sys.argv[2]))
print(hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest())
"""


def test_a_script_that_is_told_to_stop_saves_and_continues(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    several = tmp_path / "several.py"
    several.write_text(
        "import runpy, sys\n"
        "for sys.argv[1] in sys.argv[3:]:\n"
        f"    runpy.run_path({str(script)!r})\n"
        "    print('end', flush=True)\n"
    )

    def start(pause, *names, strategy="one_device", replicas=2):
        flags = f"--strategy={strategy}", f"--logical_replicas={replicas}", "--quiet"
        directories = [str(tmp_path / name) for name in names]
        command = [sys.executable, "-m", "tfdist.run", *flags, str(several), "", pause]
        return subprocess.Popen(
            [*command, *directories],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ,
        )

    stopped = start("1", "stopped", strategy="mirrored")
    for _ in range(3):
        assert stopped.stdout.readline() == "step\n"
    time.sleep(0.1)
    stopped.send_signal(signal.SIGTERM)
    rest, _ = stopped.communicate(timeout=1000)
    assert stopped.returncode == 143
    continued = start("0", "stopped", "whole")
    output, errors = continued.communicate(timeout=1000)
    assert continued.returncode == 0, errors
    lines, whole, _ = output.split("end\n")
    assert lines.splitlines()[-1] == whole.splitlines()[-1]
    assert 3 + rest.count("step") + lines.count("step") == whole.count("step") == 32
    continued = start("0", "stopped", replicas=3)
    change, digest, _ = continued.communicate(timeout=1000)[0].splitlines()
    assert "equal within rounding: logical_replicas was 2 and is 3" in change
    assert digest == whole.splitlines()[-1]


@pytest.mark.cluster
def test_two_workers_of_which_one_is_lost_end_with_the_same_bits(tmp_path):
    lost = """
if loop.strategy.cluster_resolver.task_id == 1 and not os.path.exists(sys.argv[3]):
    def die_after(number, step=step):
        def call(*batch):
            step(*batch)
            call.left -= 1
            if not call.left:
                open(sys.argv[3], "w").close()
                os._exit(1)
        call.left = number
        return call
    step = die_after(11)
"""
    script = SCRIPT.replace("import hashlib", "import hashlib, os")
    script = script.replace(
        "Loop(checkpoint_dir=sys.argv[1])",
        'Loop(strategy="multi_worker_mirrored", checkpoint_dir=sys.argv[1], checkpoint_every=3)',
    )
    script = script.replace("rng =", f"{lost}rng =")

    def run(name):
        arguments = [str(tmp_path / name), "0", str(tmp_path / "lost")]
        result = run_local_cluster(
            workers=2,
            command=[sys.executable, "-c", script, *arguments],
            run_dir=str(tmp_path / f"{name}-run"),
            max_restarts=2,
            timeout_s=1000,
            stream=False,
        )
        text = result.tasks[0].log.read_text()
        assert result.status == 0, text[-2000:]
        return text.split()[-1], text.count("step\n"), result.restarts

    digest, _, restarts = run("disturbed")
    assert restarts == 1
    assert run("whole") == (digest, 32, 0)
