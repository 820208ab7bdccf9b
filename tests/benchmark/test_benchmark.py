"""The command, with real processes; and what it makes of their numbers."""

import json
import os

import pytest

from tfdist.benchmark.__main__ import main
from tfdist.benchmark.configurations import Configuration, find_lone_worker, list_configurations
from tfdist.benchmark.options import BenchmarkOptions, ContestOptions
from tfdist.benchmark.runs import run_rounds
from tfdist.benchmark.table import format_table, make_page, make_rows

CORES = len(os.sched_getaffinity(0))


def run(monkeypatch, *flags):
    monkeypatch.setattr("sys.argv", ["benchmark", *flags])
    return main()


@pytest.mark.thorough
def test_measures_the_trainer_and_the_machine(path_with_spaces, monkeypatch, capsys):
    flags = ["--image_size=16,16", "--base_filters=4", "--depth=1", "--rounds=1", "--steps=3"]
    flags += ["--strategies=one_device", "--precisions=float32", "--baselines=keras_layers_fit"]
    assert run(monkeypatch, *flags, f"--output={path_with_spaces}") == 0
    assert "one_device" in capsys.readouterr().out
    rows = {row["name"]: row for row in read_rows(path_with_spaces)}
    assert set(rows) == {"Keras fit, Keras's layers", "one_device"}
    assert rows["one_device"]["of_one_device"] == 1
    for row in rows.values():
        assert row["lowest"] == row["examples_per_second"] > 0
        assert 0 < row["of_peak"] <= row["of_convolutions"]
        assert row["memory_mib"] > 100
    assert (path_with_spaces / "results.html").read_text().count('class="bar"') == 2


def read_rows(path):
    return json.loads((path / "results.json").read_text())["rows"]


@pytest.mark.thorough
def test_a_configuration_that_fails_is_named(monkeypatch, capsys):
    flags = ["--image_size=17,17", "--depth=1", "--rounds=2", "--strategies=one_device"]
    assert run(monkeypatch, *flags, "--precisions=float32", "--baselines=") == 1
    out, err = capsys.readouterr()
    assert "one_device, float32: worker-0: " in out
    assert err.count("one_device, float32") == 1  # and not tried again


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--strategies=mirored", "--strategies 'mirored'"),
        ("--precisions=float8", "--precisions 'float8'"),
        ("--baselines=torch", "--baselines 'torch'"),
        ("--replicas=1", "--replicas=1 is too small: give 2 or more."),
        ("--workers=two", "--workers=two is not 2,4."),
        ("--rounds=0", "--rounds=0 is too small"),
    ],
)
def test_bad_flags_cost_one_line(monkeypatch, capsys, flag, message):
    assert run(monkeypatch, flag) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


CONTEST = ContestOptions(
    strategies=("one_device", "multi_worker_mirrored"),
    precisions=("float32",),
    workers=(CORES,),
    baselines=("loop",),
    rounds=3,
)


def test_rounds_alternate_and_medians_are_compared():
    options = BenchmarkOptions(contest=CONTEST)
    configurations = list_configurations(options)
    order = []
    rates = {"loop": [9.0, 10.0, 50.0], "one_device": [10.0, 8.0, 12.0], "workers": [15, 12, 18]}
    alone = find_lone_worker(Configuration(workers=CORES))

    def measure(configuration, _):
        order.append(configuration)
        number = order.count(configuration) - 1
        if configuration.kind == "ceiling":  # most of the time another program runs as well
            busy = number < CONTEST.rounds
            return {
                "flops_per_second": 20 if busy else 200,
                "own_flops_per_second": 10 if busy else 100,
                "flops_per_example": 5,
            }
        if configuration == alone:
            return {"examples_per_second": 10.0}
        key = "loop" if configuration.kind == "loop" else "one_device"
        key = "workers" if configuration.workers > 1 else key
        return {"examples_per_second": rates[key][number]}

    found = run_rounds(configurations, options, lambda *_: None, measure=measure)
    count = len(configurations)
    assert order[count : 2 * count] == configurations[::-1]
    assert order[3 * count :] == [Configuration(kind="ceiling")]
    rows = {row.configuration.name: row for row in make_rows(found)}
    loop, one = rows["loop by hand"], rows["one_device"]
    assert (loop.examples_per_second, loop.lowest, loop.highest) == (10, 9, 50)
    assert loop.of_one_device == 1
    assert (one.of_convolutions, one.of_peak) == (0.5, 0.25)
    assert rows[f"multi_worker_mirrored, {CORES} workers"].scaling == 15 / (10 * CORES)
    assert "0.25" in format_table(list(rows.values()))
    assert 'data-value="15.0"' in make_page(list(rows.values()))
