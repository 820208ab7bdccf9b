"""What workers must have in common before they compute: the call, and the model's program."""

import contextlib
import hashlib
import inspect
import json
import numbers
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.training.replicas.optimizers import list_optimizers

# Data are compared by their contents, and what only shows progress may differ.
_NOT_COMPARED = ("x", "y", "sample_weight", "batch", "callbacks", "verbose")
# What depends on what a worker has built, drawn or imported, and what is compared after each step.
_NAMES = ("name", "shared_object_id", "module", "registered_name", "seed")
_RATE = "learning_rate"
_NUMBERED = re.compile(r"_\d+$| at 0x[0-9a-f]+")  # of a name in a text, or an object
_MOST_CHARACTERS = 200


def describe_call(
    method: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a call by their names: numbers and texts, or whether one is given.

    Args:
      args: positional arguments, with the trainer.
    """
    try:
        bound = inspect.signature(method).bind(*args, **kwargs)
    except TypeError:
        return {}  # the call itself says what is wrong
    bound.apply_defaults()
    _, *given = bound.arguments.items()
    return {f"`{name}`": _read_value(v) for name, v in given if name not in _NOT_COMPARED}


def describe_program(model: keras.Model) -> dict[str, Any]:
    """Returns the numbers and texts that configure what a model computes, by places for the user.

    They are those of its layers, loss, metrics and optimizer. Names are left out, because they
    depend on what a worker has built before.
    """
    found: dict[str, Any] = {"`steps_per_execution`": model.steps_per_execution}
    loss, metrics = (getattr(model, name, None) for name in ("_compile_loss", "_compile_metrics"))
    first, *others = list_optimizers(model) or [None]
    parts = {
        "`optimizer`": first,
        **{f"optimizer {n}": optimizer for n, optimizer in enumerate(others, 1)},
        "`loss`": getattr(model, "loss", None),
        "`loss_weights`": getattr(loss, "_user_loss_weights", None),
        "`metrics`": getattr(metrics, "_user_metrics", None),
        "`weighted_metrics`": getattr(metrics, "_user_weighted_metrics", None),
        **{f"layer {n}": layer for n, layer in enumerate(model._flatten_layers())},
    }
    for name, part in parts.items():
        place = f"{name} ({type(part).__name__})" if hasattr(part, "get_config") else name
        for path, value in _list_values(part):
            found[f"`{path}` of {place}" if path else name] = value
    return found


def _list_values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the paths within a configuration, and the number, the text or the class there."""
    if isinstance(value, keras.Model):  # whose layers are listed by themselves
        value = {"class_name": type(value).__name__, "config": {"trainable": value.trainable}}
    elif hasattr(value, "get_config"):
        value = {"class_name": type(value).__name__, "config": _read_config(value)}
    elif callable(value):
        value = getattr(value, "__name__", type(value).__name__)
    if isinstance(value, Mapping) and {"class_name", "config"} <= value.keys():
        kind, value = value["class_name"], value["config"]
        yield path, kind
        if kind == "__lambda__" or (isinstance(value, Mapping) and "layers" in value):
            return  # code, in which the path of its file is; or a model
        if str(kind).endswith("DTypePolicy"):
            value = value.get("name", value)  # quantized ones have a mode instead
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _NAMES and (key != _RATE or isinstance(inner, Mapping)):
                yield from _list_values(inner, f"{path}.{key}" if path else str(key))
    elif (plain := _read_plain(value)) is not None:
        yield path, plain
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            yield from _list_values(inner, f"{path}.{place}" if path else str(place))


def _read_config(part: Any) -> Mapping[str, Any]:
    # A user's own may not be written, and Keras warns of lambda functions.
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Keras's losses leave out what they give to their functions.
        return {**getattr(part, "_fn_kwargs", {}), **part.get_config()}
    return {}


def _read_plain(value: Any) -> Any:
    """Returns a number, a text or a list of these; None for anything else, and for paths."""
    number = _read_number(value)
    texts = value if isinstance(value, (list, tuple)) else [value]
    if number is not None or not texts or not all(isinstance(text, str) for text in texts):
        return number
    if any(character in text for text in texts for character in "/\\"):
        return None
    read = [_NUMBERED.sub("", text) for text in texts]
    if sum(map(len, read)) > _MOST_CHARACTERS:
        digest = hashlib.blake2b(json.dumps(read).encode(), digest_size=6).hexdigest()
        return f"{read[0][:20]}... of {len(read)} texts with the digest {digest}"
    return read[0] if value is texts[0] else read


def _read_value(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        value = [item for pair in value.items() for item in pair]
    number = _read_number(sorted(value) if isinstance(value, set) else value)
    return "given" if number is None else number


def _read_number(value: Any) -> Any:
    """Returns a number or a list of them, rounded, because processors round differently."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(f"{float(value):.6g}")
    if isinstance(value, (list, tuple)) and value:
        read = [_read_number(item) for item in value]
        return None if None in read else read
    return None
