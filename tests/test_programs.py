"""The harness that runs programs of others, on a tiny program, without a network."""

import json
import subprocess

import numpy as np
import pytest

from benchmarks.programs import __main__ as programs
from benchmarks.programs.adapters import AdapterError, Program, adapt_text
from benchmarks.programs.catalog import PROGRAMS
from benchmarks.programs.columns import STRATEGIES
from benchmarks.programs.record import compare
from benchmarks.programs.report import Cell, make_table

TEXT = """\
'''A program.'''
import matplotlib.pyplot as plt
import keras

(x, y), _ = keras.datasets.mnist.load_data()
steps = 500
batch_size = 1000

def build():
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

model = build()
history = model.fit(x[:20] / 255, y[:20], batch_size=batch_size, epochs=steps)
plt.plot(history.history["loss"])
model.evaluate(x[:6] / 255, y[:6])
print("a long gallery")
"""
PROGRAM = Program(
    name="tiny",
    path="tiny.py",
    repository="somebody/programs",
    commit="HEAD",
    constants={"batch_size": 8},
    stop_before="a long gallery",
)


def test_constants_are_set_outside_functions_only():
    text = "size = 1\n\nclass Config:\n    size = 2\n\ndef run():\n    size = 3\n"
    adapted = adapt_text(text, Program(name="", path="", constants={"size": 7}))
    assert adapted == "size = 7\n\nclass Config:\n    size = 7\n\ndef run():\n    size = 3\n"


def test_a_statement_takes_the_place_of_another():
    text = "a = 1\ndata = load(\n    'é', 2\n)\nb = 2\n"
    adapted = adapt_text(text, Program(name="", path="", instead={"load(": "data = made"}))
    assert adapted == "a = 1\ndata = made\nb = 2\n"


def test_what_is_left_out_keeps_the_line_numbers():
    text = "a = 1\nfit(a)\nplot(a)\nb = 2\n"
    adapted = adapt_text(text, Program(name="", path="", leave_out={"fit(": "b ="}))
    assert adapted == "a = 1\n\n\nb = 2\n"


@pytest.mark.parametrize(
    "changes",
    [
        {"replace": {"cube": "ball"}},
        {"constants": {"cube": 1}},
        {"instead": {"cube": ""}},
        {"stop_before": "cube"},
    ],
)
def test_an_adapter_that_does_not_fit_fails(changes):
    with pytest.raises(AdapterError, match="cube"):
        adapt_text("ball = 1\n", Program(name="p", path="", **changes))


def test_names_are_those_of_the_catalog():
    assert len(PROGRAMS) >= 60
    assert all(name == program.name for name, program in PROGRAMS.items())


def _read(tmp_path):
    """Returns the adapted text of the tiny program, from a checkout."""
    directory = tmp_path / "check outs" / "somebody" / "programs"
    directory.mkdir(parents=True)
    (directory / "tiny.py").write_text(TEXT)
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
        subprocess.run(["git", "-C", str(directory), *identity, *command], check=True)
    return adapt_text(programs.read_program(tmp_path / "check outs", PROGRAM), PROGRAM)


def test_a_program_runs_in_a_process_of_its_own(tmp_path):
    text = _read(tmp_path)
    end = programs.run_once(PROGRAM, text, "keras", results=tmp_path / "results", timeout_s=1000)
    assert end["status"] == "ended", end
    assert [call["call"] for call in end["calls"]] == ["fit", "evaluate"]
    assert len(end["calls"][0]["history"]["loss"]) == 2  # at most two epochs
    # What is there is not run again.
    again = programs.run_once(PROGRAM, text, "keras", results=tmp_path / "results", timeout_s=0)
    assert again == end


@pytest.mark.cluster
def test_a_program_runs_under_every_strategy_by_the_command(tmp_path):
    _read(tmp_path)
    row = programs.run_row(
        PROGRAM, tmp_path / "check outs", list(STRATEGIES), tmp_path / "results", 200
    )
    assert {name: str(cell) for name, cell in row.items() if cell.kind != "equal"} == {}
    assert row.keys() == {"keras", *STRATEGIES}


def test_an_error_is_reported_by_its_first_line(tmp_path):
    text = "raise RuntimeError('no\\nmore')"
    end = programs.run_once(PROGRAM, text, "keras", results=tmp_path, timeout_s=1000)
    assert (end["status"], end["message"]) == ("error", "RuntimeError: no more")


def test_a_checkout_that_is_not_there_says_how_to_get_it(tmp_path):
    with pytest.raises(OSError, match="git clone https://github.com/somebody/programs"):
        programs.read_program(tmp_path, PROGRAM)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, ""),
        ({"loss": [0.5, 0.26]}, "call 1, fit: loss of epoch 2 is 0.26 instead of 0.25"),
        ({"weight_0": (1.0, 2.1)}, "weights by"),
    ],
)
def test_runs_are_compared(tmp_path, change, text):
    def save(name, *, loss=(0.5, 0.25), weight_0=(1.0, 2.0)):
        calls = json.dumps([{"call": "fit", "history": {"loss": list(loss)}}])
        np.savez(tmp_path / name, calls=calls, weight_0=np.array(weight_0))

    save("first.npz")
    save("second.npz", **change)
    found = compare(tmp_path / "first.npz", tmp_path / "second.npz", "float64")
    assert found.text.startswith(text)
    assert bool(found.text) == bool(text)


def test_the_table_has_a_line_for_each_program():
    rows = {
        "first": {
            "keras": Cell("equal", fits=2, floatx="float64"),
            "one": Cell("refused", "no | such"),
        },
        "second": {"keras": Cell("not run", "needs pandas | more")},
    }
    table = make_table(rows, ["one"], commit="1a")
    lines = table.splitlines()
    assert lines[2] == "| first | float64 | 2 | 0.0 | refused (no \\| such) | 1a |"
    assert lines[3] == "| second | not run (needs pandas \\| more) |  |  |  | 1a |"
    assert lines[4] == "| **1 programs** |  |  |  | 1 refused |  |"
    # Programs that are run later take the place of their lines.
    rows = {"third": rows["first"], "second": rows["first"], "fourth": {"keras": Cell("equal")}}
    lines = make_table(rows, ["one"], old=table, commit="2b").splitlines()
    assert [line.split(" | ")[0] for line in lines[2:-1]] == ["| first", "| second", "| third"]
    assert [line[-6:] for line in lines[2:-1]] == ["| 1a |", "| 2b |", "| 2b |"]
    assert lines[-1] == "| **3 programs** |  |  |  | 3 refused |  |"
