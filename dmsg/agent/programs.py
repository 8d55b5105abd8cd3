"""Agent's side of its socket: the connection of each program, and the requests of the program."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import CannotListenError, ConnectionDone
from twisted.internet.interfaces import IListeningPort
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.agent.bridge import Bridge
from dmsg.agent.program_service import OfferProducer, Service, ServingAgent, parse_service_offer
from dmsg.agent.socket_path import peer_of
from dmsg.agent.wire import (
    WINDOW,
    Reader,
    WireError,
    encode_line,
    error_line,
    parse_line,
)
from dmsg.apps.pings import ping
from dmsg.base.printable import printable
from dmsg.errors import CloseReason, DmsgError
from dmsg.keys import PubKey
from dmsg.net.addresses import parse_port
from dmsg.net.own_pauses import FairTimeout, stop_timeout
from dmsg.net.reactor import Reactor
from dmsg.net.streams.address import DmsgAddress

RESERVED_CONNECTIONS = 64
"""Number of further connections, above ``MAX_PROGRAMS``, whose only allowed requests are those in
``ALWAYS_ACCEPTED_REQUESTS``.
"""
END_TIME = 60.0
"""Seconds that a program may take to close its connection after its stream has ended."""
REQUEST_TIME = 10.0
"""Seconds that a program may take to send its request after it has connected."""
LAST_TIME = 2.0
"""Seconds that a program may take to close its connection after the agent has sent it an error."""
MAX_TIMEOUT = 3600.0
"""Maximum seconds that a program's request may set as a timeout, or as the interval between round trips."""
MAX_COUNT = 10**6
"""Maximum number of round trips that one ``ping`` request may ask for."""
REQUESTS = frozenset({"hello", "status", "down", "wait", "connect", "ping", "listen", "accept"})
"""Requests that a program may make.  The method ``on_NAME`` of its connection handles the request NAME."""
ALWAYS_ACCEPTED_REQUESTS = frozenset({"hello", "status", "down"})
"""Requests that the agent accepts even when it has reached ``MAX_PROGRAMS``."""
NAME_SIZE = 80
"""Maximum characters of a program's name."""
_log = Logger()


