import xml.etree.ElementTree as ET

import pytest

from tfdist.curves import make_curves, stack_curves

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
    flat = make_curves({"flat": [0.0]})
    (point,) = _find_lines(flat)[0]
    (dot,) = ET.fromstring(flat).iter(f"{SVG}circle")
    assert (float(dot.get("cx")), float(dot.get("cy"))) == point, "a line of one point is unseen"
    with pytest.raises(ValueError, match="none has a finite value"):
        make_curves({"empty": [], "nan": [float("nan")]})


def test_pictures_are_stacked_without_overlap():
    one, two = (make_curves({name: [1.0, 2.0]}) for name in ("loss", "mean_iou"))
    whole = ET.fromstring(stack_curves([one, two]))
    places = [part.get("transform") for part in whole.findall(f"{SVG}g")]
    height = int(ET.fromstring(one).get("height"))
    assert places == ["translate(0 0)", f"translate(0 {height})"]
    assert int(whole.get("height")) == 2 * height
    assert len(_find_lines(ET.tostring(whole, encoding="unicode"))) == 2
