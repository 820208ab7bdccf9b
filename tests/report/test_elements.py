import base64
import re

import numpy as np
import tensorflow as tf

from tfdist.report.elements import (
    Section,
    make_bars,
    make_confusion,
    make_pairs,
    make_pictures,
    make_table,
)


def test_texts_are_escaped():
    bad = "<b>&"
    parts = [
        Section(bad, "").to_html(),
        make_table([bad], [[bad]]),
        make_pairs({bad: bad}),
        make_bars({bad: 0.5}),
        make_confusion([[1]], [bad]),
        make_pictures([(b"GIF8", bad)]),
    ]
    for part in parts:
        assert bad not in part
        assert "&lt;b&gt;&amp;" in part


def test_bars_show_the_lowest_of_many():
    bars = make_bars({f"class {index}": index / 100 for index in reversed(range(100))})
    assert bars.count('class="bar"') == 40
    assert "class 0<" in bars
    assert "class 99<" not in bars
    assert "The lowest 40 of 100." in bars


def test_a_confusion_matrix_is_in_percent_of_the_truth():
    matrix = make_confusion([[3, 1], [0, 0]], ["cat", "dog"])
    assert "cat predicted as dog: 1 of 4" in matrix
    assert re.findall(r">([\d.]+)</td>", matrix) == ["75.0", "25.0", "0", "0"]


def test_a_large_confusion_matrix_becomes_a_list_of_mistakes():
    confusion = 10 * np.eye(30, dtype=int)
    confusion[3, 7] = 5
    table = make_confusion(confusion.tolist(), [f"class {index}" for index in range(30)])
    assert table.count("<tr>") == 2  # the heads and the only mistake
    assert "<td>class 3</td><td>class 7</td>" in table


def test_pictures_are_embedded_and_large_ones_shrunk():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (300, 1200, 3)).astype(np.uint8)
    small, large = (tf.io.encode_png(x).numpy() for x in (image[:10, :10], image))
    html = make_pictures([(small, "small"), (None, "missing"), (large, "large")])
    kinds = re.findall(r"data:image/(\w+);base64,([^\"]+)", html)
    assert [kind for kind, _ in kinds] == ["png", "jpeg"]
    assert base64.b64decode(kinds[0][1]) == small
    shrunk = tf.io.decode_jpeg(base64.b64decode(kinds[1][1]))
    assert shrunk.shape == (225, 900, 3)
    assert "missing" not in html
    assert make_pictures([(None, "missing")]) == ""
