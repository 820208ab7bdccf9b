import pytest

from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.inference.files import list_images


def test_lists_images_and_says_what_is_skipped(path_with_spaces, caplog):
    for name in ("b.webp", "a.JPG", "c.jp2", ".hidden"):
        (path_with_spaces / name).touch()
    (path_with_spaces / "old").mkdir()
    images = list_images(str(path_with_spaces))
    assert list(images) == ["a", "b"]
    assert [record.message for record in caplog.records] == [
        f"Skipped 2 files in '{path_with_spaces}': 1 .jp2, 1 directory."
    ]


def test_a_file_is_not_taken_for_a_pattern(tmp_path):
    path = tmp_path / "a[1].png"
    path.write_bytes(b"")
    assert list_images(str(path)) == {"a[1]": str(path)}


def test_a_directory_without_images_is_refused(path_with_spaces, caplog):
    (path_with_spaces / "c.jp2").touch()
    with pytest.raises(TfdistError, match=r"it has no .* file, only 1 \.jp2\."):
        list_images(str(path_with_spaces))
    assert not caplog.records
