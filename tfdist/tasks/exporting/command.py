"""`tfdist.export --format`: writes a run's model as one file, and checks the file."""

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

import keras
import numpy as np

from tfdist.data.progress import show_progress
from tfdist.data.source import Source
from tfdist.errors import TfdistError
from tfdist.records.durable_files import temporary_directory, write_output
from tfdist.tasks.base import Task
from tfdist.tasks.command_options import ExportRunOptions, check_file_name, check_installed
from tfdist.tasks.data import to_sources
from tfdist.tasks.exporting.conversion import convert_model, to_float32
from tfdist.tasks.exporting.scoring import (
    Score,
    measure_difference,
    open_file,
    read_one_by_one,
    score_examples,
)
from tfdist.tasks.finished import FinishedRun, read_finished

# Of outputs, as a fraction of their mean size; 8 bits are only judged by the metric.
_MAX_DIFFERENCE = {"none": 1e-3, "float16": 2e-2, "int8": float("inf")}
_SAMPLES = 100  # inputs that represent all others


def run_file_export(options: ExportRunOptions) -> int:
    """Writes a file and its record, FILE.json, if the file predicts as well as the model.

    Raises:
      TfdistError: the input is invalid; the model cannot be converted; the file's outputs differ
        from those of the model, or it loses more of the run's metric than `max_lost`. Nothing
        was written.
    """
    output = options.find_output()
    check_file_name(output, options.format)
    check_installed(options.format)
    run = read_finished(options.run_dir, trust_task=options.trust_task)
    data = to_sources(run.task.make_data(seed=run.options.training.seed, quiet=options.quiet))
    model = to_float32(run.model)
    run.task.compile_model(model, keras.optimizers.SGD(), data.info)
    with temporary_directory() as directory:
        path = f"{directory}/{os.path.basename(output)}"
        if not options.quiet:
            print(f"Converting the model to {options.format}, which takes a while.", flush=True)
        convert_model(
            model,
            path,
            file_format=options.format,
            quantize=options.quantize,
            samples=_read_samples(data.train, model, quiet=options.quiet),
        )
        with open(path, "rb") as file:
            content = file.read()
        checked = _check_file(path, run, model, data.val, options)
    record = {
        "options": {name: getattr(options, name) for name in ("run_dir", "format", "quantize")},
        "model_sha256": run.model_sha256,
        "info": dict(data.info),
        "input_shape": model.input_shape,
        "output_shape": model.output_shape,
        "bytes": len(content),
        "examples": data.val.num_examples,
        **dataclasses.asdict(checked),
    }
    write_output(output, content)
    write_output(f"{output}.json", json.dumps(record, indent=1))
    if not options.quiet:
        size = model.count_params() * 4
        metric = _find_metric(run.task)
        print(_make_table(metric, (checked.keras, size), (checked.file, len(content))))
        print(f"{output} loses {checked.lost:.4f} of {metric}; {output}.json says more.")
    return 0


@dataclass(frozen=True)
class _Checked:
    """An accepted file: the scores of model and file, and how much is lost of the metric."""

    keras: Score
    file: Score
    lost: float
    output_difference: float


def _check_file(
    path: str, run: FinishedRun, model: keras.Model, source: Source, options: ExportRunOptions
) -> _Checked:
    """Returns the scores of a file, or raises a TfdistError if it must be refused."""
    predict = open_file(path, options.format)
    difference = measure_difference(model, predict, source)
    if not difference <= _MAX_DIFFERENCE[options.quantize]:  # NaN is refused, too.
        raise TfdistError(
            f"Refused to write `output={options.output}`: its outputs differ from those of the "
            f"model by {difference:.2g} of their mean size. Leave out `format`."
        )
    keras_score, file_score = (
        score_examples(
            model,
            function,
            show_progress(
                read_one_by_one(source, model),
                source.num_examples,
                unit="example",
                quiet=options.quiet,
            ),
        )
        for function in (model.predict_on_batch, predict)
    )
    metric = _find_metric(run.task)
    expected, found = keras_score.logs[metric], file_score.logs[metric]
    lost = expected - found if run.task.is_higher_better else found - expected
    if not lost <= options.max_lost * abs(expected):
        raise TfdistError(
            f"Refused to write `output={options.output}`: its {metric} is {found:.4f} on the "
            f"validation examples, that of the model is {expected:.4f}. Choose another "
            f"`quantize`, or a larger `max_lost` than {options.max_lost:g}."
        )
    return _Checked(keras_score, file_score, lost, difference)


def _find_metric(task: Task) -> str:
    return task.monitor.removeprefix("val_")


def _read_samples(source: Source, model: keras.Model, *, quiet: bool) -> Iterator[np.ndarray]:
    """Yields the inputs of evenly spaced training examples, which are not augmented."""
    count = min(_SAMPLES, source.num_examples)
    indices = np.linspace(0, source.num_examples - 1, count).round().astype(np.int64)
    examples = read_one_by_one(source, model, indices)
    for x, *_ in show_progress(examples, count, unit="training example", quiet=quiet):
        yield x


def _make_table(metric: str, model: tuple[Score, int], file: tuple[Score, int]) -> str:
    rows = [("", metric, "MB", "ms per example")]
    for name, (score, size) in (("Keras, float32", model), ("file", file)):
        figures = (score.logs[metric], size / 1e6, score.seconds * 1e3)
        rows.append((name, f"{figures[0]:.4f}", f"{figures[1]:.2f}", f"{figures[2]:.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if index else text.ljust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
