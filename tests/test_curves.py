import xml.etree.ElementTree as ET

import pytest

from tfdist.curves import make_curves

SVG = "{http://www.w3.org/2000/svg}"


def _find_lines(svg: str) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in ET.fromstring(svg).iter(f"{SVG}polyline")
    ]


def test_higher_values_are_higher_and_later_ones_further_right():
    first, second = _find_lines(make_curves({"loss": [3.0, 2.0, 1.0], "val": [3.0, 3.0]}))
    assert [x for x, _ in first] == sorted(x for x, _ in first)
    assert first[0][1] < first[1][1] < first[2][1], "SVG counts downwards"
    assert second == [first[0], (first[1][0], first[0][1])], "one scale for all"


def test_names_are_escaped_and_values_that_are_not_finite_left_out():
    svg = make_curves({"a<b & c": [1.0, float("nan"), 2.0]}, title="x > y")
    texts = [text.text for text in ET.fromstring(svg).iter(f"{SVG}text")]
    assert {"a<b & c", "x > y", "epoch"} <= set(texts)
    assert len(_find_lines(svg)[0]) == 2


def test_one_value_is_drawn_and_none_refused():
    assert len(_find_lines(make_curves({"flat": [0.0]}))[0]) == 1
    with pytest.raises(ValueError, match="none has a finite value"):
        make_curves({"empty": [], "nan": [float("nan")]})
