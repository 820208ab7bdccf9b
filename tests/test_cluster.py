import dataclasses
import json
import re
import subprocess
import sys

import pytest

from tfdist.cluster import (
    ClusterConfig,
    expand_node_list,
    parse_hosts,
    parse_kubernetes,
    parse_slurm,
    parse_tf_config,
    parse_vertex,
    quiet_environment,
    read_environment,
    resolve_cluster,
    set_tf_config,
)
from tfdist.errors import TfdistError
from tfdist.strategies.registry import AUTO, choose_cluster_strategy, validate_cluster
from tfdist.strategies.registry import STRATEGIES as STRATEGIES_BY_NAME

STRATEGIES = (AUTO, *STRATEGIES_BY_NAME)


def tf_config(cluster, role="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


TWO_WORKERS = tf_config({"worker": ["a:1", "b:1"]})
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[2,10]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "TFDIST_PORT": "5000",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "my-run-1",
    "TFDIST_SERVICE": "my-run",
    "TFDIST_NUM_WORKERS": "2",
}
VERTEX = {
    "cluster": {"workerpool0": ["h0:2222"], "workerpool1": ["h1:2222", "h2:2222"]},
    "task": {"type": "workerpool1", "index": 1, "trial": "3"},
    "environment": "cloud",
}


def without(mapping, *names):
    return {name: value for name, value in mapping.items() if name not in names}


# What a description means.


def test_properties_of_workers_only():
    config = parse_tf_config(TWO_WORKERS)
    assert config.num_workers == config.num_tasks == 2
    assert config.num_ps == 0
    assert config.is_chief
    assert config.address == "a:1"
    assert config.task_name == "worker-0"
    assert config.to_tf_config() == json.loads(TWO_WORKERS)


@pytest.mark.parametrize(
    ("cluster", "role", "index", "is_chief", "num_workers"),
    [
        ({"worker": ["a:1", "b:1"]}, "worker", 0, True, 2),
        ({"worker": ["a:1", "b:1"]}, "worker", 1, False, 2),
        ({"chief": ["c:1"], "worker": ["a:1"]}, "chief", 0, True, 2),
        ({"chief": ["c:1"], "worker": ["a:1"]}, "worker", 0, False, 2),
        ({"chief": ["c:1"], "worker": ["a:1"], "ps": ["p:1"]}, "chief", 0, True, 1),
        ({"chief": ["c:1"], "worker": ["a:1"], "ps": ["p:1"]}, "ps", 0, False, 1),
        ({"chief": ["c:1"]}, "chief", 0, True, 1),
        ({"worker": ["a:1"]}, "evaluator", 0, False, 1),
    ],
)
def test_chief_and_number_of_workers(cluster, role, index, is_chief, num_workers):
    config = parse_tf_config(tf_config(cluster, role, index))
    assert config.is_chief is is_chief
    assert config.num_workers == num_workers


def test_a_config_cannot_be_changed_and_equals_its_like():
    config = parse_tf_config(TWO_WORKERS)
    assert config == parse_hosts("a:1,b:1", "worker:0")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.index = 1


def test_a_config_goes_through_tf_config_unchanged():
    config = parse_hosts("chief=a:1,worker=b:1,c:1,ps=d:1", "ps:0")
    assert parse_tf_config(config.to_tf_config_json()) == config


def test_evaluators_are_no_part_of_tensorflows_cluster():
    config = parse_hosts("a:1,evaluator=e:1", "evaluator:0")
    assert config.to_tf_config() == {
        "cluster": {"worker": ["a:1"]},
        "task": {"type": "evaluator", "index": 0},
    }


def test_describe_names_every_task_and_marks_this_process():
    text = parse_hosts("chief=a:1,worker=b:1,ps=c:1", "worker:0").describe()
    assert text.splitlines() == [
        "Cluster of 3 tasks (1 chief, 1 worker, 1 ps), from --hosts",
        "  chief 0   a:1",
        "  worker 0  b:1  <- this process",
        "  ps 0      c:1",
    ]


def test_describe_an_evaluator_without_address():
    text = parse_tf_config(tf_config({"worker": ["a:1"]}, "evaluator")).describe()
    assert text.splitlines()[-1] == "  evaluator 0  no address  <- this process"


