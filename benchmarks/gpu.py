"""Shows what a machine's GPU does: equality, memory, throughput.

    python -m benchmarks.gpu [--python=PATH] [--output=DIR] [--only=NAME,NAME]

First the checks, several at a time; then the measurements, whose processes compile together and
are measured in turns. Each has a limit of time, and `results.json` is written after each. On an
H200 with 16 cores, checks took 3 minutes and the U-Nets 5. Its five processes of TensorFlow took
17 GiB each; smaller cards need a smaller `--global_batch_size`. `--python` is an interpreter with
PyTorch. The exit status is 1 if one of them failed. `--image_size=32 --base_filters=4` tries the
commands on a machine without a GPU, where no memory limit refuses anything.
"""

import argparse
import functools
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import users_models
from benchmarks.turns import Contestant, Turns, hold_contest, make_callback
from tfdist.benchmark.options import MeasuredModelOptions
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.launch.machine import describe_machine

StepResult = dict[str, Any]
Commands = dict[str, Callable[[], StepResult]]

LIST = (
    "import tensorflow as tf; print([tf.config.experimental.get_device_details(g) for g in "
    "tf.config.list_physical_devices('GPU')], tf.sysconfig.get_build_info())"
)
# Those whose devices are not the CPU's by name.
TESTS = (
    "programs step synchronous micro_batches loop global_norm loss_scaling rematerialize gradient "
    "fused_update"
)
EQUAL_LOSS = 1e-3  # between runs with and without XLA, relative
AT_ONCE = 8
PARTS = 16  # of the GPU, for the limits of memory
BATCHES = 32  # of an epoch; turns of 64 steps are two epochs
ENDLESS = 10**6  # epochs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default="", help="an interpreter with PyTorch")
    parser.add_argument("--output", default="gpu", metavar="DIR", help="directory of the results")
    parser.add_argument(
        "--only", default="", metavar="NAME,NAME", help="parts of names; all if none"
    )
    parser.add_argument("--image_size", type=int, default=256, help="height and width in pixels")
    parser.add_argument("--base_filters", type=int, default=32)
    parser.add_argument("--global_batch_size", type=int, default=32)
    parser.add_argument("--models", default="mlp,mlp loop,lstm,transformer,cnn,mobilenet")
    parser.add_argument("--rounds", type=int, default=3, help="measured turns of each")
    parser.add_argument("--compile_limit_s", type=float, default=240.0, help="for the first turns")
    flags = parser.parse_args()
    output = Path(flags.output)
    output.mkdir(parents=True, exist_ok=True)
    # Otherwise, a process with virtual devices takes all memory, and no other one may run beside.
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    results: StepResult = {"machine": describe_machine()}

    def record(name: str, run: Callable[[], StepResult]) -> None:
        began = time.monotonic()
        try:
            found = run()
        except (subprocess.SubprocessError, AssertionError, OSError, KeyError) as error:
            found = {
                "error": str(error)[-2000:],
                "output": str(getattr(error, "output", ""))[-4000:],
            }
        results[name] = found | {"seconds": round(time.monotonic() - began, 1)}
        print(name, {k: v for k, v in results[name].items() if k != "output"}, flush=True)
        (output / "results.json").write_text(json.dumps(dict(results), indent=1) + "\n")

    only = [part for part in flags.only.split(",") if part]
    for commands, workers in (
        (list_checks(flags, output), AT_ONCE),
        (list_measurements(flags, output), 1),
    ):
        chosen = [n for n in commands if not only or any(part in n for part in only)]
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda name, commands=commands: record(name, commands[name]), chosen))
    return int(any("error" in found for found in results.values() if isinstance(found, dict)))


