import pytest

from tfdist.cluster import parse_hosts
from tfdist.errors import TfdistError
from tfdist.strategies import make_parameter_server, run_server


@pytest.mark.parametrize("start", [make_parameter_server, run_server])
def test_needs_a_cluster(monkeypatch, start):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(TfdistError, match=r"needs a cluster, .*tfdist\.launch --workers=2 --ps=1"):
        start()


def test_needs_a_parameter_server():
    cluster = parse_hosts("chief=a:1,worker=b:1", "chief:0")
    with pytest.raises(TfdistError, match="needs at least one ps"):
        make_parameter_server(cluster=cluster)
