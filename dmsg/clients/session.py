"""Session of a client with a server, for all protocol families: the counterpart of :mod:`dmsg.servers.serving`.

The core of the protocol family contains the rules of the protocol. A :class:`Session` passes received data to the core,
calls a method of the family's subclass for each event of the core, and sends the core's output. It also notifies its
owner when the connection is lost, or when the server announces that it shuts down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.errors import CloseReason, DmsgTimeout, DropReason, RemoteProtocolError, TransportClosed
from dmsg.keys import PubKey
from dmsg.net.carriers.names import PLAIN, Carrier
from dmsg.net.flush import TurnFlush
from dmsg.net.isolate import call_isolated, dispatch
from dmsg.net.links.link import Link
from dmsg.net.own_pauses import add_fair_timeout
from dmsg.net.streams.stream import StreamTransport
from dmsg.net.turn_share import CLIENT_FRAMES

CLIENT_QUEUE_LIMIT = 16 * 1024 * 1024
"""Maximum number of bytes queued for a server that does not read. Beyond this limit the connection is closed, because a
server that sends requests without reading the answers would fill the memory.
"""

V = TypeVar("V")

_log = Logger()


class SessionCore(Protocol):
    """Interface of the core of a protocol family: the rules of the protocol for one connection, without I/O.

    :ivar accepting: whether streams opened by others are offered to the application.
    :ivar has_frames_left: whether whole frames may be left in the buffer, because a call processes a limited number.
    :ivar broken: error with which the connection has to end, after the events before the error are delivered; None
        without an error.
    """

    accepting: bool
    has_frames_left: bool
    broken: RemoteProtocolError | None

    def receive_frames(self, buffer: bytearray, end: int, limit: int = ...) -> tuple[int, Sequence[object]]:
        """Process whole frames from the start of ``buffer``; return the number of bytes processed, and events.

        :param end: number of bytes in ``buffer`` that may be processed.
        :param limit: maximum number of frames to process.
        """


class SessionKeeper(Protocol):
    """Interface of the owner of a client's sessions, which reacts to announcements of their servers."""

    def server_leaves(self, session: Session, seconds: int, servers: list[PubKey]) -> None:
        """Search for another server, because the server of ``session`` shuts down in ``seconds`` seconds.

        :param servers: servers that the server suggests.
        """

    def key_shared(self, address: str) -> None:
        """Warn that another program, at ``address``, is connected with the same key."""

    def reachability_changed(self, session: Session) -> None:
        """Handle a change of ``Session.unreachable``."""


