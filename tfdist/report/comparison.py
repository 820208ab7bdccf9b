"""A page that compares several runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.records.recorded_run import RecordedRun
from tfdist.report.charts import chart_runs
from tfdist.report.elements import Section, make_html, make_pictures, make_table, write_value
from tfdist.report.run_page import list_results

_SAME_FOR_NONE = {"run_dir"}
_OF_LOSS = ("loss", "class_weights", "logit_adjustment")
_OF_EXAMPLES = ("task", "dataset", "data_dir", "image_size", "val_examples", "val_fraction")
_LONG = 12
_AFTER_RESULTS = ("examples_per_second", "mfu", "seconds", "peak_memory_bytes")


def make_comparison(runs: Sequence[RecordedRun], *, pictures: Sequence[str] = ()) -> str:
    """Returns a page with the curves, options and results of several runs, as HTML."""
    names = name_runs([run.path for run in runs])
    losses = _list_losses(names, runs)
    notes = dict.fromkeys(("loss", "val_loss"), ", of different loss functions") if losses else {}
    lines = {name: run.lines for name, run in zip(names, runs, strict=True)}
    sections = [
        Section("Results", _make_results(names, runs, losses)),
        Section("Losses and metrics", chart_runs(lines, notes=notes)),
        Section("Pictures of the same examples", _make_pictures(names, runs, pictures)),
        Section("Options that differ", _make_options(names, runs)),
    ]
    return make_html(f"{len(runs)} runs", sections)


def name_runs(paths: Sequence[str]) -> list[str]:
    """Returns a name for each run: what differs in their paths.

    >>> name_runs(["runs/a", "runs/more/b"])
    ['a', 'more/b']
    >>> name_runs(["runs/a", "runs/a"])
    ['a', 'a (2)']
    >>> name_runs(["lr/0.1/run", "lr/0.2/run"])
    ['0.1', '0.2']
    >>> name_runs(["unet-shapes-of-96-seed-1-a", "unet-shapes-of-96-seed-22-a"])
    ['seed-1', 'seed-22']
    """
    names: list[str] = []
    for path, name in zip(paths, _drop_common(paths), strict=True):
        name = name or path
        count = sum(other == name or other.startswith(f"{name} (") for other in names)
        names.append(f"{name} ({count + 1})" if count else name)
    return names


def _drop_common(paths: Sequence[str]) -> list[str]:
    """Returns the paths without the directories, and of long names the words, that all share."""
    if len(set(paths)) < 2:
        return [path.rpartition("/")[2] for path in paths]
    parts = [path.strip("/").split("/") for path in paths]
    start, end = _count_common(parts, 1), _count_common([part[::-1] for part in parts], 1)
    names = ["/".join(part[start : len(part) - end] or part[-1:]) for part in parts]
    words = [name.split("-") for name in names]
    if max(map(len, names)) <= _LONG or len(set(names)) < 2:
        return names
    # One word before the first that differs stays: the name of a value.
    start = max(0, _count_common(words, 1) - 1)
    end = _count_common([word[::-1] for word in words], 1)
    return ["-".join(word[start : len(word) - end]) for word in words]


def _count_common(parts: Sequence[Sequence[str]], rest: int) -> int:
    """Returns how many first parts all have in common; at least `rest` parts are not counted."""
    most = min(map(len, parts)) - rest
    same = (len({part[index] for part in parts}) == 1 for index in range(most))
    return next((index for index, is_same in enumerate(same) if not is_same), max(0, most))


def _list_losses(names: Sequence[str], runs: Sequence[RecordedRun]) -> dict[str, str]:
    """Returns the loss of each run; nothing if they have the same."""
    found = {
        name: ", ".join(
            str(value)
            for option in _OF_LOSS
            if (value := (run.options.get("task") or {}).get(option)) not in (None, "none", 0.0)
        )
        for name, run in zip(names, runs, strict=True)
    }
    return found if len(set(found.values())) > 1 else {}


def _make_pictures(
    names: Sequence[str], runs: Sequence[RecordedRun], pictures: Sequence[str]
) -> str:
    """Returns the pictures of runs whose examples are the same, side by side."""

    def find_examples(run: RecordedRun) -> list[Any]:
        task, training = (run.options.get(name) or {} for name in ("task", "training"))
        return [*(task.get(name) for name in _OF_EXAMPLES), training.get("seed")]

    if any(find_examples(run) != find_examples(runs[0]) for run in runs):
        return ""
    return "".join(
        make_pictures(
            ((run.read(picture), name) for name, run in zip(names, runs, strict=True)), is_row=True
        )
        for picture in pictures
    )


def _make_results(
    names: Sequence[str], runs: Sequence[RecordedRun], losses: Mapping[str, str]
) -> str:
    found = [
        {
            "state": "finished" if run.summary else "not finished",
            "strategy": (run.options.get("strategy") or {}).get("strategy"),
            "replicas": run.summary.get("replicas"),
            "loss function": losses.get(name),
            "epochs": run.summary.get("epochs", run.last.get("epoch")),
            "steps": run.summary.get("steps", run.last.get("step")),
            **{n: value for n, value in list_results(run).items() if n not in ("step", "epoch")},
            **{name: {**run.last, **run.summary}.get(name) for name in _AFTER_RESULTS},
        }
        for name, run in zip(names, runs, strict=True)
    ]
    columns = [
        column
        for column in dict.fromkeys(column for results in found for column in results)
        if any(results.get(column) is not None for results in found)
    ]
    rows = [
        [name, *(results.get(column) for column in columns)]
        for name, results in zip(names, found, strict=True)
    ]
    heads = ["run", *(column.replace("_", " ") for column in columns)]
    table = make_table(heads, rows, is_sortable=True)
    if losses:
        table += "<p>The runs have different loss functions: their losses cannot be compared.</p>"
    return table


def _make_options(names: Sequence[str], runs: Sequence[RecordedRun]) -> str:
    flat: list[dict[str, Any]] = [
        {
            name: value
            for title, group in run.options.items()
            if isinstance(group, dict) and title != "about"
            for name, value in group.items()
        }
        for run in runs
    ]
    options = {name: None for values in flat for name in values if name not in _SAME_FOR_NONE}
    rows = [
        [name, *(write_value(values.get(name)) for values in flat)]
        for name in options
        if any(values.get(name) != flat[0].get(name) for values in flat)
    ]
    return make_table(["option", *names], rows, is_wide=True) if rows else "<p>None.</p>"
