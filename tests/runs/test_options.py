import json

import pytest

from tfdist.benchmark.options import BenchmarkOptions
from tfdist.cli.flags import parse_flags
from tfdist.errors import TfdistError
from tfdist.jobs import JobsOptions
from tfdist.runs.options import TrainOptions
from tfdist.strategies.options import make_strategy_options
from tfdist.tasks.commands import ExportOptions
from tfdist.tasks.segmentation.inference.options import EvaluateOptions, PredictOptions
from tfdist.tasks.segmentation.task import Segmentation, parse_label_map
from tfdist.training.options import RunOptions, TrainingOptions
from tfdist.verify.options import VerifyOptions

COMMANDS = (
    TrainOptions,
    PredictOptions,
    EvaluateOptions,
    ExportOptions,
    JobsOptions,
    BenchmarkOptions,
    VerifyOptions,
)
PATHS = [
    (command, group, name)
    for command in COMMANDS
    for group, fields in command.list_groups().items()
    for name, field in fields.__dataclass_fields__.items()
    if name.endswith("_dir")
    or "DIR" in (field.metadata.get("metavar") or "")
    or field.metadata.get("metavar") == "FILE"
]


def test_what_changes_only_the_speed_is_not_part_of_the_result():
    one = TrainOptions(strategy=make_strategy_options(strategy="one_device"))
    two = TrainOptions(strategy=make_strategy_options(strategy="mirrored", virtual_devices=2))
    assert one.select_result() == two.select_result()
    other = TrainOptions(training=TrainingOptions(seed=1))
    assert other.select_result() != one.select_result()


def test_is_json():
    options = TrainOptions()
    assert json.loads(json.dumps(options.to_dict())) == options.to_dict()
    assert json.loads(json.dumps(options.select_result())) == options.select_result()


def test_what_local_sgd_alone_is_told_belongs_to_its_result_alone():
    here, there = (
        TrainOptions(strategy=make_strategy_options(strategy=name, sync_every=3)).select_result()
        for name in ("local_sgd", "mirrored")
    )
    with pytest.raises(TfdistError, match="`strategy=mirrored` does not take `sync_every`"):
        make_strategy_options(strategy="mirrored", sync_every=3).select()
    assert here == {
        **there,
        "sync_every": 3,
        "average_optimizer": True,
        "outer_learning_rate": 1.0,
        "outer_momentum": 0.0,
    }


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["255"], "--label_map=255 is not FROM:TO"),
        (["65536:1"], "--label_map=65536:1 is not FROM:TO, a value from 0 to 65535"),
        (["255:256"], "is not FROM:TO"),
        (["#ff00:1"], "is not FROM:TO"),
        (["-1:1"], "is not FROM:TO"),
        (["255:1", "255:0"], "names 255 twice"),
        (["#ff0000:1", "#FF0000:0"], "names #ff0000 twice"),
        (["255:1", "#ff0000:1"], "mixes values and colors"),
    ],
)
def test_a_label_map_that_cannot_be_understood_is_refused(pairs, message):
    with pytest.raises(TfdistError, match=message):
        parse_label_map(pairs)


@pytest.mark.parametrize(
    ("command", "group", "name"), PATHS, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_path_may_be_below_the_home_directory(command, group, name, monkeypatch):
    monkeypatch.setenv("HOME", "/home/a b")
    expected = {"~/x": "/home/a b/x", "~": "/home/a b", "a/~/x": "a/~/x", "gs://~/x": "gs://~/x"}
    for given, read in expected.items():
        options = parse_flags(command, [f"--{name}={given}"])
        assert getattr(getattr(options, group), name) == read
        made = command.list_groups()[group](**{name: given})
        assert getattr(made, name) == read


def test_every_command_has_paths():
    assert {command for command, _, _ in PATHS} == set(COMMANDS)


def test_a_directory_has_one_name():
    assert RunOptions(run_dir="gs://a/b/").run_dir == "gs://a/b"
    assert Segmentation(data_dir="/").data_dir == "/"
    assert Segmentation(data_dir=None).data_dir is None
