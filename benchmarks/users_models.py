"""Compares `Trainer.fit` with Keras's own `fit` on models that users write.

    python -m benchmarks.users_models [--rounds=3] [--models=mlp,lstm]

Every measurement is a process of its own, and a round measures every form of every model. Prints
a Markdown table with the medians of the steps per second, 0 for forms that are not measured, and
their ratio to Keras's faster `fit`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tfdist.benchmark.runs import median_of
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.launch.call import call_in_cluster
from tfdist.launch.machine import describe_machine


class Workload(NamedTuple):
    """A model and its data.

    Attributes:
      shape, kind: of an example; `tokens` are integers below 1000.
      steps: the steps of an epoch.
      batch_size: examples per step.
      loop: steps per call of the compiled function.
      is_dataset: whether the data come as a `tf.data.Dataset` rather than as arrays.
      option: the option of `StepOptions` that makes its steps faster; none if empty.
      xla: whether both are measured under XLA, too, which is far slower for convolutions.
    """

    shape: tuple[int, ...]
    steps: int
    batch_size: int = 32
    kind: str = "float32"
    loop: int = 1
    is_dataset: bool = False
    option: str = ""
    xla: bool = True


WORKLOADS = {
    "mlp": Workload((784,), 1000),
    "mlp dataset": Workload((784,), 1000, is_dataset=True),
    "mlp loop": Workload((784,), 1000, loop=50),
    "mlp dataset loop": Workload((784,), 1000, loop=50, is_dataset=True),
    "cnn": Workload((28, 28, 1), 100, xla=False),
    "lstm": Workload((80,), 100, kind="tokens", option="fused_layers"),
    "transformer": Workload((80,), 50, kind="tokens", option="jit_compile"),
    "mobilenet": Workload((96, 96, 3), 15, batch_size=16, option="fused_layers", xla=False),
}
EPOCHS = 5  # of the measured call of `fit`, after a call that compiles
FORMS = ("keras", "keras_xla", "trainer", "trainer_xla", "option", "mirrored")
# `compile(jit_compile=)` is "auto" in the others: Keras uses XLA on GPUs, and not on CPUs.
XLA = {"keras_xla": True, "trainer_xla": True, "keras_no_xla": False, "trainer_no_xla": False}
TIMEOUT_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", default=",".join(WORKLOADS))
    flags = parser.parse_args()
    names = flags.models.split(",")
    cases = [(name, form) for name in names for form in FORMS if _has(WORKLOADS[name], form)]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {case: [] for case in cases}
    command = [sys.executable, "-m", "benchmarks.users_models", "measure"]
    for number in range(flags.rounds):
        for name, form in cases[:: 1 if number % 2 == 0 else -1]:
            finding = call_in_cluster({"name": name, "form": form}, command, timeout_s=TIMEOUT_S)
            found[name, form].append(finding)
            print(name, form, finding, sep="; ", file=sys.stderr, flush=True)
            if "error" in finding:
                return 1
    print(f"{describe_machine()}, steps/s, medians of {flags.rounds} rounds\n")
    names_of_forms = ("`Trainer`", "`Trainer`, XLA", "option", "mirrored")
    print(f"| | `fit` | `fit`, XLA | {' | ratio | '.join(names_of_forms)} | ratio |")
    print("|---" * (1 + 2 + 2 * len(names_of_forms)) + "|")
    for name in names:
        rounds = {form: found.get((name, form), []) for form in FORMS}
        rates = {form: median_of(rounds[form], "steps_per_s") or 0.0 for form in FORMS}
        fastest = max(rates["keras"], rates["keras_xla"])
        cells = [f"{rates[form]:.4g}" for form in FORMS[:2]]
        cells += [f"{rates[form]:.4g} | {rates[form] / fastest:.2f}" for form in FORMS[2:]]
        print(f"| {name} | {' | '.join(cells)} |")
    return 0


def _has(workload: Workload, form: str) -> bool:
    xla = {"keras_xla": workload.xla, "trainer_xla": workload.xla}
    return {**xla, "option": bool(workload.option)}.get(form, True)


def measure(directory: str) -> int:
    """Measures one form of a workload, which `task.json` names."""
    task = json.loads((Path(directory) / "task.json").read_text())
    start_tensorflow_quietly()
    fit, data = make_fit(**task)
    fit(**data, epochs=1, verbose=0)
    began = time.perf_counter()
    fit(**data, epochs=EPOCHS, verbose=0)
    steps = EPOCHS * WORKLOADS[task["name"]].steps
    found = {"steps_per_s": steps / (time.perf_counter() - began)}
    (Path(directory) / "result.json").write_text(json.dumps(found))
    return 0


def make_inputs(workload: Workload, count: int, rng: Any, dtype: str = "float32") -> Any:
    """Returns the inputs of some examples; `dtype` is of those that are no tokens."""
    if workload.kind == "tokens":
        return rng.integers(0, 1000, (count, *workload.shape)).astype("int32")
    return rng.normal(size=(count, *workload.shape)).astype(dtype)


def make_fit(name: str, form: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the `fit` of one form of a workload, and its data."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    workload = WORKLOADS[name]
    if form == "mirrored":
        tfdist.set_virtual_devices(2)
    num_examples = workload.steps * workload.batch_size
    rng = np.random.default_rng(0)
    x = make_inputs(workload, num_examples, rng)
    y = rng.integers(0, 10, num_examples)
    data: dict[str, Any] = {"x": x, "y": y, "batch_size": workload.batch_size}
    if workload.is_dataset:
        slices = tf.data.Dataset.from_tensor_slices((x, y))
        data = {"x": slices.batch(workload.batch_size).prefetch(2)}

    def build(steps_per_execution: int = 1) -> Any:
        keras.utils.set_random_seed(0)
        inputs = keras.Input(workload.shape, dtype=x.dtype.name)
        outputs = keras.layers.Dense(10)(BODIES[name.partition(" ")[0]](keras, inputs))
        model = keras.Model(inputs, outputs)
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=steps_per_execution,
            jit_compile=XLA.get(form, "auto"),
        )
        return model

    if form.startswith("keras"):
        return build(workload.loop).fit, data
    strategy = "mirrored" if form == "mirrored" else "one_device"
    chosen = {workload.option: True} if form == "option" else {}
    options = tfdist.StepOptions(steps_per_loop=workload.loop, **chosen)
    return tfdist.Trainer(build, strategy=strategy, step_options=options).fit, data


def _make_mlp(keras: Any, x: Any) -> Any:
    return keras.layers.Dense(64, "relu")(x)


def _make_cnn(keras: Any, x: Any) -> Any:
    for filters in (16, 32):
        x = keras.layers.Conv2D(filters, 3, activation="relu")(x)
        x = keras.layers.MaxPooling2D()(x)
    return keras.layers.Dropout(0.5)(keras.layers.Flatten()(x))


def _make_lstm(keras: Any, x: Any) -> Any:
    return keras.layers.LSTM(32)(keras.layers.Embedding(1000, 32)(x))


def _make_transformer(keras: Any, x: Any) -> Any:
    x = keras.layers.Embedding(1000, 64)(x)
    for _ in range(2):
        attended = keras.layers.MultiHeadAttention(4, 16)(x, x)
        x = keras.layers.LayerNormalization()(x + attended)
        hidden = keras.layers.Dense(128, "relu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(64)(hidden))
    return keras.layers.GlobalAveragePooling1D()(x)


def _make_mobilenet(keras: Any, x: Any) -> Any:
    network = keras.applications.MobileNetV2(
        include_top=False, weights=None, input_shape=x.shape[1:], pooling="avg"
    )
    return network(x)


BODIES: dict[str, Callable[[Any, Any], Any]] = {
    "mlp": _make_mlp,
    "cnn": _make_cnn,
    "lstm": _make_lstm,
    "transformer": _make_transformer,
    "mobilenet": _make_mobilenet,
}

if __name__ == "__main__":
    sys.exit(measure(sys.argv[2]) if sys.argv[1:2] == ["measure"] else main())
