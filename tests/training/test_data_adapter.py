import numpy as np
import pytest

from tests import zoo
from tfdist.training.inputs import make_data_adapter


@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-2"])
def test_no_pipeline_of_a_strategy_leaves_a_thread_that_tunes_it(strategy_name):
    strategy = zoo.STRATEGIES[strategy_name]()
    x, y = np.zeros((8, 2), np.float32), np.zeros((8, 1), np.float32)
    adapter = make_data_adapter(
        x, y, global_batch_size=4, num_replicas=strategy.num_replicas_in_sync, shuffle=False
    )
    for iterator in (adapter.iterate_train(strategy, start_step=0), adapter.iterate_eval(strategy)):
        iterators = [iterator]  # on one CPU, nothing is copied
        if strategy_name != "one_device":
            iterators = iterator._iterators[0]._iterator._device_iterators
            assert len(iterators) == strategy.num_replicas_in_sync
        for of_device in iterators:
            assert of_device._dataset.options().autotune.enabled is False
