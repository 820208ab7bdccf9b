import dataclasses
import re

import pytest

from tfdist.cli import synonyms
from tfdist.cli.flags import format_help, parse_flags
from tfdist.errors import TfdistError
from tfdist.launch.options import LaunchOptions
from tfdist.placement.options import PlacementOptions
from tfdist.runs.options import TrainOptions
from tfdist.serve.options import ServeOptions
from tfdist.tasks.commands import ExportOptions
from tfdist.tasks.segmentation.inference.options import PredictOptions
from tfdist.tasks.segmentation.presets import PRESETS
from tfdist.training.options import AUTO_BATCH_SIZE


@pytest.mark.smoke
def test_without_flags_everything_has_its_default():
    assert parse_flags(TrainOptions, []) == TrainOptions()


@pytest.mark.smoke
def test_reads_every_kind_of_value():
    options = parse_flags(
        TrainOptions,
        [
            "--devices=GPU:0,GPU:1",
            "--image_size=128,160",
            "--scale=0.5,2",
            "--noflip",
            "--ignore_label=11",
            "--learning_rate=1e-4",
            "--data_dir=a folder with spaces",
        ],
    )
    assert options.strategy.devices == ("GPU:0", "GPU:1")
    assert options.task.image_size == (128, 160)
    assert options.task.scale == (0.5, 2.0)
    assert options.task.flip is False
    assert options.task.ignore_label == 11
    assert options.training.learning_rate == 1e-4
    assert options.task.data_dir == "a folder with spaces"


def test_a_batch_size_is_a_number_or_to_be_found():
    read = [parse_flags(TrainOptions, [f"--global_batch_size={text}"]) for text in ("12", "auto")]
    assert [options.training.global_batch_size for options in read] == [12, AUTO_BATCH_SIZE]


@pytest.mark.parametrize(
    ("given", "read"), [("gs://a/b/", "gs://a/b"), ("a b//", "a b"), ("/", "/"), ("a", "a")]
)
def test_a_directory_has_no_slash_at_its_end(given, read):
    options = parse_flags(TrainOptions, [f"--run_dir={given}", f"--data_dir={given}"])
    assert (options.run.run_dir, options.task.data_dir) == (read, read)


def test_reads_a_flagfile(path_with_spaces):
    path = path_with_spaces / "flags"
    path.write_text("--epochs=3\n--dataset=shapes\n")
    assert parse_flags(TrainOptions, [f"--flagfile={path}"]).training.epochs == 3


@pytest.mark.parametrize("name", PRESETS)
def test_flags_that_are_given_win_over_the_preset(name, path_with_spaces):
    path = path_with_spaces / "flags"
    path.write_text(f"--preset={name}\n")
    options = parse_flags(TrainOptions, ["--epochs=3", f"--flagfile={path}", "--nopretrained"])
    expected = {"camvid": (368, 480), "camvid_small": (128, 160), "oxford_pets": (128, 128)}[name]
    assert options.task.image_size == expected
    assert options.training.epochs == 3
    assert options.task.pretrained is False
    assert options.training.learning_rate != TrainOptions().training.learning_rate


def test_every_preset_can_be_chosen():
    choices = TrainOptions.list_groups()["task"].__dataclass_fields__["preset"].metadata
    assert choices["choices"] == ("none", *PRESETS)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--stratgy=mirrored", r"Unknown flag '--stratgy'\. Did you mean --strategy"),
        ("--strategy=miror", r"Unknown --strategy 'miror'\. Valid: mirrored, "),
        ("--epochs=three", r"--epochs=three is not a whole number"),
        ("--image_size=128", r"--image_size=128 is not H,W\. .*--image_size=96,96"),
        ("--image_size=a,b", r"--image_size=a,b is not H,W"),
        ("--model=unett", r"Unknown --model 'unett'\. Valid: unet, "),
        ("shapes", r"Cannot read the argument 'shapes'"),
    ],
)
def test_refuses_in_one_line(argument, message):
    with pytest.raises(TfdistError, match=message) as caught:
        parse_flags(TrainOptions, [argument])
    assert "\n" not in str(caught.value)


def test_help_names_every_flag_with_its_default():
    text = format_help("tfdist.train", TrainOptions, ["--help=all"])
    for group in TrainOptions.list_groups().values():
        for item in dataclasses.fields(group):
            assert item.name in text
    assert "[sync_batch]" in text
    assert max(map(len, text.splitlines())) <= 100


def test_help_is_short_and_says_how_to_see_all():
    text = format_help("tfdist.train", TrainOptions)
    assert len(text.splitlines()) <= 66
    assert all(f"{name}" in text for name in TrainOptions.common)
    assert "--outer_momentum" not in text
    assert "--help=all shows all" in text


def test_help_shows_one_flag_or_what_a_task_of_ones_own_adds():
    text = format_help("tfdist.train", TrainOptions, ["--help=outer_momentum"])
    assert text.startswith("  --outer_momentum=X")
    with pytest.raises(TfdistError, match=r"Unknown flag '--lr'\. Use --learning_rate\."):
        format_help("tfdist.train", TrainOptions, ["--help=lr"])
    text = format_help("tfdist.train", TrainOptions, ["--help", "--task=classification"])
    assert "--seed" in text


@pytest.mark.parametrize(
    ("argument", "answer"),
    [
        ("--lr=1", "Use --learning_rate."),
        ("--batch-size=8", "Use --global_batch_size."),
        ("--gpus=2", "--strategy=mirrored uses all of them; --devices=GPU:0,GPU:1 names some."),
        ("--steps_per_epoch=2", "Use --max_steps or --train_examples."),
        ("--data=photos", "Use --data_dir."),
        ("--num_workers=2", "tfdist.launch --workers=N"),
        ("--resume", "The same command with the same --run_dir continues a run."),
        ("--output=runs", "Use --run_dir."),
        ("--run-dir=runs", "Use --run_dir."),
        ("train.py", "tfdist.run"),
    ],
)
def test_flags_of_other_tools_are_answered_with_the_one_that_does_it(argument, answer):
    with pytest.raises(TfdistError, match=re.escape(answer)):
        parse_flags(TrainOptions, [argument])


def test_every_flag_that_has_synonyms_is_one():
    commands = [
        TrainOptions,
        LaunchOptions,
        PredictOptions,
        ExportOptions,
        ServeOptions,
    ]
    known = {
        i.name for c in commands for g in c.list_groups().values() for i in dataclasses.fields(g)
    }
    assert set(synonyms._WORDS) <= known


def test_the_documentation_of_a_group_lists_its_options():
    text = PlacementOptions.__doc__
    assert text.startswith("Where the parts of a model are computed.\n\nArgs:\n  placement: divide")
    assert "\n  grid: placement=strips: into how many parts" in text
    local_sgd = type(parse_flags(TrainOptions, ["--strategy=local_sgd"]).strategy.select())
    assert local_sgd.__doc__.count("Args:") == 1
    for name in ("collective", "sync_every"):  # its own, and of a second base class
        assert f"\n  {name}: " in local_sgd.__doc__
