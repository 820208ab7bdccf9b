import keras
import numpy as np
import tensorflow as tf

from tfdist.data.source import ArraySource
from tfdist.tasks.segmentation.evaluation import write_samples
from tfdist.training.run_directory import RunDirectory
from tfdist.training.trainer import Trainer


def test_samples_are_spread_over_the_data(path_with_spaces):
    values = np.arange(11.0) * 20
    images = np.broadcast_to(values[:, None, None, None], (11, 128, 128, 3)).astype("float32")
    source = ArraySource.from_arrays((images, np.zeros((11, 128, 128), "int32")))
    model = keras.Sequential([keras.Input((128, 128, 3)), keras.layers.Conv2D(2, 1)])
    path = write_samples(
        RunDirectory(str(path_with_spaces)), Trainer(model), source, num_examples=3, num_classes=2
    )
    png = tf.io.decode_png((path_with_spaces / "samples" / "predictions.png").read_bytes())
    assert path == f"{path_with_spaces}/samples/predictions.png"
    assert [int(png[132 * row + 66, 66, 0]) for row in range(3)] == [0, 100, 200]