def test_an_evaluator_of_no_cluster_does_not_train_by_itself():
    with pytest.raises(TfdistError, match="TF_CONFIG makes this process an evaluator, but tfdist"):
        parse_tf_config('{"task": {"type": "evaluator", "index": 0}}')


# Flags.


@pytest.mark.parametrize(
    ("hosts", "task", "tasks", "role", "index"),
    [
        ("a:1,b:2", "worker:1", {"worker": ("a:1", "b:2")}, "worker", 1),
        (" a:1 , b:2 ", " worker:1 ", {"worker": ("a:1", "b:2")}, "worker", 1),
        ("a:1,b:2", "worker/1", {"worker": ("a:1", "b:2")}, "worker", 1),
        ("[::1]:1,b:2", "worker:0", {"worker": ("[::1]:1", "b:2")}, "worker", 0),
        (
            "chief=a:1,worker=b:1,c:1,ps=d:1",
            "chief:0",
            {"chief": ("a:1",), "worker": ("b:1", "c:1"), "ps": ("d:1",)},
            "chief",
            0,
        ),
    ],
)
def test_parse_hosts(hosts, task, tasks, role, index):
    assert parse_hosts(hosts, task) == ClusterConfig(tasks, role, index)


def test_no_flags_no_cluster():
    assert parse_hosts("", "") is None


@pytest.mark.parametrize(
    ("hosts", "task", "message"),
    [
        ("", "worker:0", "--hosts is empty. List all tasks"),
        ("a:1", "", "--task is empty. Say which task"),
        ("a:1", "worker", "not role:index. Write"),
        ("a:1", "worker:x", "index is 'x'. Write a whole number"),
        ("a:1", "worker:-1", "index is '-1'. Write a whole number"),
        ("a:1", "wroker:0", "Unknown role in --hosts: 'wroker'. Valid: worker"),
        ("boss=a:1", "worker:0", "Unknown role in --hosts: 'boss'. Valid"),
        ("a:1,b:1", "worker:2", "worker 2, but the cluster has worker 0 to 1. Correct"),
        ("a:1", "worker:1", "worker 1, but the cluster has only worker 0. Correct"),
        ("a:1", "ps:0", "ps 0, but the cluster has no ps. Correct"),
        ("a", "worker:0", "worker 0: 'a' has no port. Write host:port, as in a:2222"),
        ("[::1]", "worker:0", "has no port"),
        ("::1:2222", "worker:0", "more than one colon"),
        (":2222", "worker:0", "no valid host"),
        ("a b:2222", "worker:0", "no valid host"),
        ("a:1,,b:1", "worker:0", "worker 1: '' has no port"),
        ("a:port", "worker:0", "port 'port'. Write a number from 1 to 65535"),
        ("a:0", "worker:0", "port '0'"),
        ("a:65536", "worker:0", "port '65536'"),
        ("a:-1", "worker:0", "port '-1'"),
        ("a:²", "worker:0", "port '²'"),
        ("grpc://a:1", "worker:0", "is a URL. Write host:port alone, as in a:1"),
        ("a:1,A:1", "worker:0", "worker 0 and worker 1 have the same address A:1. Give each"),
        ("a:1,ps=a:1", "worker:0", "worker 0 and ps 0 have the same address"),
        ("chief=a:1,b:1", "chief:0", "describes 2 chiefs. Keep one"),
        ("ps=a:1", "ps:0", "neither a worker nor a chief. Add a worker"),
    ],
)
def test_parse_hosts_errors(hosts, task, message):
    with pytest.raises(TfdistError, match=re.escape(message)) as error:
        parse_hosts(hosts, task)
    assert "\n" not in str(error.value)


# TF_CONFIG.


