"""Connections from a program to its agent, each of which carries lines or one stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar, cast

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectError, ConnectionDone
from twisted.internet.interfaces import IProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.agent.local_stream import LOST, LocalCarrier, OpenedStream
from dmsg.agent.wire import Answer, Reader, WireError, encode_close, encode_line, parse_line, raise_error
from dmsg.base.timeouts import CLOSE_TIMEOUT
from dmsg.errors import CloseReason, DmsgError, DmsgTimeout
from dmsg.net.flush import TurnFlush
from dmsg.net.own_pauses import FairTimeout, add_fair_timeout, stop_timeout
from dmsg.net.reactor import Reactor
from dmsg.net.socket_endpoints import UNIXEndpoint

ANSWER_TIMEOUT = 10.0
"""Seconds to wait for an answer that the agent can compute at once."""
NO_AGENT_ERRORS = (ConnectError, ConnectionDone, OSError)
"""Errors with which a connection fails if no agent is running."""

_log = Logger()
_T = TypeVar("_T")


class AgentConnections:
    """Connections of this program to the agent.

    :param program: name of this program in ``dmsg status``.
    :ivar streams: connections that carry a stream.
    """

    def __init__(self, reactor: Reactor, path: Path, program: str) -> None:
        self.reactor = reactor
        self.turn = TurnFlush(reactor)
        self.path = path
        self._program = program
        self.streams: dict[StreamConnection, None] = {}

    def open(self, protocol: Protocol, request: Mapping[str, object]) -> Deferred[IProtocol]:
        """Connect to the agent and send a request.

        :returns: Deferred that fires with ``protocol``, or fails with one of :data:`NO_AGENT_ERRORS`.
        """
        text = encode_line({**request, "program": self._program})
        factory = Factory.forProtocol(lambda: protocol)
        factory.noisy = False
        opened = UNIXEndpoint(self.reactor, os.fspath(self.path)).connect(factory)

        def ask(connected: IProtocol) -> IProtocol:
            assert protocol.transport is not None
            protocol.transport.write(text)
            return connected

        return opened.addCallback(ask)

    async def ask(self, request: Mapping[str, object], timeout: float = ANSWER_TIMEOUT) -> Answer:
        """Send a request and return its answer.

        :param timeout: seconds to wait for the answer.
        :raises DmsgError: the agent reports a failure, is not running, or did not answer in time.
        """
        connection = LineConnection()
        try:
            await self.open(connection, request)
        except NO_AGENT_ERRORS:
            raise DmsgError(f"the agent at {self.path} has stopped") from None
        try:
            return await self.with_timeout(connection.answered, timeout)
        finally:
            if connection.transport is not None:
                connection.transport.loseConnection()

    def with_timeout(self, answered: Deferred[_T], timeout: float = ANSWER_TIMEOUT) -> Deferred[_T]:
        """Add a timeout to a Deferred, and return it.  After ``timeout`` seconds, without pauses of this
        process, it fails with DmsgTimeout.
        """
        return add_fair_timeout(answered, timeout, self.reactor, _no_answer)


def _no_answer(result: _T | Failure, seconds: float) -> _T:
    if isinstance(result, Failure) and result.check(CancelledError):
        raise DmsgTimeout(
            f"the agent did not answer within {seconds:g} s: try again, or restart it with 'dmsg down' and 'dmsg up'"
        ) from None
    return cast(_T, result)


class LineConnection(Protocol):
    """Connection over which the agent answers in lines of JSON.

    :param on_line: callback invoked with each line after the first.
    :ivar answered: Deferred that fires with the first line, or fails with the error that this line reports.
    :ivar ended: Deferred that fires when the connection is closed.
    """

    def __init__(self, on_line: Callable[[LineConnection, Answer], None] = lambda lines, content: None) -> None:
        self._reader = Reader()
        self.answered: Deferred[Answer] = Deferred()
        self.ended: Deferred[None] = Deferred()
        self._on_line = on_line

    def dataReceived(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (text := self._reader.next_line()) is not None:
                content = parse_line(text)
                if self.answered.called:
                    self._on_line(self, content)
                else:
                    self._answer(content)
        except WireError as error:
            if not self.answered.called:
                self.answered.errback(Failure(error))
            assert self.transport is not None
            self.transport.loseConnection()

    def _answer(self, content: Answer) -> None:
        try:
            raise_error(content)
        except DmsgError:
            self.answered.errback(Failure())
        else:
            self.answered.callback(content)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        if not self.answered.called:
            self.answered.errback(Failure(DmsgError("the agent has ended")))
        self.ended.callback(None)


class StreamConnection(Protocol):
    """Connection that carries one stream.

    :param build: function that returns the application's protocol for the opened stream, or None to refuse the stream.
    :param refusal: close reason of a refused stream; None to abort it.
    :ivar started: Deferred that fires with the application's protocol, or fails.
    :ivar closed: Deferred that fires when the connection is closed.
    """

    def __init__(
        self,
        connections: AgentConnections,
        build: Callable[[OpenedStream], IProtocol | None],
        *,
        refusal: CloseReason | None = None,
    ) -> None:
        self._connections = connections
        self._build = build
        self._refusal = refusal
        self._reader = Reader()
        self._carrier: LocalCarrier | None = None
        self._closing: FairTimeout | None = None
        self.started: Deferred[IProtocol] = Deferred(lambda _: self._give_up())
        self.closed: Deferred[None] = Deferred()

    def connectionMade(self) -> None:
        self._connections.streams[self] = None

    def dataReceived(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            if self._carrier is None and not self._on_answer():
                return
            carrier = self._carrier
            while carrier is not None and not carrier.closed and (found := self._reader.next_frame()) is not None:
                carrier.received(*found)
        except WireError:
            _log.failure("the agent sent a frame that breaks its protocol")
            self._give_up()

    def _on_answer(self) -> bool:
        text = self._reader.next_line()
        if text is None:
            return False
        answer = parse_line(text)
        try:
            raise_error(answer)
            opened = OpenedStream(answer)
            protocol = self._build(opened)
        except Exception:
            self._fail(Failure())
            return False
        if protocol is None:
            self._refuse(Failure(DmsgError("the application's factory built no protocol")))
            return False
        self._carrier = opened.start(self._connections.reactor, self, self._connections.turn, protocol)
        if not self.started.called:
            self.started.callback(protocol)
        return True

    def _refuse(self, failure: Failure) -> None:
        if self._refusal is None or self.transport is None:
            self._fail(failure)
            return
        self.transport.write(encode_close(self._refusal))
        self.transport.loseConnection()
        if not self.started.called:
            self.started.errback(failure)

    def _fail(self, failure: Failure) -> None:
        if not self.started.called:
            self.started.errback(failure)
        self._give_up()

    def _give_up(self) -> None:
        if self.transport is not None:
            self.transport.abortConnection()  # type: ignore[attr-defined]

    def stop(self) -> None:
        """End the stream, because the program ends.

        A stream that the application has closed has ``CLOSE_TIMEOUT`` seconds to send its data.  Other streams are
        aborted.
        """
        if self._carrier is None:
            self._give_up()
            return
        stream = self._carrier.stream
        if stream.disconnecting and not stream.has_ended:
            self._closing = FairTimeout(self._connections.reactor, CLOSE_TIMEOUT, self._give_up)
            return
        reason = stream.reason_of_stop
        self._carrier.close(reason)
        stream.client_stopped(reason)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._connections.streams.pop(self, None)
        stop_timeout(self._closing)
        if not self.started.called:
            self.started.errback(Failure(DmsgError("the agent has ended")))
        if self._carrier is not None:
            self._carrier.ended(LOST)
        self.closed.callback(None)
