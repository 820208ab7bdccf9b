import json

from tfdist.options import StrategyOptions, TrainingOptions, TrainOptions


def test_what_changes_only_the_speed_is_not_part_of_the_result():
    one = TrainOptions(strategy=StrategyOptions(strategy="one_device"))
    two = TrainOptions(strategy=StrategyOptions(strategy="mirrored", virtual_devices=2))
    assert one.select_result() == two.select_result()
    other = TrainOptions(training=TrainingOptions(seed=1))
    assert other.select_result() != one.select_result()


def test_is_json():
    options = TrainOptions()
    assert json.loads(json.dumps(options.to_dict())) == options.to_dict()
    assert json.loads(json.dumps(options.select_result())) == options.select_result()


def test_what_local_sgd_alone_is_told_belongs_to_its_result_alone():
    here, there = (
        TrainOptions(strategy=StrategyOptions(strategy=name, sync_every=3)).select_result()
        for name in ("local_sgd", "mirrored")
    )
    assert here == {
        **there,
        "sync_every": 3,
        "average_optimizer": True,
        "outer_learning_rate": 1.0,
        "outer_momentum": 0.0,
    }
