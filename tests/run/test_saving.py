"""Under `tfdist.run --workers`, the files of a script are the chief's, and nobody waits for it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import keras
import pytest

from tfdist.run.overlay import Overlay

SCRIPT = Path(__file__).with_name("saving_script.py")


@pytest.mark.cluster
@pytest.mark.parametrize("mode", ["all", "chief"])
def test_what_a_script_writes_is_the_chief_s(tmp_path, mode):
    out = tmp_path / "with spaces"
    run = subprocess.run(
        [sys.executable, "-m", "tfdist.run", "--workers=2", str(SCRIPT), mode, str(out)],
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    keras.saving.load_model(out / "function.h5")  # which restores no optimizer
    models = ("epoch0.keras", "epoch1.keras", "function.keras", "method.keras")
    for name in models:
        model = keras.saving.load_model(out / name)
        assert float(model.optimizer.iterations) == (4 if name == "epoch0.keras" else 8)
        model.load_weights(out / "epoch1.weights.h5")
    if mode == "all":
        assert (out / "text.txt").read_text() == "worker 0, twice"
        assert (out / "moved.csv").read_text().strip() == "0"
        assert (out / "deep" / "er" / "file").read_text() == "worker 0"
        assert zipfile.ZipFile(out / "archive.zip").read("name") == b"worker 0"
        assert len((out / "log.csv").read_text().splitlines()) == 3
        assert not {"copied", "made", "table.csv", "records"} & {p.name for p in out.iterdir()}
        for directory in ("summaries", "board/train"):
            assert len(list((out / directory).iterdir())) == 1


def test_an_overlay_holds_what_is_written_and_the_rest_is_read(tmp_path):
    root, real = tmp_path / "overlay", tmp_path / "real"
    root.mkdir()
    real.mkdir()
    for name in ("read", "appended", "removed", "moved"):
        (real / name).write_text("real ")
    with Overlay(str(root)).open():
        assert (real / "read").read_text() == "real "
        with open(real / "appended", "a") as file:
            file.write("and more")
        assert (real / "appended").read_text() == "real and more"
        os.remove(real / "removed")
        os.rename(real / "moved", real / "new")
        (real / "directory").mkdir()
        (real / "directory" / "file").touch()
        assert sorted(os.listdir(real)) == [
            *("appended", "directory", "moved", "new", "read", "removed")
        ]
        assert sorted(entry.name for entry in os.scandir(real)) == sorted(os.listdir(real))
        with pytest.raises(FileNotFoundError):
            (real / "absent").read_text()
    assert {path.name: path.read_text() for path in real.iterdir()} == dict.fromkeys(
        ("read", "appended", "removed", "moved"), "real "
    )
    assert (Path(f"{root}{real}") / "appended").read_text() == "real and more"
