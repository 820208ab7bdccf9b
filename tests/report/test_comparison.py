"""What a page about several runs says."""

import json
import re

from tfdist.records.recorded_run import read_recorded_run
from tfdist.report.comparison import make_comparison

PNG = b"\x89PNG of a run"


def _compare(*paths):
    runs = [read_recorded_run(path) for path in paths]
    return make_comparison(runs, pictures=["samples/predictions.png"])


def _read_rows(page):
    table = re.search(r'<table class="sortable">(.*?)</table>', page)[1]
    rows = re.findall(r"<tr>(.*?)</tr>", table)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]


def test_each_run_shows_its_own_last_epoch_and_losses_that_differ_are_marked(write_run):
    lines = [{"step": 5 * e, "epoch": e, "loss": 1 / e, "val_loss": 1.0} for e in (1, 2, 3)]
    done = {"steps": 15, "epochs": 3, "val_loss": 1.0}
    paths = [
        write_run("a", lines=lines, summary=done, task={"loss": "dice"}),
        write_run("b", lines=lines[:2], task={"loss": "focal"}),
    ]
    page = _compare(*paths)
    first, second = _read_rows(page)
    assert (first["epochs"], first["steps"], first["loss function"]) == ("3", "15", "dice")
    assert (second["epochs"], second["steps"], second["loss function"]) == ("2", "10", "focal")
    assert "their losses cannot be compared" in page
    assert "<figcaption>val loss, of different loss functions</figcaption>" in page
    data = json.loads(re.search(r'json">(.*?)</script>', page)[1])
    assert data["charts"][0]["names"] == ["a", "b"]


def test_equal_losses_are_not_marked_and_a_date_is_no_option(write_run):
    paths = [write_run(name, about={"began": name, "examples": {"val": 1}}) for name in ("a", "b")]
    page = _compare(*paths)
    assert "loss function" not in page
    assert "<p>None.</p>" in page


def test_pictures_of_the_same_examples_are_side_by_side(write_run):
    paths = [write_run(name) for name in ("a", "b")]
    other = write_run("c", task={"val_examples": 7})
    for path in (*paths, other):
        with open(f"{path}/samples.png", "wb") as file:
            file.write(PNG)
    runs = [read_recorded_run(path) for path in (*paths, other)]
    page = make_comparison(runs[:2], pictures=["samples.png"])
    (row,) = re.findall(r'<div class="row">(.*?)</div>', page)
    assert re.findall(r"<figcaption>(.*?)</figcaption>", row) == ["a", "b"]
    assert 'class="row"' not in make_comparison(runs, pictures=["samples.png"])
