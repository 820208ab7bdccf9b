"""`--patch=FILE`: what only one's own cluster needs is merged into the files of a job."""

import subprocess
import textwrap

import pytest
import yaml

from tests.jobs.commands import make_texts
from tests.jobs.schemas import check_object
from tfdist.errors import TfdistError

PEERS = ("--workers=2", "--accelerators_per_worker=1", "--", "--strategy=multi_worker_mirrored")


@pytest.fixture
def patch(path_with_spaces):
    def write(text):
        path = path_with_spaces / "patch.yaml"
        path.write_text(textwrap.dedent(text))
        return f"--patch={path}"

    return write


KUBERNETES = """
    metadata: {namespace: team, labels: {cost-center: "17"}}
    ---
    kind: Pod
    spec:
      imagePullSecrets: [{name: registry}]
      nodeSelector: {cloud.google.com/gke-accelerator: nvidia-l4}
      tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
      containers:
        env:
          - name: WANDB_API_KEY
            valueFrom: {secretKeyRef: {name: wandb, key: api-key}}
    ---
    kind: Job
    metadata: {labels: {kueue.x-k8s.io/queue-name: research}}
    spec: {suspend: true, successPolicy: null}
"""


def test_kubernetes_objects_get_what_a_cluster_needs(patch):
    given = ("--target=kubernetes", "--image=r/tfdist", patch(KUBERNETES), *PEERS)
    texts = make_texts(*given, "--run_dir=gs://bucket/run")
    plain = make_texts("--target=kubernetes", "--image=r/tfdist", *PEERS, "--run_dir=gs://b/r")
    assert "team" not in plain["job.yaml"]
    pods = []
    for text in texts.values():
        for item in yaml.safe_load_all(text):
            check_object(item)
            assert item["metadata"]["namespace"] == "team"
            assert item["metadata"]["labels"]["app.kubernetes.io/name"] == "tfdist"
            if item["kind"] == "Job":
                assert item["spec"]["suspend"] is True
                assert item["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
                pods.append(item["spec"]["template"]["spec"])
            if item["kind"] == "TFJob":
                pods += [
                    each["template"]["spec"] for each in item["spec"]["tfReplicaSpecs"].values()
                ]
            if item["kind"] == "TrainingRuntime":
                (replicated,) = item["spec"]["template"]["spec"]["replicatedJobs"]
                pods.append(replicated["template"]["spec"]["template"]["spec"])
    assert len(pods) == 3
    for pod in pods:
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
        assert pod["securityContext"]["runAsNonRoot"] is True  # what was there remains
        (container,) = pod["containers"]
        assert container["image"] == "r/tfdist"
        assert container["env"][-1]["valueFrom"]["secretKeyRef"]["name"] == "wandb"
    names = [each["name"] for each in pods[0]["containers"][0]["env"]]
    assert names[0] == "TFDIST_SERVICE"


def test_a_claim_without_a_storage_class_says_what_it_needs():
    given = ("--target=kubernetes", "--image=r/tfdist")
    run_dir = "--run_dir=/mnt/tfdist/run"
    assert "ReadWriteMany" in make_texts(*given, *PEERS, run_dir)["storage.yaml"].split("api")[0]
    texts = make_texts(*given, "--storage_class=filestore", *PEERS, run_dir)
    assert "names no storage class" not in texts["storage.yaml"]


def test_vertex_gets_reservations_and_variables(patch):
    text = """
        scheduling: {strategy: FLEX_START, maxWaitDuration: 3600s}
        workerPoolSpecs:
          machineSpec: {reservationAffinity: {reservationAffinityType: ANY_RESERVATION}}
          containerSpec: {env: [{name: MODE, value: fast}]}
    """
    given = ("--target=vertex", "--image=r/tfdist", patch(text), *PEERS, "--run_dir=gs://b/run")
    spec = yaml.safe_load(make_texts(*given)["custom_job.yaml"])
    assert spec["scheduling"]["strategy"] == "FLEX_START"
    assert "timeout" in spec["scheduling"]
    assert len(spec["workerPoolSpecs"]) == 2
    for pool in spec["workerPoolSpecs"]:
        assert pool["machineSpec"]["reservationAffinity"]
        assert pool["machineSpec"]["acceleratorCount"] == 1
        assert pool["containerSpec"]["env"] == [{"name": "MODE", "value": "fast"}]


def test_slurm_gets_options_a_module_and_a_container(patch):
    text = """
        sbatch: {qos: high prio, constraint: a100&ib, exclusive: true, open-mode: null}
        srun: {container-image: "image #1.sqsh"}
        setup: |
          module load cuda
          ulimit -l unlimited
        prefix: [apptainer, exec, --nv, my image.sif]
    """
    script = make_texts("--target=slurm", patch(text), *PEERS)["train.sbatch"]
    lines = ["--qos='high prio'", "--constraint='a100&ib'", "--exclusive"]
    assert "".join(f"#SBATCH {line}\n" for line in lines) in script
    assert "open-mode" not in script
    assert "\nmodule load cuda\nulimit -l unlimited\n\nsrun " in script
    assert "--container-image='image #1.sqsh' \\\n" in script
    assert "apptainer exec --nv 'my image.sif' python" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_a_tpu_vm_gets_options_of_gcloud_and_docker(patch):
    text = """
        create: {network: my net, internal-ips: true}
        docker: [--env=MODE=a b]
    """
    given = ("--target=tpu_vm", "--image=r/tfdist", patch(text), "--", "--strategy=tpu")
    script = make_texts(*given, "--tpu=local", "--run_dir=gs://b/run")["tpu_vm.sh"]
    assert "--network='my net' --internal-ips" in script
    assert "--env=MODE=a b" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("target", "text", "message"),
    [
        ("kubernetes", "kind: Jbo", "Unknown kind in --patch 'Jbo'. Valid: Job, TFJob, "),
        ("kubernetes", "[1, 2]", "is no mapping of names"),
        ("kubernetes", "a: [", "it is not YAML"),
        ("slurm", "sbatc: {}", "Unknown name in --patch 'sbatc'. Valid: sbatch"),
        ("slurm", "prefix: apptainer", "Cannot use prefix in --patch: write a list of words"),
        ("slurm", 'sbatch: {qos: "a\\nb"}', "it has a line break"),
    ],
)
def test_a_wrong_patch_is_refused_in_one_line(patch, target, text, message):
    image = [] if target == "slurm" else ["--image=r/tfdist"]
    run_dir = "--run_dir=gs://bucket/run"
    with pytest.raises(TfdistError) as caught:
        make_texts(f"--target={target}", *image, patch(text), *PEERS, run_dir)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_patch_is_refused():
    with pytest.raises(TfdistError, match="Cannot read `patch=nowhere.yaml`|--patch=nowhere.yaml"):
        make_texts("--target=slurm", "--patch=nowhere.yaml")
