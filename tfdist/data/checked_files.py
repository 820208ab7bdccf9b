"""Writes large files with checksums, and checks them before they are read."""

import concurrent.futures
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tfdist.reading import parse_object

RECORD = "checksums.json"

_BLOCK_BYTES = 16 * 2**20
_MAX_SAMPLED_BLOCKS = 16


class CheckedFile:
    """A file that is written sequentially; `close` syncs it to the disk."""

    def __init__(self, path: Path):
        self._path = path
        self._file: BinaryIO = path.open("wb")
        self._checksums: list[int] = []
        self._block_bytes = 0

    def write(self, data: bytes) -> None:
        """Appends to the file."""
        self._file.write(data)
        view = memoryview(data)
        while len(view):
            if self._block_bytes in (0, _BLOCK_BYTES):
                self._checksums.append(0)
                self._block_bytes = 0
            part = view[: _BLOCK_BYTES - self._block_bytes]
            self._checksums[-1] = zlib.crc32(part, self._checksums[-1])
            self._block_bytes += len(part)
            view = view[len(part) :]

    def close(self) -> dict[str, Any]:
        """Closes the file and returns its record: size, mtime and one checksum per block."""
        self._file.flush()
        os.fsync(self._file.fileno())  # a power cut could leave the right size, full of zeros
        self._file.close()
        stat = self._path.stat()
        return {
            "size_bytes": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "checksums": self._checksums,
        }

    def abandon(self) -> None:
        """Closes the file, whatever state it is in."""
        self._file.close()


def write_records(directory: Path, records: Mapping[str, Any]) -> None:
    """Writes the records of a directory's files, by name, for `find_damage`."""
    with (directory / RECORD).open("w") as file:
        json.dump(dict(records), file)
        file.flush()
        os.fsync(file.fileno())


def find_damage(directory: Path, sizes_bytes: Mapping[str, int]) -> str | None:
    """Returns what is wrong with the files in a directory, or None.

    A file that was modified after it was written is read in full; of an unmodified one, at most
    256 MiB are read.

    Args:
      sizes_bytes: name -> size of each expected file.
    """
    try:
        records = parse_object((directory / RECORD).read_bytes()) or {}
        for name, size_bytes in sizes_bytes.items():
            if records[name]["size_bytes"] != size_bytes:
                return f"{RECORD} belongs to other files"
            if problem := _find_damage(directory / name, records[name]):
                return problem
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{RECORD} cannot be read"
    return None


def _find_damage(path: Path, record: Mapping[str, Any]) -> str | None:
    stat = path.stat()
    if stat.st_size != record["size_bytes"]:
        return f"{path.name} has {stat.st_size} bytes instead of {record['size_bytes']}"
    checksums = record["checksums"]
    blocks = list(range(-(-stat.st_size // _BLOCK_BYTES)))
    if len(blocks) != len(checksums):
        return f"{RECORD} cannot be read"
    if stat.st_mtime_ns == record["mtime_ns"] and len(blocks) > _MAX_SAMPLED_BLOCKS:
        sample = np.linspace(0, len(blocks) - 1, _MAX_SAMPLED_BLOCKS).astype(int)
        blocks = sorted(set(sample.tolist()))

    def is_damaged(block: int) -> bool:
        with path.open("rb") as file:
            file.seek(block * _BLOCK_BYTES)
            return zlib.crc32(file.read(_BLOCK_BYTES)) != checksums[block]

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        damaged = any(pool.map(is_damaged, blocks))
    return f"{path.name} does not hold what was written" if damaged else None
