"""The page of one run, from what the run has recorded."""

from collections.abc import Iterable, Mapping
from typing import Any

from tfdist.records.recorded_run import RecordedRun
from tfdist.report.charts import chart_run
from tfdist.report.elements import (
    Section,
    make_bars,
    make_html,
    make_pairs,
    make_table,
    write_value,
)

_SPEED = {
    "examples_per_second": "training examples per second, without the first step",
    "seconds": "seconds from the start of the command to its end",
    "first_step_s": "seconds from the start of the process to the end of the first step",
    "check_s": "seconds in which replicas were compared with one device, before the first step",
}
_FRACTIONS = ("input_fraction", "host_fraction", "all_reduce_fraction")
_CLUSTER = {
    "strategy": "strategy",
    "replicas": "replicas",
    "restarts": "restarts",
    "lost_steps": "steps that were repeated",
    "resumed_from_step": "continued from step",
}
# For those who look for them; folded.
_DETAILS = {
    "gradient_bytes": "bytes of the gradients that replicas exchange in each step",
    "weights_sha256": "SHA-256 of the weights",
    "best_step": "step whose weights were the best",
    "skipped_examples": "examples that were left out",
}
# Shown elsewhere, or not at all.
_NOT_RESULTS = {
    *_SPEED,
    *_FRACTIONS,
    *_CLUSTER,
    "goodput",
    "flops_per_second",
    "mfu",
    "peak_memory_bytes",
    "task",
    *_DETAILS,
}
_GROUPS = ("strategy", "placement", "task", "training", "step", "run")


def make_run_page(
    run: RecordedRun, parts: Iterable[Section], *, monitor: str, defaults: Mapping[str, Any]
) -> str:
    """Returns the report of one run, finished or not, as HTML; `monitor` names its main log."""
    sections = [
        Section("Losses and metrics", chart_run(run.lines, first=monitor, within=run.steps)),
        _make_about(run),
        *parts,
        _make_results(run),
        _make_speed(run),
        _make_memory(run),
        _make_cluster(run),
        _list_changed_options(run, defaults),
        _list_all_options(run),
        _list_details(run),
    ]
    return make_html(
        run.path.rstrip("/").rpartition("/")[2],
        sections,
        subtitle=_describe_state(run),
        cards=_make_cards(run, monitor),
    )


def list_results(run: RecordedRun) -> dict[str, Any]:
    """Returns the single values that a run has reached: of its summary, or of its last line."""
    found = run.summary or run.last
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, (int, float, str)) and name not in _NOT_RESULTS and "/" not in name
    }


