"""Contract 1 over several processes: workers end where one device ends, and end together."""

import json
import os
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest

from tests import zoo
from tests.training import cluster_tasks as tasks
from tests.training import test_outputs
from tfdist.launch import run_local_cluster

pytestmark = pytest.mark.cluster

TIMEOUT_S = 1000


def run_cluster(name, directory, workers):
    result = run_local_cluster(
        workers=workers,
        command=[sys.executable, "-m", "tests.training.cluster_tasks", name, str(directory)],
        run_dir=directory,
        timeout_s=TIMEOUT_S,
        stream=False,
        environ=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    logs = "\n".join(task.log.read_text()[-3000:] for task in result.tasks)
    return result, logs


def read_findings(name, directory, workers):
    """Runs a task's processes; returns what each found."""
    result, logs = run_cluster(name, directory, workers)
    assert result.status == 0, logs
    found = [json.loads((directory / f"worker-{i}.json").read_text()) for i in range(workers)]
    for other in found[1:]:
        assert other == found[0]  # weights, logs, predictions, all of it
    return found[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two workers")
    return directory, read_findings("two", directory, 2)


@pytest.fixture(scope="module")
def two_of_two(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two workers of two replicas")
    return directory, read_findings("two_of_two", directory, 2)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    directory = tmp_path_factory.mktemp("optimizer in parts")
    return directory, read_findings("shards", directory, 2)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("steps in parts")
    return directory, read_findings("parts", directory, 2)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    directory = tmp_path_factory.mktemp("three workers")
    return directory, read_findings("three", directory, 3)


@pytest.fixture(scope="module")
def local_sgd(tmp_path_factory):
    directory = tmp_path_factory.mktemp("local sgd")
    return directory, read_findings("local_sgd", directory, 2)


_references = {}


def compare(cluster, key, model_name, optimizer, tolerance, batch=tasks.BATCH):
    """Compares what a cluster computed with one device."""
    directory, found = cluster
    case = model_name, optimizer, batch
    if case not in _references:
        strategy = zoo.STRATEGIES["one_device"]()
        trainer, history, logs = tasks.train(model_name, optimizer, strategy, batch)
        _references[case] = tasks.read_weights(trainer), history, logs
    weights, history, logs = _references[case]
    with np.load(directory / f"{key}.npz") as arrays:
        ours = [arrays[name] for name in arrays.files]
    assert zoo.largest_difference(ours, weights) < tolerance
    assert found[key]["logs"].keys() == logs.keys()
    for name, value in logs.items():
        np.testing.assert_allclose(
            found[key]["logs"][name], value, rtol=20 * tolerance, err_msg=name
        )
    np.testing.assert_allclose(found[key]["history"]["loss"], history["loss"], rtol=20 * tolerance)


@pytest.mark.parametrize("model_name", zoo.EXAMPLES)
def test_two_workers_end_where_one_device_ends(two, model_name):
    compare(two, model_name, model_name, tasks.make_sgd, 1e-5)


def test_two_workers_that_hold_different_numbers_of_examples(two, float64):
    compare(two, "uneven", "unet", tasks.make_sgd, 1e-12, tasks.UNEVEN_BATCH)


def test_adam_in_float64_on_different_numbers_of_examples(two, float64):
    compare(two, "adam_uneven", "unet", tasks.make_adam, 1e-10, tasks.UNEVEN_BATCH)


@pytest.mark.parametrize("model_name", ["unet", "random"])
def test_three_workers_share_sixteen_examples(three, model_name):
    compare(three, model_name, model_name, tasks.make_sgd, 1e-5)


def test_two_workers_of_two_replicas_end_where_one_device_ends(two_of_two):
    compare(two_of_two, "convolutional", "convolutional", tasks.make_sgd, 1e-5)


def test_adam_in_float64_on_two_workers(two, float64):
    compare(two, "adam", "unet", tasks.make_adam, 1e-10)


def test_adam_in_float64_on_three_workers(three, float64):
    compare(three, "adam", "unet", tasks.make_adam, 1e-10)


def test_an_optimizer_divided_over_workers_ends_where_one_device_ends(shards, float64):
    compare(shards, "adam", "unet", tasks.make_adam, 1e-10, tasks.UNEVEN_BATCH)
    compare(shards, "tables", "transformer", tasks.make_adam, 1e-10)
    compare(shards, "whole", "dense", tasks.make_lamb, 1e-10)


def test_an_optimizer_is_divided_evenly_over_workers(shards):
    found = shards[1]["bytes"]
    whole = sum(found["planned"])
    assert max(found["planned"]) < 1.05 * whole / 4
    assert found["of workers"] == [sum(found["planned"][:2]), sum(found["planned"][2:])]


def test_a_divided_optimizer_continues_to_the_same_bits_and_on_one_device(shards):
    directory, found = shards
    check_resumed(found["resume"], 5)
    x, y = zoo.EXAMPLES["unet"].data
    path = str(directory / "stopped checkpoints")
    strategy = zoo.STRATEGIES["one_device"]()
    trainer = tasks.make_trainer("unet", tasks.make_adam, strategy, checkpoint_dir=path)
    trainer.fit(x, y, global_batch_size=tasks.BATCH, epochs=4, verbose=0)
    assert trainer.progress.resumed_from_step == 9


def test_micro_batches_on_two_workers_end_where_one_device_ends(parts):
    compare(parts, "micro", "random", tasks.make_sgd, 1e-5, tasks.UNEVEN_BATCH)
    compare(parts, "micro_local", "random", tasks.make_plain_sgd, 1e-5)


def test_loops_of_steps_on_two_workers_end_where_one_device_ends(parts):
    compare(parts, "loops", "two_inputs", tasks.make_sgd, 1e-5, tasks.UNEVEN_BATCH)


def test_a_gradient_that_overflows_on_one_worker_is_skipped_by_both(parts):
    found = parts[1]["loss_scaling"]
    assert (found["scale"], found["iterations"]) == (2.0**13, 1)
    refused = parts[1]["refused"]  # under local SGD, where each would skip what overflows there
    assert "LocalSgdStrategy does not support `precision=mixed_float16`" in refused


def test_the_all_reduce_alone_takes_time(parts):
    assert parts[1]["all_reduce_takes_time"]


def test_gradients_are_summed_in_packs(parts):
    """Of 500 bytes and more, the gradient of `random` being 1,104; one more sums the metrics."""
    assert parts[1]["collectives"] == 3


def test_compressed_gradients_lose_digits_and_little_else(parts):
    with pytest.raises(AssertionError):
        compare(parts, "compressed", "two_inputs", tasks.make_sgd, 1e-5)
    compare(parts, "compressed", "two_inputs", tasks.make_sgd, 5e-3)


@pytest.mark.parametrize("cluster", ["two", "two_of_two", "local_sgd"])
def test_evaluates_and_predicts_every_example_once(request, cluster):
    _, found = request.getfixturevalue(cluster)
    trainer = tasks.make_trainer("two_inputs", tasks.make_sgd, zoo.STRATEGIES["one_device"]())
    x, y = zoo.EXAMPLES["two_inputs"].data
    x, y = ({name: t[:17] for name, t in part.items()} for part in (x, y))
    expected = trainer.evaluate(x, y, global_batch_size=tasks.BATCH, verbose=0, return_dict=True)
    assert found["evaluated"] == pytest.approx(expected, rel=1e-5)
    for name, outputs in trainer.predict(x, global_batch_size=tasks.BATCH).items():
        np.testing.assert_allclose(found["predicted"][name], outputs, rtol=1e-4, atol=1e-6)


def test_one_callback_stops_all_workers(two):
    _, found = two
    assert found["early"]["step"] == 9  # patience 2: three epochs of three steps
    assert len(found["early"]["history"]["val_loss"]) == 3
    assert found["stopped_by_one"] == 4


def test_programs_on_two_workers_end_where_one_device_ends(two):
    _, found = two
    assert found["programs"].keys() == set(tasks.PROGRAMS_OF_WORKERS)
    assert max(found["programs"].values()) < 1e-5
    assert found["predicted_first"] < 1e-5


@pytest.mark.parametrize("name", ["two", "two_of_two", "local_sgd"])
def test_single_batches_of_workers(request, name):
    expected = tasks.use_single_batches(zoo.STRATEGIES["one_device"]())
    for ours, whole in zip(
        request.getfixturevalue(name)[1]["single batches"], expected, strict=True
    ):
        assert ours.keys() == whole.keys()
        for key, value in whole.items():
            np.testing.assert_allclose(ours[key], value, rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("name", ["two", "two_of_two", "local_sgd"])
def test_outputs_of_every_kind_are_those_of_one_device(request, name):
    expected = [
        repr(test_outputs.list_values(test_outputs.Outputs().predict(rows, batch_size=4)))
        for rows in (test_outputs.X[:1], test_outputs.X)
    ]
    assert request.getfixturevalue(name)[1]["kinds of outputs"] == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "order",
            "Cannot use several workers, .* with a dataset that is shuffled .* without a seed",
        ),
        ("rows", "The data of worker 1 differ from the chief's: .* Give all workers the same data"),
        ("rows of a batch", "The data of worker 1 differ from the chief's: "),
        ("learning rate", "is 0.1 on worker 1 and 0.05 on the chief. Pass the callback that"),
    ],
)
def test_workers_that_would_not_train_alike_are_refused(two, name, message):
    _, found = two
    assert re.search(message, found["refusals"][name])


def check_resumed(resume, stopped_at):
    assert resume["stopped"] == [stopped_at, True]
    assert resume["resumed_from_step"] == stopped_at
    assert resume["shas"][0] == resume["shas"][1]
    expected, history = resume["histories"]
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-6, err_msg=name)