def list_checks(flags: argparse.Namespace, output: Path) -> Commands:
    """Returns name -> a function that checks whether results are equal."""
    size, filters = flags.image_size, flags.base_filters
    model = f"--image_size={size},{size} --base_filters={filters}"
    model += f" --global_batch_size={flags.global_batch_size}"
    # 4.2 million pixels of about 2.5 kB, and 770 million weights with gradients and Adam's slots.
    image = f"--image_size={8 * size},{8 * size} --base_filters={filters} --global_batch_size=1"
    weights = f"--image_size=32,32 --base_filters={10 * filters} --global_batch_size=8"
    verify = "tfdist.verify --optimizer=sgd --steps=10 --strategies="
    placed = "mirrored --mesh=data:1,model:2 --placement="
    tests = " ".join(f"tests/training/test_{name}.py" for name in TESTS.split())
    verified = {
        "replicas, float64": "mirrored,central_storage",
        "replicas, mixed_bfloat16": "mirrored --precision=mixed_bfloat16",
        "workers, float64": "multi_worker_mirrored,local_sgd,parameter_server",
        "layers, float64": f"{placed}layers",
        "shards, float64": f"{placed}shards",
        "strips, float64": f"{placed}strips",
    }
    checks: Commands = {"devices": functools.partial(run_python, ["-c", LIST], limit_s=60)}
    several = "-n 6 --dist=worksteal" if importlib.util.find_spec("xdist") else ""
    checks["tests"] = functools.partial(
        run_module,
        f"pytest --quick -W ignore -p no:cacheprovider -rfE --tb=short {several} {tests}",
        200,
        log=output / "tests.txt",
    )
    for name, chosen in verified.items():
        log = output / f"verify {name}.txt".replace(" ", "_").replace(",", "")
        checks[name] = functools.partial(run_module, verify + chosen, 120, log=log)
    return checks | {
        "deterministic": functools.partial(
            compare_runs, output, [f"{model} --deterministic"] * 2, key="weights_sha256"
        ),
        "XLA": functools.partial(
            compare_runs,
            output,
            [f"{model} {how}" for how in ("", "--jit_compile", "--strategy=mirrored")],
            key="loss",
        ),
        "mixed_float16": functools.partial(
            compare_runs, output, [f"{model} --precision=mixed_float16"], key="loss"
        ),
        "a large image": functools.partial(compare_limits, output, image, ["strips"]),
        "many weights": functools.partial(compare_limits, output, weights, ["layers", "shards"]),
    }


def list_measurements(flags: argparse.Namespace, output: Path) -> Commands:
    """Returns name -> a function that measures, and returns what it found."""
    model = (
        f"--image_size={flags.image_size},{flags.image_size} --base_filters={flags.base_filters}"
    )
    return {
        "U-Net, float32": functools.partial(compete, flags, list_unets(flags, "float32")),
        "U-Net, mixed_bfloat16": functools.partial(
            compete, flags, list_unets(flags, "mixed_bfloat16")
        ),
        "users' models": functools.partial(compete, flags, list_users_models(flags.models)),
        "largest batch": functools.partial(
            compare_runs,
            output,
            [f"{model} --global_batch_size=auto --train_examples=2048"],
            key="global_batch_size",
        ),
    }


def list_unets(flags: argparse.Namespace, precision: str) -> dict[str, Contestant]:
    """Returns the forms of the U-Net in TensorFlow and PyTorch."""
    sizes = ["image_size", "base_filters", "global_batch_size"]
    task = {name: getattr(flags, name) for name in sizes} | {"precision": precision}
    forms = {
        form: Contestant(make_command("unet", task | {"form": form}), "XLA" in form)
        for form in ("loop by hand", "Trainer", "Trainer, XLA", "Keras fit", "Keras fit, XLA")
    }
    if not flags.python:
        return forms
    model = {"num_classes": 3, "base_filters": flags.base_filters, "depth": 4}
    common = {"model": model, "global_batch_size": flags.global_batch_size}
    common |= {"image_size": [flags.image_size] * 2, "bfloat16": precision != "float32"}
    for compiled in (False, True):
        directory = tempfile.mkdtemp(prefix="tfdist-pytorch-")
        (Path(directory) / "task.json").write_text(json.dumps(common | {"compiled": compiled}))
        command = [flags.python, "-m", "benchmarks.pytorch_unet", "compete", directory]
        forms["PyTorch, compiled" if compiled else "PyTorch"] = Contestant(command, compiled)
    return forms


def list_users_models(names: str) -> dict[str, Contestant]:
    """Returns Keras's `fit` and `Trainer.fit` on users' models, as Keras compiles and without."""
    return {
        f"{name}, {form}": Contestant(make_command("users", {"name": name, "form": form}), True)
        for name in names.split(",")
        for form in ("keras", "trainer", "keras_no_xla", "trainer_no_xla")
    }


def make_command(kind: str, task: StepResult) -> list[str]:
    """Returns the command of a process that takes turns."""
    return [sys.executable, "-m", "benchmarks.gpu", "take_turns", kind, json.dumps(task)]


def compete(flags: argparse.Namespace, contestants: dict[str, Contestant]) -> StepResult:
    """Measures contestants in turns; fails if one of them failed."""
    results = hold_contest(contestants, rounds=flags.rounds, limit_s=flags.compile_limit_s)
    for name, found in results.items():
        print("", name, {k: v for k, v in found.items() if k != "turns"}, flush=True)
    failed = [name for name, found in results.items() if "error" in found]
    return {"contestants": results} | ({"error": f"failed: {failed}"} if failed else {})


