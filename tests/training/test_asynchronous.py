"""Training on parameter servers, in real processes: each step is applied exactly once."""

import contextlib
import json
import os
import pathlib
import sys
import time
import uuid

import numpy as np
import pytest

from tests import zoo
from tests.training.parameter_server_task import OF_SERVERS
from tests.training.tables import OPTIMIZERS as OPTIMIZERS_OF_TABLES
from tests.training.test_dataset_order import check_unknown
from tfdist.launch import run_local_cluster

TASK = pathlib.Path(__file__).with_name("parameter_server_task.py")
TIMEOUT_S = 1000

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher's tests read /proc"),
]


def _run(scenario, directory, *, workers, train_flags=(), task=True):
    """Runs a cluster; returns its result, and fails where a process is left."""
    mark = f"TFDIST_TEST_{uuid.uuid4().hex}"
    result = run_local_cluster(
        workers=workers,
        ps=2,
        command=[sys.executable, str(TASK), scenario, str(directory)] if task else None,
        train_flags=train_flags,
        run_dir=directory,
        timeout_s=TIMEOUT_S,
        environ={**os.environ, mark: "1"},
    )
    until = time.monotonic() + 1000
    while left := _find_marked(mark):
        assert time.monotonic() < until, f"left behind: {left}"
        time.sleep(0.05)
    return result


def _find_marked(mark):
    found = []
    for path in pathlib.Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (path / "environ").read_bytes():
                    found.append(path.name)
    return found


def _find(scenario, directory, *, workers):
    result = _run(scenario, directory, workers=workers)
    assert result.status == 0, (directory / "logs" / "chief-0.log").read_text()[-3000:]
    return json.loads((directory / "found.json").read_text())


@pytest.fixture(scope="module")
def exactness(tmp_path_factory):
    return _find("exactness", tmp_path_factory.mktemp("a cluster"), workers=2)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    directory = tmp_path_factory.mktemp("a cluster")
    return {"directory": directory, **_find("tables", directory, workers=2)}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return _find("programs", tmp_path_factory.mktemp("a cluster"), workers=1)


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    return _find("updates", tmp_path_factory.mktemp("a cluster"), workers=3)


@pytest.mark.parametrize("name", zoo.EXAMPLES)
def test_one_step_in_flight_ends_where_one_device_ends(exactness, name):
    found = exactness["models"][name]
    assert found["weights"] < 1e-5
    assert found["losses"] < 1e-5
    assert found["predictions"] < 1e-5
    for ours, theirs in found["logs"].values():
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_single_batches_are_sent_to_steps_that_are_traced_once_or_twice(exactness):
    single = exactness["single batches"]
    assert single["found"] == pytest.approx(single["expected"], rel=1e-4)
    assert len(single["traces"]) == 3
    assert max(single["traces"]) <= 2  # of a batch, and of any number of rows


def test_evaluations_and_predictions_draw_on(exactness):
    found = exactness["drawn while evaluating"]
    assert max(found["before"]) < 1e-5
    assert found["between two predictions"] > 0.1
    assert found["after"] < 1e-5
    assert "Cannot evaluate or predict" in found["refused"]
    assert "/calls, which a worker cannot do." in found["refused"]


@pytest.mark.parametrize("name", OF_SERVERS)
def test_programs_end_where_one_device_ends(programs, name):
    found = programs[name]
    assert found["weights"] < 1e-5
    expected, logs = found["logs"]
    assert logs == pytest.approx(expected, rel=1e-5)


def test_fused_layers_end_where_keras_s_end(programs):
    assert programs["blocks"] == 2  # of the functions that train and evaluate
    assert programs["fused"]["weights"] < 1e-5
    expected, logs = programs["fused"]["logs"]
    assert logs == pytest.approx(expected, rel=1e-5)


def test_refuses_programs_that_workers_cannot_compute(programs):
    spectral, frozen, steps, maximum, draws = programs["refused"]
    assert "a layer assigns its own weight spectral/" in spectral
    assert "has no trainable weights. Use another strategy." in frozen
    assert "cannot run OwnSteps.train_step: a worker computes a gradient" in steps
    assert "'largest' (Largest) under ParameterServerStrategy: it is not a sum" in maximum
    assert "draws with TensorFlow's RandomStandardNormal, which differs on each" in draws


def test_datasets_are_read_in_the_order_that_keras_sees(programs):
    for name, (expected, found) in programs["order"].items():
        assert found == expected, name


def test_data_of_unknown_length_end_as_in_keras(programs):
    in_flight, found, expected = programs["unknown"]
    check_unknown(found, expected)
    assert in_flight[1] == expected[1]


def test_a_model_that_is_not_compiled_predicts(programs):
    assert programs["bare"] < 1e-5


def test_staleness_is_bounded_and_reported(exactness):
    found = exactness["asynchronous"]
    assert (found["updates"], found["workers"], found["max_in_flight"]) == (20, 2, 4)
    assert 0 < found["staleness_mean"] <= found["staleness_max"] <= 3
    assert not any("staleness" in name for name in found["logged"])


def test_each_step_in_flight_draws_its_own_random_numbers(exactness):
    found, expected = exactness["still"]
    assert found == pytest.approx(expected, rel=1e-6)


def test_variables_are_spread_by_size(exactness):
    assert max(exactness["bytes"]) < 1.3 * min(exactness["bytes"])


def test_a_step_sends_a_few_vectors_not_every_statistic(exactness):
    found = exactness["messages"]
    assert found["statistics"] >= 8
    # The loss, the version, and for each of two servers statistics and counts of a few dtypes.
    assert found["tensors"] <= 8


