"""Which code recorded options may name: what a command line has named on this machine."""

import pathlib

import pytest

from tfdist.cli.flags import expand_flag_files
from tfdist.errors import TfdistError
from tfdist.named_code import check_recorded_code


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def check(**options):
    check_recorded_code({"task": options, "versions": {}}, where="The run", cure="say so")


@pytest.mark.parametrize("name", ["words.py:Words", "./a b/words.py:Words", "json.decoder:Words"])
@pytest.mark.parametrize("option", ["task", "strategy", "model"])
def test_what_a_command_line_names_is_known(name, option, tmp_path, monkeypatch):
    with pytest.raises(TfdistError, match=f"{option}={name}, and no command of yours"):
        check(**{option: name})
    expand_flag_files([f"--{option}={name}"])
    check(**{option: name})
    with pytest.raises(TfdistError):
        check(**{option: f"{name}s"})
    if name.endswith(".py:Words"):  # another directory's file is another one
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        with pytest.raises(TfdistError):
            check(**{option: name})


def test_names_without_code_need_no_trust():
    check(task="segmentation", strategy="mirrored", dataset="tfds:oxford_iiit_pet", model="unet")


def test_without_a_home_nothing_is_known(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("")  # no directory can be made in it
    expand_flag_files(["--task=words.py:Words"])
    with pytest.raises(TfdistError):
        check(task="words.py:Words")


def test_no_more_than_some_are_remembered(tmp_path):
    record = pathlib.Path(tmp_path, "home", ".cache", "tfdist", "named_code")
    record.parent.mkdir(parents=True)
    record.write_text("".join(f"/{n}.py:A\n" for n in range(2000)))
    expand_flag_files(["--task=words.py:Words"])
    assert len(record.read_text().splitlines()) == 1000
    check(task="words.py:Words")
