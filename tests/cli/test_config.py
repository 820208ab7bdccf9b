"""Options in files: `--config` and `--print_config`."""

import json
import os

import pytest

from tfdist.cli.command import run_command
from tfdist.cli.flags import parse_flags
from tfdist.errors import TfdistError
from tfdist.runs.options import TrainOptions

TOML = """
epochs = 3
task = "classification"

[training]
learning_rate = 0.01
deterministic = true

[data]
image_size = [32, 48]
flip = false
"""
YAML = """
epochs: 3
task: classification
training: {learning_rate: 0.01, deterministic: true}
data: {image_size: [32, 48], flip: false}
"""


def write(path, text):
    path.write_text(text)
    return f"--config={path}"


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a b.yaml", YAML)])
def test_flags_win_over_a_file(path_with_spaces, name, text):
    config = write(path_with_spaces / name, text)
    options = parse_flags(TrainOptions, ["--epochs=5", config, "--seed=2"])
    assert (options.training.epochs, options.training.seed) == (5, 2)
    assert (options.training.learning_rate, options.training.deterministic) == (0.01, True)
    assert (options.task.task, options.task.image_size) == ("classification", (32, 48))
    assert options.task.flip is False


def test_what_is_printed_can_be_read(tmp_path, capsys):
    flags = ["--task=classification", "--strategy=local_sgd", "--sync_every=3", "--noflip"]
    assert (
        run_command("tfdist.train", fail, [*flags, "--print_config"], options_class=TrainOptions)
        == 0
    )
    config = write(tmp_path / "a.toml", capsys.readouterr().out)
    assert parse_flags(TrainOptions, [config]) == parse_flags(TrainOptions, flags)


def fail(options):
    raise AssertionError


def test_a_runs_own_options_are_read(tmp_path):
    options = parse_flags(TrainOptions, ["--epochs=4", "--image_size=64,32", "--strategy=mirrored"])
    record = {**options.to_dict(), "versions": {}, "result": options.select_result()}
    config = write(tmp_path / "options.json", json.dumps(record))
    again = parse_flags(TrainOptions, [config, "--run_dir=other"])
    assert again.select_result() == options.select_result()
    assert again.run.run_dir == "other"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "epocs = 3", "Unknown flag '--epocs'. Did you mean --epochs"),
        ("a.toml", "epochs = ", "Cannot read --config="),
        ("a.toml", 'epochs = "x"', "--epochs=x is not a whole number"),
        ("a.yaml", "- 1", "contains no options"),
        ("a.txt", "", "must be .toml, .yaml or .json"),
    ],
)
def test_refuses_files_in_one_line(tmp_path, name, text, message):
    with pytest.raises(TfdistError) as error:
        parse_flags(TrainOptions, [write(tmp_path / name, text)])
    assert message in str(error.value)


def test_a_file_that_is_not_there():
    with pytest.raises(TfdistError, match="Cannot read --config=nowhere.toml: No such file"):
        parse_flags(TrainOptions, ["--config=nowhere.toml"])


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", BOMB, "aliases"),
        ("a.yaml", "epochs: " + "[" * 50_000, "Cannot read"),
        ("a.json", "[" * 100_000, "Cannot read"),
        ("a.json", '{"epochs": [[1]]}', "nested"),
        ("a.json", '{"a": {"epochs": {"b": 1}}}', "nested"),
        ("a.toml", "epochs = 1\n" + "#" * 2**20, "larger than"),
        ("a.json", '{"epochs": ' + "9" * 5000 + "}", "Cannot read"),
    ],
)
def test_hostile_files_cost_one_line(tmp_path, name, text, message):
    with pytest.raises(TfdistError, match=message):
        parse_flags(TrainOptions, [write(tmp_path / name, text)])


def test_a_device_or_a_fifo_is_no_file(tmp_path):
    (tmp_path / "a.toml").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "b.toml")
    for name in ("a", "b"):
        with pytest.raises(TfdistError, match="it is no regular file"):
            parse_flags(TrainOptions, [f"--config={tmp_path}/{name}.toml"])