class Session:
    """Session of a client with one server.

    :param accept: returns the factory for streams that others open, or None to refuse such streams.
    :ivar core: core of the protocol family.
    :ivar server: key of the server.
    :ivar lost: Deferred that fires with None when the connection is lost.
    :ivar keeper: object that is notified of the server's announcements, or None.
    :ivar connected: whether the session can open and accept streams.
    :ivar writable: whether the link accepts more data; False while it is congested.
    :ivar leaving: whether the server announced that it shuts down.
    :ivar why_lost: reason why the connection was lost.
    :ivar carrier: carrier protocol by which the server was reached.
    :ivar carriers_failed: error messages of the carrier protocols that were tried before and failed.
    :ivar is_doubtful: whether the server has not answered since this machine was suspended. If the connection ends in
        this state, the client reconnects at once.
    :ivar unreachable: reason why the requests of other clients do not reach this client over this connection; empty if
        they do, as far as known.
    :ivar refused_extension: whether the server closed the connection when the client used an extension of the protocol
        that the server's entry offers.
    """

    _handle: Mapping[type, Callable[..., None]]
    """Methods of the protocol family that handle events, by type of event."""

    core: SessionCore

    def __init__(
        self, turn: TurnFlush, server: PubKey, core: SessionCore, accept: Callable[[], IProtocolFactory | None]
    ) -> None:
        self._turn = turn
        self.server = server
        self.core = core
        self._accept = accept
        self._link: Link | None = None
        self._receiving = False
        self.writable = True
        self.connected = False
        self.leaving = False
        self.why_lost = "connection to the server was lost"
        self.refused_extension = False
        self.is_doubtful = False
        self.unreachable = ""
        self.lost: Deferred[None] = Deferred()
        self.keeper: SessionKeeper | None = None
        self.carrier = PLAIN
        self.carriers_failed: Mapping[Carrier, str] = {}

    # --- hooks for a protocol family ---

    @property
    def round_trip(self) -> float | None:
        """Round trip to the server in seconds; None while not measured."""
        raise NotImplementedError

    @property
    def transports(self) -> int:
        """Number of streams that the session carries or is about to carry."""
        raise NotImplementedError

    @property
    def streams(self) -> Sequence[StreamTransport]:
        """Streams that the session carries."""
        raise NotImplementedError

    @property
    def _accepts(self) -> bool:
        """Whether streams opened by others are offered to the application."""
        return self._accept() is not None

    def _send_all(self) -> None:
        """Send the output of the core."""
        raise NotImplementedError

    def _close_streams(self) -> None:
        """Close every stream, because the link is about to end."""
        raise NotImplementedError

    def _event_lost(self, event: Any) -> None:
        """End the stream of an event whose handler raised an exception. Without this event the stream cannot continue
        correctly.
        """
        raise NotImplementedError

    def _forget_streams(self, reason: Failure) -> Callable[[], None]:
        """Remove every stream from the core, because the link is lost.

        :returns: function that notifies the streams of the loss; it is called after :attr:`lost` has fired.
        """
        raise NotImplementedError

    def check_after_wake(self) -> None:
        """Check, after this machine was suspended, whether the server still answers; if not, close
        the connection soon.
        """

    def check_reachability(self) -> None:
        """Check soon, and regularly from then on, whether the requests of other clients reach this client over this
        connection, if this is in doubt with its server. The result is in ``unreachable``.
        """

    @property
    def was_reached(self) -> bool:
        """Whether a check has shown that requests of other clients reached this client over this connection."""
        return False

    # --- called by the application ---

    def close(self) -> None:
        """Close the connection and its streams."""
        self.connected = False
        if self._link is not None:
            self._close_streams()
            self._send_all()
            self._link.close()

    # --- called by the link ---

    def link_up(self, link: Link) -> None:
        self._link = link

    def frames_received(self, buffer: bytearray, end: int) -> int:
        core = self.core
        core.accepting = self._accepts
        # All events of a read are delivered before an error of the same read ends the connection, so that no received
        # data are lost.
        taken, events = core.receive_frames(buffer, end, CLIENT_FRAMES)
        self._deliver(events)
        link = self._link
        if core.has_frames_left and link is not None:
            link.note_frames_left()
        if core.broken is not None:
            self.why_lost = str(core.broken)
            raise core.broken
        if link is not None and link.congested and link.queued() > CLIENT_QUEUE_LIMIT:
            raise RemoteProtocolError(
                DropReason.SEND_BUFFER_FULL, "the server sends requests but does not read the answers"
            )
        return taken

    def _deliver(self, events: Sequence[object]) -> None:
        """Call the family's method for each event, and send the resulting output of the core."""
        # Output is sent only after all events of a read are handled, so that all answers fit into one record.
        self._receiving = True
        dispatch(events, self._handle, self, self._event_lost)
        self._receiving = False
        self.flush()

    def link_congested(self) -> None:
        self.writable = False

    def link_relieved(self) -> None:
        self.writable = True
        for stream in self.streams:
            call_isolated(stream.window_opened)

    def link_lost(self, reason: Failure) -> None:
        self._link = None
        self.connected = False
        tell = self._forget_streams(Failure(TransportClosed(CloseReason.PEER_DISCONNECTED, self.why_lost)))
        # The owner is notified before the streams. Otherwise a stream that searches for another server could find the
        # lost one.
        self.lost.callback(None)
        tell()

    def _server_leaves(self, seconds: int, servers: list[PubKey]) -> None:
        """Notify the keeper that the server shuts down in ``seconds`` seconds and suggests ``servers``."""
        if not self.leaving:  # Repeated announcements are ignored, because each would start a search.
            self.leaving = True
            if self.keeper is not None:
                self.keeper.server_leaves(self, seconds, servers)

    # --- called by the streams' carriers ---

    def flush(self) -> None:
        """Send the output of the core. While events of a read are handled, do nothing: the output
        is sent afterwards.
        """
        if not self._receiving:
            self._send_all()

    def schedule(self, stream: StreamTransport) -> None:
        """Schedule a flush of ``stream`` at the end of the reactor turn."""
        self._turn.add_stream(stream)


class AnsweringSession(Protocol):
    """Part of the interface of a session that :func:`wait_for_answer` uses."""

    connected: bool

    def flush(self) -> None:
        """Send the output of the core."""


def wait_for_answer(
    session: AnsweringSession, reactor: IReactorTime, waiting: Deferred[V], timeout: float, give_up: Callable[[], None]
) -> Deferred[V]:
    """Send the queued request, and wait at most ``timeout`` seconds for its answer.

    :param waiting: Deferred that fires with the answer.
    :param give_up: function that withdraws the request. It is called if the answer is late, or the caller cancels,
        while the session is connected.
    """

    def failed(failure: Failure) -> Failure:
        # If the request was refused, it is already closed, and ``give_up`` has no effect.
        if session.connected:
            give_up()
            session.flush()
        return failure

    add_fair_timeout(waiting, timeout, reactor, no_answer)
    waiting.addErrback(failed)
    session.flush()
    return waiting


def no_answer(result: object, seconds: float) -> NoReturn:
    """Raise the error for a late answer; to be passed to :meth:`~twisted.internet.defer.Deferred.addTimeout`.

    :raises DmsgTimeout: always.
    """
    raise DmsgTimeout(f"the peer did not answer within {seconds:.3g} s")


def start_opened(stream: StreamTransport, factory: IProtocolFactory, close: Callable[[int], None]) -> IProtocol:
    """Build the application protocol of a stream that this client opened, and connect it to the stream.

    :param close: function that closes the stream at the remote with a close reason; called if no protocol is built.
    :raises TransportClosed: the factory built no protocol, and the stream was closed.
    """
    try:
        protocol = factory.buildProtocol(stream.getPeer())
        if protocol is None:
            raise TransportClosed(CloseReason.REFUSED, "the factory built no protocol")
    except Exception:
        close(CloseReason.REFUSED)
        stream.carrier_closed(CloseReason.REFUSED)
        raise
    stream.start(protocol)
    return protocol


def build_accepted(factory: IProtocolFactory | None, stream: StreamTransport) -> IProtocol | None:
    """Build the application protocol of a stream that another client opened.

    :returns: the protocol; None if the factory builds none or raises an exception.
    """
    try:
        return factory.buildProtocol(stream.getPeer()) if factory is not None else None
    except Exception:
        # The exception is only logged: a bug in the application may end its stream, but not the connection, which
        # carries other streams, too.
        _log.failure("unhandled error in buildProtocol of {factory!r}", factory=factory)
        return None
