import pytest
import yaml

from tests.jobs.commands import make_texts
from tests.jobs.schemas import check_object
from tfdist.cluster import parse_kubernetes

PEERS = ("--workers=3", "--", "--strategy=multi_worker_mirrored")
SERVERS = ("--workers=2", "--ps=1", "--accelerators_per_worker=2", "--")
SERVERS = (*SERVERS, "--strategy=parameter_server")
STORED = "--run_dir=/mnt/tfdist/a run"


def make_objects(*arguments, name="job.yaml"):
    texts = make_texts("--target=kubernetes", "--image=registry/tfdist", *arguments)
    return {item["kind"]: item for item in yaml.safe_load_all(texts[name])}


def make_pods(job):
    """The environment of each pod of an indexed Job, as Kubernetes makes it."""
    name, spec = job["metadata"]["name"], job["spec"]
    container = spec["template"]["spec"]["containers"][0]
    given = {item["name"]: item["value"] for item in container["env"]}
    return [
        {**given, "JOB_COMPLETION_INDEX": str(i), "HOSTNAME": f"{name}-{i}"}
        for i in range(spec["completions"])
    ]


@pytest.mark.parametrize("arguments", [PEERS, SERVERS])
@pytest.mark.parametrize("run_dir", [STORED, "--run_dir=gs://bucket/run"])
def test_objects_are_of_the_official_schemas(arguments, run_dir):
    texts = make_texts("--target=kubernetes", "--image=r/tfdist", *arguments, run_dir)
    assert set(texts) == {"job.yaml", "tfjob.yaml", "trainjob.yaml"} | (
        {"storage.yaml"} if run_dir == STORED else set()
    )
    for text in texts.values():
        for item in yaml.safe_load_all(text):
            check_object(item)


