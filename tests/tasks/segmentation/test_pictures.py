import numpy as np
import tensorflow as tf

from tfdist.tasks.segmentation.pictures import color_mask, make_comparison, make_palette


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
    picture = tf.io.decode_png(make_comparison(images, truths, truths * 0, num_classes=2)).numpy()
    assert picture.shape == (2 * 84, 3 * 104, 3)
    assert (picture[2, 2:102] == 255).all()
    assert not picture[2, 106:206].any()
    assert not picture[2, 210:310].any()
    assert (picture[3, 210:310] == make_palette(2)[0]).all()


def test_small_pictures_are_enlarged():
    images = np.zeros((1, 16, 16, 3))
    masks = np.zeros((1, 16, 16), int)
    picture = tf.io.decode_png(make_comparison(images, masks, masks, num_classes=2))
    assert picture.shape == (132, 3 * 132, 3)
