"""Lazy re-exports, which import their module on first use (PEP 562)."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(
    package: str, targets: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and `__dir__` of a package that re-exports lazily.

    Args:
      targets: exported name -> "module" or "module:attribute".
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in targets:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module_name, _, attribute = targets[name].partition(":")
        module = importlib.import_module(module_name)
        return getattr(module, attribute) if attribute else module

    def __dir__() -> list[str]:  # noqa: N807
        return sorted(targets)

    return __getattr__, __dir__