@pytest.mark.parametrize(
    "text", ["", "  ", "{}", '{"cluster": {}}', '{"task": {"type": "worker", "index": 0}}']
)
def test_tf_config_without_a_cluster(text):
    assert parse_tf_config(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TWO_WORKERS, ClusterConfig({"worker": ("a:1", "b:1")}, "worker", 0)),
        (
            tf_config({"worker": ["a:1", "b:1"]}, index="1"),
            ClusterConfig({"worker": ("a:1", "b:1")}, "worker", 1),
        ),
        (
            tf_config({"worker": {"1": "b:1", "0": "a:1"}}, index=1),
            ClusterConfig({"worker": ("a:1", "b:1")}, "worker", 1),
        ),
        (
            tf_config({"master": ["m:1"], "worker": ["a:1"]}, "master"),
            ClusterConfig({"chief": ("m:1",), "worker": ("a:1",)}, "chief", 0),
        ),
        (
            tf_config({"worker": ["a:1"], "evaluator": []}, "evaluator"),
            ClusterConfig({"worker": ("a:1",)}, "evaluator", 0),
        ),
    ],
)
def test_parse_tf_config(text, expected):
    assert parse_tf_config(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "TF_CONFIG is not JSON: "),
        ("[1]", "TF_CONFIG holds list, not an object. Write"),
        ('{"cluster": {"worker": ["a:1"]}}', "no task with a type. Add"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {}}', "no task with a type. Add"),
        ('{"cluster": {"worker": ["a:1"]}, "task": "worker"}', "no task with a type. Add"),
        (tf_config({"worker": "a:1"}), 'the tasks of worker are "a:1". Write a list'),
        (tf_config({"worker": [1]}), "the tasks of worker are [1]. Write a list"),
        (tf_config(["a:1"]), 'the cluster is ["a:1"]. Write an object'),
        (tf_config({"worker": {"0": "a:1", "2": "b:1"}}), "are 0, 2. Number them 0, 1"),
        (tf_config({"worker": ["a:1"]}, index=None), "index is None"),
        (tf_config({"worker": ["a:1"]}, index=True), "index is True"),
        (tf_config({"worker": ["a:1"]}, index=1.5), "index is 1.5"),
        (tf_config({"worker": ["a:1"]}, index=4), "worker 4, but the cluster has only worker 0"),
        (
            tf_config({"master": ["m:1"], "chief": ["c:1"]}, "chief"),
            "Unknown role in TF_CONFIG: 'master'",
        ),
        (tf_config({"wroker": ["a:1"]}), "Unknown role in TF_CONFIG: 'wroker'"),
    ],
)
def test_parse_tf_config_errors(text, message):
    with pytest.raises(TfdistError, match=re.escape(message)) as error:
        parse_tf_config(text)
    assert "\n" not in str(error.value)


# Vertex AI.


def test_parse_vertex_first_shape():
    assert parse_vertex(json.dumps(VERTEX)) == ClusterConfig(
        {"chief": ("h0:2222",), "worker": ("h1:2222", "h2:2222")}, "worker", 1
    )


def test_parse_vertex_second_shape():
    text = json.dumps(
        {
            "worker_pools": [
                {"replicas": ["h0:2222"]},
                {"replicas": ["h1:2222"]},
                {"replicas": ["h2:2222"]},
                {"replicas": ["h3:2222"]},
            ],
            "task": {"type": "workerpool2", "index": 0},
        }
    )
    expected = {role: (f"h{i}:2222",) for i, role in enumerate(("chief", "worker", "ps"))}
    assert parse_vertex(text) == ClusterConfig(expected | {"evaluator": ("h3:2222",)}, "ps", 0)


def test_parse_vertex_with_a_pool_left_out():
    text = json.dumps(
        {
            "worker_pools": [{"replicas": ["h0:2222"]}, {}, {"replicas": ["h2:2222"]}],
            "task": {"type": "workerpool0", "index": 0},
        }
    )
    assert parse_vertex(text).tasks == {"chief": ("h0:2222",), "ps": ("h2:2222",)}


def test_one_vertex_replica_is_a_single_process():
    spec = {"cluster": {"workerpool0": ["h:2222"]}, "task": {"type": "workerpool0", "index": 0}}
    assert parse_vertex(json.dumps(spec)) is None
    assert parse_vertex("") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": None}, "CLUSTER_SPEC has a cluster but no task"),
        ({"task": {"type": "workerpool9", "index": 0}}, "Unknown worker pool in CLUSTER_SPEC"),
        ({"cluster": {"pool": ["a:1"]}}, "Unknown worker pool in CLUSTER_SPEC: 'pool'. Valid"),
        ({"task": {"type": "workerpool1", "index": 2}}, "worker 2, but the cluster has worker 0"),
        ({"cluster": {"workerpool0": "a:1"}}, "the tasks of workerpool0 are"),
    ],
)
def test_parse_vertex_errors(change, message):
    with pytest.raises(TfdistError, match=re.escape(message)):
        parse_vertex(json.dumps(VERTEX | change))


