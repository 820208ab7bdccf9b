"""Sends the lines of `metrics.jsonl` to experiment trackers, through their own clients.

Their Keras callbacks count in epochs, and cannot know what an earlier start of the run has sent.
"""

import contextlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import keras

from tfdist.errors import TfdistError, shorten_error
from tfdist.reading import parse_object
from tfdist.records.durable_files import read_file, write_atomically
from tfdist.records.run_directory import RunDirectory

_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}  # tracker -> package and extra


class Tracker(Protocol):
    """Takes the metrics of a run."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Records the numbers of a line."""

    def close(self, *, is_finished: bool) -> None:
        """Ends the tracking, of a run that is finished or that was stopped."""


def check_trackers(names: Sequence[str]) -> None:
    """Checks that the packages of trackers are installed."""
    for name in names:
        package = _PACKAGES.get(name)
        if package and importlib.util.find_spec(package) is None:
            raise TfdistError(
                f"--track={name} needs the package {package}, which is not installed. Install it "
                f"with pip install 'tfdist[{package}]', or leave {name} out."
            )


class Trackers:
    """The trackers of a run.

    A continued run continues the same tracked run. `trackers.json` holds its id and the last line
    that it got. Lines that are missing there are sent at the start, and lines that the continued
    run repeats are not sent again. If a tracker fails, a warning is
    printed and training continues; the next start sends what is missing.

    Args:
      names: `csv`, `mlflow` or `wandb`.
    """

    def __init__(
        self,
        names: Sequence[str],
        run: RunDirectory,
        hyperparameters: Mapping[str, Any],
        *,
        quiet: bool = False,
    ):
        self._names = names
        self._run = run
        self._hyperparameters = hyperparameters
        self._quiet = quiet
        self._path = f"{run.path}/trackers.json"
        self._state: dict[str, Any] = {}
        self._open: dict[str, Tracker] = {}

    def begin(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Opens the trackers and sends the lines that they lack.

        Args:
          lines: the lines of `metrics.jsonl` that the run has already.
        """
        if not self._names:
            return
        self._state = self._read_state()
        for name in self._names:
            try:
                self._open[name] = self._make(name)
            except Exception as error:
                found = shorten_error(error).rstrip(".")
                raise TfdistError(
                    f"Cannot start --track={name}: {found}. Correct this, or leave {name} out."
                ) from error
        for line in lines:
            self._send(line)
        self._write_state()

    def log(self, line: Mapping[str, Any]) -> None:
        """Sends a line to the trackers that do not have it."""
        if self._open:
            self._send(line)
            self._write_state()

    def end(self, *, is_finished: bool) -> None:
        """Closes the trackers."""
        for name, tracker in list(self._open.items()):
            with self._giving_up(name):
                tracker.close(is_finished=is_finished)
        self._open.clear()

    def _send(self, line: Mapping[str, Any]) -> None:
        # Within an epoch, lines have no validation.
        place = [line["step"], any(name.startswith("val_") for name in line)]
        numbers = {
            name: value
            for name, value in line.items()
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for name, tracker in list(self._open.items()):
            if place <= self._state[name].get("last", []):
                continue
            with self._giving_up(name):
                tracker.log(numbers, step=line["step"])
                self._state[name]["last"] = place

    def _make(self, name: str) -> Tracker:
        state = self._state.setdefault(name, {})
        if name == "csv":
            state.clear()  # it is written anew from the lines
            return CsvTracker(f"{self._run.path}/metrics.csv")
        if name == "mlflow":
            return MlflowTracker(self._run.path, state, self._hyperparameters)
        return WandbTracker(self._run.path, state, self._hyperparameters, quiet=self._quiet)

    def _write_state(self) -> None:
        write_atomically(self._path, json.dumps(self._state))

    def _read_state(self) -> dict[str, Any]:
        """Returns what the trackers have, without what is damaged: those begin anew."""
        found = parse_object(read_file(self._path)) or {}
        return {name: state for name, state in found.items() if _is_state(state)}

    @contextlib.contextmanager
    def _giving_up(self, name: str) -> Iterator[None]:
        """Gives a tracker up if it fails within the context."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(Exception):
                self._open.pop(name).close(is_finished=False)
            print(
                f"tfdist: --track={name} failed and gets no more metrics of this start: "
                f"{shorten_error(error)}",
                file=sys.stderr,
            )


def _is_state(state: Any) -> bool:
    if not isinstance(state, dict) or not isinstance(state.get("id", ""), str):
        return False
    last = state.get("last", [])
    return isinstance(last, list) and all(isinstance(number, int) for number in last)


class CsvTracker:
    """Writes a row per epoch with Keras's `CSVLogger`, into a file that it replaces."""

    def __init__(self, path: str):
        self._logger = keras.callbacks.CSVLogger(path)
        self._logger.on_train_begin()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Writes a row, if the line is of an epoch."""
        if any(name.startswith("val_") for name in metrics):
            logs = {name: value for name, value in metrics.items() if name != "epoch"}
            self._logger.on_epoch_end(int(metrics["epoch"]), {"step": step, **logs})

    def close(self, *, is_finished: bool) -> None:
        """Closes the file."""
        self._logger.on_train_end()


class MlflowTracker:
    """Logs to MLflow; the variables MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where.

    Args:
      run_dir: the run directory, whose last part names a new run.
      state: holds the id of the run, if there is one; gets it otherwise.
    """

    def __init__(self, run_dir: str, state: dict[str, Any], hyperparameters: Mapping[str, Any]):
        import mlflow

        self._mlflow = mlflow
        if "id" in state:
            mlflow.start_run(run_id=state["id"])
            return
        run = mlflow.start_run(run_name=_name_run(run_dir))
        state["id"] = run.info.run_id
        mlflow.log_params(dict(hyperparameters))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Logs the numbers at a step."""
        # MLflow refuses other characters, which names of classes may have.
        numbers = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in metrics.items()}
        self._mlflow.log_metrics(numbers, step=step)

    def close(self, *, is_finished: bool) -> None:
        """Ends the run."""
        self._mlflow.end_run("FINISHED" if is_finished else "KILLED")


class WandbTracker:
    """Logs to Weights & Biases; its own variables, such as WANDB_PROJECT, say where.

    Args:
      run_dir: the run directory, whose last part names a new run; if it is on a disk, it gets the
        directory `wandb`.
      state: holds the id of the run, if there is one; gets it otherwise.
    """

    def __init__(
        self,
        run_dir: str,
        state: dict[str, Any],
        hyperparameters: Mapping[str, Any],
        *,
        quiet: bool,
    ):
        import wandb

        self._wandb_run = wandb.init(
            id=state.get("id"),
            name=_name_run(run_dir),
            dir=None if "://" in run_dir else run_dir,
            resume="allow",
            settings=wandb.Settings(console="off", disable_git=True, silent=quiet),
        )
        state["id"] = self._wandb_run.id
        self._wandb_run.config.update(dict(hyperparameters), allow_val_change=True)
        self._wandb_run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Logs the numbers at a step."""
        self._wandb_run.log({"step": step, **metrics})

    def close(self, *, is_finished: bool) -> None:
        """Ends the run."""
        self._wandb_run.finish()


def _name_run(run_dir: str) -> str:
    return run_dir.rstrip("/").rpartition("/")[2]
