"""Trains on one device and on all of them, and says why more devices are not faster."""

import contextlib
import dataclasses
import functools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tfdist.cli.flags import parse_flags
from tfdist.doctor.findings import Finding, ok, slow, wrong
from tfdist.doctor.machine import Machine
from tfdist.doctor.options import ProbeOptions
from tfdist.doctor.reasons import Measurement, explain, is_explained, is_fast
from tfdist.errors import TfdistError
from tfdist.launch.call import run_watched
from tfdist.launch.machine import add_interop_thread, complete_environment, find_sources
from tfdist.runs.options import TrainOptions
from tfdist.strategies.options import make_strategy_options
from tfdist.strategies.registry import AUTO

_REFERENCE = (
    *("--dataset=shapes", "--image_size=64,64", "--base_filters=16", "--depth=3"),
    *("--train_examples=320", "--val_examples=16", "--global_batch_size=16"),
)
_OF_CLUSTERS = ("TF_CONFIG", "CLUSTER_SPEC", "SLURM_", "JOB_COMPLETION_INDEX", "TFDIST_")
_POLL_S = 0.2

Say = Callable[[str], None]


def parse_train_flags(train_flags: Sequence[str]) -> TrainOptions:
    """Returns the options of what is trained, by default a small U-Net."""
    options = parse_flags(TrainOptions, list(train_flags or _REFERENCE))
    options.check()
    return options


def probe(
    machine: Machine, options: ProbeOptions, train: TrainOptions, say: Say
) -> Iterator[Finding]:
    """Yields whether all devices are faster than one, and if not, why.

    In a cluster, all tasks must call it at the same time; the first one measures one device before.
    """
    config = machine.cluster
    gpus = len(machine.tensorflow.get("gpus", ()))
    devices = config.num_workers if config else gpus or machine.cores
    if devices < 2:
        yield ok("there is only one device")
        return
    if config and not machine.directory:
        yield wrong("--probe in a cluster needs --run_dir, a directory that all machines see.")
        return
    yield from _find_other_programs(machine)
    runs = _Runs(machine, options, say)
    with tempfile.TemporaryDirectory(prefix="tfdist-doctor-") as directory:
        try:
            chief = config is None or config.is_chief
            alone = dataclasses.replace(
                train,
                strategy=make_strategy_options(strategy="one_device"),
                step=dataclasses.replace(train.step, compress_gradients=False),
            )
            one = runs.run("one device", alone, f"{directory}/one") if chief else None
            together = train
            if train.strategy.strategy == AUTO and not config and not gpus:
                split = make_strategy_options(strategy="mirrored", virtual_devices=devices)
                together = dataclasses.replace(train, strategy=split)
            place = f"{machine.directory or directory}/tfdist-doctor"
            try:
                many = runs.run("all devices", together, place, in_cluster=True)
            finally:
                if chief:
                    shutil.rmtree(place, ignore_errors=True)
            if one is None or many is None:
                yield ok("the first task says how fast the cluster is")
                return
        except TfdistError as error:
            yield wrong(str(error))
            return
        larger = None
        if config is None and not is_fast(one, many) and not is_explained(many):
            size = many.batch * many.replicas
            grown = dataclasses.replace(together.training, global_batch_size=size)
            wide = dataclasses.replace(together, training=grown)
            with contextlib.suppress(TfdistError):  # it may not fit in memory
                larger = runs.run("all devices, larger batch", wide, f"{directory}/larger")
    yield explain(
        one,
        many,
        larger,
        shared_cores=0 if config or gpus else machine.cores,
        link_gbit_per_second=find_link_speed(machine) if config else 0.0,
    )


def _find_other_programs(machine: Machine) -> Iterator[Finding]:
    load = machine.read("proc/loadavg").partition(" ")[0]
    if load and float(load) > machine.cores:
        yield slow(
            f"other programs kept {load} threads busy during the last minute, and this machine has "
            f"{machine.cores} core{'s' * (machine.cores > 1)}. End them, because they distort the "
            "measurement."
        )


def find_link_speed(machine: Machine) -> float:
    """Returns the Gbit/s of the fastest network device that is up, 0 if none says."""
    speeds = [0.0]
    for device in machine.list_directory("sys/class/net"):
        place = f"sys/class/net/{device.name}"
        with contextlib.suppress(ValueError):
            if machine.read(f"{place}/operstate").strip() == "up":
                speeds.append(int(machine.read(f"{place}/speed")) / 1000)
    return max(speeds)


class _Runs:
    """Runs `tfdist.train` in processes of their own."""

    def __init__(self, machine: Machine, options: ProbeOptions, say: Say):
        self._machine, self._options, self._say = machine, options, say

    def run(
        self, name: str, train: TrainOptions, run_dir: str, *, in_cluster: bool = False
    ) -> Measurement | None:
        """Returns what training for some steps recorded; None if this task is not the chief."""
        machine, steps = self._machine, self._options.steps
        run = dataclasses.replace(
            train.run, run_dir=run_dir, log_every=1, tensorboard=False, quiet=True
        )
        training = dataclasses.replace(train.training, max_steps=steps)
        train = dataclasses.replace(train, run=run, training=training)
        environ = find_sources(machine.environ)
        if in_cluster and machine.cluster:
            environ = complete_environment(add_interop_thread(environ), machine.cluster)
        else:
            environ = {k: v for k, v in environ.items() if not k.startswith(_OF_CLUSTERS)}
        with tempfile.TemporaryDirectory(prefix="tfdist-doctor-") as directory:
            config = Path(directory) / "options.json"
            config.write_text(json.dumps(train.to_dict()))
            status, said = run_watched(
                [sys.executable, "-m", "tfdist.train", f"--config={config}"],
                directory,
                environ=environ,
                watch=functools.partial(
                    self._watch,
                    name,
                    Path(run_dir) / "metrics.jsonl",
                    time.monotonic() + self._options.timeout_s,
                ),
                every_s=_POLL_S,
            )
            if status is None or status < 0:
                said = "it took too long"
            if status != 0:
                raise TfdistError(f"the training on {name} fails: {said}")
        if in_cluster and machine.cluster and not machine.cluster.is_chief:
            return None
        return Measurement.from_summary(json.loads((Path(run_dir) / "summary.json").read_text()))

    def _watch(self, name: str, metrics: Path, until: float, pid: int) -> bool:
        """Shows the step that a training has done, and returns whether it has time left."""
        step = 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            step = json.loads(metrics.read_text().splitlines()[-1]).get("step", 0)
        self._say(f"{name}: step {step} of {self._options.steps}")
        return time.monotonic() < until
