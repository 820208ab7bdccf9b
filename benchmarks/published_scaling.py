"""Predicts published scaling from the published rows of one GPU, and prints both.

    python -m benchmarks.published_scaling

A model's layers come from Keras, the speed of one GPU from the first row of each table, and
hardware from data sheets. What holds for all tables is stated in `tfdist.plan.hardware`. Two
numbers were fitted, to that half of the tables of `published_rows.toml` that is for fitting: the
time to start an exchange, and the time of an augmentation. Needs a minute, and no GPU.
"""

import collections
import dataclasses
import functools
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.plan.collectives import find_exposed, make_path, time_all_reduce, time_servers
from tfdist.plan.communicate import list_ready
from tfdist.plan.compute import time_layers, time_pipeline
from tfdist.plan.estimate import estimate
from tfdist.plan.hardware import Hardware, Link, Measured, load_hardware
from tfdist.plan.setup import Setup
from tfdist.plan.workload import Layer, Workload

TENSORFLOW = "tensorflow.org/performance/benchmarks, 2017"
HOROVOD = "horovod, docs/benchmarks.rst"
TORCHGPIPE = "torchgpipe 0.0.5, benchmarks/unet-speed"
NVIDIA = "NVIDIA DeepLearningExamples, UNet_Medical (TensorFlow 2)"
ROWS = Path(__file__).with_name("published_rows.toml")

DECODE_CORE_S = 0.0025
"""The seconds in which a core reads, decodes, crops and resizes a JPEG of 500x375 pixels.

Assumed for processors of 2016 to 2020; TensorFlow's operations took 1.85 ms of a newer core (AMD
EPYC, processor time, 114 kB per JPEG).
"""

AUGMENT_CORE_S = 97e-9
"""The seconds in which a core applies an operation to a pixel; fitted, see above."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published number and its prediction, both relative to one GPU.

    Attributes:
      source, what, devices: which number it is.
      published, predicted: the throughput in that of one GPU.
      half: of NVIDIA's tables: `fit` or `validation`.
    """

    source: str
    what: str
    devices: int
    published: float
    predicted: float
    half: str = ""

    @property
    def error(self) -> float:
        """The prediction's error, relative to what was published."""
        return self.predicted / self.published - 1


# Model -> batch per GPU, and GPUs -> images/s. InceptionV3 and the ResNets had their variables on
# the host, the others used NCCL.
DGX1 = {
    "InceptionV3": (64, {1: 142, 2: 284, 4: 569, 8: 1131}),
    "ResNet50": (64, {1: 219, 2: 422, 4: 852, 8: 1734}),
    "ResNet152": (64, {1: 91.8, 2: 181, 4: 356, 8: 716}),
    "VGG16": (64, {1: 154, 2: 295, 4: 584, 8: 1081}),
    "AlexNet": (512, {1: 2987, 2: 5658, 4: 10509, 8: 17822}),
}
# The same, with the parameter servers of the largest row.
EC2 = {
    "InceptionV3": (64, {1: 29.7, 8: 229, 16: 459, 32: 902, 64: 1783}, 6),
    "ResNet50": (64, {1: 52.4, 8: 378, 16: 751, 32: 1388, 64: 2744}, 8),
    "ResNet152": (32, {1: 19.4, 8: 146, 16: 291, 32: 565, 64: 981}, 4),
}
# Model -> the efficiency on 512 GPUs. One GPU is as fast as in DGX1's table; ResNet-101's speed is
# between those of the other ResNets, by operations.
HOROVOD_512 = {"InceptionV3": 0.90, "ResNet101": 0.90, "VGG16": 0.68}
# Stages -> batch, micro-batches, modules of each stage, samples/s. 28.5 without GPipe.
GPIPE = {
    1: (80, 2, (241,), 24.456),
    2: (512, 32, (104, 137), 35.502),
    4: (512, 16, (30, 66, 84, 61), 67.042),
    8: (640, 40, (16, 27, 31, 44, 22, 57, 27, 17), 88.497),
}
GPIPE_ALONE = 28.5
# Precision -> images/s of one and of eight A100, 8 images each.
A100 = {"float32": (46.26, 293.64), "mixed_float16": (118.98, 561.77)}


def main() -> int:
    start_tensorflow_quietly()
    rows = [
        *predict_dgx1(),
        *predict_ec2(),
        *predict_horovod(),
        *predict_gpipe(),
        *predict_a100(),
    ]
    print("| source | what | GPUs | published | predicted | error |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.source} | {row.what} | {row.devices} | {row.published:.3g} | "
            f"{row.predicted:.3g} | {row.error:+.1%} |"
        )
    print(f"\n{summarize(rows)}.\n")
    print("| NVIDIA's tables | half | rows within 15 % | median error | bias |")
    print("|---|---|---|---|---|")
    rows = list(predict_nvidia())
    for source in dict.fromkeys(row.source for row in rows):
        own = [row for row in rows if row.source == source]
        print(f"| {source} | {own[0].half} | {summarize(own, between=' | ')} |")
    for half in ("fit", "validation"):
        own = [row for row in rows if row.half == half]
        print(f"| all | {half} | {summarize(own, between=' | ')} |")
    print()
    print("| one GPU, by its data sheet | published, images/s | predicted, of it |")
    print("|---|---|---|")
    for title, rate, share in predict_alone():
        print(f"| {title} | {rate:g} | {share:.2f} |")
    return 0


