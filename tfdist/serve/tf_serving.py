"""Writes the configuration with which TensorFlow Serving itself serves a model.

Source: https://www.tensorflow.org/tfx/serving/serving_config and
https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale-walkthrough/
"""

import os
import shlex
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError
from tfdist.jobs.yaml_text import dump_documents
from tfdist.serve.model_files import export_run
from tfdist.serve.options import BatchingOptions, ServeOptions

_CONFIG_DIR, _MODELS_DIR = "/config", "/models"
_GRPC_PORT, _REST_PORT = 8500, 8501
_TARGET_CPU_PERCENT = 70


def write_tf_serving_files(options: ServeOptions) -> int:
    """Writes the files, exports the run if one is given, and prints how to use them."""
    output, name = options.tf_serving.write_tf_serving, options.model.name
    if "://" in output:
        raise TfdistError(f"`write_tf_serving={output}` is in a bucket. Give a local directory.")
    model = options.model.model or os.path.abspath(f"{output}/{name}")
    if os.path.exists(f"{model}/saved_model.pb"):
        raise TfdistError(
            f"`model={model}` is a single SavedModel. TensorFlow Serving needs a directory of "
            "versions: move it to a directory 1 in a directory, and give that."
        )
    texts = make_tf_serving_files(options, model)
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            Path(output, file).write_text(text)
    except OSError as error:
        raise OSError(
            f"Cannot write to `write_tf_serving={output}`: {error.strerror}. Give another "
            "directory."
        ) from error
    if options.model.run_dir and (status := export_run(options.model, model)):
        return status
    if not options.run.quiet:
        print("\n".join(f"{output}/{file}" for file in texts))
        print(f"Start it with\n  sh {shlex.quote(f'{output}/docker.sh')}")
        print(f"or\n  kubectl apply -f {shlex.quote(f'{output}/kubernetes.yaml')}")
    return 0


def make_tf_serving_files(options: ServeOptions, model: str) -> dict[str, str]:
    """Returns file name -> text, for a model in a directory of versions, local or in a bucket."""
    base = model if "://" in model else f"{_MODELS_DIR}/{options.model.name}"
    configs = {
        "batching.config": _format_batching(options.batching, options.tf_serving.cpus),
        "models.config": _format_models(options.model.name, base),
        "monitoring.config": (
            'prometheus_config { enable: true path: "/monitoring/prometheus/metrics" }\n'
        ),
    }
    documents = [
        _make_object(options, "v1", "ConfigMap", data=configs),
        _make_deployment(options, has_volume=base != model),
        _make_service(options),
        _make_autoscaler(options),
    ]
    comment = f"TensorFlow Serving for {base}"
    if base != model:
        comment += (
            f"; copy the versions to the directory {options.model.name} of the volume claim "
            f"{options.tf_serving.claim}"
        )
    return {
        **configs,
        "docker.sh": _format_docker(options, model),
        "kubernetes.yaml": dump_documents(f"{comment}.", documents),
    }


def list_server_flags(options: ServeOptions) -> list[str]:
    """Returns the flags of `tensorflow_model_server`."""
    timeout_ms = round(1000 * options.limits.request_timeout_s)
    return [
        f"--port={_GRPC_PORT}",
        f"--rest_api_port={_REST_PORT}",
        f"--rest_api_timeout_in_ms={timeout_ms}",
        f"--model_config_file={_CONFIG_DIR}/models.config",
        f"--file_system_poll_wait_seconds={max(1, round(options.model.poll_s))}",
        "--enable_batching=true",
        f"--batching_parameters_file={_CONFIG_DIR}/batching.config",
        f"--monitoring_config_file={_CONFIG_DIR}/monitoring.config",
    ]


def _format_batching(options: BatchingOptions, cpus: int) -> str:
    values = {
        "max_batch_size": options.max_batch_size,
        "batch_timeout_micros": options.batch_timeout_micros,
        "max_enqueued_batches": options.max_enqueued_batches,
        "num_batch_threads": options.num_batch_threads or cpus,
    }
    lines = [f"{name} {{ value: {value} }}" for name, value in values.items()]
    lines += [f"allowed_batch_sizes: {size}" for size in options.allowed_batch_sizes]
    return "\n".join(lines) + "\n"


