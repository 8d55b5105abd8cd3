"""Agent: a client that stays online until its user stops it, and the socket for programs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

from twisted.application.service import Service as TwistedService
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IAddress, IListeningPort, IReactorUNIX
from twisted.internet.protocol import Factory
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.agent.bridge import Bridge, SharedWindow
from dmsg.agent.program_service import MAX_PROGRAMS, Service
from dmsg.agent.programs import RESERVED_CONNECTIONS, ProgramConnection
from dmsg.agent.socket_path import MAX_PATH, AgentError, find_agent, is_socket
from dmsg.agent.wire import PROTOCOL, Answer
from dmsg.base.eviction import Seniority
from dmsg.base.version import program_version
from dmsg.directory_checks import UnsafeDirectory, make_directory
from dmsg.keys import PubKey
from dmsg.net.clock import ClockWatch
from dmsg.net.descriptors import max_connections
from dmsg.net.reactor import Reactor
from dmsg.v2019.client import Client
from dmsg.v2019.session import ClientSession

CHECK_INTERVAL = 1.0
"""Seconds between two updates of the rates and paths of all streams."""
BACKLOG = 1024
"""Maximum number of connections from programs that the system queues until the agent accepts them."""
STATUS_STREAMS = 1000
"""Maximum number of streams that ``status`` lists.  The streams with the highest rates come first; further streams are
only counted.
"""

_log = Logger()


class Agent(TwistedService):
    """Agent: a client, the Unix socket for programs, and the services and streams of these programs.

    :param path: path of the socket.  Its directory is created so that only this user can access it.
    :param on_down: callback invoked when a program asks the agent to stop.
    :ivar bridges: streams that programs use.
    :ivar services: services of programs, by port.
    :ivar untaken: streams that a program has been offered and has not accepted yet, by number.
    """

    name = "dmsg-agent"

    def __init__(
        self, reactor: Reactor, client: Client, path: Path, discovery: tuple[str, ...], on_down: Callable[[], None]
    ) -> None:
        self._reactor = reactor
        self.client = client
        self._path = path
        self._discovery = discovery
        self._on_down = on_down
        self._since = time.time()
        self._began = reactor.seconds()
        self._port: IListeningPort | None = None
        self._watch = ClockWatch(reactor)
        self._checks = LoopingCall(self._check)
        self._checks.clock = reactor
        self._updated_at = reactor.seconds()
        self._factory = _ProgramFactory(self, reactor)
        self.shared = SharedWindow()
        # These are dictionaries instead of sets, because a dictionary keeps the order of insertion. So runs of the lab
        # with the same seed are equal.
        self.bridges: dict[Bridge, None] = {}
        self.services: dict[int, Service] = {}
        self.untaken: dict[int, Bridge] = {}
        self.seniority: Seniority[PubKey] = Seniority()

    def startService(self) -> None:
        """Open the socket and start the client.

        :raises AgentError: the socket cannot be created, or another agent uses it.
        """
        self._port = self._listen()
        super().startService()  # type: ignore[no-untyped-call]
        self.client.startService()
        self._watch.startService()
        self._checks.start(CHECK_INTERVAL, now=False).addErrback(lambda _: None)

    def _listen(self) -> IListeningPort:
        path, reactor = self._path, cast(IReactorUNIX, self._reactor)
        if len(os.fsencode(path)) > MAX_PATH:
            raise AgentError(
                f"{path}: this path has more than {MAX_PATH} bytes, the limit for a socket: choose a shorter one"
            )
        try:
            make_directory(path.parent)
            if os.path.lexists(path):
                if not is_socket(path):
                    raise AgentError(f"{path}: this file exists and is not a socket: remove it, or choose another path")
                if (other := find_agent(path)) is not None:
                    raise AgentError(f"{path}: an agent runs there already (process {other.pid})")
                path.unlink()  # A killed agent has left this file.
            before = os.umask(0o177)
            try:
                port: IListeningPort = reactor.listenUNIX(os.fspath(path), self._factory, BACKLOG, 0o600)
            finally:
                os.umask(before)
        except OSError as error:
            why = error.strerror or str(error)
            raise AgentError(why if isinstance(error, UnsafeDirectory) else f"{path}: {why}") from None
        return port

    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self._watch.stopService()
        if self._checks.running:
            self._checks.stop()
        port, self._port = self._port, None
        if port is not None:
            await maybeDeferred(port.stopListening)
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
        for bridge in [*self.bridges, *self.untaken.values()]:
            bridge.stop()
        await self.client.stopService()
        self._factory.end_all()

    def _check(self) -> None:
        now = self._reactor.seconds()
        seconds, self._updated_at = max(now - self._updated_at, 0.001), now
        for bridge in self.bridges:
            bridge.update_rates(seconds)

    # --- requests of programs ---

    @property
    def is_full(self) -> bool:
        """Whether the agent has reached its limit of connections from programs.  It then accepts only ``status``,
        ``hello`` and ``down``.
        """
        return self._factory.open > self.max_programs

    @property
    def max_programs(self) -> int:
        """Maximum number of connections from programs: ``MAX_PROGRAMS``, or fewer if this process may open fewer
        files.
        """
        return min(MAX_PROGRAMS, max(1, max_connections() - RESERVED_CONNECTIONS))

    def hello(self) -> Answer:
        return {
            "protocol": PROTOCOL,
            "key": str(self.client.public_key),
            "pid": os.getpid(),
            "version": program_version(),
            "discovery": list(self._discovery),
            "encryption": self.client.encryption.value,
        }

    def status(self) -> Answer:
        client = self.client
        streams = sorted(self.bridges, key=lambda one: one.rate_in + one.rate_out, reverse=True)
        return {
            **self.hello(),
            "since": self._since,
            "up_seconds": self._reactor.seconds() - self._began,
            "state": client.status,
            "waits_for": "" if client.status == "online" and not client.last_error else client.waiting_for,
            "servers": [_server(session) for session in client.sessions()],
            "services": [_service(one) for _, one in sorted(self.services.items())],
            "streams": [_stream(one, self._reactor.seconds()) for one in streams[:STATUS_STREAMS]],
            "streams_in_all": len(streams),
            "refused": client.refused,
        }

    def down(self) -> None:
        _log.info("a program asked the agent to stop")
        self._reactor.callLater(0, self._on_down)


class _ProgramFactory(Factory):
    """Factory of the connections from programs."""

    noisy = False

    def __init__(self, agent: Agent, reactor: Reactor) -> None:
        self._agent = agent
        self._reactor = reactor
        self._open: dict[_CountedConnection, None] = {}

    def buildProtocol(self, addr: IAddress | None) -> _CountedConnection | None:
        most = self._agent.max_programs + RESERVED_CONNECTIONS
        if len(self._open) >= most:
            _log.warn(
                "a program's connection was refused: the agent has {most} connections, its limit",
                most=most,
            )
            return None
        return _CountedConnection(self._agent, self._reactor, self._open)

    @property
    def open(self) -> int:
        """Number of open connections from programs."""
        return len(self._open)

    def end_all(self) -> None:
        """Close all connections from programs, because the agent stops."""
        for one in list(self._open):
            one.stop()


class _CountedConnection(ProgramConnection):
    """Connection from a program that is in the factory's set of connections while it is open."""

    def __init__(self, agent: Agent, reactor: Reactor, connections: dict[_CountedConnection, None]) -> None:
        super().__init__(agent, reactor)
        self._connections = connections

    def connectionMade(self) -> None:
        self._connections[self] = None
        super().connectionMade()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._connections.pop(self, None)
        super().connectionLost(reason)


def _server(session: ClientSession) -> dict[str, object]:
    return {
        "key": str(session.server),
        "round_trip": session.round_trip,
        "carrier": str(session.carrier),
        "carriers_failed": {str(carrier): why for carrier, why in session.carriers_failed.items()},
    }


def _service(service: Service) -> dict[str, object]:
    return {
        "port": service.port,
        "program": service.program,
        "pid": service.pid,
        "since": service.since,
        "offers": service.offer.offers,
        "anyone": service.offer.anyone,
        "allow": list(service.offer.allowed_sample),
        "allowed": service.offer.allowed,
        "taken": service.stream_count,
        "refused": service.refused,
    }


def _stream(bridge: Bridge, now: float) -> dict[str, object]:
    described = bridge.describe()
    return {
        "peer": described["peer"],
        "port": described["port"] if bridge.incoming else described["peer_port"],
        "incoming": bridge.incoming,
        "server": described["server"],
        "secure": described["secure"],
        "cipher": bridge.transport.cipher,
        "seconds": now - bridge.since,
        "bytes_in": bridge.bytes_in,
        "bytes_out": bridge.bytes_out,
        "rate_in": bridge.rate_in,
        "rate_out": bridge.rate_out,
        "away": bridge.seconds_away,
    }