@pytest.mark.parametrize("strategy", ["multi_worker_mirrored", "local_sgd"])
def test_reduction_servers_are_left_out_under_peers(strategy):
    cluster = VERTEX["cluster"] | {"workerpool2": ["r:2222"]}
    environ = {"CLUSTER_SPEC": json.dumps(VERTEX | {"cluster": cluster})}
    assert resolve_cluster(environ=environ).num_ps == 1
    config = resolve_cluster(environ=environ, has_servers=strategy == "parameter_server")
    assert config.num_ps == 0
    validate_cluster(config, strategy)


def test_a_reduction_server_cannot_run_the_trainer():
    cluster = VERTEX["cluster"] | {"workerpool2": ["r:2222"]}
    task = {"type": "workerpool2", "index": 0}
    environ = {"CLUSTER_SPEC": json.dumps({"cluster": cluster, "task": task})}
    with pytest.raises(TfdistError, match="Run the Reduction Server's container"):
        resolve_cluster(environ=environ, has_servers=False)


# Slurm.


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n2,n10", ["n2", "n10"]),
        ("n[2,10]", ["n2", "n10"]),
        ("n[1-3,07-10],m5", ["n1", "n2", "n3", "n07", "n08", "n09", "n10", "m5"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1-2].cluster.org,m1", ["n1.cluster.org", "n2.cluster.org", "m1"]),
    ],
)
def test_expand_node_list(text, hosts):
    assert expand_node_list(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n[2-1]", "n[a-b]", "n]1[", "n[]", "n[1,]"])
def test_expand_node_list_errors(text):
    with pytest.raises(TfdistError, match="not of the form"):
        expand_node_list(text)


def test_parse_slurm_in_natural_order():
    assert parse_slurm(SLURM) == ClusterConfig(
        {"worker": ("n2:5000", "n2:5001", "n10:5000")}, "worker", 2
    )


def test_parse_slurm_cyclic():
    environ = SLURM | {
        "SLURM_DISTRIBUTION": "cyclic:block",
        "SLURM_PROCID": "2",
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": "1",
    }
    assert parse_slurm(environ).tasks["worker"] == ("n2:5000", "n10:5000", "n2:5001")


def test_parse_slurm_without_the_steps_variables():
    environ = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "TFDIST_PORT": "5000",
    }
    assert parse_slurm(environ).tasks["worker"] == ("n1:5000", "n1:5001", "n2:5000", "n2:5001")
    assert parse_slurm(environ).index == 3


def test_parse_slurm_repeated_counts():
    environ = without(SLURM, "SLURM_LOCALID", "SLURM_NODEID") | {
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_STEP_NODELIST": "n[1-4]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "SLURM_PROCID": "6",
    }
    assert parse_slurm(environ).address == "n4:5000"


@pytest.mark.parametrize(
    ("rank", "role", "index"), [(0, "chief", 0), (1, "worker", 0), (2, "worker", 1), (3, "ps", 0)]
)
def test_parse_slurm_with_parameter_servers(rank, role, index):
    environ = {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "n[1-4]",
        "TFDIST_NUM_PS": "1",
    }
    config = parse_slurm(environ)
    assert (config.role, config.index) == (role, index)
    validate_cluster(config, "parameter_server")


def test_slurm_ports_differ_between_jobs_and_stay_below_the_ephemeral_ones():
    environ = without(SLURM, "TFDIST_PORT")
    addresses = [parse_slurm(environ | {"SLURM_JOB_ID": str(job)}).address for job in range(60)]
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    assert len(set(ports)) == len(ports)
    assert 20000 <= min(ports) <= max(ports) < 32768
    other_step = parse_slurm(environ | {"SLURM_STEP_ID": "1"})
    assert other_step.address != parse_slurm(environ | {"SLURM_STEP_ID": "0"}).address


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},
        # A batch script, which is not one of the job's tasks.
        {
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "4",
            "SLURM_JOB_NODELIST": "n",
            "ENVIRONMENT": "BATCH",
        },
    ],
)
def test_no_slurm_step_no_cluster(environ):
    assert parse_slurm(environ) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x' is not a whole number"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID=3, but the step has 3 tasks"),
        ({"SLURM_STEP_NODELIST": ""}, "node list ''"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, "tasks per node are [2]"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(3)"}, "not of the form 2(x3),1"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID=0, found 1. Start"),
        ({"SLURM_NODEID": "0"}, "SLURM_NODEID=1, found 0. Start"),
        ({"SLURM_DISTRIBUTION": "plane=2"}, "SLURM_DISTRIBUTION=plane=2 is not supported"),
        ({"TFDIST_NUM_PS": "2"}, "3 tasks are too few for a chief, a worker and 2 parameter"),
        ({"TFDIST_NUM_PS": "-1"}, "TFDIST_NUM_PS='-1' is not a whole number"),
        ({"TFDIST_PORT": "70000"}, "port '70000'"),
    ],
)
def test_parse_slurm_errors(change, message):
    with pytest.raises(TfdistError, match=re.escape(message)) as error:
        parse_slurm(SLURM | change)
    assert "\n" not in str(error.value)