def summarize(rows: Sequence[Row], *, between: str = ", ") -> str:
    """Returns how many rows are within 15 %, their median error, and their mean error."""
    errors = [row.error for row in rows]
    within = sum(abs(error) <= 0.15 for error in errors)
    middle, bias = statistics.median(map(abs, errors)), statistics.mean(errors)
    texts = (f"{within} of {len(rows)} within 15 %", f"median {middle:.1%}", f"bias {bias:+.1%}")
    return between.join(texts)


def predict_alone() -> Iterator[tuple[str, float, float]]:
    """Yields what one GPU computes, its published speed, and the share of it that is predicted.

    Here, nothing is known of the GPU but its data sheet.
    """
    cases = [("p100", name, batch, rates[1]) for name, (batch, rates) in DGX1.items()]
    cases += [("k80", name, batch, rates[1]) for name, (batch, rates, _) in EC2.items()]
    cases.append(("a100", "U-Net", 8, A100["float32"][0]))
    for kind, name, batch, rate in cases:
        workload = Workload(layers=_make_layers(name), global_batch_size=batch)
        seconds = sum(time_layers(workload, load_hardware(kind), batch))
        yield f"{name}, {kind.upper()}", rate, batch / seconds / rate
    workload = Workload(layers=make_gpipe_unet(), global_batch_size=40)
    seconds = sum(time_layers(workload, load_hardware("p40"), 40))
    yield "torchgpipe's U-Net, P40", GPIPE_ALONE, 40 / seconds / GPIPE_ALONE


def predict_dgx1() -> Iterator[Row]:
    """Yields the rows of one DGX-1 with P100: all-reduce over NVLink."""
    hardware = load_hardware("p100")
    for name, (batch, rates) in DGX1.items():
        for count in list(rates)[1:]:
            setup = Setup(strategy="multi_worker_mirrored", replicas=count)
            workload, measured = _prepare(name, batch, rates[1], hardware)
            yield Row(
                source=f"{TENSORFLOW}, DGX-1 (P100)",
                what=name,
                devices=count,
                published=rates[count] / rates[1],
                predicted=predict(setup, workload, measured),
            )


def predict_ec2() -> Iterator[Row]:
    """Yields the rows of p2.8xlarge: sums inside of a machine, parameter servers between them."""
    hardware = load_hardware("k80")
    for name, (batch, rates, servers) in EC2.items():
        for count in list(rates)[1:]:
            machines = count // 8
            used = min(servers, machines)
            inside = make_path(hardware, hardware.inside)
            between = make_path(hardware, hardware.between)

            def send(size: float, n: int = machines, s: int = used) -> float:
                time = time_all_reduce(8, size, inside)  # noqa: B023
                # A server shares its machine's link with the worker there.
                return time + (time_servers(n, s, size, between) if n > 1 else 0.0)  # noqa: B023

            setup = Setup(strategy="multi_worker_mirrored", workers=machines, replicas=8)
            workload, measured = _prepare(name, batch, rates[1], hardware)
            yield Row(
                source=f"{TENSORFLOW}, p2.8xlarge (K80)",
                what=name,
                devices=count,
                published=rates[count] / rates[1],
                predicted=predict(setup, workload, measured, send=send),
            )


def predict_horovod() -> Iterator[Row]:
    """Yields the rows of 128 machines of 4 P100 with 25 Gbit/s: a ring."""
    hardware = dataclasses.replace(load_hardware("p100"), between=Link(25e9 / 8, 10e-6))
    for name, efficiency in HOROVOD_512.items():
        setup = Setup(strategy="multi_worker_mirrored", workers=128, replicas=4)
        rate = DGX1[name][1][1] if name in DGX1 else _interpolate_resnet101()
        workload, measured = _prepare(name, 64, rate, hardware)
        yield Row(
            source=HOROVOD,
            what=name,
            devices=512,
            published=512 * efficiency,
            predicted=predict(setup, workload, measured),
        )


