"""Compares `--placement=shards` with Keras's own model parallelism, which requires JAX.

    python3 -m venv build/jax && build/jax/bin/pip install keras==3.15.1 "jax[cpu]"
    python -m benchmarks.against_jax --python=build/jax/bin/python

Both train the same models on two devices, from the same weights, with the same layout: Keras on JAX
under `keras.distribution.ModelParallel`, tfdist on TensorFlow. Prints the largest difference of the
weights after 20 steps of SGD with momentum; the exit status is 1 if one is above 1e-6. Models are
in float64, but Keras computes many operations in float32 unless its backend is TensorFlow
(`result_type` in keras/src/backend/common/dtypes.py), which Adam would amplify.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS, BATCH_SIZE, DEVICES = 20, 12, 2
TOLERANCE = 1e-6  # relative to the largest weight
# Model -> the patterns of the weights' paths, and the axis that is divided.
LAYOUTS = {
    "dense": {".*hidden.*kernel": 1},
    "convolutional": {".*conv.*kernel": 3},
    "transformer": {".*table.*embeddings": 1, ".*(query|key|value)/kernel": 1, ".*wide/kernel": 1},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="the interpreter with JAX")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        train(flags.child)
        return 0
    worst = 0.0
    for name in LAYOUTS:
        difference = compare(name, flags.python)
        print(f"{name:<14} {difference:.1e}", flush=True)
        worst = max(worst, difference)
    return int(worst > TOLERANCE)


def compare(name: str, python: str) -> float:
    """Returns the largest difference of the weights, relative to the largest weight."""
    import numpy as np

    found = []
    for backend, interpreter in (("jax", python), ("tensorflow", sys.executable)):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "weights.npz"
            environment = {
                **os.environ,
                "KERAS_BACKEND": backend,
                "JAX_ENABLE_X64": "1",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
                "TF_CPP_MIN_LOG_LEVEL": "2",
            }
            child = json.dumps({"model": name, "output": str(path)})
            command = [interpreter, __file__, f"--child={child}"]
            subprocess.run(command, env=environment, check=True, timeout=300)
            found.append(list(np.load(path).values()))
    ours, theirs = found[1], found[0]
    largest = max(np.abs(weight).max() for weight in theirs)
    return float(max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) / largest)


def train(child: str) -> None:
    """Trains a model, divided, on this interpreter's backend, and writes its weights."""
    import keras
    import numpy as np

    given = json.loads(child)
    name = given["model"]
    keras.config.set_dtype_policy("float64")
    keras.config.set_floatx("float64")
    rng = np.random.default_rng(0)
    x, y = make_data(name, rng)
    if keras.backend.backend() == "jax":
        mesh = keras.distribution.DeviceMesh((1, DEVICES), ("batch", "model"))
        layout = keras.distribution.LayoutMap(mesh)
        for pattern, axis in LAYOUTS[name].items():
            layout[pattern] = tuple("model" if a == axis else None for a in range(axis + 1))
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
        )
        model = build(name)
        model.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
        divided = [w for w in model.weights if not w.value.sharding.is_fully_replicated]
    else:
        import tfdist
        from tfdist.placement.shards.divided import find_divided

        tfdist.set_virtual_devices(DEVICES)
        patterns = tuple(f"{pattern}:{axis}" for pattern, axis in LAYOUTS[name].items())
        placement = tfdist.placement.Shards(layout=patterns)
        trainer = tfdist.Trainer(lambda: build(name), strategy="one_device", placement=placement)
        trainer.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
        model = trainer.model
        divided = [w for w in model.weights if find_divided(w) is not None]
    assert divided
    np.savez(given["output"], *(np.asarray(w) for w in model.get_weights()))


def make_data(name, rng):
    """Returns x and y for 20 steps."""
    rows = STEPS * BATCH_SIZE
    if name == "transformer":
        return rng.integers(0, 30, (rows, 8)), rng.integers(0, 30, (rows, 8))
    shape = {"dense": (12,), "convolutional": (12, 12, 3)}[name]
    return rng.normal(size=(rows, *shape)), rng.integers(0, 4, rows)


def build(name):
    """Returns the compiled model; the same weights on every backend."""
    import keras
    import numpy as np
    from keras import layers

    if name == "dense":
        inputs = keras.Input((12,))
        x = layers.Dense(16, "relu", name="hidden_1")(inputs)
        outputs = layers.Dense(4)(layers.Dense(10, "relu", name="hidden_2")(x))
    elif name == "convolutional":
        inputs = keras.Input((12, 12, 3))
        x = layers.Conv2D(8, 3, padding="same", activation="relu", name="conv_1")(inputs)
        x = layers.BatchNormalization()(layers.Conv2D(12, 3, strides=2, name="conv_2")(x))
        outputs = layers.Dense(4)(layers.GlobalAveragePooling2D()(layers.ReLU()(x)))
    else:
        inputs = keras.Input((8,), dtype="int32")
        x = layers.Embedding(30, 16, name="table")(inputs)
        # Attention of two heads, of whose projections the units are divided.
        query, key, value = (
            layers.Dense(16, use_bias=False, name=part)(x) for part in ("query", "key", "value")
        )
        x = x + layers.Attention(use_scale=False)([query, value, key])
        x = x + layers.Dense(16)(layers.Dense(32, "relu", name="wide")(x))
        outputs = layers.Dense(30)(x)
    model = keras.Model(inputs, outputs)
    rng = np.random.default_rng(1)
    model.set_weights(
        [
            0.3 * rng.normal(size=weight.shape)
            if "kernel" in v.path or "embed" in v.path
            else np.asarray(weight)
            for v, weight in zip(model.weights, model.get_weights(), strict=True)
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True), loss)
    return model


if __name__ == "__main__":
    sys.exit(main())
