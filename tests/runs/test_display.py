"""What a run shows where nobody watches a bar."""

import os
import pty
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfdist
from tfdist.announcing import announce, announcing
from tfdist.data.progress import Pace
from tfdist.runs.callbacks import Throughput
from tfdist.runs.display import LogLines

X, Y = np.ones((16, 4), "f4"), np.ones((16, 1), "f4")


def _build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def _fit(*, every_s, verbose=1):
    trainer = tfdist.Trainer(_build)
    throughput = Throughput(trainer, 8)
    lines = LogLines(trainer, throughput, total_steps=6, every_s=every_s)
    data = {"validation_data": (X, Y), "batch_size": 8, "epochs": 3}
    trainer.fit(X, Y, callbacks=[throughput, lines], verbose=verbose, **data)


def test_shows_the_first_step_and_a_line_an_epoch(capsys):
    _fit(every_s=60)
    first, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"[\d:]{8} epoch 1/3, step 1/6: loss [\d.e-]+, mae \S+", first)
    assert len(lines) == 3
    pattern = r"[\d:]{8} epoch 2/3, step 4/6: loss [\d.e-]+, mae \S+, val_loss \S+, val_mae \S+; "
    assert re.fullmatch(pattern + r"\S+ examples/s, \d+ s left", lines[1])
    assert lines[2].endswith("examples/s")
    assert not re.search(r"[\x00-\x1f]", "".join(lines))


def test_shows_lines_within_an_epoch_where_it_is_long(capsys):
    _fit(every_s=0)
    steps = re.findall(r"step (\d)/6", capsys.readouterr().out)
    assert steps == ["1", "2", "2", "3", "4", "4", "5", "6", "6"]


def test_lines_come_soon_at_first_and_seldom_later(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    pace, shown = Pace(60), []
    for now in range(100, 500):
        if pace.is_due():
            pace.note()
            shown.append(now - 100)
    assert shown == [0, 5, 15, 35, 75, 135, 195, 255, 315, 375]


def test_what_takes_long_is_announced_once_and_only_to_those_who_listen(tmp_path):
    def fit(listen, **options):
        trainer = tfdist.Trainer(_build, checkpoint_dir=str(tmp_path))
        with announcing(listen):
            trainer.fit(X, Y, validation_data=(X, Y), batch_size=8, epochs=2, verbose=0)
            trainer.fit(X, Y, batch_size=8, epochs=2, verbose=0)

    said = []
    fit(said.append)
    assert said == [
        "Tracing the training step of one replica",
        "Compiling the training step of one replica",
        "Tracing and compiling the evaluation step of one replica",
    ]
    announce("Nobody hears it")
    assert len(said) == 3


@pytest.mark.parametrize(
    ("variables", "shown"), [({}, b"True"), ({"JPY_PARENT_PID": "7"}, b"False")]
)
def test_a_notebooks_terminal_gets_lines(variables, shown):
    """The `!` of a notebook makes a terminal, but shows the backspaces of a bar as text."""
    code = "import sys; from tfdist.cluster import can_redraw; print(can_redraw(sys.stdout))"
    ours, theirs = pty.openpty()
    environ = {name: value for name, value in os.environ.items() if name != "JPY_PARENT_PID"}
    command = [sys.executable, "-c", code]
    subprocess.run(command, stdout=theirs, env=environ | variables, check=True, timeout=1000)
    assert os.read(ours, 100).strip() == shown
    os.close(ours)
    os.close(theirs)


def test_says_nothing_when_it_is_not_asked(capsys):
    _fit(every_s=0, verbose=0)
    assert capsys.readouterr().out == ""