# Kubernetes.


def test_parse_kubernetes():
    assert parse_kubernetes(KUBERNETES) == ClusterConfig(
        {"worker": ("my-run-0.my-run:2222", "my-run-1.my-run:2222")}, "worker", 1
    )


def test_parse_kubernetes_with_everything_named():
    environ = KUBERNETES | {
        "HOSTNAME": "somebody",
        "TFDIST_JOB": "j",
        "TFDIST_PORT": "3000",
        "TFDIST_NUM_PS": "1",
        "JOB_COMPLETION_INDEX": "3",
    }
    config = parse_kubernetes(environ)
    assert config.address == "j-3.my-run:3000"
    assert config.role == "ps"
    validate_cluster(config, "parameter_server")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        without(KUBERNETES, "JOB_COMPLETION_INDEX"),
        {"JOB_COMPLETION_INDEX": "3"},
        KUBERNETES | {"TFDIST_NUM_WORKERS": "1", "JOB_COMPLETION_INDEX": "0"},
    ],
)
def test_no_kubernetes_no_cluster(environ):
    assert parse_kubernetes(environ) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"TFDIST_SERVICE": ""}, "TFDIST_SERVICE is not set. Set"),
        ({"TFDIST_NUM_WORKERS": ""}, "TFDIST_NUM_WORKERS is not set. Set"),
        ({"TFDIST_NUM_WORKERS": "two"}, "TFDIST_NUM_WORKERS='two' is not a whole number"),
        ({"HOSTNAME": "other"}, "Set TFDIST_JOB"),
        ({"JOB_COMPLETION_INDEX": "5", "HOSTNAME": "my-run-5"}, "worker 5, but the cluster has"),
        ({"TFDIST_PORT": "x"}, "TFDIST_PORT='x' is not a whole number"),
    ],
)
def test_parse_kubernetes_errors(change, message):
    with pytest.raises(TfdistError, match=re.escape(message)):
        parse_kubernetes(KUBERNETES | change)


# The order, and what suits a strategy.


def test_the_order_in_which_descriptions_are_read():
    environ = SLURM | KUBERNETES | {"TF_CONFIG": TWO_WORKERS, "CLUSTER_SPEC": json.dumps(VERTEX)}
    flags = {"hosts": "f:1", "task": "worker:0"}
    assert resolve_cluster(**flags, environ=environ).source == "--hosts"
    for name, source in [
        ("TF_CONFIG", "TF_CONFIG"),
        ("CLUSTER_SPEC", "CLUSTER_SPEC"),
        ("SLURM_PROCID", "Slurm"),
        ("JOB_COMPLETION_INDEX", "Kubernetes"),
    ]:
        assert resolve_cluster(environ=environ).source == source
        environ = without(environ, name)
    assert resolve_cluster(environ=environ) is None


PEERS = parse_hosts("a:1,b:1", "worker:0")
SERVERS = parse_hosts("chief=a:1,worker=b:1,ps=c:1", "chief:0")
ALONE = parse_hosts("a:1", "worker:0")


@pytest.mark.parametrize(
    ("config", "strategy"),
    [
        (None, "one_device"),
        (None, "mirrored"),
        (None, "multi_worker_mirrored"),
        (ALONE, "mirrored"),
        (ALONE, "multi_worker_mirrored"),
        (PEERS, "multi_worker_mirrored"),
        (PEERS, "local_sgd"),
        (PEERS, "auto"),
        (PEERS, "tpu"),
        (PEERS, ""),
        (SERVERS, "parameter_server"),
    ],
)
def test_clusters_that_suit(config, strategy):
    validate_cluster(config, strategy)


