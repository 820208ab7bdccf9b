"""Predicts the speed of candidates from that of one device, to leave out slow ones."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import tensorflow as tf

from tfdist import memory
from tfdist.auto.candidates import list_candidates
from tfdist.errors import TfdistError
from tfdist.plan.compute import count_parameters
from tfdist.plan.estimate import estimate
from tfdist.plan.hardware import Hardware, Measured, load_hardware
from tfdist.plan.subject import describe_model
from tfdist.runs.options import TrainOptions

if TYPE_CHECKING:
    import keras

MOST_S = 60.0
"""The seconds after which no further candidate is tried."""

_FAR = 0.5  # of the fastest predicted speed: slower candidates are not tried
_GPUS = ("b200", "h200", "h100", "l40s", "a100", "v100", "p100", "p40", "k80", "t4", "l4")


def predict(
    options: TrainOptions, model: "keras.Model", *, rate: float, gpu_limit: int | None
) -> dict[str, float]:
    """Returns candidate -> predicted examples per second; 0 if it does not fit or is refused.

    Args:
      gpu_limit: the bytes that may be used of the smallest GPU; None for CPUs.

    Returns:
      An empty dictionary if the plan does not know this kind of device, or cannot read the model.
    """
    try:
        workload = describe_model(model, options, precision=options.training.precision)
        measured = Measured(
            parameters=count_parameters(workload),
            flops=workload.flops,
            precision=workload.precision,
            step_s=0.0,
            example_s=1 / rate,
        )
        available = float(gpu_limit or memory.find_free_memory().bytes)
        hardware = replace(_find_hardware(), measured=(measured,), memory_bytes=available)
        found = {
            name: estimate(setup.split(workload.micro_batches), workload, hardware)
            for name, setup in list_candidates(options).items()
        }
    except TfdistError:
        return {}
    return {name: e.examples_per_s if e.is_possible else 0.0 for name, e in found.items()}


def order(names: Iterable[str], predicted: Mapping[str, float]) -> list[str]:
    """Returns candidates, those of the highest predicted speed first."""
    return sorted(names, key=lambda name: -predicted.get(name, 0.0))


def explain_omission(name: str, predicted: Mapping[str, float], *, left_s: float) -> str:
    """Returns why a candidate is not tried; empty if it is.

    Args:
      left_s: the seconds in which trials may still begin.

    >>> explain_omission("b", {"b": 4.0, "one_device": 10.0}, left_s=60)
    'only 4 examples/s are predicted'
    """
    if left_s < 0:
        return "the others took too long"
    rate = predicted.get(name)
    if rate == 0.0:
        return "predicted not to fit"
    if rate is not None and rate < _FAR * max(predicted.values()):
        return f"only {rate:.4g} examples/s are predicted"
    return ""


def _find_hardware() -> Hardware:
    """Returns the hardware of this process's devices, in the plan's table."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return replace(load_hardware("cpu"), shares_cores=True)
    name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "").lower()
    return load_hardware(next((gpu for gpu in _GPUS if re.search(rf"\b{gpu}\b", name)), name))
