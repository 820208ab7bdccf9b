import pytest

from tfdist import strategies
from tfdist.errors import TfdistError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sync_every": 0}, "`sync_every=0` is too small: give 1 or more"),
        ({"outer_momentum": 1.0}, "`outer_momentum=1.0` is not below 1"),
        ({"outer_learning_rate": 0.0}, "`outer_learning_rate=0.0` is too small: give more than 0"),
    ],
)
def test_refuses_numbers_out_of_range(arguments, message):
    with pytest.raises(TfdistError, match=message):
        strategies.make_local_sgd(**arguments)
