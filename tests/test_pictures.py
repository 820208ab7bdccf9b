import numpy as np
import tensorflow as tf

from tfdist.pictures import colour_mask, make_comparison, make_palette


def test_classes_have_colours_of_their_own_and_void_is_black():
    palette = make_palette(30)
    assert len(np.unique(palette, axis=0)) == 30
    coloured = colour_mask(np.array([[0, 29, 255, -1]]), palette)
    assert (coloured[0, 1] == palette[29]).all()
    assert not coloured[0, 2:].any()


def test_a_row_an_example_and_void_hidden_in_the_prediction():
    images = np.full((2, 8, 10, 3), 300.0)
    truths = np.zeros((2, 8, 10), int)
    truths[:, 0] = 9
    picture = tf.io.decode_png(make_comparison(images, truths, truths * 0, num_classes=2)).numpy()
    assert picture.shape == (2 * 12, 3 * 14, 3)
    assert (picture[2, 2:12] == 255).all()
    assert not picture[2, 16:26].any()
    assert not picture[2, 30:40].any()
    assert (picture[3, 30:40] == make_palette(2)[0]).all()
