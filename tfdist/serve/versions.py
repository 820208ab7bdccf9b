"""The versions of a servable in a directory: loads new ones, and unloads old ones."""

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.serve.model_files import check_versions, find_versions
from tfdist.serve.servable import RequestError, Servable

_MAX_ATTEMPTS = 3  # A directory may be read while it is written.
_LOOK_S = 0.05


@dataclass(eq=False)
class _Version:
    servable: Servable
    users: int = 0


class Versions:
    """Serves the highest version of a directory, and follows the directory."""

    def __init__(self, path: str, load: Callable[[str, int], Servable]):
        self._path = path
        self._load = load
        self._current: _Version | None = None
        self._retired: list[_Version] = []
        self._failures: dict[int, list[str]] = {}

    def load_first(self) -> Servable:
        """Loads the highest version; there must be one."""
        found = find_versions(self._path)
        check_versions(self._path, found)
        servable = self._load(found[max(found)], max(found))
        self._current = _Version(servable)
        return servable

    @contextlib.contextmanager
    def use(self, number: int | None = None) -> Iterator[Servable]:
        """Yields the current servable, of the given version, which remains loaded meanwhile."""
        version = self._current
        if version is None or (number is not None and number != version.servable.version):
            there = "none" if version is None else str(version.servable.version)
            raise RequestError(f"There is no version {number}. Loaded: {there}.", status=404)
        version.users += 1
        try:
            yield version.servable
        finally:
            version.users -= 1

    def list_states(self) -> list[dict[str, Any]]:
        """Returns the states of the versions, as TensorFlow Serving describes them."""
        loaded = [*self._retired, *([self._current] if self._current else [])]
        states = [
            _make_state(
                version.servable.version,
                "AVAILABLE" if version is self._current else "UNLOADING",
                "",
            )
            for version in loaded
        ]
        states += [_make_state(n, "END", errors[-1]) for n, errors in self._failures.items()]
        return sorted(states, key=lambda state: -int(state["version"]))

    async def watch(self, poll_s: float, report: Callable[[str], None]) -> None:
        """Loads and unloads versions as the directory changes, until it is cancelled."""
        while True:
            await asyncio.sleep(poll_s)
            try:
                found = await asyncio.to_thread(find_versions, self._path)
            except (OSError, tf.errors.OpError):
                continue  # The storage may return.
            self._failures = {n: errors for n, errors in self._failures.items() if n in found}
            given_up = {n for n, e in self._failures.items() if len(e) >= _MAX_ATTEMPTS}
            wanted = max(set(found) - given_up, default=None)
            if wanted is None or (self._current and wanted == self._current.servable.version):
                continue
            try:
                servable = await asyncio.to_thread(self._load, found[wanted], wanted)
            except TfdistError as error:
                self._failures.setdefault(wanted, []).append(str(error))
                report(f"tfdist: {error}")
                continue
            self._failures.pop(wanted, None)
            await self._replace(servable)
            report(f"Version {wanted} is served.")

    async def _replace(self, servable: Servable) -> None:
        old, self._current = self._current, _Version(servable)
        if old is None:
            return
        self._retired.append(old)
        while old.users:
            await asyncio.sleep(_LOOK_S)
        self._retired.remove(old)
        del old
        # TensorFlow's functions form cycles, which hold the variables.
        await asyncio.to_thread(gc.collect)


def _make_state(version: int, state: str, error: str) -> dict[str, Any]:
    status = {"error_code": "UNKNOWN" if error else "OK", "error_message": error}
    return {"version": str(version), "state": state, "status": status}
