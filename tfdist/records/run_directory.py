"""The directory of a run: where its files are, and whether a command may continue the run."""

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfdist.cluster import read_environment
from tfdist.errors import TfdistError, shorten_error
from tfdist.reading import parse_object, parse_options
from tfdist.records.durable_files import (
    append_durably,
    copy_file,
    exists,
    make_directories,
    read_file,
    remove_file,
    sync_to_disk,
    write_atomically,
)
from tfdist.records.run_lock import hold_run_lock

if TYPE_CHECKING:
    import numpy as np

DEFAULT_RUN_DIR = "runs/default"
"""The default of `--run_dir`."""
METRICS, WITHIN_EPOCHS = "metrics.jsonl", "steps.jsonl"
"""The files of a line per epoch, and of lines within epochs for the curves of a report."""


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run, on any file system of `tf.io.gfile`.

    Attributes:
      checkpoint_dir, tensorboard_dir: directories for these outside of `path`.
    """

    path: str
    checkpoint_dir: str = ""
    tensorboard_dir: str = ""
    model_copy_dir: str = ""

    @property
    def checkpoints(self) -> str:
        """The directory of checkpoints."""
        return self.checkpoint_dir or f"{self.path}/checkpoints"

    @property
    def tensorboard(self) -> str:
        """The directory of TensorBoard events."""
        return self.tensorboard_dir or f"{self.path}/tensorboard"

    @property
    def is_finished(self) -> bool:
        """Whether the run was trained to its end, as seen from this machine."""
        return exists(f"{self.path}/summary.json")

    @property
    def model(self) -> str:
        """The path of the saved model."""
        return f"{self.path}/model.keras"

    @contextlib.contextmanager
    def claim(
        self,
        options: Mapping[str, Any],
        *,
        result: Mapping[str, Any],
        may_increase: Collection[str] = (),
    ) -> Iterator[None]:
        """Reserves the directory for this process and its command within the context.

        Args:
          result: the options that decide what the run computes, as flag -> value: a command
            that continues a run must have the same.
          may_increase: options that may be larger than those of a finished run, which then
            continues.

        Raises:
          TfdistError: the directory holds another command's run, is in use by another process,
            or cannot be written.
        """
        try:
            make_directories(self.path)
        except OSError as error:
            raise TfdistError(self._describe_failure(error)) from error
        with hold_run_lock(self.path):
            self._record(options, result, may_increase)
            yield

    def _record(
        self, options: Mapping[str, Any], result: Mapping[str, Any], may_increase: Collection[str]
    ) -> None:
        path, summary = f"{self.path}/options.json", f"{self.path}/summary.json"
        try:
            self.check(result, may_increase=may_increase)
            goes_on = self.is_finished and self.read_result() != result
            write_atomically(path, json.dumps({**options, "result": dict(result)}, indent=1))
            if goes_on:
                remove_file(summary)
        except OSError as error:
            raise TfdistError(self._describe_failure(error)) from error

    def check(self, result: Mapping[str, Any], *, may_increase: Collection[str] = ()) -> bool:
        """Returns whether the directory already holds a run, which must be this command's."""
        before = self.read_result()
        if (
            before is not None
            and before != result
            and not self._has_grown(before, result, may_increase)
        ):
            raise TfdistError(self._describe_difference(before, result))
        return before is not None

    def _has_grown(
        self, before: Mapping[str, Any], now: Mapping[str, Any], may_increase: Collection[str]
    ) -> bool:
        changed = {name for name in {*before, *now} if before.get(name) != now.get(name)}
        return self.is_finished and all(
            name in may_increase
            and all(isinstance(values.get(name), (int, float)) for values in (before, now))
            and now[name] > before[name]
            for name in changed
        )

    def read_result(self) -> dict[str, Any] | None:
        """Returns the options that decide what the run computes, as flag -> value; None if new."""
        recorded = self.read_options()
        return None if recorded is None else dict(recorded["result"])

    def read_options(self) -> dict[str, Any] | None:
        """Returns the content of `options.json`; None if the run is new."""
        path = f"{self.path}/options.json"
        if not exists(path):
            return None
        content = read_file(path)
        recorded = parse_options(content)
        if recorded is None or "result" not in recorded:
            raise TfdistError(
                f"Cannot continue the run in `run_dir={self.path}`: its options.json "
                f"{'is incomplete or was changed' if content else 'is empty'}. Remove that "
                "file and give the flags that the run began with, or give another `run_dir`."
            )
        return recorded

    def copy_model(self) -> None:
        """Copies the saved model to `model_copy_dir`, if there is one."""
        if self.model_copy_dir:
            with self._show_failure():
                make_directories(self.model_copy_dir)
                copy_file(self.model, f"{self.model_copy_dir}/model.keras")

    def append_metrics(self, *lines: Mapping[str, Any], name: str = METRICS) -> None:
        """Appends lines to `metrics.jsonl`, or to another file of such lines."""
        with self._show_failure():
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            append_durably(f"{self.path}/{name}", text)

    def read_metrics(self, name: str = METRICS) -> Iterator[dict[str, Any]]:
        """Yields the lines of `metrics.jsonl` up to the first incomplete or changed one."""
        for text in (read_file(f"{self.path}/{name}") or b"").splitlines():
            line = parse_object(text)
            if line is None or not isinstance(line.get("step"), int):
                return
            yield line

    def forget_metrics_after(
        self, step: int, *, lines_of_step: int | None = None, name: str = METRICS
    ) -> None:
        """Drops the lines after a step, and of it those after `lines_of_step`, if given."""
        if exists(f"{self.path}/{name}"):
            lines = list(self.read_metrics(name))
            kept = [line for line in lines if line["step"] < step]
            kept += [line for line in lines if line["step"] == step][:lines_of_step]
            self.write_metrics(*kept, name=name)

    def write_metrics(self, *lines: Mapping[str, Any], name: str = METRICS) -> None:
        """Replaces all lines of `metrics.jsonl`, or of another file of such lines."""
        with self._show_failure():
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            write_atomically(f"{self.path}/{name}", text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`, which marks the run as finished."""
        with self._show_failure():
            if exists(self.model):
                sync_to_disk(self.model)  # A finished run must keep its model after a power cut.
            write_atomically(f"{self.path}/summary.json", json.dumps(summary, indent=1))

    def write_picture(self, name: str, content: bytes) -> str:
        """Writes a picture with a name such as `samples/predictions.png`, and returns its path."""
        path = f"{self.path}/{name}"
        with self._show_failure():
            make_directories(path.rpartition("/")[0])
            write_atomically(path, content)
        return path

    def write_png(self, name: str, values: "np.ndarray") -> str:
        """Writes uint8 [height, width, channels] as a picture, and returns its path."""
        import tensorflow as tf

        return self.write_picture(name, tf.io.encode_png(values).numpy())

    @contextlib.contextmanager
    def _show_failure(self) -> Iterator[None]:
        """Raises an error of the file system as an OSError with a message of one line."""
        try:
            yield
        except OSError as error:
            raise OSError(self._describe_failure(error)) from error

    def _describe_failure(self, error: OSError) -> str:
        return (
            f"Cannot write to `run_dir={self.path}`: {shorten_error(error)}. "
            "Check its permissions and the free space, then run the same command again."
        )

    def _describe_difference(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
        changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        shown = ", ".join(
            f"--{name}={now.get(name)} (there: {before.get(name)})" for name in changed[:3]
        )
        return (
            f"`run_dir={self.path}` holds the run of another command: {shown}"
            f"{' and more' if len(changed) > 3 else ''}. "
            "Give the same flags to continue it, or another `run_dir`."
        )


def find_run_directory(run_dir: str, *, environ: Mapping[str, str] | None = None) -> RunDirectory:
    """Returns the directory of a run: `--run_dir` or, without that flag, Vertex AI's.

    A Vertex AI job with a base output directory names three directories below it in AIP_MODEL_DIR,
    AIP_CHECKPOINT_DIR and AIP_TENSORBOARD_LOG_DIR. Checkpoints and events are written there, the
    other files to the base output directory, and the model to both.

    Args:
      environ: the environment to read; this process's own by default.

    Source: https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec
    """
    environ = read_environment() if environ is None else environ
    checkpoint_dir = environ.get("AIP_CHECKPOINT_DIR", "").rstrip("/")
    if run_dir != DEFAULT_RUN_DIR or not checkpoint_dir:
        return RunDirectory(run_dir)
    return RunDirectory(
        checkpoint_dir.rpartition("/")[0],
        checkpoint_dir=checkpoint_dir,
        tensorboard_dir=environ.get("AIP_TENSORBOARD_LOG_DIR", "").rstrip("/"),
        model_copy_dir=environ.get("AIP_MODEL_DIR", "").rstrip("/"),
    )
