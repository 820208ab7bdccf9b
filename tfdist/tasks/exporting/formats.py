"""Checks what can be exported, without TensorFlow."""

import importlib.util

from tfdist.errors import TfdistError

_MODULES = {"litert": ("ai_edge_litert",), "onnx": ("onnx", "onnxruntime", "tf2onnx")}
_ENDINGS = {"litert": ".tflite", "onnx": ".onnx"}


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
