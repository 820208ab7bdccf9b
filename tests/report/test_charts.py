import json
import re

import pytest

from tfdist.report.charts import chart_run, chart_runs


def read_charts(html):
    """Returns the places, and title -> name -> values."""
    data = json.loads(re.search(r'json">(.*?)</script>', html)[1])
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", html)
    charts = [dict(zip(c["names"], c["curves"], strict=True)) for c in data["charts"]]
    return data["x"], dict(zip(titles, charts, strict=True))


def test_training_and_validation_share_a_picture():
    lines = [
        {"step": 5, "epoch": 1, "loss": 2.0, "accuracy": 0.5},  # within the epoch
        {"step": 10, "epoch": 1, "loss": 1.0, "accuracy": 0.6},
        {"step": 10, "epoch": 1, "loss": 1.0, "val_loss": 1.5, "examples_per_second": 7.0},
    ]
    x, charts = read_charts(chart_run(lines, first="val_accuracy"))
    assert x == [5, 10]
    assert charts == {
        "accuracy": {"training": [0.5, 0.6]},
        "loss": {"training": [2.0, 1.0], "validation": [None, 1.5]},
        "examples per second": {"training": [None, 7.0]},
    }
    assert list(charts) == ["accuracy", "loss", "examples per second"]


def test_classes_share_a_picture_unless_they_are_many():
    line = {"step": 1, "epoch": 1, "iou/a": 0.1, "val_iou/a": 0.2, "val_iou/b": 0.3}
    line |= {f"val_dice/{index}": 0.5 for index in range(11)}
    _, charts = read_charts(chart_run([line]))
    assert charts == {"iou, validation": {"a": [0.2], "b": [0.3]}}


def test_values_that_are_not_finite_are_gaps():
    lines = [{"step": step, "loss": value} for step, value in ((1, float("nan")), (2, 0.25))]
    _, charts = read_charts(chart_run(lines))
    assert charts["loss"]["training"] == [None, 0.25]


def test_a_long_run_is_thinned_and_keeps_its_validation_and_its_end():
    lines = [{"step": step, "epoch": 1, "loss": 1 / step} for step in range(1, 20001)]
    for line in lines[99::100]:
        line["val_loss"] = 1.0
    x, charts = read_charts(chart_run(lines))
    assert len(x) == 200
    assert x[-1] == 20000
    assert charts["loss"]["validation"].count(1.0) == 200


def test_lines_within_epochs_fill_the_curve_and_the_ends_of_epochs_are_marked():
    lines = [{"step": 100 * e, "epoch": e, "loss": 1 / e, "val_loss": 1.0} for e in (1, 2)]
    within = [{"step": step, "epoch": 1 + step // 101, "loss": 2.0} for step in range(1, 201)]
    html = chart_run(lines, within=within)
    x, charts = read_charts(html)
    assert len(x) <= 200
    assert charts["loss"]["training"][x.index(100)] == 1.0
    assert charts["loss"]["training"].count(2.0) > 90
    assert json.loads(re.search(r'json">(.*?)</script>', html)[1])["marks"] == [
        ["1", 100],
        ["2", 200],
    ]


@pytest.mark.parametrize("lines", [[], [{"step": 1, "epoch": 1, "loss": float("inf")}]])
def test_nothing_to_draw_is_said(lines):
    assert chart_run(lines) == "<p>No epoch has ended yet.</p>"


def test_runs_are_compared_by_epoch():
    runs = {
        "one": [{"step": 10, "epoch": 1, "loss": 2.0}, {"step": 20, "epoch": 2, "loss": 1.0}],
        "two": [{"step": 5, "epoch": 1, "loss": 3.0, "val_loss": 4.0}],
    }
    x, charts = read_charts(chart_runs(runs))
    assert x == [1, 2]
    assert charts == {
        "val loss": {"one": [None, None], "two": [4.0, None]},
        "loss": {"one": [2.0, 1.0], "two": [3.0, None]},
    }
