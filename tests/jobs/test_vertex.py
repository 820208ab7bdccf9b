import contextlib
import shlex

import pytest
import yaml

from tests.jobs.commands import make_files, make_texts
from tfdist.errors import TfdistError
from tfdist.jobs.vertex_machines import check_machine

GIVEN = ("--target=vertex", "--image=region-docker.pkg.dev/p/r/tfdist")


def make_spec(*arguments):
    return yaml.safe_load(make_texts(*GIVEN, *arguments)["custom_job.yaml"])


def parse_as_google(spec):
    types = pytest.importorskip(
        "google.cloud.aiplatform_v1.types", reason="google-cloud-aiplatform: make test-vertex"
    )
    json_format = pytest.importorskip("google.protobuf.json_format")
    # Fields and enums that the message does not have are errors.
    return json_format.ParseDict(spec, types.CustomJobSpec.pb(types.CustomJobSpec()))


@pytest.mark.parametrize(
    ("flags", "counts", "accelerators"),
    [
        (("--workers=1",), [1], [2]),
        (("--workers=3",), [1, 2], [2, 2]),
        (("--workers=2", "--ps=3"), [1, 2, 3], [0, 2, 0]),
    ],
)
def test_is_what_google_reads(flags, counts, accelerators):
    strategy = "parameter_server" if "--ps=3" in flags else "auto"
    spec = parse_as_google(
        make_spec(
            *flags,
            "--accelerators_per_worker=2",
            "--accelerator=NVIDIA_L4",
            "--machine=g2-standard-24",
            "--",
            f"--strategy={strategy}",
            "--run_dir=gs://bucket/run",
        )
    )
    pools = spec.worker_pool_specs
    assert [pool.replica_count for pool in pools] == counts
    assert [pool.machine_spec.accelerator_count for pool in pools] == accelerators
    kind = type(pools[0].machine_spec).DESCRIPTOR.fields_by_name["accelerator_type"].enum_type
    l4 = kind.values_by_name["NVIDIA_L4"].number
    assert [pool.machine_spec.accelerator_type for pool in pools] == [
        l4 if count else 0 for count in accelerators
    ]
    assert spec.base_output_directory.output_uri_prefix == "gs://bucket/run"
    assert spec.scheduling.timeout.seconds == 24 * 3600


def test_pools_are_in_their_fixed_order():
    spec = make_spec(
        "--workers=2", "--ps=3", "--", "--strategy=parameter_server", "--run_dir=gs://b/r"
    )
    assert [pool["replicaCount"] for pool in spec["workerPoolSpecs"]] == [1, 2, 3]
    assert spec["scheduling"]["restartJobOnWorkerRestart"] is False
    spec = make_spec("--workers=3", "--", "--run_dir=gs://b/r")
    assert [pool["replicaCount"] for pool in spec["workerPoolSpecs"]] == [1, 2]
    assert spec["scheduling"]["restartJobOnWorkerRestart"] is True


TPU = ("--strategy=tpu", "--tpu=local")


def test_spot_machines_an_account_and_a_tensorboard():
    board = "projects/p/locations/r/tensorboards/7"
    flags = ("--spot", "--service_account=a@p.iam.gserviceaccount.com")
    spec = make_spec(*flags, f"--vertex_tensorboard={board}", "--", "--run_dir=gs://b/r")
    assert spec["scheduling"]["strategy"] == "SPOT"
    assert spec["serviceAccount"] == "a@p.iam.gserviceaccount.com"
    assert spec["tensorboard"] == board
    assert "strategy" not in make_spec("--", "--run_dir=gs://b/r")["scheduling"]


def test_a_tpu_is_part_of_the_machine():
    spec = make_spec("--machine=ct5lp-hightpu-4t", "--", *TPU, "--run_dir=gs://b/r")
    (pool,) = spec["workerPoolSpecs"]
    assert pool["machineSpec"] == {"machineType": "ct5lp-hightpu-4t", "tpuTopology": "2x2"}
    assert pool["containerSpec"]["args"] == list(TPU)


