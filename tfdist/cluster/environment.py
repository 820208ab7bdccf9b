"""This process's environment variables; the only module that touches `os.environ`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.tf_config import parse_tf_config
from tfdist.errors import TfdistError

LAUNCH_DIR = "TFDIST_LAUNCH_DIR"
TOKEN, TOKEN_FILE = "TFDIST_TOKEN", "TFDIST_TOKEN_FILE"
_MAX_TOKEN = 4096


def read_environment() -> Mapping[str, str]:
    """Returns a copy of this process's environment."""
    return dict(os.environ)


def find_metadata_host() -> str | None:
    """Returns the host of Google Cloud's metadata server, or None on other machines.

    GCE_METADATA_HOST names another host, as for Google's own libraries.
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
    """Returns the cluster that TF_CONFIG describes, or None if there is none."""
    return parse_tf_config(os.environ.get("TF_CONFIG", ""))


def has_peers() -> bool:
    """Returns whether TF_CONFIG describes several workers without parameter servers."""
    config = find_tf_config()
    return config is not None and config.num_workers > 1 and not config.num_ps


def find_launch_dir() -> str | None:
    """Returns the directory of this task's launcher, or None without a launcher."""
    return os.environ.get(LAUNCH_DIR)


def find_token() -> str:
    """Returns the secret of this cluster's tasks, maybe from a file; "" if there is none."""
    token = os.environ.get(TOKEN, "").strip()
    path = os.environ.get(TOKEN_FILE, "")
    if token or not path:
        return token
    found, problem = "", "it is empty"
    try:
        with open(path, "rb") as file:
            found = file.read(_MAX_TOKEN).decode(errors="surrogateescape").strip()
    except OSError as error:
        problem = error.strerror or str(error)
    if not found:
        raise TfdistError(
            f"Cannot read the token of the cluster from {TOKEN_FILE}={path}: {problem}. Write 32 "
            "random bytes to it, as `openssl rand -hex 32` prints them, the same on every host."
        )
    return found


def can_redraw(stream: TextIO) -> bool:
    """Returns whether a stream is a terminal, where a line can be drawn again.

    A notebook gives the commands of its cells a terminal, but shows all that they print.
    """
    return stream.isatty() and "JPY_PARENT_PID" not in os.environ


def set_tf_config(config: ClusterConfig) -> None:
    """Sets this process's TF_CONFIG, for the parts of TensorFlow that read only that."""
    os.environ["TF_CONFIG"] = config.to_tf_config_json()


def add_xla_flag(flag: str) -> None:
    """Adds a flag to those that TensorFlow reads for XLA.

    This has an effect only before TensorFlow is imported.
    """
    os.environ["TF_XLA_FLAGS"] = f"{os.environ.get('TF_XLA_FLAGS', '')} {flag}".strip()


def quiet_environment() -> None:
    """Silences TensorFlow's and gRPC's logs, unless the user has set a level.

    This has an effect only before TensorFlow is imported. TensorFlow 2.21 still writes a few
    lines to standard error while it is imported, before it reads these variables.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
