import keras
import numpy as np

from tfdist.data.source import ArraySource
from tfdist.tasks.segmentation.report import draw_samples
from tfdist.training.fit.trainer import Trainer


def test_samples_are_spread_over_the_data():
    values = np.arange(11.0) * 20
    images = np.broadcast_to(values[:, None, None, None], (11, 128, 128, 3)).astype("float32")
    source = ArraySource.from_arrays((images, np.zeros((11, 128, 128), "int32")))
    model = keras.Sequential([keras.Input((128, 128, 3)), keras.layers.Conv2D(2, 1)])
    picture = draw_samples(Trainer(model), source, class_names=["a", "b"])
    shown = [int(picture[18 + 132 * row + 66, 66, 0]) for row in range(6)]
    assert shown == [0, 40, 80, 120, 160, 200]
