import pytest
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.strategies import make_mirrored


@pytest.mark.parametrize("all_reduce", ["auto", "hierarchical_copy", "reduction_to_one_device"])
def test_sums_over_the_devices(all_reduce):
    strategy = make_mirrored(devices=["CPU:0", "/device:CPU:2"], all_reduce=all_reduce)

    @tf.function
    def total():
        def replica():
            context = tf.distribute.get_replica_context()
            value = tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
            return context.all_reduce("SUM", value)

        return strategy.experimental_local_results(strategy.run(replica))

    assert [float(value) for value in total()] == [3.0, 3.0]


def test_takes_all_cpus_without_accelerators():
    assert make_mirrored().num_replicas_in_sync == len(tf.config.list_logical_devices("CPU"))


def test_refuses_nccl_on_cpus():
    with pytest.raises(TfdistError, match="nccl` needs GPUs.*Use auto, hierarchical_copy"):
        make_mirrored(devices=["CPU:0", "CPU:1"], all_reduce="nccl")


def test_refuses_an_unknown_algorithm():
    with pytest.raises(TfdistError, match=r"Unknown `all_reduce` 'ncl'. Valid: nccl"):
        make_mirrored(all_reduce="ncl")


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["GPU:3"], r"names GPU:3, but 0 GPUs are visible\. .*CUDA_VISIBLE_DEVICES"),
        (["CPU:0", "CPU:7"], r"names CPU:7, but 3 CPUs are visible .*`virtual_devices=8`"),
        (["CPU:0", "CPU:0"], "names a device twice"),
        (["gpu"], "'gpu' is not a device name"),
        (["2"], "'2' is not a device name.*strategy=mirrored uses all, without names"),
    ],
)
def test_refuses_devices_that_are_not_there(devices, message):
    with pytest.raises(TfdistError, match=message):
        make_mirrored(devices=devices)
