"""TensorFlow Serving's configuration, read with its own messages and those of Kubernetes."""

import subprocess

import pytest
import yaml
from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    message_factory,
    text_format,
    wrappers_pb2,
)
from tensorflow_serving.config import model_server_config_pb2

from tests.jobs.schemas import check_object
from tfdist.cli.command import run_command
from tfdist.serve.__main__ import run_serving
from tfdist.serve.options import ServeOptions

# The messages that the package tensorflow-serving-api does not have, as published in
# servables/tensorflow/session_bundle_config.proto and config/monitoring_config.proto.
PUBLISHED = """
name: "test.proto" package: "test" syntax: "proto3" dependency: "google/protobuf/wrappers.proto"
message_type {
  name: "BatchingParameters"
  field { name: "max_batch_size" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".google.protobuf.Int64Value" }
  field { name: "batch_timeout_micros" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".google.protobuf.Int64Value" }
  field { name: "max_enqueued_batches" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".google.protobuf.Int64Value" }
  field { name: "num_batch_threads" number: 4 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".google.protobuf.Int64Value" }
  field { name: "allowed_batch_sizes" number: 6 label: LABEL_REPEATED type: TYPE_INT64 }
}
message_type {
  name: "PrometheusConfig"
  field { name: "enable" number: 1 label: LABEL_OPTIONAL type: TYPE_BOOL }
  field { name: "path" number: 2 label: LABEL_OPTIONAL type: TYPE_STRING }
}
message_type {
  name: "MonitoringConfig"
  field { name: "prometheus_config" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".test.PrometheusConfig" }
}
"""  # noqa: E501


def make_messages():
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(wrappers_pb2.DESCRIPTOR.serialized_pb)
    file = text_format.Parse(PUBLISHED, descriptor_pb2.FileDescriptorProto())
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClassesForFiles(["test.proto"], pool)


def write(directory, *flags):
    arguments = [f"--write_tf_serving={directory}", "--name=shapes", *flags]
    return run_command("tfdist.serve", run_serving, arguments, options_class=ServeOptions)


@pytest.fixture
def files(path_with_spaces):
    """The files for a directory whose name has a quotation mark."""
    output = path_with_spaces / "out"
    flags = ("--max_batch_size=4", "--allowed_batch_sizes=1,4", "--batch_timeout_micros=500")
    model = f"{path_with_spaces}/my model"
    assert write(output, f"--model={model}", *flags, "--quiet") == 0
    return {path.name: path.read_text() for path in output.iterdir()} | {"model": model}


def test_a_path_that_tensorflow_takes_for_a_pattern_is_refused(tmp_path, capfd):
    model = tmp_path / "e[1]"
    (model / "1").mkdir(parents=True)
    (model / "1" / "saved_model.pb").touch()
    arguments = [f"--model={model}"]
    assert run_command("tfdist.serve", run_serving, arguments, options_class=ServeOptions) == 2
    assert f"--model={model}: TensorFlow cannot load" in capfd.readouterr().err


def test_the_server_reads_its_configuration(files):
    messages = make_messages()
    batching = text_format.Parse(files["batching.config"], messages["test.BatchingParameters"]())
    assert batching.max_batch_size.value == 4
    assert batching.batch_timeout_micros.value == 500
    assert batching.max_enqueued_batches.value == 16
    assert batching.num_batch_threads.value == 4
    assert list(batching.allowed_batch_sizes) == [1, 4]
    models = text_format.Parse(files["models.config"], model_server_config_pb2.ModelServerConfig())
    (model,) = models.model_config_list.config
    assert (model.name, model.base_path) == ("shapes", "/models/shapes")
    assert model.model_platform == "tensorflow"
    monitoring = text_format.Parse(files["monitoring.config"], messages["test.MonitoringConfig"]())
    assert monitoring.prometheus_config.enable


def test_docker_gets_the_paths_with_spaces(files, path_with_spaces):
    docker = path_with_spaces / "docker"
    docker.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    docker.chmod(0o755)
    script = path_with_spaces / "out" / "docker.sh"
    environment = {"PATH": f"{path_with_spaces}:/usr/bin:/bin"}
    output = subprocess.check_output(["sh", str(script)], env=environment, text=True, timeout=1000)
    arguments = output.splitlines()
    assert f"{path_with_spaces}/out:/config:ro" in arguments
    assert f"{files['model']}:/models/shapes:ro" in arguments
    assert arguments[arguments.index("--entrypoint") + 1] == "tensorflow_model_server"
    assert "--batching_parameters_file=/config/batching.config" in arguments


def test_objects_are_of_the_official_schemas(files):
    objects = {item["kind"]: item for item in yaml.safe_load_all(files["kubernetes.yaml"])}
    assert list(objects) == ["ConfigMap", "Deployment", "Service", "HorizontalPodAutoscaler"]
    for item in objects.values():
        check_object(item)
    assert objects["ConfigMap"]["data"]["batching.config"] == files["batching.config"]
    pod = objects["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"] == labels
    assert objects["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    target = objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["name"] == objects["Deployment"]["metadata"]["name"]
    ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in objects["Service"]["spec"]["ports"]} == ports
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {m["name"] for m in pod["spec"]["containers"][0]["volumeMounts"]} == volumes


def test_a_model_in_a_bucket_needs_no_volume(tmp_path):
    assert write(tmp_path, "--model=gs://bucket/shapes", "--quiet") == 0
    assert 'base_path: "gs://bucket/shapes"' in (tmp_path / "models.config").read_text()
    assert "persistentVolumeClaim" not in (tmp_path / "kubernetes.yaml").read_text()
    assert ":/models/" not in (tmp_path / "docker.sh").read_text()


def test_a_run_is_exported_beside_the_files(run_dir, tmp_path, capfd):
    assert write(tmp_path, f"--run_dir={run_dir}") == 0
    assert (tmp_path / "shapes" / "1" / "saved_model.pb").exists()
    assert f"sh {tmp_path}/docker.sh" in capfd.readouterr().out
