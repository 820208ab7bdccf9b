"""The options of the commands that use finished runs: `evaluate`, `predict` and `export`."""

import importlib.util
from dataclasses import dataclass

from tfdist.errors import TfdistError
from tfdist.named_code import trust_option
from tfdist.options import CommandOptions, OptionGroup, inherit, option
from tfdist.strategies.base import devices_option
from tfdist.strategies.options import StrategyOptions
from tfdist.strategies.registry import AUTO, STRATEGIES

SAVED_MODEL = "saved_model"
_MODULES = {"litert": ("ai_edge_litert",), "onnx": ("onnx", "onnxruntime", "tf2onnx")}
_ENDINGS = {"litert": ".tflite", "onnx": ".onnx"}


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(OptionGroup):
    """Devices."""

    strategy: str = option(
        AUTO,
        "how the work is distributed over this machine's devices",
        choices=(AUTO, *(name for name, kind in STRATEGIES.items() if kind.traits.is_local)),
        result=False,
    )
    devices: tuple[str, ...] = devices_option()
    virtual_devices: int = inherit(StrategyOptions, "virtual_devices")


@dataclass(frozen=True, kw_only=True)
class FinishedRunOptions(OptionGroup):
    """Options of every command that uses a finished run."""

    run_dir: str = option("runs/default", "directory of a finished run", metavar="DIR")
    trust_task: bool = trust_option()
    quiet: bool = option(False, "print nothing but errors", result=False)
    verbose_tensorflow: bool = option(False, "show TensorFlow's own messages", result=False)


@dataclass(frozen=True, kw_only=True)
class EvaluateRunOptions(FinishedRunOptions):
    """Input and output."""

    split: str = option("val", "part of the data to evaluate on", choices=("train", "val"))
    global_batch_size: int = option(32, "examples per step, over all replicas", minimum=1)
    output: str | None = option(
        None, "JSON file of the metrics; RUN_DIR/evaluation/SPLIT.json by default", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(CommandOptions):
    """The options of `python -m tfdist.evaluate` for a task without its own evaluation."""

    run: EvaluateRunOptions = EvaluateRunOptions()
    devices: DeviceOptions = DeviceOptions()


@dataclass(frozen=True, kw_only=True)
class PredictRunOptions(FinishedRunOptions):
    """Input and output."""

    examples: str | None = option(
        None,
        "inputs: an .npy file, or an .npz file with an array per input",
        metavar="FILE",
        must_exist="Name another.",
    )
    global_batch_size: int = option(32, "examples per step, over all replicas", minimum=1)
    output: str | None = option(None, "the outputs: .npy, or .npz if several", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class PredictOptions(CommandOptions):
    """The options of `python -m tfdist.predict` for a task without its own prediction."""

    run: PredictRunOptions = PredictRunOptions()
    devices: DeviceOptions = DeviceOptions()


@dataclass(frozen=True, kw_only=True)
class ExportRunOptions(FinishedRunOptions):
    """Input and output."""

    format: str = option(
        SAVED_MODEL,
        "saved_model: a directory for TensorFlow Serving; litert, onnx: a file for other runtimes, "
        "which is compared with the model on the validation examples",
        choices=(SAVED_MODEL, "litert", "onnx"),
    )
    quantize: str = option(
        "none",
        "litert: float16 stores weights in half of the bytes; int8 also computes in 8 bits, in "
        "ranges found with training examples",
        choices=("none", "float16", "int8"),
    )
    max_lost: float = option(
        0.02,
        "litert, onnx: the largest fraction of the run's metric that the file may lose",
        minimum=0,
    )
    output: str | None = option(
        None,
        "saved_model: directory of the versions 1, 2, ..., each export adds one; litert, onnx: "
        "the file, named .tflite or .onnx",
        metavar="DIR_OR_FILE",
    )

    def find_output(self) -> str:
        """Returns the output, which must be given; only one format can be quantized."""
        if not self.output:
            raise TfdistError("Cannot export without `output`. Give a directory or a file.")
        if self.quantize != "none" and self.format != "litert":
            raise TfdistError(
                f"`quantize={self.quantize}` is only for `format=litert`. Leave it out."
            )
        return self.output


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CommandOptions):
    """The options of `python -m tfdist.export`."""

    run: ExportRunOptions = ExportRunOptions()


def check_file_name(path: str, file_format: str) -> None:
    """Checks that a file's name has the ending of its format."""
    ending = _ENDINGS[file_format]
    if not path.endswith(ending):
        raise TfdistError(
            f"Cannot export `format={file_format}` to `output={path}`: the file's name must end "
            f"with {ending}."
        )


def check_installed(file_format: str) -> None:
    """Checks that the packages of a format are installed."""
    for name in _MODULES[file_format]:
        if importlib.util.find_spec(name) is None:
            raise TfdistError(
                f"Cannot export `format={file_format}` without the package {name}. Run "
                f"`pip install 'tfdist[{file_format}]'`."
            )