def predict_gpipe() -> Iterator[Row]:
    """Yields the rows of a pipeline on P40, with the published cuts; it recomputes activations.

    The last micro-batch is not recomputed.
    """
    hardware = load_hardware("p40")
    layers = make_gpipe_unet()
    for stages, (batch, count, modules, rate) in GPIPE.items():
        workload = Workload(layers=layers, global_batch_size=batch)
        times = time_layers(workload, hardware, batch / count)
        # One GPU without a pipeline, 40 images at a time, is as published.
        alone = time_layers(workload, hardware, 40)
        scale = 40 / GPIPE_ALONE / sum(alone)
        recomputed = 1 + (count - 1) / count / 3
        ends = [sum(modules[: i + 1]) for i in range(len(modules))]
        cuts = list(zip([0, *ends[:-1]], ends, strict=True))
        seconds = time_pipeline([scale * recomputed * sum(times[a:b]) for a, b in cuts], count)
        yield Row(
            source=f"{TORCHGPIPE} (P40)",
            what=f"U-Net (5, 64), {count} micro-batches",
            devices=stages,
            published=rate / GPIPE_ALONE,
            predicted=batch / seconds / GPIPE_ALONE,
        )


def predict_a100() -> Iterator[Row]:
    """Yields the rows of a U-Net on 8 A100."""
    setup = Setup(strategy="multi_worker_mirrored", replicas=8)
    for precision, (one, eight) in A100.items():
        hardware = load_hardware("a100")
        workload, measured = _prepare("U-Net", 8, one, hardware)
        yield Row(
            source=f"{NVIDIA}, 8 A100",
            what=f"U-Net, {precision}",
            devices=8,
            published=eight / one,
            predicted=predict(setup, workload, measured),
        )


def predict_nvidia() -> Iterator[Row]:
    """Yields the rows of NVIDIA's tables, which have input from processors and several machines."""
    found = tomllib.loads(ROWS.read_text())
    for table in found["tables"]:
        size = table.get("size", 0)
        pixel_s = AUGMENT_CORE_S * table.get("operations", 0)
        core_s = DECODE_CORE_S + pixel_s * size**2 if size else 0.0
        for given in table["rows"]:
            machine = dict(found["machines"][given["machine"]])
            hardware = load_hardware(machine.pop("hardware"))
            hardware = dataclasses.replace(hardware, **machine)
            rates = {int(count): rate for count, rate in given["rates"].items()}
            workload, measured = _prepare(
                table["model"], given["batch"], rates[1], hardware, syncs=table.get("syncs", False)
            )
            workload = dataclasses.replace(workload, example_core_s=core_s)
            for count in list(rates)[1:]:
                replicas = min(count, hardware.devices_per_machine)
                setup = Setup(
                    strategy="multi_worker_mirrored", workers=count // replicas, replicas=replicas
                )
                yield Row(
                    source=table["source"],
                    what=f"{given['machine']}, {given['precision']}, {given['batch']} images",
                    devices=count,
                    published=rates[count] / rates[1],
                    predicted=predict(setup, workload, measured),
                    half=table["half"],
                )


def predict(
    setup: Setup,
    workload: Workload,
    hardware: Hardware,
    *,
    send: Callable[[float], float] | None = None,
) -> float:
    """Returns the throughput in that of one GPU, whose batch each GPU has.

    Args:
      setup: the GPUs.
      workload: the model, and the batch of one GPU.
      hardware: has the measured speed of one GPU.
      send: bytes -> seconds of their sum, if it is not an all-reduce.
    """
    batch = workload.global_batch_size
    together = dataclasses.replace(workload, global_batch_size=batch * setup.devices)
    found = estimate(setup, together, hardware)
    seconds = found.step_s
    layers = time_layers(workload, hardware, batch)
    if send is not None:
        ready = list_ready(workload, layers)
        exposed = find_exposed(ready, send, bytes_per_pack=workload.bytes_per_pack)
        seconds += exposed - found.communication_s
    return setup.devices * sum(layers) / seconds