def test_the_pods_of_the_job_find_one_another():
    objects = make_objects(*SERVERS, STORED, "--grace_period_s=40.5")
    job, service = objects["Job"], objects["Service"]
    spec = job["spec"]["template"]["spec"]
    # Kubernetes names pod i <job>-<i>.<subdomain>, where the subdomain is a headless Service.
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == 4
    configs = [parse_kubernetes(pod) for pod in make_pods(job)]
    assert [config.task_name for config in configs] == ["chief-0", "worker-0", "worker-1", "ps-0"]
    assert configs[0].tasks["ps"] == ("tfdist-3.tfdist:2222",)
    assert spec["containers"][0]["ports"][0]["containerPort"] == 2222
    assert spec["terminationGracePeriodSeconds"] == 46
    # The servers end when the chief has; the Job must not wait for them.
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_failures_are_treated_as_their_exit_status_says():
    job = make_objects(*PEERS, STORED)["Job"]
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"  # the policy's condition
    assert "successPolicy" not in job["spec"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    by_status = {
        rule["onExitCodes"]["values"][0]: rule["action"] for rule in rules if "onExitCodes" in rule
    }
    assert by_status == {2: "FailJob", 143: "Ignore"}
    assert job["spec"]["backoffLimit"] == 3 * 3
    tf_job = make_objects(*PEERS, STORED, name="tfjob.yaml")["TFJob"]
    assert tf_job["spec"]["tfReplicaSpecs"]["Worker"]["restartPolicy"] == "ExitCode"
    assert tf_job["spec"]["successPolicy"] == "AllWorkers"


def test_the_nodes_of_a_train_job_find_one_another():
    objects = make_objects(*SERVERS, STORED, name="trainjob.yaml")
    runtime, job = objects["TrainingRuntime"], objects["TrainJob"]
    assert job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": "tfdist"}
    assert runtime["metadata"]["name"] == "tfdist"
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    # Trainer fills in this container of this replicated job.
    assert replicated["name"] == container["name"] == "node"
    trainer = job["spec"]["trainer"]
    given = {item["name"]: item["value"] for item in trainer["env"]}
    # JobSet names the pods so: <job set>-<replicated job>-<its index>-<the pod's>.<job set>.
    pods = [
        {**given, "JOB_COMPLETION_INDEX": str(i), "HOSTNAME": f"tfdist-node-0-{i}"}
        for i in range(trainer["numNodes"])
    ]
    configs = [parse_kubernetes(pod) for pod in pods]
    assert [config.task_name for config in configs] == ["chief-0", "worker-0", "worker-1", "ps-0"]
    assert configs[0].tasks["ps"] == ("tfdist-node-0-3.tfdist:2222",)
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "2"
    spec = replicated["template"]["spec"]
    of_job = make_objects(*SERVERS, STORED)["Job"]["spec"]
    for name in ("backoffLimit", "successPolicy"):
        assert spec[name] == of_job[name]
    rules, others = (s["podFailurePolicy"]["rules"] for s in (spec, of_job))
    assert [rule["action"] for rule in rules] == [rule["action"] for rule in others]
    names = {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule}
    assert names == {"node"}


@pytest.mark.parametrize("name", ["job.yaml", "tfjob.yaml", "trainjob.yaml"])
def test_guards_cover_the_pods_and_only_them(name):
    objects = make_objects(*SERVERS, STORED, name=name)
    if name == "job.yaml":
        templates = [objects["Job"]["spec"]["template"]]
    elif name == "trainjob.yaml":
        (node,) = objects["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
        templates = [node["template"]["spec"]["template"]]
    else:
        roles = objects["TFJob"]["spec"]["tfReplicaSpecs"]
        assert {role: spec["replicas"] for role, spec in roles.items()} == {
            "Chief": 1,
            "Worker": 2,
            "PS": 1,
        }
        templates = [spec["template"] for spec in roles.values()]
        limits = [t["spec"]["containers"][0]["resources"]["limits"] for t in templates]
        assert [limit.get("nvidia.com/gpu") for limit in limits] == [None, "2", None]
    policy = objects["NetworkPolicy"]["spec"]
    own = {"matchLabels": templates[0]["metadata"]["labels"]}
    assert own["matchLabels"]["app.kubernetes.io/instance"] == "tfdist"
    assert policy["podSelector"] == own
    assert policy["ingress"] == [{"from": [{"podSelector": own}]}]
    assert objects["PodDisruptionBudget"]["spec"]["selector"] == own
    assert objects["PodDisruptionBudget"]["spec"]["minAvailable"] == 4
    assert all(t["metadata"]["labels"] == own["matchLabels"] for t in templates)
    assert all(t["spec"]["securityContext"]["runAsNonRoot"] for t in templates)


def test_all_pods_share_the_storage():
    objects = make_objects(*PEERS, STORED)
    spec = objects["Job"]["spec"]["template"]["spec"]
    claim = make_objects(*PEERS, STORED, name="storage.yaml")["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert STORED.startswith(f"--run_dir={spec['containers'][0]['volumeMounts'][0]['mountPath']}/")
    assert spec["containers"][0]["args"][-1] == STORED
    assert "storageClassName" not in claim["spec"]
    given = make_objects("--storage_class=nfs", *PEERS, STORED, name="storage.yaml")
    assert given["PersistentVolumeClaim"]["spec"]["storageClassName"] == "nfs"
    check_object(given["PersistentVolumeClaim"])
    texts = make_texts("--target=kubernetes", "--image=r/x", "--claim=mine", *PEERS, STORED)
    assert "storage.yaml" not in texts
    assert "claimName: mine" in texts["job.yaml"]


def test_texts_stay_texts_for_readers_of_any_yaml():
    given = ["--run_dir=gs://b/a: 'b' # \"c\" {d} $(e)", "--learning_rate", "1e-3", "--tpu", "y"]
    text = make_texts("--target=kubernetes", "--image=r/t:1", "--claim=0x1F", "--", *given)
    job = make_objects("--claim=0x1F", "--", *given)["Job"]
    assert job["spec"]["template"]["spec"]["containers"][0]["args"] == given
    # YAML 1.2 has numbers without a point, and other readers than PyYAML take y for true.
    assert [line.strip() for line in text["job.yaml"].splitlines()[-40:]].count('- "1e-3"') == 1
    assert '- "y"' in text["job.yaml"]
