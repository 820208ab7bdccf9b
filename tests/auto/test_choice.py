"""What `--strategy=auto` chooses from, and when trials are needed."""

import json
import resource

import keras
import pytest

from tfdist.auto.cache import Cache, make_key
from tfdist.auto.candidates import apply, find_devices, list_candidates
from tfdist.auto.choice import choose_strategy
from tfdist.auto.prediction import explain_omission, order, predict
from tfdist.auto.trials import Findings
from tfdist.cli.flags import parse_flags
from tfdist.records.run_directory import find_run_directory
from tfdist.runs.options import TrainOptions
from tfdist.runs.plan import make_plan, read_data
from tfdist.strategies.builtin.mirrored import Mirrored

SMALL = [
    "--dataset=shapes",
    "--image_size=16,16",
    "--train_examples=32",
    "--val_examples=4",
    "--base_filters=4",
    "--depth=2",
    "--global_batch_size=6",
]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "a home"))
    return tmp_path / "a home"


def plan(run_dir, *flags):
    return make_plan(parse_flags(TrainOptions, [*SMALL, f"--run_dir={run_dir}", *flags]))


def test_candidates_are_on_up_to_all_devices():
    options = parse_flags(TrainOptions, SMALL)
    names = ["one_device"]
    for count in (2, 3):
        names += [f"mirrored on {count} devices", f"central_storage on {count} devices"]
    candidates = list_candidates(options)
    assert list(candidates) == names
    chosen = apply(options, candidates["mirrored on 2 devices"])
    assert chosen.strategy.select().devices == ("CPU:0", "CPU:1")
    assert chosen.select_result() == options.select_result()


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--devices=CPU:2"], ["one_device"]),
        (["--devices=CPU:2,CPU:0", "--all_reduce=hierarchical_copy"], ["mirrored on 2 devices"]),
        (
            ["--devices=CPU:2,CPU:0", "--shard_optimizer"],
            ["mirrored + shard_optimizer on 2 devices"],
        ),
    ],
)
def test_candidates_suit_the_other_flags(flags, names):
    assert list(list_candidates(parse_flags(TrainOptions, [*SMALL, *flags]))) == names


@pytest.mark.parametrize(
    "flags",
    [
        ["--strategy=one_device"],
        ["--devices=CPU:1"],
        ["--placement=layers"],
        ["--batch_norm=per_replica"],  # replicas would change the result
        ["--global_batch_size=auto"],  # the size would depend on the strategy
    ],
)
def test_some_flags_leave_nothing_to_choose(path_with_spaces, flags):
    given = plan(path_with_spaces / "run", *flags)
    assert choose_strategy(given) == (given, None)