def test_continues_to_the_same_bits(two_of_two):
    check_resumed(two_of_two[1]["resume"], 5)


def test_a_killed_worker_is_named_and_the_others_end(tmp_path):
    outcome = []
    cluster = threading.Thread(target=lambda: outcome.append(run_cluster("killed", tmp_path, 2)))
    cluster.start()
    until = time.monotonic() + 1000
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < until, "the workers do not train"
        time.sleep(0.05)
    os.kill(find_task(tmp_path, 1), signal.SIGKILL)
    cluster.join()
    ((result, logs),) = outcome
    assert result.first_failed == "worker-1"
    assert result.status == 128 + signal.SIGKILL
    assert not result.timed_out
    assert find_task(tmp_path, 0) is None, logs


def find_task(directory, index):
    """Returns the process of a worker of the cluster that works in a directory."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline") as file:
                arguments = file.read().split("\0")
            with open(f"/proc/{name}/environ") as file:
                environment = file.read().split("\0")
        except OSError:
            continue
        config = next((v[10:] for v in environment if v.startswith("TF_CONFIG=")), "")
        is_task = str(directory) in arguments and config
        if is_task and json.loads(config)["task"]["index"] == index:
            return int(name)
    return None


# Where the two workers' means are those of the batch: no normalization over the batch, and no
# weights or ignored labels, of which one worker may hold more than the other.
SEPARABLE = ("dense", "two_inputs", "transformer", "random")


@pytest.mark.parametrize("model_name", SEPARABLE)
def test_averaging_at_every_step_is_synchronous_training(local_sgd, model_name):
    compare(local_sgd, model_name, model_name, tasks.make_plain_sgd, 1e-5)


@pytest.mark.parametrize("model_name", sorted(set(zoo.EXAMPLES) - set(SEPARABLE)))
def test_averaging_at_every_step_trains_the_other_models(local_sgd, model_name):
    losses = local_sgd[1][model_name]["history"]["loss"]
    assert losses[-1] < losses[0]


def test_an_outer_momentum_at_every_step_is_momentum(local_sgd):
    compare(local_sgd, "outer", "dense", tasks.make_momentum_sgd, 1e-5)


@pytest.mark.parametrize("average_optimizer", [True, False])
def test_local_sgd_continues_to_the_same_bits(local_sgd, average_optimizer):
    """Asked to stop at step 5, workers that average every two steps stop at 6."""
    check_resumed(local_sgd[1][f"resume {average_optimizer}"], 6)


def test_averaging_rarely_learns_too(local_sgd):
    losses = local_sgd[1]["rarely"]["history"]["loss"]
    assert losses[-1] < losses[0]
