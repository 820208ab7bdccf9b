"""Where tasks run: all of a cluster on this machine, or one of a cluster of several machines."""

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence

from tfdist.cluster import TOKEN, TOKEN_FILE, ClusterConfig
from tfdist.errors import TfdistError
from tfdist.launch.agent_client import AgentProcess, agent_process
from tfdist.launch.logs import Logs
from tfdist.launch.machine import (
    Environment,
    add_interop_thread,
    complete_environment,
    divide_machine,
)
from tfdist.launch.report import announce
from tfdist.launch.tasks import hold_ports, make_configs

ISOLATION = ("auto", "always", "never")

_FIRST_ISOLATED_PORT = 2222


class LocalCluster:
    """The tasks of a cluster on this machine, so many of each role."""

    is_whole = True

    def __init__(self, counts: Mapping[str, int], *, evaluator: bool, isolate: str):
        self._counts = dict(counts)
        self._evaluator = evaluator
        self._isolate = isolate

    @contextlib.contextmanager
    def agent(self) -> Iterator[AgentProcess]:
        """Starts an agent, in its own network if one is wanted and possible."""
        with agent_process(self._isolate) as agent:
            if self._isolate == "always" and not agent.isolated:
                raise TfdistError(
                    f"--isolate=always: cannot give the cluster its own network ({agent.problem})."
                    " Use --isolate=auto behind a firewall, or allow network namespaces."
                )
            yield agent

    @contextlib.contextmanager
    def place(
        self, agent: AgentProcess, logs: Logs, environ: Mapping[str, str], *, stream: bool
    ) -> Iterator[tuple[list[ClusterConfig], list[Environment]]]:
        """Yields every task's configuration and environment, and holds the tasks' ports."""
        number = sum(self._counts.values())
        with contextlib.ExitStack() as stack:
            ports: Sequence[int]
            if agent.isolated:
                ports = range(_FIRST_ISOLATED_PORT, _FIRST_ISOLATED_PORT + number)
            else:
                ports = stack.enter_context(hold_ports(number))
            configs = make_configs(self._counts, ports, evaluator=self._evaluator)
            announce(configs, agent, logs, isolate=self._isolate, stream=stream)
            if not (environ.get(TOKEN) or environ.get(TOKEN_FILE)):
                environ = {**environ, TOKEN: secrets.token_hex(32)}
            yield configs, divide_machine(configs, environ)

    def resize(self, workers: int) -> None:
        """Sets the number of workers for the next start."""
        self._counts["worker"] = workers


class OneTask:
    """One task of a cluster of several machines, or its only task."""

    def __init__(self, config: ClusterConfig):
        self._config = config
        self.is_whole = sum(map(len, config.tasks.values())) == 1

    def agent(self) -> contextlib.AbstractContextManager[AgentProcess]:
        """Starts an agent in the machine's own network."""
        return agent_process("never")

    @contextlib.contextmanager
    def place(
        self, agent: AgentProcess, logs: Logs, environ: Mapping[str, str], *, stream: bool
    ) -> Iterator[tuple[list[ClusterConfig], list[Environment]]]:
        """Yields the configuration and environment of the task, which gets the whole machine."""
        environment = complete_environment(add_interop_thread(environ), self._config)
        yield [self._config], [(environment, None)]

    def resize(self, workers: int) -> None:
        """Does nothing: only a launcher of all tasks can reduce the number of workers."""
