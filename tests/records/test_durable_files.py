import errno
import os
import stat

import pytest
import tensorflow as tf

from tfdist.records.durable_files import (
    append_durably,
    exists,
    make_directories,
    read_file,
    remove_file,
    write_atomically,
    write_output,
)


@pytest.fixture
def events(monkeypatch):
    """The syncs and renames, in order, as names of files."""
    found = []
    fsync, replace, rename = os.fsync, os.replace, tf.io.gfile.rename

    def note_sync(descriptor):
        found.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def note_replace(source, target):
        found.append(("rename", os.path.basename(target)))
        replace(source, target)

    def note_rename(source, target, overwrite=False):
        found.append(("rename", os.path.basename(target)))
        rename(source, target, overwrite=overwrite)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(tf.io.gfile, "rename", note_rename)
    return found


def test_the_content_is_on_the_disk_before_the_name(path_with_spaces, events):
    path = path_with_spaces / "file"
    write_atomically(str(path), "content")
    assert path.read_text() == "content"
    assert events == [
        ("sync", "file.writing"),
        ("rename", "file"),
        ("sync", path_with_spaces.name),
    ]


def test_a_new_file_that_is_added_to_is_on_the_disk_with_its_name(path_with_spaces, events):
    path = path_with_spaces / "lines"
    append_durably(str(path), "a\n")
    append_durably(str(path), "b\n")
    assert path.read_text() == "a\nb\n"
    assert events == [("sync", "lines"), ("sync", path_with_spaces.name), ("sync", "lines")]


def test_every_new_directory_is_on_the_disk(path_with_spaces, events):
    make_directories(f"{path_with_spaces}/a/b/")
    assert (path_with_spaces / "a" / "b").is_dir()
    assert events == [("sync", "a"), ("sync", path_with_spaces.name)]
    make_directories(f"{path_with_spaces}/a/b/")
    assert len(events) == 2


def test_other_file_systems_are_not_synced(path_with_spaces, events):
    root = f"ram://{path_with_spaces}"
    make_directories(f"{root}/a")
    write_atomically(f"{root}/a/file", b"content")
    append_durably(f"{root}/a/lines", "line\n")
    assert events == [("rename", "file")]


@pytest.mark.parametrize("root", ["/no such place", "ram://no such place"])
def test_errors_are_the_same_on_every_file_system(root):
    with pytest.raises(OSError, match="no such place/a"):
        remove_file(f"{root}/a")
    assert read_file(f"{root}/a") is None
    assert not exists(f"{root}/a")


def test_a_directory_that_cannot_be_made_is_named():
    with pytest.raises(OSError, match=r"^/proc/run; No such file or directory$"):
        make_directories("/proc/run/a")


def test_a_disk_that_cannot_take_a_file_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(str(path), "old")

    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(str(path), "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_output_is_written_to_a_pipe_and_an_open_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    own, other = os.pipe()
    try:
        write_output(str(tmp_path / "pipe"), "content")
        write_output(f"/dev/fd/{other}", "more")
        assert (os.read(reader, 99), os.read(own, 99)) == (b"content", b"more")
    finally:
        for descriptor in (reader, own, other):
            os.close(descriptor)
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_an_output_gets_its_directory(path_with_spaces):
    write_output(f"{path_with_spaces}/a/b.json", "new")
    assert (path_with_spaces / "a/b.json").read_text() == "new"


def test_a_file_system_that_cannot_sync_is_good_enough(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    write_atomically(str(tmp_path / "file"), "content")
    assert (tmp_path / "file").read_text() == "content"
