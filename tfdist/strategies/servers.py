"""The tasks of a ParameterServerStrategy: the chief's connection, the servers, the variables."""

import signal
import socket
import time
import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.cluster import ClusterConfig, resolve_cluster, split_address
from tfdist.strategies.base import check_servers
from tfdist.strategies.rendezvous import check_own_address, wait_for_servers

_POLL_S = 0.25
_CONNECT_TIMEOUT_S = 1.0
# A chief that starts many processes at once may not answer for a moment.
_GONE_AFTER = 4
_GRACE_S = 30.0


def connect(
    cluster: ClusterConfig | None = None, *, timeout_s: float
) -> tf.distribute.ParameterServerStrategy:
    """Returns the chief's strategy, once the workers and parameter servers answer."""
    config = check_servers(cluster or resolve_cluster())
    check_own_address(config)
    wait_for_servers(config, timeout_s=timeout_s)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        _make_cluster_spec(config), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    make_coordinator(strategy)
    return strategy


def make_coordinator(
    strategy: tf.distribute.ParameterServerStrategy,
) -> tf.distribute.coordinator.ClusterCoordinator:
    """Returns the strategy's only coordinator, which the first call creates."""
    return _Coordinator(strategy)


def run_server(cluster: ClusterConfig | None = None) -> int:
    """Serves the chief as a worker or parameter server, until the chief is gone.

    Signals meant for the whole cluster reach this task too. After SIGINT, SIGTERM or SIGHUP, it
    serves for up to 30 s more, for the chief's last checkpoint; a second signal ends it at once.
    """
    config = check_servers(cluster or resolve_cluster())
    check_own_address(config)
    chief = split_address(config.tasks["chief"][0])
    end_at = float("inf")

    def prepare_to_end(number: int, _: object) -> None:
        nonlocal end_at
        if end_at < float("inf"):
            raise KeyboardInterrupt
        end_at = time.monotonic() + _GRACE_S

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # as by nohup
        signal.signal(number, prepare_to_end)
    server = tf.distribute.Server(
        _make_cluster_spec(config),
        job_name=config.role,
        task_index=config.index,
        protocol="grpc",
        start=True,
    )
    seen = False
    failures = 0
    while failures < _GONE_AFTER and time.monotonic() < end_at:
        time.sleep(_POLL_S)
        answers = _is_listening(chief)
        seen = seen or answers
        failures = 0 if answers or not seen else failures + 1
    del server
    return 0


def make_placement(strategy: tf.distribute.ParameterServerStrategy) -> Callable[..., tf.Variable]:
    """Returns a variable creator that puts each variable on the server with the fewest bytes.

    TensorFlow counts variables instead, which puts all kernels on one of two servers and all
    biases on the other. Optimizers' slots stay with their variables, and are counted. The
    variables of metrics stay in the chief, the only task that writes and reads them.

    Args:
      strategy: the strategy; the creator is for `tf.variable_creator_scope` inside its scope.
    """
    extended = strategy.extended
    num_bytes = [0] * extended._num_ps
    # Stands in for a variable there, because none can be made while the strategy's scope is open.
    in_chief = types.SimpleNamespace(device="/device:CPU:0", name="the chief")

    def create(next_creator: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        # TensorFlow 2.21 offers no other way to choose the server: it takes the next one in turn.
        extended._variable_count = num_bytes.index(min(num_bytes))
        if arguments.get("synchronization") == tf.VariableSynchronization.ON_READ:
            arguments["colocate_with"] = in_chief
        variable = next_creator(**arguments)
        spec = tf.DeviceSpec.from_string(variable.device)
        if spec.job == "ps":
            num_bytes[spec.task] += (variable.shape.num_elements() or 0) * variable.dtype.size
        return variable

    return create


class _Coordinator(tf.distribute.coordinator.ClusterCoordinator):
    """A coordinator that lets its process exit while a worker is gone.

    When TensorFlow 2.21 deletes a coordinator, it stops the threads and waits for the one that
    waits for the worker to return. The threads are daemons, so they need not be stopped.
    """

    def __del__(self) -> None:
        pass


def _make_cluster_spec(config: ClusterConfig) -> tf.train.ClusterSpec:
    return tf.train.ClusterSpec(config.to_tf_config()["cluster"])


def _is_listening(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S):
            return True
    except TimeoutError:
        return True  # it is busy
    except OSError:
        return False