@pytest.mark.parametrize(
    ("config", "strategy", "message"),
    [
        (None, "parameter_server", "needs a cluster, but this is a single process. Start one with"),
        (PEERS, "one_device", "runs in one process, but --hosts describes 2 tasks. Use"),
        (PEERS, "mirrored", "runs in one process"),
        (PEERS, "central_storage", "runs in one process"),
        (SERVERS, "multi_worker_mirrored", "no parameter servers, but --hosts describes 1. Leave"),
        (SERVERS, "local_sgd", "has no parameter servers"),
        (PEERS, "parameter_server", "needs exactly one chief, but --hosts describes none. Add"),
        (
            parse_hosts("chief=a:1,ps=b:1", "chief:0"),
            "parameter_server",
            "needs at least one worker",
        ),
        (parse_hosts("chief=a:1,worker=b:1", "chief:0"), "parameter_server", "at least one ps"),
        *(
            (parse_tf_config(tf_config(cluster, "evaluator")), strategy, "none: the workers")
            for strategy in STRATEGIES
            for cluster in ({"worker": ["a:1", "b:1"]}, {"chief": ["a:1"], "evaluator": ["b:1"]})
        ),
        (ClusterConfig({"worker": ("a",)}, "worker"), "", "ClusterConfig: worker 0: 'a' has no"),
        (ClusterConfig({"worker": ("a:1",)}, "worker", -1), "", "worker -1, but the cluster has"),
    ],
)
def test_clusters_that_do_not_suit(config, strategy, message):
    with pytest.raises(TfdistError, match=re.escape(message)) as error:
        validate_cluster(config, strategy)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (None, None),
        (parse_hosts("a:1", "worker:0"), None),
        (PEERS, "multi_worker_mirrored"),
        (SERVERS, "parameter_server"),
        (parse_hosts("chief=a:1,worker=b:1,ps=c:1", "ps:0"), "parameter_server"),
    ],
)
def test_auto_is_the_same_in_every_task(config, name):
    assert choose_cluster_strategy(config) == name


# The environment.


def test_the_environment_read_is_a_copy(monkeypatch):
    monkeypatch.setenv("TFDIST_TEST", "1")
    environ = read_environment()
    assert environ["TFDIST_TEST"] == "1"
    monkeypatch.setenv("TFDIST_TEST", "2")
    assert environ["TFDIST_TEST"] == "1"


def test_setters_change_the_environment(monkeypatch):
    for name in ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL", "GRPC_VERBOSITY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    set_tf_config(PEERS)
    assert resolve_cluster() == PEERS
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
    quiet_environment()
    assert read_environment()["TF_CPP_MIN_LOG_LEVEL"] == "1"
    assert read_environment()["GRPC_VERBOSITY"] == "ERROR"


def test_importing_starts_no_tensorflow():
    code = "import sys, tfdist.cluster; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1000)


NINES = "9" * 5000  # more digits than Python converts


@pytest.mark.parametrize(
    "environ",
    [
        {"TF_CONFIG": "[" * 60_000},
        {"TF_CONFIG": '{"cluster": ' * 60_000},
        {"TF_CONFIG": TWO_WORKERS.replace("0", NINES)},
        {"TF_CONFIG": TWO_WORKERS.replace(":", f":{NINES}")},
        {"CLUSTER_SPEC": "[" * 60_000},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-999999999]"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n" + "[1-999]" * 9},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": f"n[{NINES}]"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "999999999", "SLURM_JOB_NODELIST": "n"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": NINES, "SLURM_JOB_NODELIST": "n"},
        {
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "2",
            "SLURM_JOB_NODELIST": "n",
            "SLURM_TASKS_PER_NODE": "1(x999999999)",
        },
        {
            "JOB_COMPLETION_INDEX": "0",
            "TFDIST_SERVICE": "s",
            "TFDIST_NUM_WORKERS": "999999999999",
            "HOSTNAME": "j-0",
        },
    ],
)
def test_hostile_descriptions_are_refused_at_once(environ):
    with pytest.raises(TfdistError):
        resolve_cluster(environ=environ)
