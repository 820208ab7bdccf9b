"""The weights of a finished run, with which another run begins."""

import collections
from collections.abc import Iterable, Iterator

import keras
import tensorflow as tf

from tfdist.errors import TfdistError, shorten_error
from tfdist.records.durable_files import FullTemporaryError, temporary_directory


class InitialWeights:
    """The weights of a saved model, by path. Must be created outside of any strategy's scope.

    Args:
      run_dir: the directory of a finished run, or a `.keras` file.

    Raises:
      TfdistError: there is no model, or Keras cannot read it.
    """

    def __init__(self, run_dir: str):
        self._run_dir = run_dir
        path = run_dir if run_dir.endswith(".keras") else f"{run_dir}/model.keras"
        if not tf.io.gfile.exists(path):
            raise TfdistError(
                f"`init_from={run_dir}` has no model.keras. Name a finished run, or a .keras file."
            )
        try:
            with temporary_directory() as directory:
                local = f"{directory}/model.keras"
                tf.io.gfile.copy(path, local)
                saved = keras.models.load_model(local, compile=False)
        except FullTemporaryError:
            raise
        except Exception as error:  # another program's file may hold anything
            raise TfdistError(
                f"Cannot read `init_from={run_dir}`: {shorten_error(error)}"
            ) from error
        self._values = {name: v.numpy() for name, v in _name_variables(saved.variables)}
        self._new: list[str] = []
        self._num_used = 0

    def give_to(self, model: keras.Model) -> None:
        """Sets the weights of a built model with the same path and shape, of which it has some."""
        if not all(layer.built for layer in model._flatten_layers()):
            raise TfdistError(
                f"`init_from={self._run_dir}` requires {model.name!r} to be built. "
                "Return a model with known inputs from build_model."
            )
        used = [
            (variable, self._values[name])
            for name, variable in _name_variables(model.variables)
            if name in self._values and self._values[name].shape == tuple(variable.shape)
        ]
        trainable = {id(variable) for variable in model.trainable_variables}
        if not any(id(variable) in trainable for variable, _ in used):
            raise TfdistError(
                f"No weight in `init_from={self._run_dir}` matches one of {model.name!r} by name "
                "and shape. Name a run of the same network."
            )
        for variable, value in used:
            variable.assign(value)
        known = {id(variable) for variable, _ in used}
        self._new = [v.path for v in model.trainable_variables if id(v) not in known]
        self._num_used = len(used)

    def describe(self) -> str:
        """Describes in one line which weights were used."""
        text = f"Starting with {self._num_used} weights from {self._run_dir}"
        if not self._new:
            return f"{text}."
        more = f" and {len(self._new) - 3} more" if len(self._new) > 3 else ""
        return f"{text}; new: {', '.join(self._new[:3])}{more}."


def _name_variables(
    variables: Iterable[keras.Variable],
) -> Iterator[tuple[tuple[str, int], keras.Variable]]:
    """Yields variables with their paths, which parts of a model may share, numbered in order."""
    counts: collections.Counter[str] = collections.Counter()
    for variable in variables:
        yield (variable.path, counts[variable.path]), variable
        counts[variable.path] += 1