def _format_models(name: str, base: str) -> str:
    quoted = base.replace("\\", "\\\\").replace('"', '\\"')
    return (
        "model_config_list {\n"
        f'  config {{ name: "{name}" base_path: "{quoted}" model_platform: "tensorflow" }}\n'
        "}\n"
    )


def _format_docker(options: ServeOptions, model: str) -> str:
    mounts = [f'"$(cd "$(dirname "$0")" && pwd)":{_CONFIG_DIR}:ro']
    if "://" not in model:
        source = shlex.quote(os.path.abspath(model))
        mounts.append(f"{source}:{_MODELS_DIR}/{options.model.name}:ro")
    parts = [
        "docker run --rm",
        f"-p {_GRPC_PORT}:{_GRPC_PORT} -p {_REST_PORT}:{_REST_PORT}",
        *(f"-v {mount}" for mount in mounts),
        # The image's own entry point serves one model and passes further flags on.
        "--entrypoint tensorflow_model_server",
        shlex.quote(options.tf_serving.image),
        *list_server_flags(options),
    ]
    return "#!/bin/sh\nexec " + " \\\n  ".join(parts) + "\n"


def _make_object(options: ServeOptions, api: str, kind: str, **content: Any) -> dict[str, Any]:
    metadata = {"name": options.model.name, "labels": _make_labels(options)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def _make_labels(options: ServeOptions) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "tensorflow-serving",
        "app.kubernetes.io/instance": options.model.name,
    }


def _make_deployment(options: ServeOptions, *, has_volume: bool) -> dict[str, Any]:
    chosen = options.tf_serving
    resources = {"cpu": str(chosen.cpus), "memory": f"{chosen.memory_gib}Gi"}
    # The port is opened when the model is loaded.
    probe = {"httpGet": {"path": f"/v1/models/{options.model.name}", "port": "rest"}}
    mounts = [{"name": "config", "mountPath": _CONFIG_DIR, "readOnly": True}]
    volumes: list[dict[str, Any]] = [{"name": "config", "configMap": {"name": options.model.name}}]
    if has_volume:
        mounts.append({"name": "models", "mountPath": _MODELS_DIR, "readOnly": True})
        claim = {"claimName": chosen.claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
    container = {
        "name": "serving",
        "image": chosen.image,
        "command": ["tensorflow_model_server"],
        "args": list_server_flags(options),
        "ports": [
            {"name": "grpc", "containerPort": _GRPC_PORT},
            {"name": "rest", "containerPort": _REST_PORT},
        ],
        "resources": {"requests": resources, "limits": resources.copy()},
        "startupProbe": {**probe, "periodSeconds": 5, "failureThreshold": 60},
        "readinessProbe": {**probe, "periodSeconds": 5},
        # Endpoints are removed while the server still answers.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
        "volumeMounts": mounts,
    }
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(_REST_PORT),
        "prometheus.io/path": "/monitoring/prometheus/metrics",
    }
    spec = {
        "selector": {"matchLabels": _make_labels(options)},
        "template": {
            "metadata": {"labels": _make_labels(options), "annotations": annotations},
            "spec": {
                "automountServiceAccountToken": False,
                "containers": [container],
                "volumes": volumes,
            },
        },
    }
    return _make_object(options, "apps/v1", "Deployment", spec=spec)


def _make_service(options: ServeOptions) -> dict[str, Any]:
    ports = [
        {"name": "grpc", "port": _GRPC_PORT, "targetPort": "grpc"},
        {"name": "rest", "port": _REST_PORT, "targetPort": "rest"},
    ]
    spec = {"selector": _make_labels(options), "ports": ports}
    return _make_object(options, "v1", "Service", spec=spec)


def _make_autoscaler(options: ServeOptions) -> dict[str, Any]:
    name = options.model.name
    target = {"type": "Utilization", "averageUtilization": _TARGET_CPU_PERCENT}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicas": 1,
        "maxReplicas": options.tf_serving.max_replicas,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
    }
    return _make_object(options, "autoscaling/v2", "HorizontalPodAutoscaler", spec=spec)
