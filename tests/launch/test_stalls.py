"""Steps that do not come: which task the launcher names, and where that task is."""

import os
import sys
import textwrap
import threading

import pytest

from tfdist.launch import run, run_local_cluster, run_task
from tfdist.launch.pulse import find_path
from tfdist.launch.stalls import find_place

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the tests read /proc"),
]

TASK = """
from tfdist.launch.pulse import BUSY, OUT, OWN, SERVE, STEP, open_pulse
import threading
pulse = open_pulse()
def wait_in_a_step():
    pulse.show(STEP)
    while True:
        time.sleep(0.1)
"""
# What starts late is no hang either.
BEGIN = """
(here / f"begun-{index}").touch()
wait_for("begun-0")
wait_for("begun-1")
"""


def launch(script, code, **options):
    command = script(TASK + BEGIN + textwrap.dedent(code))
    given = {"workers": 2, "stall_timeout_s": 1.5, "timeout_s": 1000} | options
    return run_local_cluster(command=command, **given)


CODE_THAT_HANGS = {
    "sleeps": "time.sleep(60)",
    "spins": "while True: pass",
    "waits for a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
}


@pytest.mark.parametrize("code", CODE_THAT_HANGS.values(), ids=CODE_THAT_HANGS)
def test_a_worker_that_hangs_in_its_own_code(script, code, capfd):
    result = launch(
        script,
        f"""
        def callback():
            {code}
        wait_in_a_step() if index == 0 else pulse.show(OWN)
        callback()
        """,
    )
    assert result.first_failed == "worker-1"
    assert "hung for" in result.cause
    assert "s in callback (" in result.cause
    said = capfd.readouterr().err
    assert f"worker-1 {result.cause}, and no step has come. It will be killed." in said
    assert not list(result.tasks[0].log.parent.glob("*.pulse"))