class ProgramConnection(Protocol):
    """Connection from a program.  It carries one request, the answer, and then the frames or lines of that request."""

    def __init__(self, agent: ServingAgent, reactor: Reactor) -> None:
        self._agent = agent
        self.reactor = reactor
        self._reader = Reader()
        self._has_request = False
        self._bridge: Bridge | None = None
        self._listening: IListeningPort | None = None
        self._of: Service | None = None
        self._finished = False
        self.service: Service | None = None
        self._work: Deferred[None] | None = None
        self._deadline: FairTimeout | None = None
        self.program = ""
        self.pid = 0

    # --- events of the connection ---

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.pid, _ = peer_of(self.transport.getHandle())  # type: ignore[attr-defined]
        self._deadline = FairTimeout(self.reactor, REQUEST_TIME, self._end)

    def dataReceived(self, data: bytes) -> None:
        if self._finished:
            return  # The data is discarded, because the program sent it before it learned that the stream had ended.
        self._reader.feed(data)
        try:
            if not self._has_request:
                self._on_request()
            elif self._bridge is not None:
                self._on_frames(self._bridge)
            elif self.service is not None:
                self._on_lines(self.service)
            elif self._reader.buffered_bytes > WINDOW:
                raise WireError("the program sends too many requests without waiting for answers")
        except (WireError, ValueError, DmsgError) as error:
            _log.info(
                "the agent closes a program's connection because of its error: {error}", error=printable(str(error))
            )
            if self._bridge is None:
                self._say_last(error)
            else:
                self._end()

    def _say_last(self, error: BaseException) -> None:
        """Send an error to the program, and discard what it sends until it closes the connection.

        If the agent closed the socket while data from the program is unread, the program would not receive the error.
        """
        self._finished = True
        stop_timeout(self._deadline)
        self.say(error_line(error))
        assert self.transport is not None
        self.transport.unregisterProducer()  # type: ignore[attr-defined]
        self.transport.loseWriteConnection()  # type: ignore[attr-defined]
        self._deadline = FairTimeout(self.reactor, LAST_TIME, self._abort)

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abortConnection()  # type: ignore[attr-defined]

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._finished = True
        stop_timeout(self._deadline)
        if self._work is not None:
            self._work.cancel()
        if self._bridge is not None:
            bridge = self._bridge
            self._forget()
            bridge.program_lost()
        if self._listening is not None and self.service is not None:
            self._agent.services.pop(self.service.port, None)
            self._listening.stopListening()
            self.service.stop()
            _log.info(
                "port {port} is free again: {program} has ended or disconnected",
                port=self.service.port,
                program=self.service.program,
            )

    def say(self, content: Mapping[str, object]) -> None:
        """Send an object to the program as one line of JSON."""
        self.write(encode_line(content))

    def _end(self) -> None:
        stop_timeout(self._deadline)
        if self.transport is not None:
            # A connection closes only after its producer is unregistered.
            self.transport.unregisterProducer()  # type: ignore[attr-defined]
            self.transport.loseConnection()

    def stop(self) -> None:
        """Close the connection, because the agent stops."""
        self._end()

    # --- methods of ProgramLink, which the bridge calls ---

    def stream_opened(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._agent.bridges[bridge] = None
        self.say(bridge.describe())
        assert self.transport is not None
        self.transport.registerProducer(_ProgramProducer(bridge), True)  # type: ignore[attr-defined]
        bridge.start_forwarding()
        if self._reader.buffered_bytes:
            # The program has sent frames without waiting for the answer. They are processed in the next turn.
            self.reactor.callLater(0, self.dataReceived, b"")

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def finish(self) -> None:
        # The program has to close the connection. If the agent closed it first, the program's next write would fail,
        # and data that the program has not read yet would be lost.
        self._detach()
        self._deadline = FairTimeout(self.reactor, END_TIME, self._end)

    def end(self) -> None:
        self._detach()
        self._end()

    def _detach(self) -> None:
        """Detach the connection from its stream, so that no more data passes."""
        self._finished = True
        self._forget()
        assert self.transport is not None
        self.transport.unregisterProducer()  # type: ignore[attr-defined]

    def _forget(self) -> None:
        """Drop the reference to the stream of this connection."""
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            self._agent.bridges.pop(bridge, None)
            if self._of is not None:
                self._of.stream_ended(bridge)

    # --- requests ---

    def _on_request(self) -> None:
        text = self._reader.next_line()
        if text is None:
            return
        self._has_request = True
        stop_timeout(self._deadline)
        request = parse_line(text)
        self.program = printable(str(request.get("program", "")))[:NAME_SIZE]
        do = str(request.get("do"))
        if do not in REQUESTS:
            raise WireError(f"the agent does not know the request {do[:40]!r}")
        if self._agent.is_full and do not in ALWAYS_ACCEPTED_REQUESTS:
            raise DmsgError(
                "the agent has reached its limit of connections from programs: end some of them; dmsg status lists them"
            )
        if request.get("as") not in (None, str(self._agent.client.public_key)):
            raise DmsgError(f"the agent now runs with another key, {self._agent.client.public_key.text}")
        getattr(self, f"on_{do}")(request)

    def on_hello(self, request: dict[str, object]) -> None:
        """Answer with the description of the agent."""
        self.say(self._agent.hello())
        self._end()

    def on_status(self, request: dict[str, object]) -> None:
        """Answer with the agent's status."""
        self.say(self._agent.status())
        self._end()

    def on_down(self, request: dict[str, object]) -> None:
        """Stop the agent.  The program's connection is closed once the agent has stopped."""
        self.say({"pid": self._agent.hello()["pid"]})
        self._agent.down()

    def on_wait(self, request: dict[str, object]) -> None:
        """Answer when the client is connected to a server or, with ``published``, when its entry is also in
        discovery.
        """
        client, timeout = self._agent.client, _seconds(request, "timeout", 15.0)

        async def work() -> None:
            await client.when_online(timeout)
            if request.get("published"):
                await client.when_published(timeout)
            self.say({"servers": [str(one) for one in client.servers]})

        self._begin(work)

    def on_connect(self, request: dict[str, object]) -> None:
        """Open a stream to a peer.  This connection then carries the stream."""
        address = DmsgAddress(PubKey.from_hex(str(request.get("to"))), parse_port(str(request.get("port", 0))))
        timeout = _seconds(request, "timeout", 10.0)
        via = request.get("via")
        server = None if via is None else PubKey.from_hex(str(via))

        async def work() -> None:
            bridge = Bridge(self.reactor, self._agent.shared, incoming=False)
            bridge.take(self, half_close=request.get("half_close") is True)
            factory = Factory.forProtocol(lambda: bridge)
            factory.noisy = False
            await self._agent.client.connect(
                address, factory, timeout=timeout, via=server, resumable=bool(request.get("resumable", True))
            )

        self._begin(work, stays=True)

    def on_ping(self, request: dict[str, object]) -> None:
        """Measure round trips to a peer, and send one line for each."""
        key = PubKey.from_hex(str(request.get("to")))
        port = None if request.get("port") is None else parse_port(str(request["port"]))
        count = request.get("count", 1)
        if not isinstance(count, int) or not 1 <= count <= MAX_COUNT:
            raise WireError(f"count must be 1 to {MAX_COUNT}")
        interval, timeout = _seconds(request, "interval", 0.2), _seconds(request, "timeout", 10.0)

        async def work() -> None:
            client = self._agent.client
            await ping(
                self.reactor, client, key, port, count=count, interval=interval, timeout=timeout, on_event=self.say
            )

        self._begin(work)

    def on_listen(self, request: dict[str, object]) -> None:
        """Open a port of the agent's key, which is closed when this connection ends."""
        port = parse_port(str(request.get("port", 0)))
        service = Service(self._agent, self, port, parse_service_offer(request))
        try:
            self._listening = self._agent.client.listen(service, port)
        except CannotListenError:
            other = self._agent.services.get(port)
            by = f" by {other.program} (process {other.pid})" if other is not None else ""
            raise DmsgError(
                f"port {port} of the agent's key is in use{by}: choose another port, or stop that program"
            ) from None
        self.service = self._agent.services[port] = service
        assert self.transport is not None
        self.transport.registerProducer(OfferProducer(service), True)  # type: ignore[attr-defined]
        self.say({"host": str(self._agent.client.public_key), "port": port})
        _log.info("port {port} is served by {program} (process {pid})", port=port, program=self.program, pid=self.pid)

    def on_accept(self, request: dict[str, object]) -> None:
        """Attach a stream that a peer has opened.  This connection then carries the stream."""
        number = request.get("stream")
        bridge = self._agent.untaken.get(number) if isinstance(number, int) else None
        if bridge is None or bridge.transport is None:
            raise WireError("there is no such stream: it has ended, or was not accepted in time")
        for service in self._agent.services.values():
            if number in service.waiting:
                service.take(number)
                self._of = service
        bridge.take(self, half_close=request.get("half_close") is True)

    def _begin(self, work: Callable[[], Coroutine[Deferred[object], Any, None]], *, stays: bool = False) -> None:
        """Start a coroutine that handles the request.  If it fails, its error is sent to the program.

        :param stays: whether the connection stays open when the coroutine has ended.
        """

        def done(result: object) -> None:
            self._work = None
            if isinstance(result, Failure):
                if self._finished or result.check(CancelledError):
                    return
                if not result.check(DmsgError, OSError):
                    _log.failure("unhandled error in a program's request to the agent", result)
                self._say_last(result.value or Exception())
            elif not stays:
                self._end()

        self._work = Deferred.fromCoroutine(work())
        self._work.addBoth(done)

    # --- frames after the answer ---

    def _on_frames(self, bridge: Bridge) -> None:
        while self._bridge is bridge and (found := self._reader.next_frame()) is not None:
            kind, payload = found
            bridge.received(kind, payload)

    def _on_lines(self, service: Service) -> None:
        while (text := self._reader.next_line()) is not None:
            number = parse_line(text).get("refuse")
            if isinstance(number, int):
                service.refuse(number, CloseReason.REFUSED)


class _ProgramProducer:
    """Producer for a program's connection, which informs the bridge when the program stops or resumes reading.

    The agent reads from the program all the same, because some programs write all their data before they read.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    def pauseProducing(self) -> None:
        self._bridge.congested(True)

    def resumeProducing(self) -> None:
        self._bridge.congested(False)

    def stopProducing(self) -> None:
        """Do nothing: the protocol itself learns that the connection was lost."""


def _seconds(request: dict[str, object], name: str, default: float) -> float:
    value = request.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIMEOUT:
        raise WireError(f"{name} must be 0 to {MAX_TIMEOUT:g} seconds")
    return float(value)
