"""What all commands have in common: which arguments they take, and who reads their help."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tfdist.__main__
from tfdist import evaluate, export, predict, train
from tfdist.benchmark import __main__ as benchmark
from tfdist.cli.arguments import check_arguments
from tfdist.cli.flags import parse_flags
from tfdist.errors import TfdistError
from tfdist.jobs import __main__ as jobs
from tfdist.launch import __main__ as launch
from tfdist.runs.options import TrainOptions
from tfdist.verify import __main__ as verify

COMMANDS = [train, predict, evaluate, export, verify, benchmark, jobs, launch]
COMMAND_IDS = [command.__name__ for command in COMMANDS]
NOT_TEXT = ["\n", "\r", "\t", "\0", "\x1b", "\x7f", "\x85", "\u2028", "\u2029", "\udcff"]


@pytest.mark.parametrize("character", NOT_TEXT, ids=ascii)
def test_control_characters_are_refused(character):
    with pytest.raises(TfdistError, match="not printable text. Remove that character") as error:
        check_arguments(["--epochs=1", f"--accelerator=a100{character}echo"])
    assert repr(character) in str(error.value)
    assert str(error.value).isprintable()


def test_any_other_text_is_taken():
    check_arguments(["--name=größer 大 🙂", "a\u200db", "--command=a 'b' \\ $(c) `d` ; e"])


@pytest.mark.parametrize("command", COMMANDS, ids=COMMAND_IDS)
def test_each_command_refuses_a_line_break_in_any_flag(command, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["command", "--quiet", "--run_dir=a\necho INJECTED"])
    assert command.main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert r"Cannot use the argument '--run_dir=a\necho INJECTED': it contains '\n'" in err


@pytest.mark.parametrize(
    ("command", "flags"), [(jobs, ["--target=slurm"]), (launch, ["--workers=2"])]
)
def test_the_flags_of_train_after_others_are_looked_at(command, flags, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["command", *flags, "--", "--run_dir=a\nb"])
    assert command.main() == 2
    assert r"'--run_dir=a\nb'" in capsys.readouterr().err


def test_a_file_of_flags_is_looked_at(tmp_path):
    (tmp_path / "flags").write_text("--seed=3\n--run_dir=a\x1b[2Jb\n")
    with pytest.raises(TfdistError, match=r"\\x1b"):
        parse_flags(TrainOptions, [f"--flagfile={tmp_path / 'flags'}"])


@pytest.mark.parametrize("command", COMMANDS, ids=COMMAND_IDS)
def test_help_into_a_pipe_that_nobody_reads(command):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", command.__name__, "--help"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=1000,
        )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--version"], 0, f"tfdist {tfdist.__version__}\n"),
        (["--help"], 0, "usage: tfdist COMMAND"),
        ([], 0, "usage: tfdist COMMAND"),
        (["train", "--epochs=x"], 2, "tfdist: --epochs=x is not a whole number.\n"),
        (["jobs", "--target=slurn"], 2, "Unknown --target 'slurn'"),
        (["trian"], 2, "tfdist: Unknown command 'trian'. Valid: train, "),
    ],
)
def test_every_command_is_under_one_name(arguments, status, said):
    run = subprocess.run(
        [sys.executable, "-m", "tfdist", *arguments], capture_output=True, text=True, timeout=1000
    )
    assert run.returncode == status
    assert said in run.stdout + run.stderr


def test_the_one_name_has_every_command():
    root = Path(tfdist.__file__).parent
    packages = {path.parent.name for path in root.glob("*/__main__.py")}
    modules = {path.stem for path in root.glob("*.py") if "def main(" in path.read_text()}
    assert set(tfdist.__main__.COMMANDS) == packages | modules - {"__main__"}
