"""A directory of a worker's own, in place of the files that a script writes.

Every worker runs the whole script, but only the chief's files count. On every other worker, what
the script writes goes to an overlay: a file opened for writing, a directory, a saved model is put
below a temporary directory, at the same path. Where the script reads a path, it gets the overlay's
file if there is one, and else the real one. So a script finds what it wrote, no file is written by
two workers, and no worker has to wait for another one. Removing a file removes the overlay's.
"""

import builtins
import bz2
import contextlib
import functools
import io
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import h5py
import numpy as np
import tensorflow as tf

from tfdist.internals import (
    TrackableSaver,
    file_io,
    gen_summary_ops,
    model_loading,
    model_saving,
    py_checkpoint_reader,
)
from tfdist.replacing import find_function, replaced

PathLike: TypeAlias = str | bytes | os.PathLike

_OPEN, _OS = builtins.open, {name: getattr(os, name) for name in dir(os)}
_KERNEL = ("/dev", "/proc", "/sys")
# Functions of `os` that read what a path names, and that change or remove it. Those for extended
# attributes are missing on macOS.
_READING = ("stat", "lstat", "access", "readlink", "listxattr", "getxattr", "pathconf", "statvfs")
_CHANGING = (
    *("unlink", "remove", "rmdir", "chmod", "chown", "lchown", "utime", "setxattr"),
    "removexattr",
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Overlay:
    """Maps paths to a directory, empty at first, below which this process writes."""

    def __init__(self, root: str):
        self._root = os.path.realpath(root)
        self._left_alone: set[str] = {self._root, *_KERNEL}

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Maps the paths that Python and TensorFlow are given."""
        plain = _Plain(self._left_alone.add)
        with contextlib.ExitStack() as stack:

            def replace(owner: object, name: str, value: object) -> None:
                stack.enter_context(replaced(owner, name, value, in_all_threads=True))

            for name in ("_os", "_io"):  # temporary files have names of their own
                replace(tempfile, name, plain if name == "_os" else _PlainIO)
            for module, name in (
                (builtins, "open"),
                (io, "open"),
                (bz2, "_builtin_open"),
                (tarfile, "bltn_open"),
            ):
                replace(module, name, self._open)
            for name, call in self._map_os().items():
                replace(os, name, call)
            replace(shutil, "rmtree", self._wrap(shutil.rmtree, self._to_remove))
            replace(file_io, "_pywrap_file_io", self._map_file_io())
            replace(h5py.File, "__init__", self._map_hdf5(h5py.File.__init__))
            save = find_function(TrackableSaver, "save")
            save = self._name_as_given(self._wrap(save, self.to_write, place=1))
            replace(TrackableSaver, "save", save)
            load = staticmethod(self._wrap(tf.data.Dataset.load, self.to_read))
            replace(tf.data.Dataset, "load", load)
            list_files = self._map_list_files(tf.data.Dataset.list_files)
            replace(tf.data.Dataset, "list_files", list_files)
            replace(tf.io, "matching_files", _match_files)
            owner: Any
            find: Any
            for owner, name, place, find in (
                (tf.io.TFRecordWriter, "__init__", 1, self.to_write),
                (tf.data.Dataset, "cache", 1, self.to_write),
                (tf.data.Dataset, "save", 1, self.to_write),
                (tf.io, "write_file", 0, self.to_write),
                (tf.io, "read_file", 0, self._to_read_one),
                *((kind, "__init__", 1, self._to_read_all) for kind in _READERS),
                (model_saving, "save_and_return_nodes", 1, self.to_write),
                (model_loading, "load_partial", 0, self.to_read),
                (gen_summary_ops, "create_summary_file_writer", 1, self.to_write),
                (TrackableSaver, "restore", 1, self._to_restore),
                (py_checkpoint_reader, "NewCheckpointReader", 0, self._to_restore),
            ):
                mapped = self._wrap(find_function(owner, name), find, place=place)
                replace(owner, name, mapped)
            yield

    def to_write(self, path: PathLike, *, keeps: bool = False) -> Any:
        """Returns where to write what the script writes to a path, or appends if it `keeps`."""
        real = self._find_real(path)
        if real is None:
            return path
        mapped = self._root + real
        _OS["makedirs"](_dirname(mapped), exist_ok=True)
        if keeps and not _exists(mapped) and _OS["path"].isfile(real):
            _copy(real, mapped)
        return os.fsencode(mapped) if isinstance(path, bytes) else mapped

    def to_read(self, path: PathLike) -> Any:
        """Returns what to read where the script reads a path."""
        real = self._find_real(path)
        if real is None or not _exists(self._root + real):
            return path
        mapped = self._root + real
        return os.fsencode(mapped) if isinstance(path, bytes) else mapped

    def _to_read_all(self, names: Any) -> Any:
        """Returns what to read where the script gives or computes one name or many."""
        if isinstance(names, tf.data.Dataset):
            return names.map(self._to_read_in_graph)
        if _is_computed(names):
            return self._to_read_in_graph(names)
        if tf.is_tensor(names) or hasattr(names, "dtype"):
            names = [os.fsdecode(name) for name in np.ravel(names)]
        return tf.nest.map_structure(self.to_read, names)

    def _to_read_one(self, name: Any) -> Any:
        return self._to_read_in_graph(name) if _is_computed(name) else self.to_read(name)

    @tf.autograph.experimental.do_not_convert
    def _to_read_in_graph(self, names: tf.Tensor) -> tf.Tensor:
        """Returns operations that find what to read where a pipeline computes names."""
        directory = os.getcwd()

        def find(name: tf.Tensor) -> tf.Tensor:
            absolute = tf.strings.regex_full_match(name, "/(?s:.*)")
            real = tf.where(absolute, name, tf.strings.join([directory, name], "/"))
            mapped = self._root + tf.strings.regex_replace(real, r"/(\./+)+", "/")
            pattern = tf.strings.regex_replace(mapped, r"[\\*?\[\]]", r"\\\0")
            return tf.where(tf.size(tf.raw_ops.MatchingFiles(pattern=pattern)) > 0, mapped, name)

        return find(names) if names.shape.rank == 0 else tf.map_fn(find, names)

    def _map_list_files(self, list_files: Callable[..., Any]) -> Any:
        @functools.wraps(list_files)
        def mapped(
            file_pattern: Any, shuffle: bool | None = None, seed: Any = None, name: Any = None
        ) -> tf.data.Dataset:
            if isinstance(file_pattern, tf.data.Dataset) or not tf.executing_eagerly():
                return list_files(file_pattern, shuffle, seed, name)
            patterns = [os.fsdecode(each) for each in np.ravel(file_pattern)]
            names = sorted(each for pattern in patterns for each in tf.io.gfile.glob(pattern))
            found = [self.to_read(each) for each in names]
            if found == names:
                return list_files(file_pattern, shuffle, seed, name)
            dataset = tf.data.Dataset.from_tensor_slices(found, name=name)
            if shuffle or shuffle is None:  # as TensorFlow does
                dataset = dataset.shuffle(len(found), seed=seed, name=name)
            return dataset

        return staticmethod(mapped)

    def _to_remove(self, path: PathLike) -> Any:
        """Returns what to remove; None if there is nothing of this process's own."""
        found = self.to_read(path)
        return found if found is not path or self._find_real(path) is None else None

    def _to_restore(self, prefix: PathLike) -> Any:
        real = self._find_real(prefix)
        if real is None or not _exists(f"{self._root}{real}.index"):
            return self.to_read(prefix)
        return self._root + real

    def _find_real(self, path: Any) -> str | None:
        """Returns the absolute path of what may be mapped; None for anything else."""
        if tf.is_tensor(path) and hasattr(path, "numpy") and path.dtype == tf.string:
            path = path.numpy()
        if isinstance(path, int) or not isinstance(path, (str, bytes, os.PathLike)) or not path:
            return None
        text = os.fsdecode(path)
        if "://" in text:
            return "/" + text.replace("://", "/")
        real = os.path.abspath(text)
        at = real
        while at not in self._left_alone:
            if at in ("/", ""):
                return real
            at = _dirname(at)
        return None

    def _wrap(
        self, call: Callable[..., Any], find: Callable[[Any], Any], *, place: int = 0
    ) -> Callable[..., Any]:
        """Returns a function with one of its paths mapped; it does nothing for None."""

        @functools.wraps(call)
        def mapped(*args: Any, **kwargs: Any) -> Any:
            values: Any = list(args)
            key: Any = place
            if len(args) <= place:
                values, key = kwargs, next((name for name in _PATH_NAMES if name in kwargs), None)
            if key is None or kwargs.get("dir_fd") is not None:
                return call(*args, **kwargs)
            given, values[key] = values[key], find(values[key])
            if values[key] is None and given is not None:
                return None
            return call(*args, **values) if values is kwargs else call(*values, **kwargs)

        return mapped

    def _open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if any(letter in mode for letter in "wax+"):
            return _OPEN(self.to_write(file, keeps="w" not in mode), mode, *args, **kwargs)
        return _OPEN(self.to_read(file), mode, *args, **kwargs)

    def _map_os(self) -> dict[str, Callable[..., Any]]:
        def open_descriptor(path: PathLike, flags: int, *args: Any, **kwargs: Any) -> int:
            if kwargs.get("dir_fd") is None:
                is_written = flags & _WRITING
                keeps = not flags & os.O_TRUNC
                path = self.to_write(path, keeps=keeps) if is_written else self.to_read(path)
            return _OS["open"](path, flags, *args, **kwargs)

        def rename(source: Any, target: Any, **kwargs: Any) -> None:
            if self._find_real(source) is None and self._find_real(target) is None:
                return _OS["replace"](source, target, **kwargs)
            found, target = self.to_read(source), self.to_write(target)
            if found is not source or self._find_real(source) is None:
                return _OS["replace"](found, target)
            # The real file is the chief's to move.
            copy = shutil.copytree if os.path.isdir(found) else _copy
            copy(found, target)
            return None

        def link(source: Any, target: Any, **kwargs: Any) -> Any:
            found, target = self.to_read(source), self.to_write(target)
            if found is not source or self._find_real(source) is None:
                return _OS["link"](found, target, **kwargs)
            return _copy(source, target)  # a link would let the real file be written

        def symlink(source: PathLike, target: PathLike, *args: Any, **kwargs: Any) -> None:
            source = self.to_read(source) if os.path.isabs(source) else source
            _OS["symlink"](source, self.to_write(target), *args, **kwargs)

        def chdir(path: Any) -> None:
            found = self.to_read(path)
            _OS["chdir"](found if not isinstance(path, int) and not _exists(path) else path)

        def find_directory() -> str:
            directory: str = _OS["getcwd"]()
            return directory.removeprefix(self._root)

        return {
            **{name: self._wrap(_OS[name], self.to_read) for name in _READING if name in _OS},
            **{name: self._wrap(_OS[name], self._to_remove) for name in _CHANGING if name in _OS},
            **{name: self._wrap(_OS[name], self.to_write) for name in ("mkdir", "mkfifo", "mknod")},
            "truncate": self._wrap(_OS["truncate"], functools.partial(self.to_write, keeps=True)),
            "open": open_descriptor,
            "rename": rename,
            "replace": rename,
            "link": link,
            "symlink": symlink,
            "chdir": chdir,
            "getcwd": find_directory,
            "listdir": lambda path=".": self._list(path),
            "scandir": lambda path=".": _Entries(self, path),
        }

    def _list(self, path: PathLike) -> list[Any]:
        found = self.to_read(path)
        names = _OS["listdir"](found)
        if found is not path:
            with contextlib.suppress(OSError):
                names += [name for name in _OS["listdir"](path) if name not in names]
        return names

    def _name_as_given(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that saves, and returns the path that the script knows."""

        @functools.wraps(save)
        def named(*args: Any, **kwargs: Any) -> Any:
            path = save(*args, **kwargs)
            text = path.numpy().decode() if tf.is_tensor(path) else path
            return tf.constant(text.removeprefix(self._root))

        return named

    def _map_hdf5(self, init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(init)
        def mapped(file: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            find = self.to_read if mode == "r" else self.to_write
            if mode in ("a", "r+"):
                find = functools.partial(self.to_write, keeps=True)
            return init(file, find(name), mode, *args, **kwargs)

        return mapped

    def _map_file_io(self) -> Any:
        """Returns the functions of `tf.io.gfile`, with their paths mapped."""
        original = file_io._pywrap_file_io

        def create(path: PathLike) -> None:
            with contextlib.suppress(tf.errors.AlreadyExistsError):
                original.RecursivelyCreateDir(self.to_write(path))

        def move(source: PathLike, target: PathLike, overwrite: bool) -> None:
            found = self.to_read(source)
            if found is not source or self._find_real(source) is None:
                return original.RenameFile(found, self.to_write(target), overwrite)
            return original.CopyFile(source, self.to_write(target), True)

        def list_children(path: PathLike) -> list[Any]:
            found = self.to_read(path)
            names = list(original.GetChildren(found))
            if found is not path:
                with contextlib.suppress(tf.errors.NotFoundError):  # the chief has not made it
                    names += [name for name in original.GetChildren(path) if name not in names]
            return names

        def match(pattern: PathLike) -> list[Any]:
            real = self._find_real(pattern)
            names = list(original.GetMatchingFiles(pattern))
            if real is not None:
                own: Any = map(str, original.GetMatchingFiles(os.fsencode(self._root + real)))
                known = {self._find_real(name) for name in names}
                own = (name[len(self._root) :] for name in own)
                names += [_name_like(pattern, name) for name in own if name not in known]
            return names

        def write(path: Any, mode: Any) -> Any:
            return original.WritableFile(self.to_write(path, keeps=b"w" not in mode), mode)

        mapped = {
            **{
                name: self._wrap(getattr(original, name), self.to_read)
                for name in ("FileExists", "IsDirectory", "Stat", "BufferedInputStream")
            },
            **{
                name: self._wrap(getattr(original, name), self._to_remove)
                for name in ("DeleteFile", "DeleteRecursively")
            },
            "WritableFile": write,
            "CreateDir": create,
            "RecursivelyCreateDir": create,
            "CopyFile": lambda source, target, overwrite: original.CopyFile(
                self.to_read(source), self.to_write(target), overwrite
            ),
            "RenameFile": move,
            "GetChildren": list_children,
            "GetMatchingFiles": match,
        }
        return _Namespace(original, mapped)


_READERS = (
    tf.data.TFRecordDataset,
    tf.data.TextLineDataset,
    tf.data.FixedLengthRecordDataset,
    tf.data.experimental.CsvDataset,
)
_PATH_NAMES = (
    "path",
    "filename",
    "filenames",
    "export_dir",
    "logdir",
    "file_prefix",
    "save_path",
    "dst",
)


class _Namespace:
    """A module with some of its functions replaced."""

    def __init__(self, original: Any, replacements: dict[str, Any]):
        self._original = original
        self._replacements = replacements

    def __getattr__(self, name: str) -> Any:
        return self._replacements.get(name) or getattr(self._original, name)


class _Plain:
    """The functions of `os` without a mapping, for `tempfile`; what they create is left alone."""

    def __init__(self, leave_alone: Callable[[str], None]):
        self._leave_alone = leave_alone

    def __getattr__(self, name: str) -> Any:
        return _OS[name]

    def mkdir(self, path: PathLike, *args: Any) -> None:
        _OS["mkdir"](path, *args)
        self._leave_alone(os.path.abspath(os.fsdecode(path)))

    def open(self, path: PathLike, *args: Any, **kwargs: Any) -> int:
        descriptor: int = _OS["open"](path, *args, **kwargs)
        self._leave_alone(os.path.abspath(os.fsdecode(path)))
        return descriptor


_PlainIO = _Namespace(io, {"open": _OPEN})


class _Entries:
    """The entries of a directory and of its overlay, as `os.scandir` returns them."""

    def __init__(self, overlay: Overlay, path: PathLike):
        found = path if isinstance(path, int) else overlay.to_read(path)
        self._parts = [_OS["scandir"](found)]
        if found is not path:
            with contextlib.suppress(OSError):
                self._parts.append(_OS["scandir"](path))
        self._entries = self._iterate()

    def _iterate(self) -> Iterator[Any]:
        seen = set()
        for part in self._parts:
            for entry in part:
                if entry.name not in seen:
                    seen.add(entry.name)
                    yield entry

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> "_Entries":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        for part in self._parts:
            part.close()


@tf.autograph.experimental.do_not_convert
def _match_files(pattern: Any, name: str | None = None) -> tf.Tensor:
    """Takes the place of `tf.io.matching_files`, by the mapped `tf.io.gfile.glob`."""

    def match(patterns: Any) -> Any:
        texts = map(os.fsdecode, np.ravel(patterns))
        names = sorted(os.fsencode(name) for text in texts for name in tf.io.gfile.glob(text))
        return np.array(names, object)

    if not _is_computed(pattern):
        return tf.constant(match(pattern), tf.string, name=name)
    found = tf.numpy_function(match, [pattern], tf.string, name=name)
    return tf.ensure_shape(found, [None])


def _is_computed(names: Any) -> bool:
    """Returns whether a graph computes names, which are not known yet."""
    return tf.is_tensor(names) and not hasattr(names, "numpy")


def _name_like(pattern: PathLike, name: str) -> str:
    """Returns an absolute name in the form in which TensorFlow returns it for a pattern."""
    text = os.fsdecode(pattern)
    fixed = re.split(r"[*?[\\]", text)[0]
    if fixed == text:
        return text
    if "://" in text:
        return name[1:].replace("/", "://", 1)
    if os.path.isabs(text):
        return name
    short = os.path.relpath(os.path.abspath(text))
    start = text.removesuffix(short) if text.endswith(short) else ""
    return (start or ("" if "/" in fixed else "./")) + os.path.relpath(name)


def _dirname(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _exists(path: str) -> bool:
    try:
        _OS["lstat"](path)
    except OSError:
        return False
    return True


def _copy(source: str, target: str) -> None:
    with _OPEN(source, "rb") as read, _OPEN(target, "wb") as write:
        while piece := read.read(1 << 20):
            write.write(piece)