def test_without_a_time_a_worker_that_hangs_is_only_named(script, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(run, "STALL_TIMEOUT_S", 1.5)
    said = []

    def end_when_named():
        while not ended.wait(0.1):
            said.extend(capfd.readouterr().err.splitlines())
            if any("seems to hang" in line for line in said):
                (tmp_path / "named").touch()

    ended = threading.Event()
    thread = threading.Thread(target=end_when_named)
    thread.start()
    try:
        result = launch(
            script,
            f"""
            def callback():
                while not os.path.exists({str(tmp_path / "named")!r}):
                    time.sleep(0.1)
                time.sleep(2)
            pulse.show(STEP if index == 0 else OWN)
            callback()
            """,
            stall_timeout_s=None,
        )
    finally:
        ended.set()
        thread.join()
    said = [line for line in said if "seems to hang" in line]
    assert result.status == 0
    assert len(said) == 1
    assert "worker-1 seems to hang (hung for " in said[0]
    assert "s in callback (" in said[0]


def test_a_worker_that_does_not_train_while_another_waits_for_it(script):
    result = launch(
        script,
        """
        def prepare():
            time.sleep(60)
        prepare() if index == 1 else wait_in_a_step()
        """,
    )
    assert result.first_failed == "worker-1"
    assert "s in prepare (" in result.cause


def test_a_step_in_which_all_wait_for_one_another(script):
    result = launch(script, "wait_in_a_step()")
    assert result.status == 137
    assert "in a step, as all tasks: none of them runs code of its own" in result.cause


def test_after_a_hang_all_start_again(script):
    result = launch(
        script,
        """
        import pathlib
        if (here / "once").exists():
            sys.exit(0)
        if index == 1:
            pulse.show(OWN)
            (here / "once").touch()
            time.sleep(60)
        wait_in_a_step()
        """,
        max_restarts=1,
    )
    assert (result.status, result.restarts) == (0, 1)


WORK = {
    "steps": "pulse.show(STEP); time.sleep(0.2)",
    "compiles": "pulse.show(BUSY) if not i else sum(range(3_000_000)); time.sleep(0.1)",
    "writes": "pulse.show(BUSY) if not i else file.write(bytes(1 << 18)); time.sleep(0.2)",
    "validates": "pulse.show(OWN); time.sleep(0.2); pulse.show(STEP)",
}


@pytest.mark.parametrize("code", WORK.values(), ids=WORK)
def test_work_is_no_hang(script, code):
    """The other worker waits for it in a step, longer than the time-out and the stacks take."""
    result = launch(
        script,
        f"""
        file = open(here / "file", "wb", buffering=0)
        until, i = time.monotonic() + 7, 0
        while time.monotonic() < until and index == 1:
            {code}
            i += 1
        pulse.show(STEP)
        if index == 0:
            wait_for("done")
        (here / "done").touch()
        """,
        stall_timeout_s=3,  # fifteen times what a sign of life takes to come
    )
    assert result.status == 0, result.cause


@pytest.mark.parametrize("works", [True, False])
def test_a_chief_that_waits_while_a_server_compiles(script, works):
    result = launch(
        script,
        f"""
        def serve():
            time.sleep(60)
        pulse.show(BUSY if index == 0 else SERVE)
        until = time.monotonic() + 4
        while time.monotonic() < until and index == 1:
            sum(range(1_000_000)) if {works} else serve()
        wait_for("done") if index == 0 else (here / "done").touch()
        """,
    )
    assert (result.status == 0) is works, result.cause


def test_one_task_of_several_machines_is_judged_by_its_own_code(script):
    from tfdist.cluster import parse_hosts

    config = parse_hosts("127.0.0.1:1,127.0.0.1:2", "worker:0")
    options = {"stall_timeout_s": 1.0, "stream": False}
    waits = run_task(config, command=script(TASK + "wait_in_a_step()"), timeout_s=4, **options)
    assert waits.timed_out
    assert waits.first_failed is None
    hangs = run_task(config, command=script(TASK + "pulse.show(OWN); time.sleep(60)"), **options)
    assert hangs.first_failed == "worker-0"


def test_a_full_disk_does_not_end_a_task(tmp_path, monkeypatch):
    from tfdist.launch.pulse import OWN, STEP, Pulse

    monkeypatch.setenv("TFDIST_LAUNCH_DIR", str(tmp_path))
    assert find_path(tmp_path, "worker-0").name == "worker-0.pulse"
    file = os.open("/dev/full", os.O_WRONLY)
    try:
        with Pulse(file).at(STEP):
            Pulse(file).show(OWN)
    finally:
        os.close(file)


STACKS = """
some line of the program
Thread 0x00007f0000000001 (most recent call first):
  File "/home/me/loader.py", line 5 in load
  File "/home/me/loader.py", line 9 in __getitem__
  File "/v/site-packages/keras/src/trainers/data_adapters/py_dataset_adapter.py", line 3 in get
  File "/v/site-packages/tensorflow/python/ops/script_ops.py", line 270 in __call__

Current thread 0x00007f0000000002 (most recent call first):
  File "/v/site-packages/tensorflow/python/eager/execute.py", line 53 in quick_execute
  File "/home/me/train.py", line 42 in <module>
"""


def test_code_that_a_step_calls():
    place = find_place(STACKS)
    assert place.is_called
    assert str(place.frame) == "load (/home/me/loader.py:5)"
    rest = STACKS.partition("\n\n")[2]
    assert not find_place(rest).is_called
    assert str(find_place(rest).frame) == "<module> (/home/me/train.py:42)"
    assert find_place("nothing").frame is None
    of_module = f'{rest.rstrip()}\n  File "<frozen runpy>", line 198 in _run_module_as_main\n'
    assert str(find_place(of_module).frame) == "<module> (/home/me/train.py:42)"


TRAINING = """
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy as np, tfdist
config = json.loads(os.environ["TF_CONFIG"])
mode = sys.argv[2]

class Data(keras.utils.PyDataset):
    def __len__(self):
        return 6
    def __getitem__(self, i):
        if mode == "data" and index == 1 and i == 4:
            time.sleep(1000)
        return np.ones((4, 2), "f"), np.ones((4, 1), "f")

class Callback(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if mode == "callback" and index == 1 and batch == 4:
            time.sleep(1000)
    def on_test_batch_end(self, batch, logs=None):
        time.sleep(1.5)  # a long validation, which makes progress

def make_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

trainer = tfdist.Trainer(make_model, strategy="multi_worker_mirrored")
trainer.fit(Data(), validation_data=Data(), epochs=2, verbose=0, callbacks=[Callback()])
"""


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("mode", "place"), [("callback", "on_train_batch_end"), ("data", "getitem"), ("", "")]
)
def test_trainers_that_hang_and_one_that_does_not(script, mode, place):
    command = [*script(TRAINING), mode]
    result = run_local_cluster(workers=2, command=command, stall_timeout_s=6, timeout_s=1000)
    if not mode:
        assert result.status == 0
        return
    assert result.first_failed == "worker-1"
    assert place in result.cause
    assert "a task.py:" in result.cause
