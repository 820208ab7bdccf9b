"""This process's environment variables; the only module that touches `os.environ`."""

import os
from collections.abc import Mapping
from pathlib import Path

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.tf_config import parse_tf_config

LAUNCH_DIR = "TFDIST_LAUNCH_DIR"


def read_environment() -> Mapping[str, str]:
    """Returns a copy of this process's environment."""
    return dict(os.environ)


def find_metadata_host() -> str | None:
    """Returns where Google Cloud's metadata server answers, or None on other machines.

    GCE_METADATA_HOST names another one, as for Google's own libraries.
    """
    named = os.environ.get("GCE_METADATA_HOST")
    if named:
        return named
    try:
        product = Path("/sys/class/dmi/id/product_name").read_text()
    except OSError:
        return None
    return "metadata.google.internal" if product.strip() == "Google Compute Engine" else None


def find_tf_config() -> ClusterConfig | None:
    """Returns the cluster that TF_CONFIG describes; None where there is none."""
    return parse_tf_config(os.environ.get("TF_CONFIG", ""))


def has_peers() -> bool:
    """Returns whether TF_CONFIG describes several workers that train in step."""
    config = find_tf_config()
    return config is not None and config.num_workers > 1 and not config.num_ps


def find_launch_dir() -> str | None:
    """Returns where this task's launcher keeps its files, None without a launcher."""
    return os.environ.get(LAUNCH_DIR)


def set_tf_config(config: ClusterConfig) -> None:
    """Sets TF_CONFIG of this process, for the parts of TensorFlow that read only that."""
    os.environ["TF_CONFIG"] = config.to_tf_config_json()


def set_environment_defaults(values: Mapping[str, str]) -> None:
    """Sets those environment variables that are not set yet."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def set_tensorflow_log_level(level: int) -> None:
    """Sets from which severity TensorFlow's C++ code logs: 0 all, 1 warnings, 2 errors, 3 fatal.

    It has its effect only before TensorFlow is imported.
    """
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = str(level)


def quiet_environment() -> None:
    """Silences TensorFlow's and gRPC's logs, except where the user has set a level.

    It has its effect only before TensorFlow is imported. TensorFlow 2.21 still writes a few
    lines to the standard error while it is imported, before it reads these.
    """
    set_environment_defaults({"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"})
