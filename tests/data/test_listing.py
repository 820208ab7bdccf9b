"""What is in folders instead of files: it costs one line, and no time."""

import os

import pytest
import tensorflow as tf

from tfdist.data.fingerprint import hash_files
from tfdist.data.listing import list_directory
from tfdist.errors import TfdistError
from tfdist.tasks.images.reading import read_image

MAKERS = {
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "directory": lambda path: path.mkdir(),
    "FIFO": lambda path: os.mkfifo(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_no_file_is_named(path_with_spaces, kind):
    path = path_with_spaces / "x.png"
    MAKERS[kind](path)
    assert list_directory(str(path_with_spaces), (".png",)).names == ("x.png",)
    for read in (read_image, lambda path: hash_files([{"image": path}])):
        with pytest.raises(TfdistError, match=r"Cannot read '.*x\.png'"):
            read(str(path))


def test_links_to_files_are_read(tmp_path):
    (tmp_path / "a.png").write_bytes(tf.io.encode_png(tf.zeros((2, 2, 3), tf.uint8)).numpy())
    (tmp_path / "b.png").symlink_to("a.png")
    assert read_image(str(tmp_path / "b.png")).shape == (2, 2, 3)


def test_a_name_that_is_no_text_is_named(tmp_path):
    try:
        (tmp_path / os.fsdecode(b"\xff.png")).touch()
    except OSError:
        pytest.skip("this file system has only names in UTF-8")
    with pytest.raises(TfdistError, match="not UTF-8"):
        list_directory(str(tmp_path), (".png",))
