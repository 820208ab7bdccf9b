"""Under `tfdist.run --workers`, the files of a script are the chief's, and nobody waits for it."""

import contextlib
import inspect
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

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


def test_patterns_and_datasets_find_what_the_overlay_has_once(tmp_path, monkeypatch):
    root, real = tmp_path / "overlay", tmp_path / "real"
    root.mkdir()
    real.mkdir()
    monkeypatch.chdir(real)
    (real / "a.txt").write_text("real")
    with Overlay(str(root)).open():
        for name in ("a.txt", "b.txt"):
            Path(name).write_text(f"own {name}")
        assert tf.io.gfile.glob("a.txt") == ["a.txt"]
        assert tf.io.gfile.glob("b.txt") == ["b.txt"]
        for given, start in ("", "./"), ("./", "./"), ("../real/", "../real/"), (f"{real}/",) * 2:
            expected = [f"{start}a.txt", f"{start}b.txt"]
            assert sorted(tf.io.gfile.glob(f"{given}*.txt")) == expected
            for names in (expected, np.array(expected), tf.constant(expected)):
                lines = tf.data.TextLineDataset(names).as_numpy_iterator()
                assert list(lines) == [b"own a.txt", b"own b.txt"]
        rows = tf.data.experimental.CsvDataset("b.txt", [""])
        assert [row[0] for row in rows.as_numpy_iterator()] == [b"own b.txt"]
        fixed = tf.data.FixedLengthRecordDataset(filenames="a.txt", record_bytes=9)
        assert list(fixed.as_numpy_iterator()) == [b"own a.txt"]
        with tf.io.TFRecordWriter("records") as writer:
            writer.write(b"record")
        assert list(tf.data.TFRecordDataset(["records"]).as_numpy_iterator()) == [b"record"]
    assert [path.name for path in real.iterdir()] == ["a.txt"]


def test_names_that_a_pipeline_computes_are_found_where_this_process_wrote(tmp_path, monkeypatch):
    root, real = tmp_path / "overlay", tmp_path / "real"
    root.mkdir()
    (real / "deep[1]").mkdir(parents=True)
    monkeypatch.chdir(real)
    (real / "0.txt").write_text("real")
    with Overlay(str(root)).open():
        for name in ("1.txt", "2.txt", "deep[1]/3.txt"):
            Path(name).write_text(name)
        tf.io.write_file("4.txt", "4.txt")
        (real / "rows.csv").write_text("a,b\n1,2\n")
        absolute, relative = f"{real}/deep[1]/3.txt", "./deep[1]/3.txt"
        read = tf.data.Dataset.from_tensor_slices(["0.txt", "1.txt", absolute, relative]).map(
            lambda name: tf.io.read_file(name)
        )
        expected = [b"real", b"1.txt", b"deep[1]/3.txt", b"deep[1]/3.txt"]
        assert list(read.as_numpy_iterator()) == expected
        for start in ("", f"{real}/"):
            names = tf.data.Dataset.list_files(f"{start}?.txt", shuffle=False)
            found = [tf.io.read_file(name) for name in names]
            assert found == [b"real", b"1.txt", b"2.txt", b"4.txt"]
            lines = names.interleave(lambda name: tf.data.TextLineDataset([name]), cycle_length=1)
            assert list(lines.as_numpy_iterator()) == found
            lines = tf.data.TextLineDataset(names)
            assert list(lines.as_numpy_iterator()) == found
            assert [
                tf.io.read_file(name) for name in tf.io.matching_files(f"{start}?.txt")
            ] == found
            patterns = tf.data.Dataset.from_tensors(f"{start}?.txt")
            names = patterns.flat_map(
                lambda pattern: tf.data.Dataset.from_tensor_slices(tf.io.matching_files(pattern))
            )
            assert list(names.map(tf.io.read_file).as_numpy_iterator()) == found
        assert tf.io.matching_files(["absent*", "9*"]).shape == [0]
        nested = tf.data.Dataset.list_files(["deep[[]1]/*", "absent*", "2*"], shuffle=False)
        assert len(list(nested)) == 2
        rows = tf.data.experimental.make_csv_dataset("rows.csv", 1, num_epochs=1, label_name="b")
        assert [int(label[0]) for _, label in rows] == [2]
    assert sorted(path.name for path in real.iterdir()) == ["0.txt", "deep[1]"]
    assert not list((real / "deep[1]").iterdir())


def test_every_function_of_os_that_takes_a_path_is_mapped(tmp_path):
    """Functions in Python call those in C, which are mapped, and programs are not this process."""
    plain = dict(vars(os))
    with Overlay(str(tmp_path)).open():
        mapped = {name for name, value in plain.items() if getattr(os, name) is not value}
    with_paths = set()
    for name, value in plain.items():
        if inspect.isbuiltin(value):
            with contextlib.suppress(ValueError):  # some have no signature
                with_paths |= (
                    {name} if {"path", "src"} & {*inspect.signature(value).parameters} else set()
                )
    others = {"copy_file_range", "splice", "fspath"}  # of descriptors, of no file
    assert with_paths - mapped - others == {"chroot", "execv", "execve"}
    assert "utime" in mapped


def test_what_only_the_overlay_has_is_copied_linked_and_entered(tmp_path, monkeypatch):
    root, real = tmp_path / "overlay", tmp_path / "real"
    root.mkdir()
    real.mkdir()
    monkeypatch.chdir(tmp_path)
    with Overlay(str(root)).open():
        (real / "deep" / "er").mkdir(parents=True)
        (real / "deep" / "file").write_text("text")
        shutil.copytree(real / "deep", real / "copied")
        assert sorted(os.listdir(real / "copied")) == ["er", "file"]
        os.link(real / "deep" / "file", real / "link")
        os.symlink(real / "deep" / "file", real / "symbolic")
        assert (real / "link").read_text() == (real / "symbolic").read_text() == "text"
        os.chmod(real / "link", 0o600)
        os.chown(real / "link", -1, -1)
        os.chdir(real / "deep")
        assert os.getcwd() == str(real / "deep")
        assert Path("file").read_text() == "text"
        os.chdir(tmp_path)
    assert not list(real.iterdir())
