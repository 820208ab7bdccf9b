import pytest
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.strategies import make_tpu


@pytest.mark.parametrize(
    ("tpu", "looked_at"), [("", "TPU_NAME"), ("local", "`tpu=local`"), ("node-1", "`tpu=node-1`")]
)
def test_says_where_it_looked(tpu, looked_at):
    if tf.config.list_physical_devices("TPU"):
        pytest.skip("there is a TPU")
    with pytest.raises(TfdistError, match=f"no TPU found.*{looked_at}.*`strategy=auto`"):
        make_tpu(tpu=tpu)
