"""The states of random generators on parameter servers, for the steps in flight."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.training.replicas.random_layers import count_draws, list_seed_generators


class PsDraws:
    """The states with which the generators of a model begin each step.

    The servers hold the states after the last step that was taken, while several steps in flight
    have been given their own.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self.generators = list_seed_generators(model)
        self._states: list[np.ndarray] = []
        self._known: dict[tuple[str, str], list[int]] = {}
        self._counts: dict[str, list[int]] = {}
        self._next: dict[str, int] = {}

    def begin(self, kind: str, batch_spec: Any, step: int) -> None:
        """Begins steps of a kind, `train`, `test` or `predict`, of which `step` is taken first."""
        self._states = [generator.state.numpy() for generator in self.generators]
        key = kind, repr(batch_spec)
        if key not in self._known:
            self._known[key] = count_draws(self._model, self.generators, batch_spec, kind=kind)
        self._counts[kind] = self._known[key]
        self._next[kind] = step

    def read(self, kind: str, step: int) -> list[tf.Tensor]:
        """Returns the state of each generator before a step that has not been taken."""
        ahead = step - self._next[kind]
        return [
            tf.constant(state + _make_advance(count * ahead, state))
            for state, count in zip(self._states, self._counts[kind], strict=True)
        ]

    def take(self, kind: str) -> None:
        """Counts the next step; only a training step has counted its draws on the servers."""
        self._next[kind] += 1
        self.count(kind, on_servers=kind != "train")

    def count(self, kind: str, *, on_servers: bool = True) -> None:
        """Counts the draws of a step, also on the servers if they do not know of it."""
        for place, count in enumerate(self._counts[kind]):
            if count:
                advance = _make_advance(count, self._states[place])
                self._states[place] = self._states[place] + advance
                if on_servers:
                    self.generators[place].state.assign_add(advance)


def _make_advance(count: int, state: np.ndarray) -> np.ndarray:
    return np.array([0, count]).astype(state.dtype)
