"""Runs each strategy, in this process or in the processes of a cluster."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist import devices
from tfdist.errors import TrainingError
from tfdist.launch.call import call_in_cluster, make_command
from tfdist.placement.options import Placement
from tfdist.runs import processes
from tfdist.strategies.base import Traits
from tfdist.strategies.registry import find_strategy, make_strategy
from tfdist.strategies.servers import run_server
from tfdist.training.replicas.step_checks import can_shard_optimizer
from tfdist.verify.comparison import TOLERANCES, Comparison, compare
from tfdist.verify.diagnosis import diagnose, find_batch_layers
from tfdist.verify.options import VerifyOptions
from tfdist.verify.problem import Problem, make_problem, make_train_options
from tfdist.verify.recording import Recording, record

_GROUP_NORM = "group"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result for one strategy.

    Attributes:
      problem: why there is no comparison, or the cause of a difference.
      skip_reason: the skip reason, in two words; empty if the strategy was not skipped.
    """

    strategy: str
    form: str = ""
    comparison: Comparison | None = None
    problem: str = ""
    skip_reason: str = ""

    @property
    def holds(self) -> bool:
        """Whether the strategy agrees with one device or was skipped."""
        return bool(self.skip_reason) or (self.comparison is not None and self.comparison.holds)


Report = Callable[[str, int], None]


def run_strategies(options: VerifyOptions, report: Report) -> Iterator[Verdict]:
    """Yields the verdict on each strategy as soon as it is known.

    Args:
      report: called with the name of a strategy and the number of steps it has done.
    """
    problem = make_problem(options)
    one_device = _make_strategy("one_device", options)
    reference = _record("one_device", problem, one_device, options, report)
    for name in options.verification.strategies:
        form, expected, chosen = "", reference, problem
        try:
            traits = find_strategy(name).traits
            if traits.local_updates:
                chosen = make_local_problem(options)
                layers = [] if options.model.is_own else find_batch_layers(chosen, one_device)
                if layers:
                    text = f"{layers[0]} sees only the examples of its own worker, by design."
                    yield Verdict(name, problem=text, skip_reason="not comparable")
                    continue
                expected = _record("one_device", chosen, one_device, options, report)
            form = _describe_form(name, options, chosen)
            refusal = _find_refusal(traits, options)
            if refusal:
                yield Verdict(name, form, problem=refusal, skip_reason="not supported")
                continue
            if name == "one_device" and not find_placement(options):
                found = reference
            elif not traits.has_processes:
                strategy = _make_strategy(name, options)
                found = _record(name, chosen, strategy, options, report, is_tested=True)
            else:
                found = _run_cluster(name, options, report)
        except (ValueError, RuntimeError, tf.errors.OpError) as error:
            skip_reason = "not available" if traits.is_remote else ""
            yield Verdict(name, form, problem=" ".join(str(error).split()), skip_reason=skip_reason)
            continue
        tolerance = TOLERANCES[options.model.precision]
        comparison = compare(found, expected, tolerance)
        cause = ""
        if not comparison.holds:
            several = _make_strategy("mirrored", options)
            cause = diagnose(chosen, comparison, (one_device, several), tolerance)
        yield Verdict(name, form, comparison, cause)


def _find_refusal(traits: Traits, options: VerifyOptions) -> str:
    """Returns why a strategy cannot divide a model or an optimizer; empty if it can."""
    if find_placement(options) and (traits.has_servers or traits.shares_variables):
        return "it decides itself where variables are, so a placement is refused."
    is_shared = traits.is_single or can_shard_optimizer(traits)
    if options.verification.shard_optimizer and not is_shared:
        return "only replicas with copies of the weights divide an optimizer."
    return ""


def make_local_problem(options: VerifyOptions) -> Problem:
    """Returns the problem in a form for which local SGD can give the result of one device.

    Averaging after each step equals synchronous training if updates are linear in the gradient and
    no layer depends on the batch, since each worker normalizes by its own examples.
    """
    norm = _GROUP_NORM if _must_change_norm(options) else None
    return make_problem(options, norm=norm).make_linear(workers=options.verification.workers)


