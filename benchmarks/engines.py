"""Compares tfdist with Keras on TensorFlow, JAX and PyTorch: speed, and what two devices change.

    python3 -m venv build/engines
    build/engines/bin/pip install keras==3.15.1 "jax[cpu]" -r benchmarks/requirements-pytorch.txt
    python -m benchmarks.engines --python=build/engines/bin/python [--rounds=3] [--models=mlp,lstm]

Every engine trains the same models by `fit` on arrays, on one device and on two virtual devices of
the CPU, in each form that it has: with and without compilation by XLA or PyTorch, several steps a
call, and tfdist's fused layers. Processes prepare together and are measured in turns; the fastest
form counts, and the table names it. Keras has no data parallelism of its own on PyTorch.

What two devices change is measured apart: the largest difference of the weights from those of the
same engine on one device, relative to the largest weight, after two epochs of SGD with momentum in
float64, with a last batch that two devices cannot share equally. The exit status is 1 if that of
tfdist is above 1e-9.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.turns import Contestant, hold_contest, make_callback
from benchmarks.users_models import BODIES, Workload, make_inputs

TOLERANCE = 1e-9
TIMEOUT_S = 900


MODELS = {  # two epochs are a turn; forms of several steps a call are left out if `loop` is 1
    "unet": Workload((64, 64, 3), steps=8, batch_size=16),
    "resnet50": Workload((64, 64, 3), steps=4, batch_size=16),
    "transformer": Workload((80,), steps=20, loop=10, kind="tokens"),
    "lstm": Workload((80,), steps=20, loop=10, kind="tokens"),
    "mlp": Workload((784,), steps=400, loop=50),
}

# Of SGD, where weights are compared. At 0.01, a ResNet-50 turns one last bit of one pixel into a
# difference of 1e-6 within eight steps, and one that comes later into more.
RATES = {"resnet50": 1e-4}


class Way(NamedTuple):
    """How a model is trained.

    Attributes:
      engine, devices: what a column of the table is.
      form: one of those of which the fastest counts.
    """

    engine: str
    devices: int
    form: str = "plain"

    @property
    def backend(self) -> str:
        return {"tfdist": "tensorflow"}.get(self.engine, self.engine)


FORMS = {
    "tensorflow": ("plain", "XLA", "loop", "XLA loop"),
    "jax": ("plain", "loop"),  # XLA compiles both
    "torch": ("plain", "compiled"),
    "tfdist": ("plain", "XLA", "loop", "XLA loop", "fused_layers"),
}
COLUMNS = [
    (engine, devices) for engine in FORMS for devices in (1, 2) if (engine, devices) != ("torch", 2)
]
_NAMES = {"tensorflow": "Keras, TensorFlow", "jax": "Keras, JAX", "torch": "Keras, PyTorch"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", required=True, help="the interpreter with JAX and PyTorch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        return train(json.loads(flags.child))
    from tfdist.launch.machine import describe_machine

    names = flags.models.split(",")
    rates = {name: measure(name, flags.python, flags.rounds) for name in names}
    changes = {name: compare(name, flags.python) for name in names}
    print(f"\n{describe_machine()}, examples/s, medians of {flags.rounds} turns\n")
    titles = [f"{_NAMES.get(engine, engine)}, {devices}" for engine, devices in COLUMNS]
    print(f"| | {' | '.join(titles)} |", "|---" * (1 + len(COLUMNS)) + "|", sep="\n")
    for name in names:
        print(f"| {name} | {' | '.join(_show_rates(rates[name]))} |")
    pairs = [engine for engine, devices in COLUMNS if devices == 2]
    print(f"\n| two devices | {' | '.join(_NAMES.get(engine, engine) for engine in pairs)} |")
    print("|---" * (1 + len(pairs)) + "|")
    for name in names:
        print(f"| {name} | {' | '.join(_show(changes[name][engine]) for engine in pairs)} |")
    own = [changes[name]["tfdist"] for name in names]
    return int(not all(isinstance(change, float) and change < TOLERANCE for change in own))


def measure(name: str, python: str, rounds: int) -> dict[tuple[str, int], dict[str, float]]:
    """Returns the examples per second of a model: (engine, devices) -> form -> examples/s."""
    ways = [
        Way(engine, devices, form)
        for engine, devices in COLUMNS
        for form in FORMS[engine]
        if MODELS[name].loop > 1 or "loop" not in form
    ]
    contestants = {
        " ".join(map(str, way)): Contestant(_make_command(way, name, python, "")) for way in ways
    }
    found = hold_contest(contestants, rounds=rounds, limit_s=TIMEOUT_S)
    rates: dict[tuple[str, int], dict[str, float]] = {column: {} for column in COLUMNS}
    for way, finding in zip(ways, found.values(), strict=True):
        if "error" not in finding:
            rate = MODELS[name].batch_size * 1000 / finding["ms_per_step"]
            rates[way.engine, way.devices][way.form] = rate
    return rates


def compare(name: str, python: str) -> dict[str, float | str]:
    """Returns what two devices change, by engine: a difference, or the error in their place."""
    changes: dict[str, float | str] = {}
    for engine in [engine for engine, devices in COLUMNS if devices == 2]:
        try:
            alone, together = (_find_weights(Way(engine, n), name, python) for n in (1, 2))
        except subprocess.CalledProcessError as error:
            print(name, engine, error.stderr[-1500:], file=sys.stderr)
            changes[engine] = "fails"
            continue
        largest = max(abs(weight).max() for weight in alone)
        differences = [abs(a - b).max() for a, b in zip(alone, together, strict=True)]
        changes[engine] = float(max(differences) / largest)
        print(name, engine, changes[engine], file=sys.stderr, flush=True)
    return changes


def _find_weights(way: Way, name: str, python: str) -> list[Any]:
    import numpy as np

    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "weights.npz")
        command = _make_command(way, name, python, path)
        subprocess.run(command, check=True, timeout=TIMEOUT_S, capture_output=True, text=True)
        return list(np.load(path).values())


def _make_command(way: Way, name: str, python: str, output: str) -> Sequence[str]:
    """Returns the command of a child; it compares in float64 if it has a file for its weights."""
    child = json.dumps({"model": name, "way": way, "output": output})
    environment = {
        "KERAS_BACKEND": way.backend,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "JAX_ENABLE_X64": str(int(bool(output))),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={way.devices}"
        if way.engine == "jax"
        else "",
        # Two devices of few cores wait for each other for ever otherwise, and XLA aborts.
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false" if way.devices > 1 else "",
    }
    interpreter = sys.executable if way.backend == "tensorflow" else python
    variables = [f"{key}={value}" for key, value in environment.items() if value]
    arguments = ["-m", "benchmarks.engines", "--python=", f"--child={child}"]
    return ["env", *variables, interpreter, *arguments]


def train(child: dict[str, Any]) -> int:
    """Trains in turns, or writes the weights of two epochs."""
    import keras
    import numpy as np

    name, way, output = child["model"], Way(*child["way"]), child["output"]
    model = MODELS[name]
    if output:
        keras.config.set_floatx("float64")
    batch_size = 8 if output else model.batch_size
    count = 3 * batch_size + 5 if output else model.steps * batch_size
    rng = np.random.default_rng(0)
    x = make_inputs(model, count, rng, keras.config.floatx())
    y = rng.integers(0, 10, (count, *(model.shape[:-1] if name == "unet" else ())))
    fit, trained = _prepare(name, way, is_exact=bool(output))
    data = {"x": x, "y": y, "batch_size": batch_size, "shuffle": False, "verbose": 0}
    if not output:
        turns = make_callback(warmup=1, steps=2 * model.steps)
        fit(**data, epochs=10**6, callbacks=[turns])
    fit(**data, epochs=2)
    np.savez(output, *(np.asarray(w, "float64") for w in trained().get_weights()))
    return 0


def _prepare(name: str, way: Way, *, is_exact: bool) -> tuple[Any, Any]:
    """Returns the `fit` of a way, and a function that returns the model."""
    import keras

    def build() -> Any:
        return _build(name, way, is_exact=is_exact)

    if way.engine == "tfdist":
        import tfdist

        tfdist.set_virtual_devices(way.devices)
        options = tfdist.StepOptions(
            fused_layers=way.form == "fused_layers",
            steps_per_loop=MODELS[name].loop if "loop" in way.form else 1,
        )
        strategy = "mirrored" if way.devices > 1 else "one_device"
        trainer = tfdist.Trainer(build, strategy=strategy, step_options=options)
        return trainer.fit, lambda: trainer.model
    if way.devices > 1 and way.engine == "jax":
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    if way.devices > 1 and way.engine == "tensorflow":
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        parts = [tf.config.LogicalDeviceConfiguration()] * way.devices
        tf.config.set_logical_device_configuration(cpu, parts)
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            model = build()
    else:
        model = build()
    return model.fit, lambda: model


def _build(name: str, way: Way, *, is_exact: bool) -> Any:
    import keras
    import numpy as np

    model = MODELS[name]
    kind = "int32" if model.kind == "tokens" else keras.config.floatx()
    inputs = keras.Input(model.shape, dtype=kind)
    outputs = (_make_unet if name == "unet" else _add_classes)(keras, inputs, name)
    network = keras.Model(inputs, outputs)
    rng = np.random.default_rng(1)
    network.set_weights(  # the same on every engine
        [
            rng.normal(size=w.shape) * np.sqrt(2 / np.prod(w.shape[:-1])) if w.ndim > 1 else w
            for w in network.get_weights()
        ]
    )
    network.compile(
        keras.optimizers.SGD(RATES.get(name, 0.01), momentum=0.9) if is_exact else "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=True if way.form.startswith(("XLA", "compiled")) else "auto",
        steps_per_execution=model.loop if "loop" in way.form and way.engine != "tfdist" else 1,
    )
    return network


def _add_classes(keras: Any, x: Any, name: str) -> Any:
    if name == "resnet50":
        network = keras.applications.ResNet50(
            include_top=False, weights=None, input_shape=x.shape[1:], pooling="avg"
        )
        return keras.layers.Dense(10)(network(x))
    return keras.layers.Dense(10)(BODIES[name](keras, x))


def _make_unet(keras: Any, x: Any, _: str) -> Any:
    layers = keras.layers

    def convolve(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        return x

    kept = []
    for filters in (16, 32, 64):
        x = convolve(x, filters)
        kept.append(x)
        x = layers.MaxPooling2D()(x)
    x = convolve(x, 128)
    for filters in (64, 32, 16):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = convolve(layers.Concatenate()([x, kept.pop()]), filters)
    return layers.Conv2D(10, 1)(x)


def _show_rates(rates: dict[tuple[str, int], dict[str, float]]) -> list[str]:
    """Returns a cell for each column: the fastest form, and its ratio to Keras on TensorFlow."""
    base = max(rates["tensorflow", 1].values(), default=0.0)
    cells = []
    for column in COLUMNS:
        if not rates[column]:
            cells.append("fails")
            continue
        form, rate = max(rates[column].items(), key=lambda item: item[1])
        ratio = f", {rate / base:.2f}" if base else ""
        cells.append(f"{rate:.4g}{ratio}{'' if form == 'plain' else f' ({form})'}")
    return cells


def _show(change: float | str) -> str:
    return change if isinstance(change, str) else f"{change:.0e}"


if __name__ == "__main__":
    sys.exit(main())
