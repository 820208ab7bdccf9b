"""Checks objects against the classes that Kubernetes and Kubeflow generate from their schemas."""

import re
from typing import Any

import kubeflow.training.models
import kubeflow_trainer_api.models
import kubernetes.client.models

KINDS = {
    "Service": "V1Service",
    "Job": "V1Job",
    "NetworkPolicy": "V1NetworkPolicy",
    "PodDisruptionBudget": "V1PodDisruptionBudget",
    "PersistentVolumeClaim": "V1PersistentVolumeClaim",
    "ConfigMap": "V1ConfigMap",
    "Deployment": "V1Deployment",
    "HorizontalPodAutoscaler": "V2HorizontalPodAutoscaler",
    "TFJob": "KubeflowOrgV1TFJob",
}
_PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object}


def check_object(value: dict[str, Any]) -> None:
    """Asserts that every field is one of the schema's, of its type, and none is missing."""
    if value["apiVersion"].startswith("trainer.kubeflow.org/"):
        model = getattr(kubeflow_trainer_api.models, f"TrainerV1alpha1{value['kind']}")
        # What is not of the schema does not come back.
        assert model.from_dict(value).to_dict() == value
        return
    _make(value, KINDS[value["kind"]], value["kind"])


def _make(value: Any, kind: str, path: str) -> Any:
    if match := re.fullmatch(r"list\[(.+)\]", kind):
        assert isinstance(value, list), path
        return [_make(item, match[1], f"{path}[{i}]") for i, item in enumerate(value)]
    if match := re.fullmatch(r"dict\(str, (.+)\)", kind):
        assert isinstance(value, dict), path
        return {key: _make(item, match[1], f"{path}.{key}") for key, item in value.items()}
    if kind in _PLAIN:
        assert isinstance(value, _PLAIN[kind]), f"{path}: {value!r} is not {kind}"
        assert kind != "int" or not isinstance(value, bool), path
        return value
    model = getattr(kubernetes.client.models, kind, None) or getattr(kubeflow.training.models, kind)
    names = {there: here for here, there in model.attribute_map.items()}
    assert isinstance(value, dict), path
    assert set(value) <= set(names), f"{path}: {set(value) - set(names)}"
    # The constructor asks for what is required.
    return model(
        **{
            names[key]: _make(item, model.openapi_types[names[key]], f"{path}.{key}")
            for key, item in value.items()
        }
    )