def take_turns(kind: str, task: StepResult) -> None:
    """Trains one form of a model in turns; see benchmarks/turns.py."""
    start_tensorflow_quietly()
    import tfdist
    from tfdist import devices
    from tfdist.benchmark.measuring import build_model, make_batches, run_loop

    if kind == "users":
        steps = users_models.WORKLOADS[task["name"]].steps
        fit, data = users_models.make_fit(**task)
        fit(**data, epochs=ENDLESS, verbose=0, callbacks=[make_callback(steps=steps)])
        return
    form, size = task["form"], task["image_size"]
    devices.configure_precision(task["precision"])
    if not form.startswith("Keras"):
        devices.configure_layout()  # for tfdist's layers, in a loop by hand, too
    options = MeasuredModelOptions(
        image_size=(size, size),
        base_filters=task["base_filters"],
        global_batch_size=task["global_batch_size"],
    )
    x, y = make_batches(options, BATCHES)
    xla, clock = "XLA" in form, [make_callback()]
    if form.startswith("Keras"):
        model = build_model(options, keras_layers=True, jit_compile=xla)
        batch_size = options.global_batch_size
        model.fit(x, y, batch_size=batch_size, epochs=ENDLESS, verbose=0, callbacks=clock)
    elif form.startswith("Trainer"):
        trainer = tfdist.Trainer(
            lambda: build_model(options),
            strategy="one_device",
            step_options=tfdist.StepOptions(jit_compile=xla),
        )
        batch_size = options.global_batch_size
        trainer.fit(x, y, batch_size=batch_size, epochs=ENDLESS, verbose=0, callbacks=clock)
    else:
        turns, losses = Turns(lambda: losses[-1].numpy()), []

        def end_step(loss: Any) -> None:
            losses[:] = [loss]
            turns.end_steps()

        turns.begin()
        run_loop(options, (x, y), None, end_step)


def run_python(arguments: list[str], *, limit_s: float, log: Path | None = None) -> StepResult:
    """Runs an interpreter, and returns the end of its output; ends it with all its children."""
    command = [sys.executable, *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = None
    try:
        text, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        late = error
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
    if log is not None:
        log.write_text(text)
    if late is not None:
        raise subprocess.TimeoutExpired(command, limit_s, text)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, text)
    return {"output": text[-4000:]}


def run_module(command: str, limit_s: float, *, log: Path | None = None) -> StepResult:
    """Runs a module, and returns the end of its output."""
    return run_python(["-m", *shlex.split(command)], limit_s=limit_s, log=log)


def train(output: Path, flags: str, limit_s: float = 150) -> StepResult:
    """Trains eight steps, and returns the run's summary."""
    run_dir = output / f"run-{time.time_ns()}"
    strategy = "" if "--strategy" in flags else "--strategy=one_device"
    run_module(
        f"tfdist.train {strategy} --train_examples=256 --val_examples=32 "
        f"--max_steps=8 --quiet {flags} --run_dir={shlex.quote(str(run_dir))}",
        limit_s,
    )
    summary: StepResult = json.loads((run_dir / "summary.json").read_text())
    return summary


def compare_runs(output: Path, flags: list[str], *, key: str) -> StepResult:
    """Trains once for each set of flags, and compares an entry of the summaries."""
    summaries = [train(output, own) for own in flags]
    found = [summary[key] for summary in summaries]
    first = found[0]
    if isinstance(first, float):
        assert all(abs(value / first - 1) < EQUAL_LOSS for value in found), found
    else:
        assert all(value == first for value in found), found
    return {
        key: found,
        "examples_per_second": [summary["examples_per_second"] for summary in summaries],
    }


def compare_limits(output: Path, flags: str, placements: list[str]) -> StepResult:
    """Trains what one device of limited memory refuses, on four such devices."""
    split = f"{flags} --virtual_devices={PARTS} --train_examples=8 --val_examples=8"
    try:
        train(output, split)
    except subprocess.CalledProcessError as error:
        refusal = error.output.strip().splitlines()[-1]
        assert "memory" in refusal, refusal
    else:
        raise AssertionError("one device trains it")
    found: StepResult = {"one device": refusal}
    for placement in placements:
        summary = train(output, f"{split} --placement={placement} --mesh=data:1,model:4")
        found[placement] = {
            key: summary.get(key)
            for key in ("loss", "peak_memory_bytes_per_device", "examples_per_second")
        }
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["take_turns"]:
        take_turns(sys.argv[2], json.loads(sys.argv[3]))
    else:
        sys.exit(main())
