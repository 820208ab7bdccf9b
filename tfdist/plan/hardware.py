"""The hardware that a plan is for: a table of kinds, or a file."""

import dataclasses
import importlib.resources
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdist.errors import TfdistError, make_unknown_name_error
from tfdist.reading import read_text

LINK_SHARE = 0.8
"""The share of a link's bandwidth on the data sheet that collectives reach.

Source: NVIDIA's nccl-tests and `p2pBandwidthLatencyTest` report 0.75 to 0.9 of it.
"""

JITTER = 0.02
"""The standard deviation of a step's time on a device, relative to its mean.

That of what all devices of a machine share (processor, storage, links) is taken to be as large.

Source: Sinha et al. 2022 (arXiv:2208.11035) found that equal GPUs of a cluster differ by 8 % on
average from the fastest to the slowest without outliers, which is four to five such deviations.
"""

EXCHANGE_S = 0.006
"""The seconds of a step in which the processes of several accelerators agree to exchange gradients.

Fitted to those tables of `benchmarks/published_rows.toml` that are for fitting. Horovod, which most
of them used, looked for new gradients every 5 ms by default until version 0.21 (its release notes).
"""

PEAK_SHARE = 0.5
"""The share of the peak that large convolutions and matrix products reach."""

MEMORY_SHARE = 0.8
"""The share of the memory's bandwidth that an operation reaches."""


@dataclass(frozen=True)
class Link:
    """A link, by the alpha-beta model: a message takes `latency_s + bytes / bytes_per_s`."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measured steps of a model on one device.

    Attributes:
      parameters, flops: identify the model: its parameters, and operations per example (forward).
      precision: the precision of the measurement.
      step_s: seconds of a step that do not depend on the number of examples.
      example_s: seconds of a step for each example.
      step_busy, example_busy: the share of the processor's cores that is busy in this time. What
        it leaves idle is used by other replicas, if they share the processor.
      share: the share of the processor's cores that the process had.
    """

    parameters: int
    flops: float
    precision: str
    step_s: float
    example_s: float
    step_busy: float = 1.0
    example_busy: float = 1.0
    share: float = 1.0

    def divide(self, count: int) -> "Measured":
        """Returns the steps of one of several processes that have equal shares of the cores."""
        longer = self.share * count
        return dataclasses.replace(
            self,
            step_s=longer * self.step_s,
            example_s=longer * self.example_s,
            step_busy=1 / count,
            example_busy=1 / count,
            share=1.0,
        )


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Machines of one kind, each with devices of one kind.

    Attributes:
      title: the name for people.
      source: where the numbers are from.
      devices_per_machine: the devices of a machine.
      flops_per_s: precision -> the peak.
      memory_bytes, memory_bytes_per_s: of a device.
      inside: between two devices of a machine.
      between: between two machines; all devices of a machine share it.
      host: between a device and its host.
      is_tpu: whether its strategy is `tpu`.
      shares_cores: whether all devices and processes share one processor, as in a test on one
        machine: they take turns.
      sends_itself: whether what computes also sends and sums, as a processor does: communication
        does not overlap with computation.
      peak_share, memory_share, link_share, jitter: see the constants of this module.
      exchange_s: see `EXCHANGE_S`; not used of processors and TPUs.
      operation_s: the least time of an operation.
      host_s: the time of the host at each step, for one process.
      process_bytes: the memory of a device that is taken before there is a model.
      examples_per_s: what a machine's input pipeline delivers; 0 for unlimited.
      cores: the cores of a machine's processors, which prepare examples; 0 if unknown.
      measured: the steps of models that were measured.
    """

    title: str
    source: str
    devices_per_machine: int
    flops_per_s: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    inside: Link
    between: Link
    host: Link
    is_tpu: bool = False
    shares_cores: bool = False
    sends_itself: bool = False
    peak_share: float = PEAK_SHARE
    memory_share: float = MEMORY_SHARE
    link_share: float = LINK_SHARE
    jitter: float = JITTER
    exchange_s: float = EXCHANGE_S
    operation_s: float = 5e-6
    host_s: float = 0.0005
    process_bytes: float = 0.5e9
    examples_per_s: float = 0.0
    cores: int = 0
    measured: tuple[Measured, ...] = field(default=())

    def time(self, link: Link, num_bytes: float, *, messages: float = 1.0) -> float:
        """Returns the seconds that messages take on a link, one after the other."""
        return messages * link.latency_s + num_bytes / (link.bytes_per_s * self.link_share)

    def time_input(self, examples: float, core_s: float) -> float:
        """Returns the seconds in which a machine prepares examples of `core_s` of a core each."""
        by_cores = examples * core_s / self.cores if self.cores else 0.0
        return max(by_cores, examples / self.examples_per_s if self.examples_per_s else 0.0)

    def time_memory(self, num_bytes: float) -> float:
        """Returns the seconds in which operations of a device read or write so many bytes."""
        return num_bytes / (self.memory_bytes_per_s * self.memory_share)

    def find_peak(self, precision: str) -> float:
        """Returns the operations per second at a precision.

        Raises:
          TfdistError: the hardware does not have this precision.
        """
        if precision not in self.flops_per_s:
            raise TfdistError(
                f"`precision={precision}` is not one of {self.title}. Use "
                f"{' or '.join(self.flops_per_s)}."
            )
        return self.flops_per_s[precision]


def load_hardware(name: str) -> Hardware:
    """Returns the hardware of a name or a file.

    Args:
      name: a table of `hardware.toml`, or the path of a TOML file with the keys of one table.

    Raises:
      TfdistError: there is no such name or file, or the file lacks a key or has a wrong one.
    """
    kinds = _read_kinds()
    if name in kinds:
        return _parse(kinds[name], name)
    if not name.endswith(".toml"):
        raise make_unknown_name_error("`hardware`", name, [*kinds, "FILE.toml"])
    try:
        return _parse(tomllib.loads(read_text(name)), name)
    except OSError as error:
        raise TfdistError(f"Cannot read `hardware={name}`: {error.strerror or error}.") from error
    except TfdistError:
        raise
    except (ValueError, TypeError, AttributeError) as error:  # no TOML, or a value of another type
        raise TfdistError(f"Cannot read `hardware={name}`: {error}.") from error


def format_hardware(hardware: Hardware) -> str:
    """Returns the content of a file for `load_hardware`."""
    values = dataclasses.asdict(hardware)
    measured = values.pop("measured")
    lines = [f"{key} = {_format(value)}" for key, value in values.items()]
    for model in measured:
        lines += ["", "[[measured]]", *(f"{k} = {_format(v)}" for k, v in model.items())]
    return "\n".join(lines) + "\n"


def _read_kinds() -> dict[str, Any]:
    text = importlib.resources.files("tfdist.plan").joinpath("hardware.toml").read_text()
    return tomllib.loads(text)


def _parse(values: Mapping[str, Any], name: str) -> Hardware:
    fields = {item.name: item for item in dataclasses.fields(Hardware)}
    for key in values:
        if key not in fields:
            raise make_unknown_name_error(f"key of `hardware={name}`", key, fields)
    required = [k for k, item in fields.items() if item.default is dataclasses.MISSING]
    missing = [key for key in required if key not in values]
    if missing:
        raise TfdistError(f"`hardware={name}` lacks {', '.join(missing)}. Add what is missing.")
    links = {key: Link(**values[key]) for key in ("inside", "between", "host")}
    measured = tuple(Measured(**model) for model in values.get("measured", ()))
    return Hardware(**{**values, **links, "measured": measured})


def _format(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_format(part)}" for key, part in value.items()) + " }"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