def make_gpipe_unet() -> tuple[Layer, ...]:
    """Returns torchgpipe's U-Net of 241 modules: depth 5, 5 convolutions, 64 channels, 192x192."""
    layers: list[Layer] = []

    def add(name: str, size: int, channels: int, flops: float = 0.0, moves: float = 2.0) -> None:
        held = 4.0 * size * size * channels
        layers.append(Layer(name=name, flops=flops, activations=held, moved=moves * held))

    def add_cell(taken: int, channels: int, last: int, size: int) -> None:
        for given in (*[channels] * 4, last):
            add("conv", size, given, 2.0 * 9 * taken * given * size * size)
            for name in ("dropout", "norm", "relu"):
                add(name, size, given)
            taken = given

    for i in range(5):
        taken = 3 if i == 0 else 64 * 2 ** (i - 1)
        add_cell(taken, 64 * 2**i, 64 * 2**i, 192 // 2**i)
        add("stash", 192 // 2**i, 64 * 2**i, moves=0.0)
        add("pool", 96 // 2**i, 64 * 2**i, moves=5.0)
    add_cell(1024, 2048, 1024, 6)
    for i in reversed(range(5)):
        size, channels = 192 // 2**i, int(64 * 2.0 ** (i - 1))
        add("up", size, 64 * 2**i)
        add("cat", size, 64 * 2 ** (i + 1))
        add_cell(64 * 2 ** (i + 1), channels, channels, size)
    add("segment", 192, 1, 2.0 * 32 * 192 * 192)
    return tuple(layers)


def _prepare(
    name: str, batch: int, rate: float, hardware: Hardware, *, syncs: bool = False
) -> tuple[Workload, Hardware]:
    """Returns a model, and hardware that computes it at a published speed on one GPU.

    Args:
      syncs: whether the GPUs normalized their batches together.
    """
    layers = _make_layers(name, syncs)
    workload = Workload(layers=layers, global_batch_size=batch)
    found = Measured(
        parameters=round(workload.weights / 4),
        flops=workload.flops,
        precision="float32",
        step_s=0.0,
        example_s=1 / rate,
    )
    # The host's time is a part of what was published of one GPU.
    return workload, dataclasses.replace(hardware, measured=(found,), host_s=0.0)


def _interpolate_resnet101() -> float:
    flops = {
        name: sum(x.flops for x in _make_layers(name))
        for name in ("ResNet50", "ResNet101", "ResNet152")
    }
    share = (flops["ResNet101"] - flops["ResNet50"]) / (flops["ResNet152"] - flops["ResNet50"])
    first, last = 1 / DGX1["ResNet50"][1][1], 1 / DGX1["ResNet152"][1][1]
    return 1 / (first + share * (last - first))


@functools.cache
def _make_layers(name: str, syncs: bool = False) -> tuple[Layer, ...]:
    import keras

    from tfdist.models import make_model
    from tfdist.plan.workload import make_layers

    if name == "AlexNet":
        model = _build_alexnet()
    elif name == "U-Net":
        model = make_model("unet", image_size=(576, 576), num_classes=2, base_filters=64, depth=4)
    elif name.endswith("ResNeXt101"):
        model = _build_resnext101(squeezes=name.startswith("SE"))
    elif name == "EfficientNetV2S":
        model = keras.applications.EfficientNetV2S(weights=None, input_shape=(300, 300, 3))
    else:
        model = getattr(keras.applications, name)(weights=None)
    layers = make_layers(model)
    norms = [place for place, layer in enumerate(layers) if layer.sums] if syncs else []
    # Horovod sums the means and the squares one after the other.
    sums = collections.Counter([*norms, *(place + 1 for place in norms)])
    return tuple(dataclasses.replace(layer, sums=sums[i]) for i, layer in enumerate(layers))


def _build_alexnet():
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((227, 227, 3)),
            layers.Conv2D(64, 11, 4, activation="relu"),
            layers.MaxPooling2D(3, 2),
            layers.Conv2D(192, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(3, 2),
            layers.Conv2D(384, 3, padding="same", activation="relu"),
            layers.Conv2D(384, 3, padding="same", activation="relu"),
            layers.Conv2D(256, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(3, 2),
            layers.Flatten(),
            layers.Dense(4096, activation="relu"),
            layers.Dense(4096, activation="relu"),
            layers.Dense(1000),
        ]
    )


def _build_resnext101(*, squeezes: bool):
    """Returns ResNeXt-101 with 32 groups of 4 channels, with or without squeeze-and-excitation."""
    import keras
    from keras import layers

    def convolve(x, units, size=1, *, stride=1, groups=1, activation="relu"):
        x = layers.Conv2D(
            units, size, stride, padding="same", groups=groups, use_bias=False, activation=None
        )(x)
        x = layers.BatchNormalization()(x)
        return layers.Activation(activation)(x) if activation else x

    def squeeze(x, units):
        weight = layers.GlobalAveragePooling2D(keepdims=True)(x)
        weight = layers.Dense(units // 16, activation="relu")(weight)
        return layers.Multiply()([x, layers.Dense(units, activation="sigmoid")(weight)])

    images = keras.Input((224, 224, 3))
    x = layers.MaxPooling2D(3, 2, padding="same")(convolve(images, 64, 7, stride=2))
    for stage, count in enumerate((3, 4, 23, 3)):
        width = 128 * 2**stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            shortcut = x if block else convolve(x, 2 * width, stride=stride, activation=None)
            x = convolve(convolve(x, width), width, 3, stride=stride, groups=32)
            x = convolve(x, 2 * width, activation=None)
            x = squeeze(x, 2 * width) if squeezes else x
            x = layers.Activation("relu")(layers.Add()([x, shortcut]))
    return keras.Model(images, layers.Dense(1000)(layers.GlobalAveragePooling2D()(x)))


if __name__ == "__main__":
    sys.exit(main())
