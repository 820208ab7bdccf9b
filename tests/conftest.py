"""Shared set-up of the tests: three logical CPUs or GPUs, no accelerators' chatter."""

import collections
import contextlib
import gc
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# What XLA compiles for tests is not kept in the user's home.
os.environ.setdefault("TF_XLA_FLAGS", "--tf_xla_persistent_cache_directory=")

import pytest
import tensorflow as tf
from tensorflow.python.eager import context as tf_context
from tensorflow.python.framework import config as tf_config

from tfdist.cli.quiet import collect_garbage_less_often

TESTS = pathlib.Path(__file__).parent
LOGICAL_CPUS = 3  # and as many logical GPUs, if there is a GPU
GPU_MEMORY_MIB = 2048  # of each
# Deterministic kernels on GPUs ask for one.
GLOBAL_SEED = 0 if tf.config.list_physical_devices("GPU") else None

# Files of which each takes half a minute or more come first, so that two processes that share all
# files end together.
LONG = (
    "training/test_programs.py",
    "training/test_loop_progress.py",
    "run/test_ordinary.py",
    "training/test_trainer.py",
    "cli/test_xla_cache.py",
    "launch/test_stalls.py",
    "launch/test_launch.py",
    "test_train.py",
    "training/test_guard.py",
    "training/test_recovery.py",
    "placement/test_contract.py",
    "placement/test_shards.py",
    "placement/test_strips.py",
    "serve/test_server.py",
)

collect_garbage_less_often()


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--write-docs", action="store_true", help="write the pages of docs/ that tests make"
    )
    parser.addoption(
        "--quick", action="store_true", help="leave out most variants of the tests marked thorough"
    )


def pytest_configure() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS
    )
    for gpu in tf.config.list_physical_devices("GPU"):
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=GPU_MEMORY_MIB)
        tf.config.set_logical_device_configuration(gpu, [limit] * LOGICAL_CPUS)
        # The tests compare exactly, or to the rounding of float32.
        tf.config.experimental.enable_op_determinism()
        tf.random.set_seed(GLOBAL_SEED)
        tf.config.experimental.enable_tensor_float_32_execution(False)


def pytest_collection_modifyitems(config, items) -> None:
    items.sort(key=lambda item: _find_turn(item.path))  # others keep their order
    if not config.getoption("--quick"):
        return
    seen: collections.Counter[str] = collections.Counter()
    kept, left_out = [], []
    for item in items:
        mark = item.get_closest_marker("thorough")
        function = item.nodeid.partition("[")[0]
        is_kept = mark is None or seen[function] < mark.kwargs.get("keep", 0)
        seen[function] += 1
        (kept if is_kept else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def _find_turn(path) -> int:
    name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
    return LONG.index(name) if name in LONG else len(LONG)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was imported is no garbage


@pytest.fixture(autouse=True, scope="session")
def _short_measurements():
    """Runs measure the peak of the device, which no test of theirs looks at, for a shorter time."""
    from tfdist.runs import flops

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flops, "_LEAST_S", 0.0)
        patch.setattr(flops, "_ROUNDS", 1)
        yield


@contextlib.contextmanager
def _graph_optimizer(*, is_on):
    options = tf.config.optimizer
    was_off = options.get_experimental_options().get("disable_meta_optimizer", False)
    options.set_experimental_options({"disable_meta_optimizer": not is_on})
    yield
    options.set_experimental_options({"disable_meta_optimizer": was_off})


@pytest.fixture(autouse=True, scope="module")
def _graphs_as_traced(request):
    """With --quick, graphs run as they were traced, except in modules marked `optimized`.

    TensorFlow's graph optimizer takes a fifth of a small run's time. The modules that hold up the
    promise across strategies, programs and placements are marked, and what looks at optimized
    graphs. All that one test compares runs one way, but for the processes that tests start, which
    optimize as everybody's do.
    """
    marked = request.node.get_closest_marker("optimized") is not None
    with _graph_optimizer(is_on=marked or not request.config.getoption("--quick")):
        yield


@pytest.fixture
def optimized_graphs():
    """Graphs are optimized in one test of another module."""
    with _graph_optimizer(is_on=True):
        yield


@pytest.fixture(autouse=True)
def global_seed_of_its_own():
    """A seed that another test or a shared fixture has set decides nothing, such as an order."""
    if tf_context.global_seed() != GLOBAL_SEED:
        tf.random.set_seed(GLOBAL_SEED)


@pytest.fixture
def path_with_spaces(tmp_path):
    """An empty directory whose name has spaces in it."""
    path = tmp_path / "a folder with spaces"
    path.mkdir()
    return path


@pytest.fixture
def float64():
    """Keras computes in float64 for one test."""
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.fixture(autouse=True)
def _allow_all_kernels():
    """Takes back what a command's `--deterministic` did to the process."""
    yield
    if not tf.config.list_physical_devices("GPU"):
        tf_config.disable_op_determinism()


@pytest.fixture
def deterministic(_allow_all_kernels):
    """Only deterministic kernels, for one test."""
    tf.config.experimental.enable_op_determinism()


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory):
    """A finished run: a tiny U-Net for images of 16x16, of the 4 classes of `shapes`."""
    from tests import zoo
    from tfdist.cli.command import run_command
    from tfdist.runs.options import TrainOptions
    from tfdist.train import run_training

    path = tmp_path_factory.mktemp("trained run") / "run"
    flags = [*zoo.SMALL_RUN, "--dataset=shapes", "--quiet"]
    flags = [*flags, f"--run_dir={path}"]
    with _graph_optimizer(is_on=True):
        assert run_command("tfdist.train", run_training, flags, options_class=TrainOptions) == 0
    return str(path)


@pytest.fixture(scope="session")
def labelled_images(tmp_path_factory):
    """A `folder` data set: val/images and val/masks of three sizes, one below a window's."""
    import numpy as np

    from tfdist.tasks.segmentation.shapes import make_shapes

    path = tmp_path_factory.mktemp("labelled images")
    for directory in ("images", "masks"):
        (path / "val" / directory).mkdir(parents=True)
    example = make_shapes("val", (40, 40), 1, 3).load(tf.constant(0, tf.int64))
    for name, (height, width) in {"a": (40, 28), "b": (16, 16), "c": (9, 21)}.items():
        image, mask = (np.round(part).astype(np.uint8)[:height, :width] for part in example)
        (path / "val" / "images" / f"{name}.png").write_bytes(tf.io.encode_png(image).numpy())
        (path / "val" / "masks" / f"{name}.png").write_bytes(
            tf.io.encode_png(mask[..., None]).numpy()
        )
    return path