def test_google_reads_the_further_fields():
    board = "--vertex_tensorboard=projects/p/locations/r/tensorboards/7"
    given = ("--machine=ct5lp-hightpu-4t", "--spot", "--service_account=a@p.com", board)
    spec = parse_as_google(make_spec(*given, "--", *TPU, "--run_dir=gs://b/r"))
    assert spec.worker_pool_specs[0].machine_spec.tpu_topology == "2x2"
    strategy = type(spec.scheduling).DESCRIPTOR.fields_by_name["strategy"].enum_type
    assert spec.scheduling.strategy == strategy.values_by_name["SPOT"].number
    assert spec.tensorboard.endswith("/7")


def test_accelerators_are_those_of_the_machine():
    flags = ("--machine=a2-highgpu-2g", "--accelerators_per_worker=2", "--workers=2", "--ps=1")
    spec = make_spec(*flags, "--", "--strategy=parameter_server", "--run_dir=gs://b/r")
    machines = [pool["machineSpec"] for pool in spec["workerPoolSpecs"]]
    of_worker = {
        "machineType": "a2-highgpu-2g",
        "acceleratorType": "NVIDIA_TESLA_A100",
        "acceleratorCount": 2,
    }
    # The chief and the servers have none, which a machine of this type cannot do without.
    assert machines == [
        {"machineType": "n1-standard-8"},
        of_worker,
        {"machineType": "n1-standard-8"},
    ]


@pytest.mark.parametrize(
    ("machine", "kind", "count", "is_valid"),
    [
        ("n1-standard-8", "NVIDIA_TESLA_T4", 1, True),
        ("n1-standard-8", "NVIDIA_TESLA_T4", 3, False),
        ("n1-standard-32", "NVIDIA_TESLA_T4", 1, False),
        ("n1-standard-32", "NVIDIA_TESLA_T4", 2, True),
        ("n1-highmem-64", "NVIDIA_TESLA_V100", 4, False),
        ("n1-highmem-64", "NVIDIA_TESLA_V100", 8, True),
        ("n1-standard-8", "NVIDIA_L4", 1, False),
        ("g2-standard-24", "NVIDIA_L4", 1, False),
        ("g2-standard-24", "NVIDIA_L4", 2, True),
        ("a3-highgpu-8g", "NVIDIA_H100_80GB", 8, True),
        ("e2-standard-4", "NVIDIA_TESLA_T4", 1, False),
        ("e2-standard-4", "NVIDIA_TESLA_T4", 0, True),
        ("z9-of-tomorrow-8", "NVIDIA_TOMORROW", 1, True),
    ],
)
def test_a_machine_that_cannot_have_the_accelerators_is_refused(machine, kind, count, is_valid):
    context = contextlib.nullcontext() if is_valid else pytest.raises(TfdistError, match=machine)
    with context:
        check_machine(machine, kind, count)


@pytest.mark.parametrize("run_dir", [("--run_dir=gs://b/r",), ("--run_dir", "gs://b/r")])
def test_the_run_directory_is_vertex_ais_own(run_dir):
    spec = make_spec("--", "--epochs=2", *run_dir, "--seed=3")
    assert spec["baseOutputDirectory"] == {"outputUriPrefix": "gs://b/r"}
    # Without the flag, training takes the directory from the AIP_ variables.
    assert spec["workerPoolSpecs"][0]["containerSpec"]["args"] == ["--epochs=2", "--seed=3"]


def test_is_submitted_by_gcloud():
    files = make_files(*GIVEN, "--region=europe-west4", "--", "--run_dir=gs://b/r")
    assert shlex.split(files.submission.commands[0].format(output="out")) == [
        "gcloud",
        "ai",
        "custom-jobs",
        "create",
        "--region=europe-west4",
        "--display-name=tfdist",
        "--config=out/custom_job.yaml",
    ]


def test_awkward_texts_arrive_as_they_were_given():
    given = ("--tpu=a: 'b' # \"c\" {d} $(e)", "--learning_rate", "1e-3")
    flags = ("--region={a} b", "--machine=1e3", "--", "--run_dir=gs://b/{r}", *given)
    files = make_files(*GIVEN, *flags)
    spec = yaml.safe_load(files.texts["custom_job.yaml"])
    (pool,) = spec["workerPoolSpecs"]
    assert pool["containerSpec"]["args"] == list(given)
    assert pool["machineSpec"]["machineType"] == "1e3"
    assert '"1e3"' in files.texts["custom_job.yaml"]
    (command,) = files.submission.commands
    assert "--region={a} b" in shlex.split(command.format(output="jobs"))