def test_gradients_do_not_pass_through_the_chief(exactness):
    assert exactness["messages"]["jobs"] == ["ps"]


def test_takes_a_keras_dataset_with_an_uneven_last_batch(exactness):
    found = exactness["dataset"]
    assert found["weights"] < 1e-5
    assert found["accuracy"] == pytest.approx(found["expected"], rel=1e-6)


def _sum_updates(name, steps):
    if name == "sgd":
        return -float(steps)
    if name == "adam":
        return -0.5 * steps
    velocity = total = 0.0
    for _ in range(steps):
        velocity = 0.5 * velocity - 1
        total += velocity
    return total


def _check(found, name, steps):
    assert found["iterations"] == found["updates"] == steps
    # Adam's epsilon makes its steps a little shorter; one step is more than 1 %.
    np.testing.assert_allclose(found["weights"], _sum_updates(name, steps), rtol=5e-5)
    assert found["mean"] == pytest.approx(1 - 0.9**steps, rel=1e-5)
    assert found["staleness_max"] < found["max_in_flight"] == 3


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_the_sum_of_the_updates_is_exact(updates, name):
    _check(updates[name], name, 60)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_a_killed_worker_s_steps_are_applied_once(updates, name):
    _check(updates["killed"][name], name, 80)


def test_a_gradient_that_comes_late_is_dropped(tmp_path):
    assert _find("late", tmp_path, workers=2) == [-2 * sum(range(12))] * 2


def test_goes_on_without_a_worker_that_does_not_come_back(updates):
    _check(updates["gone"], "adam", 60)


def test_continues_at_the_exact_count(updates):
    found = updates["continued"]
    assert found["stopped_at"] == found["resumed_from"] == 23
    _check(found, "momentum", 50)


def test_refuses_what_workers_cannot_compute(updates):
    in_parts, compiled, again, scaled = updates["refused"]
    assert "does not support `micro_batches` (given: 2)" in in_parts
    assert "does not support `jit_compile`" in compiled
    assert "does not support `rematerialize`" in again
    assert "does not support `precision=mixed_float16`" in scaled


@pytest.mark.parametrize("name", OPTIMIZERS_OF_TABLES)
def test_a_divided_table_ends_where_one_device_ends(tables, name):
    found = tables["compared"][name]
    assert found["variables"] < 1e-12
    assert found["losses"] < 1e-12
    servers = [f"/job:ps/replica:0/task:{task}/device:CPU:0" for task in (0, 1)]
    assert sorted(found["devices"]) == servers
    assert (found["rows"], found["divided"]) == ([12, 11], 1)
    num_slots = 2 if "Adam" in name else 1
    assert found["slots"] == [found["devices"]] * num_slots


@pytest.mark.parametrize("name", OPTIMIZERS_OF_TABLES)
def test_keras_loads_a_divided_table_as_a_whole_one(tables, name):
    found = tables["compared"][name]
    assert found["paths"] == ["table/embeddings", "kinds/embeddings"]
    assert found["predictions"] < 1e-14
    ours, theirs = found["logs"]
    assert ours == pytest.approx(theirs, rel=1e-12)


def test_a_divided_table_learns_with_steps_in_flight(tables):
    assert tables["in_flight"][-1] < tables["in_flight"][0]


def test_refuses_tables_that_are_read_whole(tables):
    refused = tables["refused"]
    for name in ("tied", "own call"):
        assert "cannot divide table/embeddings: a training step reads all of" in refused[name]
    assert "does not support Lamb: it does not update each" in refused["LAMB"]
    assert "cannot be combined with an optimizer with `use_ema`" in refused["average"]
    assert "`shard_tables_bytes=1048576` has nothing to divide" in refused["small"]


def test_a_divided_table_continues_after_a_server_was_killed(tables):
    assert tables["lost"].startswith("Parameter server 1 was lost")
    found = _find("continued_table", tables["directory"], workers=1)
    assert found["resumed_from"] == [2, 12]
    assert found["variables"] < 1e-12
    assert "the index 23: the table has 23 rows" in found["outside"]


def test_a_lost_parameter_server_is_named(tmp_path):
    found = _find("lost_server", tmp_path, workers=1)
    assert found["type"] == "TrainingError"
    assert found["message"].startswith("Parameter server 1 was lost")
    assert "\n" not in found["message"]


def test_workers_that_are_all_gone_are_named(tmp_path):
    found = _find("lost_workers", tmp_path, workers=1)
    assert found["type"] == "TrainingError"
    assert found["message"].startswith("No worker has answered for 2 s: worker 0 (Connection")


def test_the_command_trains_and_fills_the_run_directory(path_with_spaces):
    run_dir = path_with_spaces / "a run"
    flags = [
        "--strategy=parameter_server",
        "--dataset=shapes",
        "--train_examples=32",
        "--val_examples=16",
        "--image_size=16,16",
        "--base_filters=2",
        "--depth=1",
        "--cache=none",
        "--global_batch_size=8",
        "--epochs=2",
        "--quiet",
        f"--run_dir={run_dir}",
    ]
    result = _run("", run_dir, workers=1, train_flags=flags, task=False)
    assert result.status == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["strategy"] == "parameter_server"
    assert summary["steps"] == summary["updates"] == 8
    assert summary["staleness_max"] == 0  # one step a worker
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8]
    assert all("staleness_mean" in line for line in lines)
    assert (run_dir / "model.keras").exists()
