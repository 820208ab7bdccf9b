"""A pytest plugin: runs every test as `tfdist.run` runs a script, and writes down how it ends.

    pytest -p benchmarks.keras_tests.plugin --way=mirrored-2 --outcomes=FILE ...

FILE gets a line of JSON when a test begins, and another one when it has ended. So a test that ends
its process is found, too.
"""

import contextlib
import importlib.util
import json
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.internals import TensorFlowTrainer
from tfdist.run.routing import Routing
from tfdist.run.scope import keeping_scope
from tfdist.strategies.registry import to_strategy
from tfdist.training.step_options import StepOptions

PLAIN = "plain"
# Backends that tests import even if they run on another one.
BACKENDS = "jax", "torch"
PASSED, SKIPPED, REFUSED, FAILED = "passed", "skipped", "refused", "failed"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--way", default=PLAIN, help="plain, or STRATEGY or STRATEGY-DEVICES")
    parser.addoption("--outcomes", required=True, help="a file for the outcomes of the tests")
    parser.addoption("--below", required=True, help="the directory of the tests")
    parser.addoption("--but", default="", help="a file with tests to leave out, one a line")


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("requires_trainable_backend", "multi_device"):  # those of Keras's conftest.py
        config.addinivalue_line("markers", f"{marker}: one of Keras's")
    devices = int(config.getoption("--way").partition("-")[2] or 1)
    if devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration()] * devices
        tf.config.set_logical_device_configuration(cpu, logical)


class LayerAsModel(keras.Model):
    """A model for tests that mix Keras's private trainer class into a layer."""

    def __init__(self) -> None:
        TensorFlowTrainer.__init__(self)

    def __init_subclass__(cls) -> None:
        for layer in cls.__bases__:
            if not issubclass(layer, keras.Model) and layer is not keras.Layer:
                for name in {"build", "call", "compute_output_shape"} - vars(cls).keys():
                    setattr(cls, name, getattr(layer, name))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    absent = [name for name in BACKENDS if not importlib.util.find_spec(name)]
    sys.modules |= {name: types.ModuleType(name) for name in absent}
    sys.modules["conftest"] = conftest = types.ModuleType("conftest")
    conftest.skip_if_backend = _skip_if_backend
    module, name = sys.modules[TensorFlowTrainer.__module__], TensorFlowTrainer.__name__
    setattr(module, name, LayerAsModel)
    try:
        return (yield)
    finally:
        setattr(module, name, TensorFlowTrainer)
        for name in [*absent, "conftest"]:
            del sys.modules[name]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = config.getoption("--but")
    left_out = pathlib.Path(path).read_text().splitlines() if path else []
    items[:] = [item for item in items if find_name(item) not in left_out]


def find_name(item: pytest.Item) -> str:
    """Returns the name of a test, the same wherever Keras is installed."""
    _, *names = item.nodeid.split("::")
    return "::".join([str(item.path.relative_to(item.config.getoption("--below"))), *names])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    # Keras's global state, its optimizers' and generators' seeds too, is that of a new process.
    keras.utils.set_random_seed(1337)
    _write(item, began=True)
    with _running_as(item.config.getoption("--way")):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.when == "call" or report.outcome != PASSED:
        kind, text = report.outcome, ""
        if call.excinfo is not None and kind != SKIPPED:
            error = call.excinfo.value
            refusal = _find_refusal(error)
            kind = REFUSED if refusal else FAILED
            text = f"{type(refusal or error).__name__}: {refusal or error}"
        _write(item, kind=kind, text=text, trace=report.longreprtext, seconds=call.duration)
    return report


def _skip_if_backend(backend: str, reason: str) -> pytest.MarkDecorator:
    """Does what the function of Keras's conftest.py does."""
    return pytest.mark.skipif(backend == keras.backend.backend(), reason=reason)


@contextlib.contextmanager
def _running_as(way: str) -> Iterator[None]:
    if way == PLAIN:
        yield
        return
    strategy = to_strategy(way.partition("-")[0])
    with keeping_scope(strategy, strategy.scope), Routing(strategy, StepOptions()).open():
        yield


def _find_refusal(error: BaseException | None) -> TfdistError | None:
    """Returns the one-line error that led to an error, if there is one."""
    while error is not None and not isinstance(error, TfdistError):
        error = error.__cause__ or error.__context__
    return error


def _write(item: pytest.Item, **found: Any) -> None:
    with open(item.config.getoption("--outcomes"), "a") as file:
        print(json.dumps({"name": find_name(item), **found}), file=file)
