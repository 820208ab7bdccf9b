"""How a step is computed changes its speed, and what cannot be done is refused."""

import keras
import pytest

import tfdist
from tests import zoo
from tfdist.errors import TfdistError

SGD = lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)  # noqa: E731


def test_refuses_to_compress_what_crosses_no_network():
    with pytest.raises(TfdistError, match="MirroredStrategy does not take --compress_gradients"):
        tfdist.Trainer(
            lambda: zoo.EXAMPLES["dense"].build(SGD()),
            strategy=zoo.STRATEGIES["mirrored-2"](),
            compress_gradients=True,
        )
