"""Stubs for modules that draw, show or download; they do nothing."""

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

NAMES = (
    "IPython",
    "conlleval",
    "cv2",
    "datasets",
    "gdown",
    "imageio",
    "imgaug",
    "ipywidgets",
    "matplotlib",
    "mpl_toolkits",
    "seaborn",
    "tensorflow_docs",
    "torch",
)


def install_stubs() -> None:
    """Makes the modules in `NAMES` importable as stubs, whether or not they are installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]  # Keras imports matplotlib if it is installed
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None):
        if fullname.partition(".")[0] not in NAMES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Stub(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "subplots":
            return _make_subplots
        if name == "pyplot":
            return importlib.import_module(f"{self.__name__}.{name}")
        return MagicMock(name=f"{self.__name__}.{name}")


def _make_subplots(*_: Any, **__: Any) -> tuple[MagicMock, MagicMock]:
    return MagicMock(name="figure"), MagicMock(name="axes")
