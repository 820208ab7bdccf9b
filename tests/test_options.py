import json

import pytest

from tfdist.errors import TfdistError
from tfdist.options import StrategyOptions, TrainingOptions, TrainOptions, parse_label_map


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


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["255"], "--label_map=255 is not FROM:TO"),
        (["256:1"], "--label_map=256:1 is not FROM:TO, a value from 0 to 255"),
        (["255:256"], "is not FROM:TO"),
        (["#ff00:1"], "is not FROM:TO"),
        (["-1:1"], "is not FROM:TO"),
        (["255:1", "255:0"], "names 255 twice"),
        (["#ff0000:1", "#FF0000:0"], "names #ff0000 twice"),
        (["255:1", "#ff0000:1"], "mixes values and colors"),
    ],
)
def test_a_label_map_that_cannot_be_understood_is_refused(pairs, message):
    with pytest.raises(TfdistError, match=message):
        parse_label_map(pairs)
