"""Checks that XLA can compile a model before training begins, with errors of one line."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Nested
from tfdist.errors import TfdistError
from tfdist.replacing import find_function, replaced

_NODE = r"\{\{node ([^}]+)\}\}"
_UNKNOWN = re.compile(rf"Detected unsupported operations .*? on \w+: (\w+) \(.*?{_NODE}")
_CONVERTED = re.compile(r'File "([^"]+)", line (\d+), in (\S+)  \*\n')
# In errors of tf.distribute where replicas would have to meet within a nested graph.
_WITHIN = "merge_call"
_LIBRARIES = {"contextlib", "functools", "keras", "runpy", "tensorflow", "tfdist", "threading"}
_FAILED = re.compile(rf"(XLA[^\n]*?)\.\s.*?{_NODE}.*tf2xla conversion failed", re.DOTALL)


@contextlib.contextmanager
def compiling_as_alone(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Makes `compile(jit_compile="auto")` choose for one device as Keras does outside of a scope.

    On a GPU, that is XLA. In the scope of any strategy, Keras 3.15 leaves XLA out.
    """
    if not isinstance(strategy, tf.distribute.OneDeviceStrategy):
        yield
        return
    resolve = find_function(keras.Model, "_resolve_auto_jit_compile")

    def resolve_alone(model: keras.Model) -> bool:
        with replaced(model, "_distribute_strategy", None):
            return bool(resolve(model))

    with replaced(keras.Model, "_resolve_auto_jit_compile", resolve_alone):
        yield


def compile_with_xla(step: Callable[..., Any]) -> Any:
    """Returns a model's own step, compiled by XLA as Keras compiles it."""
    return tf.function(step, jit_compile=True, reduce_retracing=True, autograph=False)


def check_compilation(model: keras.Model, x_spec: Nested[tf.TypeSpec]) -> None:
    """Checks that XLA supports the operations of a model's forward and backward pass.

    The operations are translated for XLA, but neither compiled nor executed. A model whose inputs
    have unknown sizes is not checked: its first step would show the error.
    """
    variables = model.variables

    @tf.function(jit_compile=True, autograph=False)
    def differentiate(x: Nested[tf.Tensor], values: list[tf.Tensor]) -> list[Any]:
        watched = [value for value in values if value.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            mapping = zip(variables, values, strict=True)
            with keras.StatelessScope(mapping, collect_losses=True) as scope:
                outputs = keras.tree.flatten(model(x, training=True))
            total = [tf.reduce_sum(tf.cast(t, tf.float32)) for t in [*outputs, *scope.losses]]
        return tape.gradient(tf.add_n(total), watched)

    if any(None in spec.shape[1:] for spec in keras.tree.flatten(x_spec)):
        return
    x = keras.tree.map_structure(lambda spec: tf.zeros([1, *spec.shape[1:]], spec.dtype), x_spec)
    values = [tf.zeros(variable.shape, variable.dtype) for variable in variables]
    try:
        differentiate.experimental_get_compiler_ir(x, values)(stage="hlo")
    except ValueError as error:
        user_error = _explain(str(error), model)
        if user_error is not None:
            raise user_error from error


@contextlib.contextmanager
def explain_step_errors(model: keras.Model) -> Iterator[None]:
    """Raises a TfdistError in place of TensorFlow's error about a model's step, if understood.

    This covers what `check_compilation` does not see, such as the loss, and what replicas cannot
    do within a condition, a loop or a function of TensorFlow's.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        user_error = _explain(str(error), model)
        if user_error is None:
            raise
        raise user_error from error
    except (RuntimeError, ValueError) as error:
        if _WITHIN not in str(error):
            raise
        raise TfdistError(
            f"Replicas cannot run a step of {type(model).__name__}: it updates variables or "
            f"communicates within tf.function, tf.cond or a loop{_find_place(error)}. Move that "
            "out of it, or train on one device."
        ) from error


def _find_place(error: BaseException) -> str:
    """Returns in which line of the user's code an error was raised, if there is one."""
    found, place = error.__traceback__, ""
    while found is not None:
        code = found.tb_frame.f_code
        module = found.tb_frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _LIBRARIES and os.path.isfile(code.co_filename):
            place = f" (in {code.co_name}, {code.co_filename}:{found.tb_lineno})"
        found = found.tb_next
    converted = _CONVERTED.findall(str(error))  # what ran is in a file of AutoGraph's
    if converted:
        path, line, name = converted[-1]
        place = f" (in {name}, {path}:{line})"
    return place


def describe_layer(layer: keras.Layer) -> str:
    """Returns a layer's name and class, for error messages."""
    return f"{layer.name!r} ({type(layer).__name__})"


def _explain(text: str, model: keras.Model) -> TfdistError | None:
    unknown, failed = _UNKNOWN.search(text), _FAILED.search(text)
    if unknown:
        what = f"it does not support the operation {unknown[1]}"
        node = unknown[2]
    elif failed:
        what, node = failed.groups()
    else:
        return None
    layer = find_layer(model, node)
    where = f"in the layer {describe_layer(layer)}" if layer else f"({node})"
    return TfdistError(
        f"Cannot compile the step with XLA: {what} {where}. Leave out `jit_compile`."
    )


def find_layer(model: keras.Model, node: str) -> keras.Layer | None:
    """Returns the layer named in a node's name scopes; None if it is not unique."""
    layers = list(model._flatten_layers(include_self=False))
    for scope in reversed(node.split("/")):
        found = [a for a in layers if re.fullmatch(f"{re.escape(a.name)}(_[0-9]+)?", scope)]
        if found:
            return found[0] if len(found) == 1 else None
    return None
