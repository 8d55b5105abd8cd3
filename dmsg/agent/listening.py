"""Service of a program at a port of the agent's key, which is registered again after a restart of the agent."""

from __future__ import annotations

from collections.abc import Callable
from random import SystemRandom

from twisted.internet.defer import Deferred, DeferredSemaphore, succeed
from twisted.internet.interfaces import IAddress, IListeningPort, IProtocol, IProtocolFactory
from twisted.logger import Logger
from zope.interface import implementer

from dmsg.agent.connections import NO_AGENT_ERRORS, AgentConnections, LineConnection, StreamConnection
from dmsg.agent.local_stream import OpenedStream
from dmsg.agent.wire import ALLOW_LIMIT, OFFERS_SIZE, Answer, WireError, encode_line
from dmsg.errors import CloseReason, DmsgError
from dmsg.keys import PubKey
from dmsg.net.retry import retry_delay
from dmsg.net.retry_loop import RetryLoop
from dmsg.net.streams.address import DmsgAddress

FIRST_DELAY = 0.25
"""Seconds until the first attempt to reach an agent whose connection was lost."""
MAX_TAKING = 64
"""Maximum number of streams that a service accepts at the same time; further streams wait."""
MAX_AGENT_DELAY = 5.0
"""Maximum seconds between two attempts to reach an agent whose connection was lost."""

_log = Logger()


def describe_service(factory: IProtocolFactory) -> dict[str, object]:
    """Return the description of a service for the agent: the keys of the allowed peers, and the text ``offers``.

    :param factory: factory whose attributes ``admits`` and ``offers`` describe the service; see
        :meth:`dmsg.agent.client.AgentClient.listen`.
    """
    told: dict[str, object] = {"offers": str(getattr(factory, "offers", ""))[:OFFERS_SIZE]}
    admits = getattr(factory, "admits", None)
    if admits is None:
        told["anyone"] = True
    elif hasattr(admits, "keys"):
        told["anyone"] = admits.keys is None
        keys = sorted(str(key) for key in admits.keys or ())
        told["allow"], told["allowed"] = keys[:ALLOW_LIMIT], len(keys)
    return told


@implementer(IListeningPort)
class AgentListeningPort:
    """Service of this program at a port that the agent has opened for it."""

    def __init__(
        self,
        connections: AgentConnections,
        key: PubKey,
        services: dict[AgentListeningPort, None],
        on_warning: Callable[[str], None],
        factory: IProtocolFactory,
        port: int,
    ) -> None:
        self._connections = connections
        self._key = key
        self._services = services
        self._on_warning = on_warning
        self._factory = factory
        self._port = port
        self._lines: LineConnection | None = None
        self._has_warned = False
        self._tries = 0
        self._taking = DeferredSemaphore(MAX_TAKING)
        self._registration = RetryLoop(
            connections.reactor, self._register_again, self._delay, "registering with the agent"
        )

    async def register(self) -> None:
        """Request the port from the agent.

        :raises DmsgError: the port is in use, or the agent did not answer in time.
        """
        lines = LineConnection(self._on_line)
        request = {"do": "listen", "port": self._port, "as": str(self._key), **describe_service(self._factory)}
        await self._connections.open(lines, request)
        await self._connections.with_timeout(lines.answered)
        self._lines = lines

    def watch(self) -> None:
        """Register the service again whenever the connection to the agent was lost."""
        self._registration.start()
        self._watch()

    def _watch(self) -> None:
        assert self._lines is not None
        self._lines.ended.addCallback(lambda _: self._agent_lost())

    def _on_line(self, lines: LineConnection, content: Answer) -> None:
        try:
            number = int(content["stream"])
            peer = DmsgAddress(PubKey.from_hex(str(content["peer"])), int(content["peer_port"]))
        except (KeyError, TypeError, ValueError):
            raise WireError("the agent sent a line that does not offer a stream") from None
        taking = Deferred.fromCoroutine(self._take(number, peer, lines))
        taking.addErrback(
            lambda failure: _log.failure("unhandled error while a stream of the agent was accepted", failure)
        )

    async def _take(self, number: int, peer: DmsgAddress, lines: LineConnection) -> None:
        """Accept or refuse a stream that a peer has opened."""
        admits = getattr(self._factory, "admits", None)
        if admits is not None and not admits(peer):
            if lines.transport is not None:
                lines.transport.write(encode_line({"refuse": number}))
            return
        try:
            await self._taking.run(self._accept, number)
        except (DmsgError, *NO_AGENT_ERRORS) as error:
            _log.info("the stream from {peer} was not accepted: {error}", peer=peer.short, error=str(error))

    def _accept(self, number: int) -> Deferred[IProtocol]:
        # The protocol is built only after the agent has confirmed that the stream still exists. Otherwise the factory
        # would count a protocol that is never connected, and so never loses its connection, as an open one.
        connection = StreamConnection(self._connections, self._build, refusal=CloseReason.REFUSED)
        opened = self._connections.open(connection, {"do": "accept", "stream": number, "half_close": True})
        return opened.addCallback(lambda _: self._connections.with_timeout(connection.started))

    def _build(self, opened: OpenedStream) -> IProtocol | None:
        try:
            return self._factory.buildProtocol(opened.peer)
        except Exception:
            _log.failure("unhandled error in buildProtocol of {factory!r}", factory=self._factory)
            return None

    def _agent_lost(self) -> None:
        self._lines = None
        if self in self._services:
            self._on_warning("the agent has ended: start it again with 'dmsg up', and this service resumes")
            self._tries = 0
            self._registration.soon(FIRST_DELAY)

    async def _register_again(self) -> float | None:
        try:
            await self.register()
        except NO_AGENT_ERRORS:
            self._tries += 1
            return self._delay(self._tries)
        except DmsgError as error:
            self._tries += 1
            if not self._has_warned:
                self._has_warned = True
                self._on_warning(f"{error}; trying again")
            return self._delay(self._tries)
        if not self._registration.is_started:
            # The service was stopped while the agent opened the port again.
            if self._lines is not None and self._lines.transport is not None:
                self._lines.transport.loseConnection()
            return None
        self._has_warned = False
        self._on_warning("the agent is back")
        self._watch()
        return None

    def _delay(self, failures: int) -> float:
        return min(MAX_AGENT_DELAY, retry_delay(failures, SystemRandom()))

    def startListening(self) -> None:
        """Do nothing, because the port is already open."""

    def stopListening(self) -> Deferred[None]:
        self._registration.stop()
        if self in self._services:
            self._services.pop(self, None)
            self._factory.doStop()
        lines = self._lines
        if lines is None or lines.transport is None:
            return succeed(None)
        lines.transport.loseConnection()
        ended: Deferred[None] = Deferred()
        lines.ended.addCallback(lambda _: ended.callback(None))
        return ended

    def getHost(self) -> IAddress:
        return DmsgAddress(self._key, self._port)
