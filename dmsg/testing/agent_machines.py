"""Machines of a walk of agents: on each machine, an agent and the programs that use it run, each as a separate process.

The processes run the classes of the package ``dmsg.agent`` unchanged. They are connected by simulated Unix sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.interfaces import IProtocolFactory
from twisted.python.failure import Failure

from dmsg.agent.client import AgentClient
from dmsg.agent.connections import NO_AGENT_ERRORS
from dmsg.agent.service import Agent
from dmsg.agent.socket_path import AgentError, FoundAgent
from dmsg.base.cipher_names import Cipher
from dmsg.base.memory import Memory
from dmsg.errors import DmsgError
from dmsg.keys import PubKey
from dmsg.testing.lab import Lab
from dmsg.testing.network import Host
from dmsg.testing.numbered_ends import AcceptingFactory, NumberedEnd
from dmsg.testing.promise import PromiseBroken
from dmsg.testing.unix_sockets import Process, UNIXPort
from dmsg.v2019.client import Client

RESUME_TIMEOUT = 3600.0
"""Seconds that a stream may be without a transport. It is longer than a walk, so that no fault of the network ends a
stream."""
RETRY = 1.0
"""Seconds after which a program asks for its port again."""


class Machine:
    """Machine with an agent.

    :param directory: existing directory of the agent's socket.
    :ivar host: process of the agent.
    :ivar agent: running agent; None while none runs.
    :ivar is_stopping: whether a program has asked the agent to stop.
    :ivar on_end: function that is called when the agent ends.
    """

    def __init__(self, lab: Lab, name: str, directory: Path) -> None:
        self.lab = lab
        self.name = name
        self.path = directory / f"{name}.sock"
        self.sockets: dict[str, UNIXPort] = {}
        self.host = Process(lab.network, name, self.sockets)
        self.key = lab.key(name).public
        self.agent: Agent | None = None
        self.is_stopping = False
        self.on_end: Callable[[Machine], object] = lambda machine: None

    def start_agent(self) -> None:
        """Start the agent, if it does not run.

        :raises PromiseBroken: the agent cannot be started.
        """
        if self.agent is None:
            self.host.revive()
            self.host.do(self._start)

    def _start(self) -> None:
        lab, host = self.lab, self.host
        client = Client(
            host.reactor,
            lab.key(self.name),
            lab.lookups(host),
            random=lab.random,
            cipher=Cipher.AES_256_GCM.value,
            memory=Memory(),
            resume_timeout=RESUME_TIMEOUT,
        )
        agent = Agent(host.reactor, client, self.path, (), self._stop)
        try:
            agent.startService()
        except AgentError as error:
            raise PromiseBroken(f"the agent cannot be started again: {error}") from error
        self.agent = agent
        lab.clients[self.name] = client

    def _stop(self) -> None:
        """End the process, because a program has asked the agent to stop."""
        agent = self.agent
        if agent is not None:
            agent.stopService().addBoth(lambda _: self.lab.clock.callLater(0, self._ended, agent))

    def stop_agent(self) -> Deferred[None]:
        """Stop the agent in an orderly way.

        :returns: Deferred that fires when it has stopped.
        """
        stopped: Deferred[None] = Deferred()
        agent = self.agent
        if agent is None:
            stopped.callback(None)
        else:
            self.host.do(lambda: agent.stopService().chainDeferred(stopped))
        return stopped

    def _ended(self, agent: Agent) -> None:
        if self.agent is agent:
            self.kill()

    def kill(self) -> None:
        """Kill the agent."""
        self.on_end(self)
        self.agent = None
        self.is_stopping = False
        self.lab.kill(self.name)

    def find_agent(self) -> FoundAgent:
        """Return the description of the agent that a program gets when it searches for the agent of this machine."""
        return FoundAgent(self.path, self.key, self.host.pid, (), "require")


class User:
    """Program that opens and accepts streams, either through the agent of a machine or with a client of its own.

    :param machine: machine whose agent the program uses; None for a program with a client of its own.
    :param port: port at which the program accepts streams.
    :param ends: accepting ends of all streams, by the numbers of the streams.
    :ivar is_listening: whether the program accepts streams at its port.
    :ivar is_running: whether the process runs.
    """

    def __init__(self, lab: Lab, name: str, machine: Machine | None, port: int, ends: Sequence[NumberedEnd]) -> None:
        self.lab = lab
        self.name = name
        self.machine = machine
        self.port = port
        self.host: Host = lab.network.host(name) if machine is None else Process(lab.network, name, machine.sockets)
        self.key: PubKey = lab.key(name).public if machine is None else machine.key
        self.is_running = self.is_listening = False
        self._ends = ends
        self._client: AgentClient | Client | None = None

    def start(self) -> None:
        """Start the process, unless it is running."""
        if not self.is_running:
            self.is_running = True
            self.host.revive()
            self.host.do(self._start)

    def _start(self) -> None:
        if self.machine is None:
            self._client = self.lab.add_client(self.name, resume_timeout=RESUME_TIMEOUT)
        else:
            agent = self.machine.find_agent()
            self._client = AgentClient(self.host.reactor, agent, self.name, on_warning=lambda text: None)
        self._listen()

    def _listen(self) -> None:
        assert self._client is not None
        listening: Deferred[Any] = maybeDeferred(self._client.listen, AcceptingFactory(self._ends), self.port)
        listening.addCallbacks(self._has_port, self._has_no_port)

    def _has_port(self, port: object) -> None:
        self.is_listening = True

    def _has_no_port(self, failure: Failure) -> None:
        failure.trap(DmsgError, *NO_AGENT_ERRORS)
        self.host.callLater(RETRY, self._listen)

    def connect(self, other: User, factory: IProtocolFactory) -> Deferred[Any]:
        """Open a stream to another program."""
        connected: Deferred[Any] = Deferred()
        client = self._client
        assert client is not None
        self.host.do(lambda: client.connect(other.key, factory, other.port).chainDeferred(connected))
        return connected

    def ask_for_the_end(self) -> None:
        """Ask the agent to stop, as ``dmsg down`` does."""
        client = self._client
        assert isinstance(client, AgentClient) and self.machine is not None
        self.machine.is_stopping = True
        self.host.do(
            lambda: Deferred.fromCoroutine(client._connections.ask({"do": "down"})).addErrback(  # noqa: SLF001
                lambda failure: failure.trap(DmsgError)
            )
        )

    def kill(self) -> None:
        """Kill the process."""
        self.is_running = self.is_listening = False
        self.lab.kill(self.name)
