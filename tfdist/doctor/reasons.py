"""Says why several devices are not faster than one, from what their runs have measured."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdist.doctor.findings import Finding, ok, slow

_ENOUGH = 0.8  # of the devices' number
_MAIN, _NOTABLE = 0.3, 0.1  # fractions of the time
_FASTER = 1.2  # what a larger batch must bring to be the reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a run has measured; see docs/speed.md.

    Attributes:
      replicas: the number of devices that trained.
      fractions: input, host and all-reduce -> fraction of the time.
      gradient_bytes: what each all-reduce sums.
    """

    examples_per_second: float
    batch: int
    replicas: int
    fractions: Mapping[str, float]
    gradient_bytes: int = 0

    @classmethod
    def from_summary(cls, summary: Mapping[str, Any]) -> "Measurement":
        """Returns what a run's `summary.json` says."""
        names = {
            "input": "input_fraction",
            "host": "host_fraction",
            "all-reduce": "all_reduce_fraction",
        }
        return cls(
            examples_per_second=summary["examples_per_second"],
            batch=summary["global_batch_size"],
            replicas=summary["replicas"],
            fractions={name: summary.get(key) or 0.0 for name, key in names.items()},
            gradient_bytes=summary.get("gradient_bytes", 0),
        )

    @property
    def gbit_per_second(self) -> float:
        """What each replica sends during the all-reduce alone, if it is a ring; 0 if unknown."""
        seconds = self.fractions["all-reduce"] * self.batch / self.examples_per_second
        sent = 2 * (self.replicas - 1) / self.replicas * self.gradient_bytes
        return sent * 8e-9 / seconds if seconds else 0.0


def explain(
    one: Measurement,
    many: Measurement,
    larger: Measurement | None = None,
    *,
    shared_cores: int = 0,
    link_gbit_per_second: float = 0.0,
) -> Finding:
    """Returns whether several devices are faster than one, and if not, why.

    Args:
      larger: several devices with as many examples each as one has in `one`; None if not measured.
      shared_cores: the number of cores that all devices share, 0 if each has its own.
      link_gbit_per_second: the speed of the network, 0 if unknown or not used.
    """
    speedup = many.examples_per_second / one.examples_per_second
    head = f"{many.replicas} devices are {speedup:.2f} times as fast as one"
    shares = ", ".join(f"{name} {part:.0%}" for name, part in many.fractions.items())
    rates = f"({one.examples_per_second:.4g} and {many.examples_per_second:.4g} examples/s)"
    if is_fast(one, many):
        return ok(f"{head} {rates}; of the time, {shares}")
    name, part = max(many.fractions.items(), key=lambda item: item[1])
    if part < _MAIN and shared_cores:
        reason = (
            f"they share the same {shared_cores} cores, which one device already uses. More speed "
            "needs GPUs or more machines"
        )
    elif part >= _NOTABLE:
        reason = _explain_part(name, many, link_gbit_per_second)
    elif larger and larger.examples_per_second > _FASTER * many.examples_per_second:
        reason = (
            f"the batch is too small: each has only {many.batch / many.replicas:g} examples per "
            f"step. With batches of {larger.batch}, they are "
            f"{larger.examples_per_second / one.examples_per_second:.2f} times as fast. Use a "
            "larger global_batch_size"
        )
    else:
        reason = "of a cause that the run does not measure. Look at it with tfdist.train --profile"
    return slow(f"{head} {rates}, because {reason} (of the time, {shares}).")


def is_fast(one: Measurement, many: Measurement) -> bool:
    """Returns whether several devices are nearly as many times as fast as one."""
    return many.examples_per_second >= _ENOUGH * many.replicas * one.examples_per_second


def is_explained(many: Measurement) -> bool:
    """Returns whether a part of the steps is large enough to be the reason."""
    return max(many.fractions.values()) >= _NOTABLE


def _explain_part(name: str, many: Measurement, link_gbit_per_second: float) -> str:
    part = f"{many.fractions[name]:.0%}"
    if name == "input":
        return (
            f"steps wait for their batches {part} of the time. Use --cache, smaller files or fewer "
            "augmentations, or more cores"
        )
    if name == "host":
        return (
            f"the host works between steps {part} of the time. Use --steps_per_loop=10, and "
            "callbacks that do less per step"
        )
    size, rate = f"{many.gradient_bytes / 1e6:.3g} MB", f"{many.gbit_per_second:.2g}"
    rate += f" of {link_gbit_per_second:g}" if link_gbit_per_second else ""
    return (
        f"the all-reduce of {size} takes {part} of a step, at {rate} Gbit/s. Use larger batches, "
        "--compress_gradients or --strategy=local_sgd, or a faster network"
    )