def find_placement(options: VerifyOptions) -> Placement | None:
    """Returns how the model of a replica is divided, over two devices by default."""
    found = options.placement.select()
    return found and dataclasses.replace(found, devices=found.devices or 2)


def _count_model_devices(options: VerifyOptions) -> int:
    found = find_placement(options)
    return found.devices if found else 1


def configure_process(options: VerifyOptions) -> None:
    """Sets devices, precision and seeds for the strategies of one process."""
    needed = options.verification.replicas * _count_model_devices(options)
    if len(tf.config.list_physical_devices("GPU")) < needed:
        devices.set_virtual_devices(needed)
    processes.configure_process(make_train_options(options))


def record_in_cluster(task: dict[str, Any]) -> dict[str, Any] | None:
    """Trains in one process of the cluster that `_run_cluster` started."""
    name, options = task["name"], VerifyOptions.from_dict(task["options"])
    size = _count_model_devices(options)
    is_split = size > 1 and not tf.config.list_physical_devices("GPU")
    _, config = processes.start_process(
        make_train_options(options, strategy=name, virtual_devices=size if is_split else 0)
    )
    assert config is not None
    kind = find_strategy(name)
    if kind.traits.has_servers and not config.is_chief:
        run_server(config)
        return None
    replicas = {"replicas_per_worker": 1} if size > 1 else {}
    strategy = make_strategy(name, **kind.exact, **replicas)
    problem = make_local_problem(options) if kind.traits.local_updates else make_problem(options)
    recording = record(
        problem,
        strategy,
        steps=options.verification.steps,
        placement=find_placement(options),
        shard_optimizer=options.verification.shard_optimizer,
    )
    if not config.is_chief:
        return None
    recording.save(task["recording"])
    return {}


def _run_cluster(name: str, options: VerifyOptions, report: Report) -> Recording:
    report(name, 0)
    with tempfile.TemporaryDirectory(prefix="tfdist-verify-") as directory:
        path = f"{directory}/recording.npz"
        found = call_in_cluster(
            {"name": name, "options": options.to_dict(), "recording": path},
            make_command("tfdist.verify.runs:record_in_cluster"),
            workers=options.verification.workers,
            ps=int(find_strategy(name).traits.has_servers),
            timeout_s=options.verification.timeout_s,
        )
        if "error" in found:
            raise TrainingError(found["error"])
        return Recording.load(path)


def _record(
    name: str,
    problem: Problem,
    strategy: tf.distribute.Strategy,
    options: VerifyOptions,
    report: Report,
    *,
    is_tested: bool = False,
) -> Recording:
    """Trains under a strategy; only a tested one is divided as the options say."""
    is_single = find_strategy(name).traits.is_single
    return record(
        problem,
        strategy,
        steps=options.verification.steps,
        placement=find_placement(options) if is_tested else None,
        shard_optimizer=is_tested and not is_single and options.verification.shard_optimizer,
        report=functools.partial(report, name),
    )


def _make_strategy(name: str, options: VerifyOptions) -> tf.distribute.Strategy:
    kind = find_strategy(name)
    if "devices" not in {item.name for item in dataclasses.fields(kind)}:
        return make_strategy(name)
    count = 1 if kind.traits.is_single else options.verification.replicas
    return make_strategy(name, devices=devices.list_devices()[:count])


def _describe_form(name: str, options: VerifyOptions, local_problem: Problem) -> str:
    """Returns a description of how a strategy runs."""
    kind = find_strategy(name)
    size = _count_model_devices(options)
    placed = [f"{options.placement.placement} on {size} devices"] if size > 1 else []
    if kind.traits.is_single or kind.traits.is_remote:
        return ", ".join(placed)
    if kind.traits.is_local:
        return ", ".join([f"{options.verification.replicas} replicas", *placed])
    parts = [f"{options.verification.workers} workers", *placed]
    parts += [f"{option}={value}" for option, value in {**kind.exact, **kind.exact_steps}.items()]
    if kind.traits.local_updates:
        parts += ["plain SGD", f"batches of {local_problem.global_batch_size}"]
        parts += [f"norm={_GROUP_NORM}"] if _must_change_norm(options) else []
    return ", ".join(parts)


def _must_change_norm(options: VerifyOptions) -> bool:
    return options.model.is_own and options.model.norm in ("sync_batch", "batch")