def test_a_cluster_leaves_nothing_to_choose(path_with_spaces, monkeypatch):
    cluster = {"cluster": {"worker": ["localhost:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    assert not plan(path_with_spaces / "run").is_open


def test_a_short_run_needs_no_trials(path_with_spaces, capsys):
    given = plan(path_with_spaces / "run", "--max_steps=99")
    chosen, data = choose_strategy(given)
    assert chosen == given
    assert data.train.num_examples == 32
    assert capsys.readouterr().out.splitlines()[-1] == (
        "--strategy=auto: one_device, as the devices suggest: trials would not pay for a run of 99 "
        "steps."
    )


@pytest.mark.parametrize("steps", [9, 1000])
def test_a_run_keeps_its_strategy_while_its_devices_are_there(path_with_spaces, steps):
    run = find_run_directory(str(path_with_spaces / "run"))
    began = parse_flags(TrainOptions, [*SMALL, "--strategy=mirrored", f"--max_steps={steps}"])
    described = {**began.to_dict(), "devices": ["CPU:0", "CPU:1"]}
    with run.claim(described, result=began.select_result()):
        pass
    chosen, data = choose_strategy(plan(run.path, f"--max_steps={steps}"))
    assert chosen.options.strategy.select() == Mirrored(devices=("CPU:0", "CPU:1"))
    assert chosen.traits == Mirrored.traits
    assert data is None


def test_a_run_whose_devices_are_gone_gets_another_strategy(path_with_spaces):
    run = find_run_directory(str(path_with_spaces / "run"))
    began = parse_flags(TrainOptions, [*SMALL, "--strategy=mirrored", "--max_steps=9"])
    described = {**began.to_dict(), "devices": ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]}
    with run.claim(described, result=began.select_result()):
        pass
    chosen, _ = choose_strategy(plan(run.path, "--max_steps=9", "--quiet"))
    assert chosen.options.strategy.strategy == "one_device"


def test_trials_are_remembered(path_with_spaces, capsys, home):
    given = plan(path_with_spaces / "run", "--max_steps=100")
    cache = Cache.find(given, read_data(given), find_devices(given.options))
    assert cache.path.is_relative_to(home / ".cache" / "tfdist")
    rates = {"one_device": 10.0, "central_storage on 3 devices": 12.0}
    assert cache.write(Findings(rates, {"mirrored on 2 devices": "x"}, 9.0)) == ""
    assert cache.read() == Findings(rates, {"mirrored on 2 devices": "x"}, 9.0)
    chosen, _ = choose_strategy(given)
    assert chosen.options.strategy.strategy == "central_storage"
    assert capsys.readouterr().out.splitlines()[-1] == (
        "--strategy=auto: central_storage on 3 devices: 12 examples/s; one_device: 10; not "
        f"mirrored on 2 devices: x; from the trials in {cache.path}."
    )


def test_a_damaged_cache_is_no_cache(path_with_spaces):
    path = path_with_spaces / "cache.json"
    assert Cache(path, {}).read() is None
    found = ("{}", '{"a": 1}', '{"rates": 1}', '{"rates": {"one_device": "fast"}}')
    for content in ("", "{", "[]", *(f'{{"found": {text}}}' for text in found)):
        path.write_text(content)
        assert Cache(path, {}).read() is None


def test_a_cache_that_cannot_be_written_is_no_error(path_with_spaces):
    (path_with_spaces / "file").write_text("")
    problem = Cache(path_with_spaces / "file" / "auto" / "x.json", {}).write(Findings())
    assert "Not a directory" in problem


def test_the_cache_depends_on_what_changes_the_speed(path_with_spaces):
    data = read_data(plan(path_with_spaces / "run", "--quiet"))

    def find(*flags):
        given = plan(path_with_spaces / "run", *flags)
        return make_key(given, data, find_devices(given.options))

    key = find()
    assert json.loads(json.dumps(key)) == key
    assert find("--epochs=50", "--seed=3", "--log_every=2") == key
    for flag in (
        "--global_batch_size=12",
        "--depth=3",
        "--steps_per_loop=2",
        "--devices=CPU:0,CPU:1",
    ):
        assert find(flag) != key


def test_where_nothing_fits_the_devices_decide(path_with_spaces, capsys, home):
    given = plan(path_with_spaces / "run", "--max_steps=100")
    before = resource.getrlimit(resource.RLIMIT_RSS)
    resource.setrlimit(resource.RLIMIT_RSS, (2**20, before[1]))
    try:
        chosen, _ = choose_strategy(given)
    finally:
        resource.setrlimit(resource.RLIMIT_RSS, before)
    assert chosen == given
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith(
        "--strategy=auto: one_device, as the devices suggest: no trial succeeded; not one_device: "
        "the trial was stopped at 0 MiB; not mirrored on 2 devices: the trial was stopped at"
    )
    assert not home.exists()


def test_one_device_predicts_the_others():
    options = parse_flags(TrainOptions, SMALL)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    predicted = predict(options, model, rate=50.0, gpu_limit=None)
    assert predicted.keys() == list_candidates(options).keys()
    assert predicted["one_device"] == pytest.approx(50.0, rel=0.2)
    assert 0 < predicted["mirrored on 3 devices"] < predicted["one_device"]
    assert set(predict(options, model, rate=50.0, gpu_limit=1000).values()) == {0.0}


class Subclass(keras.Model):
    def call(self, x):
        return x


def test_a_model_without_layers_is_not_predicted():
    model = Subclass()
    model.compile("adam", "mse")
    assert predict(parse_flags(TrainOptions, SMALL), model, rate=1.0, gpu_limit=None) == {}


def test_what_is_not_worth_a_trial():
    predicted = {"one_device": 10.0, "a": 4.9, "b": 0.0, "c": 30.0, "d": 15.0}
    assert order(predicted, predicted) == ["c", "d", "one_device", "a", "b"]
    said = {name: explain_omission(name, predicted, left_s=1) for name in (*predicted, "unknown")}
    assert said == {
        "one_device": "only 10 examples/s are predicted",
        "a": "only 4.9 examples/s are predicted",
        "b": "predicted not to fit",
        "c": "",
        "d": "",
        "unknown": "",
    }
    assert explain_omission("c", predicted, left_s=-1) == "the others took too long"
