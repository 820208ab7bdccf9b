import numpy as np
import tensorflow as tf

from tfdist.tasks.segmentation.masks import decode_mask, encode_mask


def test_labels_come_back_from_an_indexed_png_and_show_in_their_colors():
    labels = np.random.default_rng(0).integers(0, 7, (13, 9), np.uint8)
    palette = np.random.default_rng(1).integers(0, 256, (7, 3), np.uint8)
    data = encode_mask(labels, palette)
    assert (decode_mask(data) == labels).all()
    assert (tf.io.decode_png(data, channels=3).numpy() == palette[labels]).all()
