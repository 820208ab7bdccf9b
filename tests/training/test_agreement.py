"""Workers that differ in data, weights, programs or the calls they make are refused."""

import json
import os
import re
import sys

import pytest

from tfdist.launch import run_local_cluster

pytestmark = pytest.mark.cluster

OTHER_DATA = r"Batch \d of worker 1 has other examples than the chief's\. Give all workers the same"
OTHER_ARRAYS = r"The data of worker 1 differ from the chief's: .*\. Give all workers the same data"
LENGTHS = ("fewer batches", "fewer batches to evaluate")
PROGRAM = r"on the chief\. Run the same program on every worker"
DENSE = r"layer 2 \(Dense\)"
BIAS = "The variable sequential.*/dense.*/bias of worker 1 differs from the chief's"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two workers")
    result = run_local_cluster(
        workers=2,
        command=[sys.executable, "-m", "tests.training.agreement_task", str(directory)],
        run_dir=directory,
        timeout_s=1000,
        stream=False,
        environ=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    assert result.status == 0, [task.log.read_text()[-3000:] for task in result.tasks]
    chief, other = (json.loads((directory / f"worker-{i}.json").read_text()) for i in range(2))
    assert chief == other
    return chief


@pytest.mark.parametrize("strategy", ["CollectiveAllReduceStrategy", "LocalSgdStrategy"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, OTHER_DATA) for name in ("generator", "PyDataset", "scan")),
        *((name, OTHER_DATA) for name in ("evaluate", "predict", "shuffled", "single batches")),
        *((name, "Batch 3 of worker 1 does not exist on this worker") for name in LENGTHS),
        *((f"arrays to {use}", OTHER_ARRAYS) for use in ("evaluate", "validate", "predict")),
        ("weights, then evaluate", BIAS),
        ("weights, then predict", BIAS),
        ("epochs", f"`epochs` is 2 on worker 1 and 1 {PROGRAM}"),
        ("validation", f'`validation_data` is "given" on worker 1 and null {PROGRAM}'),
        ("batch size", f"`batch_size` is 7 on worker 1 and 8 {PROGRAM}"),
        (
            "frozen layer",
            f"`trainable` of {DENSE} is true on worker 1 and false {PROGRAM}",
        ),
        (
            "penalty",
            f"`kernel_regularizer.l2` of {DENSE} is 1.1 on worker 1 and 0.1 {PROGRAM}",
        ),
        ("momentum", f"`beta_1` of `optimizer` .Adam. is 0.6 on worker 1 and 0.5 {PROGRAM}"),
        ("activation", f'`activation` of {DENSE} is "tanh" on worker 1 and "relu" {PROGRAM}'),
        (
            "initializer",
            f'`kernel_initializer` of {DENSE} is "Ones" on worker 1 and "HeNormal" {PROGRAM}',
        ),
        ("another optimizer", f'`optimizer` is "SGD" on worker 1 and "Adam" {PROGRAM}'),
        ("another loss", f'`loss` is "mae" on worker 1 and "mse" {PROGRAM}'),
        (
            "another loss to evaluate",
            f"`delta` of `loss` .Huber. is 2.0 on worker 1 and 1.0 {PROGRAM}",
        ),
        ("other metrics", f'`metrics` is ."mae". on worker 1 and ."mse". {PROGRAM}'),
        (
            "another schedule",
            f"`learning_rate.decay_rate` of `optimizer` .SGD. is 0.8 on worker 1 and 0.9 {PROGRAM}",
        ),
        (
            "train and test on batch",
            "Worker 1 calls `test_on_batch` while the chief calls `train_on_batch`. Call the same",
        ),
        (
            "one batch more",
            "Worker 1 calls `train_on_batch` while the chief calls `predict_on_batch`. Call the",
        ),
        ("another step", "Worker 1 calls `validation_step` while the chief calls `train_step`"),
    ],
)
def test_workers_that_differ_are_refused(found, strategy, name, message):
    assert re.match(f".*{message}", found[f"{strategy}: {name}"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weights before", BIAS),
        ("weights in a callback", BIAS),
        ("statistics in a callback", "The variable .*norm/moving_mean of worker 1 differs"),
        ("optimizer", "The variable adam.*/.* of worker 1 differs"),
    ],
)
def test_weights_that_one_worker_changes_are_refused(found, name, message):
    """Under local SGD, workers begin with the chief's weights, and differ within an epoch."""
    assert re.match(message, found[f"CollectiveAllReduceStrategy: {name}"])


@pytest.mark.parametrize("strategy", ["CollectiveAllReduceStrategy", "LocalSgdStrategy"])
@pytest.mark.parametrize(
    "name", ["seeded PyDataset", "augmented", "declared", "other names", "nothing", "few"]
)
def test_workers_that_agree_are_not_refused(found, strategy, name):
    assert found[f"{strategy}: {name}"] == ""


BUILDS = """
import json, os
import keras, tfdist

def build_model():
    units = 3 + json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])

tfdist.Trainer(build_model, strategy="multi_worker_mirrored")
"""


def run_script(directory, text):
    """Runs a script on two workers; returns its exit status and what each has printed."""
    (directory / "script.py").write_text(text)
    result = run_local_cluster(
        workers=2,
        command=[sys.executable, str(directory / "script.py")],
        run_dir=directory,
        timeout_s=300,
        stream=False,
        environ=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    return result.status, [task.log.read_text() for task in result.tasks]


def test_models_with_other_shapes_are_refused(tmp_path):
    status, logs = run_script(tmp_path, BUILDS)
    assert status != 0
    assert re.search(
        r"UnlikeWorkersError: Workers build different models: a variable has the shapes \[2,[34]\] "
        r"and \[2,[34]\]\. Build the same models",
        "".join(logs),
    ), logs


BY_NAME = """
import gc
import keras, numpy as np, tfdist

x, y = np.random.default_rng(0).random((2, 12, 2))

def build_model():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model

for _ in range(2):
    trainer = tfdist.Trainer(build_model, strategy="multi_worker_mirrored")
    print("trained", trainer.fit(x, y, batch_size=4, verbose=0).history, flush=True)
    del trainer
    gc.collect()
try:
    tfdist.Trainer(build_model, strategy=tfdist.strategies.MultiWorkerMirrored(bytes_per_pack=0))
except tfdist.TfdistError as error:
    print("refused", error, flush=True)
"""


def test_trainers_that_name_their_strategy_share_it(tmp_path):
    status, logs = run_script(tmp_path, BY_NAME)
    assert status == 0, logs
    for log in logs:
        first, again = (line for line in log.splitlines() if line.startswith("trained"))
        assert first == again
        assert "refused Cannot connect this process to its cluster again: it has built a" in log
