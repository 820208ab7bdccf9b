import numpy as np
import tensorflow as tf

from tfdist.tasks.segmentation.pictures import (
    color_mask,
    make_comparison,
    make_overlay,
    make_palette,
)


def test_classes_have_colors_of_their_own_and_void_is_black():
    palette = make_palette(30)
    assert len(np.unique(palette, axis=0)) == 30
    colored = color_mask(np.array([[0, 29, 255, -1]]), palette)
    assert (colored[0, 1] == palette[29]).all()
    assert not colored[0, 2:].any()


def test_a_row_an_example_and_void_hidden_in_the_prediction():
    images = np.full((2, 80, 100, 3), 300.0)
    truths = np.zeros((2, 80, 100), int)
    truths[:, 0] = 9
    names = ["sky", "road"]
    picture = make_comparison(images, truths, truths * 0, class_names=names)
    headings, rows, legend = np.split(picture, [18, 18 + 2 * 84])
    assert rows.shape == (2 * 84, 3 * 104, 3)
    assert (rows[2, 2:102] == 255).all()
    assert not rows[2, 106:206].any()
    assert not rows[2, 210:310].any()
    assert (rows[3, 210:310] == make_palette(2)[0]).all()
    assert all(column.min() < 100 for column in np.split(headings, 3, axis=1))
    assert legend.shape == (18, 3 * 104, 3)
    colors = set(map(tuple, legend.reshape(-1, 3)))
    assert tuple(make_palette(2)[0]) in colors
    assert tuple(make_palette(2)[1]) not in colors  # no pixel is of this class


def test_small_pictures_are_enlarged():
    images = np.zeros((1, 16, 16, 3))
    masks = np.zeros((1, 16, 16), int)
    picture = make_comparison(images, masks, masks, class_names=["a", "b"])
    assert picture.shape == (18 + 132 + 18, 3 * 132, 3)


def test_a_legend_widens_narrow_pictures_and_has_as_many_lines_as_it_needs():
    image, mask = np.zeros((9, 12, 3), np.uint8), np.arange(108).reshape(9, 12) % 3
    names = ["a", "a name that is long", "b"]
    overlay = tf.io.decode_png(make_overlay(image, mask, make_palette(3), class_names=names))
    height, width, _ = overlay.shape
    assert height in (9 + 2 * 18, 9 + 3 * 18)
    assert width > 80
    assert (overlay[:9, 12:] == 255).numpy().all()
    plain = tf.io.decode_png(make_overlay(image, mask, make_palette(3)))
    np.testing.assert_array_equal(overlay[:9, :12], plain)