def _name_results(results: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", " "): value for name, value in results.items()}


def _find_option(run: RecordedRun, group: str, name: str) -> Any:
    return (run.options.get(group) or {}).get(name)


def _describe_state(run: RecordedRun) -> str:
    task, strategy = (_find_option(run, name, name) for name in ("task", "strategy"))
    trained = f"{task}, {strategy}, {run.path}"
    epochs = _find_option(run, "training", "epochs")
    if run.summary:
        return f"{trained}: finished after {run.summary.get('steps')} steps"
    if not run.lines:
        return f"{trained}: not finished, no epoch has ended yet"
    until = "" if _find_option(run, "training", "max_steps") else f" of {epochs}"
    return (
        f"{trained}: not finished; last seen in epoch {run.last.get('epoch')}{until}, "
        f"after step {run.last.get('step')}"
    )


def _make_cards(run: RecordedRun, monitor: str) -> dict[str, str]:
    found = {**run.last, **run.summary}
    cards = {
        name.replace("_", " "): f"{found[name]:.4f}"
        for name in dict.fromkeys((monitor, "val_loss", "loss"))
        if isinstance(found.get(name), float)
    }
    if rate := found.get("examples_per_second"):
        cards["examples per second"] = f"{rate:,.1f}"
    if "replicas" in found:
        cards["replicas"] = str(found["replicas"])
    if "seconds" in found:
        cards["duration"] = _write_duration(found["seconds"])
    if peak := found.get("peak_memory_bytes"):
        cards["peak memory"] = _write_bytes(peak)
    return cards


def _make_results(run: RecordedRun) -> Section:
    return Section("Results", make_pairs(_name_results(list_results(run))) if run.summary else "")


def _make_about(run: RecordedRun) -> Section:
    """Returns what was trained, on what, how and where; runs of older versions say less."""
    about = run.options.get("about") or {}
    sizes = (f"{count:,} {split}" for split, count in (about.get("examples") or {}).items())
    number, last = about.get("parameters"), about.get("last_start")
    pairs = {
        "model": about.get("model_name") or _find_option(run, "task", "model"),
        "parameters": number
        and f"{number:,}, of which {about.get('trainable_parameters') or 0:,} are trained",
        "data": about.get("dataset") or _find_option(run, "task", "dataset"),
        "examples": ", ".join(sizes),
        "command": about.get("command"),
        "began": about.get("began"),
        "continued": "" if last == about.get("began") else last,
        "machine": about.get("machine"),
        "git commit": run.options.get("commit"),
    }
    versions = run.options.get("versions") or {}
    pairs["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    found = {name: value for name, value in pairs.items() if value}
    return Section("This run", make_pairs(found) if found else "")


def _list_details(run: RecordedRun) -> Section:
    found = {text: run.summary[n] for n, text in _DETAILS.items() if run.summary.get(n) is not None}
    return Section("Details", make_pairs(found) if found else "", is_folded=True)


def _make_speed(run: RecordedRun) -> Section:
    found = {**run.last, **run.summary}
    pairs = {text: found[name] for name, text in _SPEED.items() if found.get(name) is not None}
    if "mfu" in found:
        pairs["GFLOP/s, billions of floating-point operations per second"] = (
            found["flops_per_second"] / 1e9
        )
        pairs["the same, relative to the fastest convolution alone (MFU)"] = f"{found['mfu']:.1%}"
    body = make_pairs(pairs) if pairs else ""
    waited, host, reduced = (found.get(name) for name in _FRACTIONS)
    if waited is not None and host is not None:
        bars = {"input": waited, "host": host, "computation": 1 - waited - host}
        body += "<h3>Where the time of a step goes</h3>" + make_bars(bars)
        body += "<p>Host: logs and callbacks between the steps.</p>"
        if reduced:
            body += f"<p>Of the computation, all-reduce is at most {reduced:.1%} of the time.</p>"
    return Section("Speed", body + _make_goodput(found))


def _make_goodput(found: Mapping[str, Any]) -> str:
    """Returns where the time of all starts of a run went."""
    seconds = dict(found.get("goodput_seconds") or {})
    total = seconds.pop("total", 0.0)
    if not total:
        return ""
    bars = {name.replace("_", " "): value / total for name, value in seconds.items() if value}
    text = f"<p>Goodput {found['goodput']:.1%} of {_write_duration(total)}, over all starts.</p>"
    return "<h3>Where the time of the run goes</h3>" + make_bars(bars) + text


def _make_memory(run: RecordedRun) -> Section:
    peaks = run.summary.get("peak_memory_bytes_per_device") or {}
    rows = [(device, peak / 2**20) for device, peak in peaks.items()]
    return Section("Memory", make_table(("device", "peak, MiB"), rows) if rows else "")


def _make_cluster(run: RecordedRun) -> Section:
    found = {"strategy": _find_option(run, "strategy", "strategy"), **run.summary}
    pairs = {text: found[name] for name, text in _CLUSTER.items() if found.get(name) is not None}
    pairs["devices of the chief"] = run.options.get("devices")
    for job, addresses in (run.options.get("cluster") or {}).items():
        pairs[f"tasks of {job}"] = addresses
    body = make_pairs(pairs)
    keys = ("time", "task", "cause", "step", "then", "workers")
    if run.failures:
        rows = [[failure.get(key) for key in keys] for failure in run.failures]
        body += "<h3>Failures</h3>" + make_table(keys, rows)
    elif causes := run.summary.get("restart_causes"):
        body += "<h3>Failures</h3>" + make_table(("failure",), [[cause] for cause in causes])
    return Section("Cluster", body)


def _list_changed_options(run: RecordedRun, defaults: Mapping[str, Any]) -> Section:
    rows = [
        (f"--{name}", write_value(value), write_value(defaults[name]))
        for group in _GROUPS
        for name, value in (run.options.get(group) or {}).items()
        if name in defaults and value != defaults[name]
    ]
    table = make_table(("option", "value", "default"), rows) if rows else ""
    return Section("Options that differ from their defaults", table)


def _list_all_options(run: RecordedRun) -> Section:
    body = "".join(
        f"<h3>{group}</h3>{make_pairs(run.options[group])}"
        for group in _GROUPS
        if run.options.get(group)
    )
    return Section("All options", body, is_folded=True)


def _write_duration(seconds: float) -> str:
    """Returns a duration as text.

    >>> [_write_duration(x) for x in (5.04, 75, 7300)]
    ['5.0 s', '1 min 15 s', '2 h 1 min']
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _write_bytes(number: float) -> str:
    return f"{number / 2**20:,.0f} MiB" if number < 2**30 else f"{number / 2**30:,.1f} GiB"
