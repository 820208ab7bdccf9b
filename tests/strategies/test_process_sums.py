"""Sums between processes: right, small ones by one message, and others in any order."""

import json
import os
import sys

import pytest

from tests.strategies.process_sums_task import SIZES
from tfdist.launch import run_local_cluster

WORKERS = 3


@pytest.mark.cluster
def test_workers_that_trace_at_different_times_have_the_same_sums(tmp_path):
    result = run_local_cluster(
        workers=WORKERS,
        command=[sys.executable, "-m", "tests.strategies.process_sums_task", str(tmp_path)],
        run_dir=tmp_path,
        timeout_s=1000,
        stream=False,
        environ=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    assert result.status == 0, "\n".join(t.log.read_text()[-3000:] for t in result.tasks)
    found = [json.loads((tmp_path / f"worker-{i}.json").read_text()) for i in range(WORKERS)]
    for length in range(1, 4):
        for worker, one in enumerate(found):
            (loss, *_), repeated = one[f"length {length}"]
            assert loss == 6.0 * length * length * (worker + 1)
            assert repeated[0] == 4 * loss
    first, *others = ({k: v for k, v in one.items() if "length" not in k} for one in found)
    assert others == [first, first]
    for length in range(1, 4):
        total = 6.0 * length  # of all workers' x
        once, repeated = found[0][f"length {length}"]
        assert once[2] == 3 * length
        # The gradient of sum(total * x) is total, and the sum of x over all replicas.
        assert once[1] == 2 * total
        assert repeated[1:] == [4 * value for value in once[1:]]
    for size in SIZES:
        expected = [3.0 * (place % 2) + 3 for place in range(min(size, 9))]
        for dtype in ("float32", "float64", "bfloat16", "int64"):
            assert found[0][f"{dtype} {size}"] == expected
    operations = found[0]["operations"]
    assert operations.pop("40000") == [["CollectiveReduceV2", 0]]
    assert list(operations.values()) == 4 * [[["CollectiveGatherV2", 1]]]
