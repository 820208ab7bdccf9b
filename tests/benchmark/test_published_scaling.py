"""The predictions of published throughputs."""

import statistics

from benchmarks import published_scaling
from benchmarks.published_scaling import predict_nvidia


def test_published_rows_of_resnet_50_are_predicted(monkeypatch, tmp_path):
    whole = published_scaling.ROWS.read_text()
    head, *tables = whole.split("[[tables]]")
    own = [table for table in tables if 'model = "ResNet50"' in table]
    rows = tmp_path / "rows.toml"
    rows.write_text("[[tables]]".join([head, *own]))
    monkeypatch.setattr(published_scaling, "ROWS", rows)
    found = list(predict_nvidia())
    assert {row.half for row in found} == {"fit", "validation"}
    errors = [row.error for row in found]
    assert len(errors) == 28
    assert max(map(abs, errors)) < 0.15
    assert statistics.median(map(abs, errors)) < 0.04
