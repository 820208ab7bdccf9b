"""Trains the same steps with logical replicas in every arrangement, and compares the bits."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from tfdist.launch.call import call_in_cluster, make_command
from tfdist.runs import processes
from tfdist.strategies.registry import AUTO
from tfdist.training.fit.trainer import Trainer
from tfdist.verify.options import VerifyOptions
from tfdist.verify.problem import make_problem, make_train_options


@dataclass(frozen=True)
class Arrangement:
    """The result of one arrangement of the replicas.

    Attributes:
      hashes: for each step, name -> hash of each log and each weight after it.
      problem: why there are none, or where they are not those of the first arrangement.
    """

    name: str
    hashes: list[dict[str, str]]
    problem: str = ""

    @property
    def sha256(self) -> str:
        """The hash of all weights after the last step."""
        return _hash(json.dumps(self.hashes[-1]).encode()) if self.hashes else ""


def compare_bits(options: VerifyOptions, report: Callable[[str], None]) -> Iterator[Arrangement]:
    """Yields the result of each arrangement, in one process or more; reports its name before."""
    count = options.verification.logical_replicas
    first: Arrangement | None = None
    for workers in range(1, count + 1):
        name = f"{workers} workers" if workers > 1 else "one process"
        report(name)
        found = call_in_cluster(
            {"options": options.to_dict(), "workers": workers},
            make_command("tfdist.verify.bits:hash_steps"),
            workers=workers,
            timeout_s=options.verification.timeout_s,
        )
        hashes = found.get("hashes", [])
        result = Arrangement(name, hashes, found.get("error", ""))
        if first is not None and hashes and not result.problem:
            result = Arrangement(name, hashes, find_difference(first.hashes, hashes))
        first = first or result
        yield result


def find_difference(expected: list[dict[str, str]], found: list[dict[str, str]]) -> str:
    """Returns where the hashes of two runs part; empty if they are equal.

    >>> find_difference([{"loss": "0", "a": "1"}], [{"loss": "0", "a": "2"}])
    'other bits from step 1 on, first in a'
    """
    for step, (one, other) in enumerate(zip(expected, found, strict=True), 1):
        if names := [name for name in one if one[name] != other[name]]:
            return f"other bits from step {step} on, first in {names[0]}"
    return ""


def hash_steps(task: Mapping[str, Any]) -> dict[str, Any] | None:
    """Trains in one process of an arrangement that `compare_bits` started."""
    options = VerifyOptions.from_dict(task["options"])
    train_options = make_train_options(
        options,
        strategy=AUTO,  # as many workers as there are
        logical_replicas=options.verification.logical_replicas,
    )
    train_options, config = processes.start_process(train_options)
    strategy = processes.build_strategy(train_options)
    problem = make_problem(options)
    problem.reset_process()
    trainer = Trainer(problem.build_model, strategy=strategy, seed=problem.seed)
    hashes = _Hashes()
    problem.fit(trainer, max_steps=options.verification.steps, callbacks=[hashes])
    return {"hashes": hashes.found} if config is None or config.is_chief else None


class _Hashes(keras.callbacks.Callback):
    """Hashes the logs and the weights after each step.

    The logs come first: where they are equal and a weight is not, the forward pass was, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str]] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        values = {f"the log {name!r}": value for name, value in (logs or {}).items()}
        values |= {variable.path: variable.numpy() for variable in self.model.weights}
        self.found.append({name: _hash(np.asarray(v).tobytes()) for name, v in values.items()})


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
