"""The scope that a script runs in: afterwards, TensorFlow is as it was before."""

import tensorflow as tf

from tests import zoo
from tfdist.run.scope import keeping_scope


def test_strategies_can_be_built_after_a_script():
    strategy = zoo.STRATEGIES["mirrored-2"]()
    with keeping_scope(strategy, strategy.scope):
        assert tf.distribute.MirroredStrategy(["CPU:0"]) is strategy
    later = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    assert later is not strategy
    assert later.num_replicas_in_sync == 3
    assert tf.distribute.OneDeviceStrategy("CPU:0").num_replicas_in_sync == 1
    assert not tf.distribute.has_strategy()
