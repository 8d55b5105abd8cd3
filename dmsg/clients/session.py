"""One connection of a client to a server, for any family: the counterpart of :mod:`dmsg.servers.serving`.

The core of the family has the rules.  A :class:`Session` feeds it what the link receives, hands its events to the
family's methods, sends what it has to send, and says when the connection is lost or is about to end.
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
from dmsg.net.flush import TurnFlush
from dmsg.net.isolate import dispatched, isolated
from dmsg.net.links.link import Link
from dmsg.net.streams.stream import StreamTransport
from dmsg.net.turn_share import FRAMES

CLIENT_QUEUE_LIMIT = 16 * 1024 * 1024
"""Bytes queued for a server that reads none of them; beyond this limit the connection ends: the server provokes answers
and takes none."""

V = TypeVar("V")

_log = Logger()


class SessionCore(Protocol):
    """The rules of a family for one connection, without I/O.

    :ivar accepting: whether streams that others open are offered to the application.
    :ivar left: whether the last read may have left whole frames behind.
    :ivar broken: why the connection has to end; the events before it are delivered first.
    """

    accepting: bool
    left: bool
    broken: RemoteProtocolError | None

    def receive_frames(self, buffer: bytearray, end: int, most: int = ...) -> tuple[int, Sequence[object]]:
        """Take whole frames from the start of ``buffer``; return the bytes taken and the events."""


class SessionKeeper(Protocol):
    """Owner of a client's sessions, which decides what follows from what their servers say."""

    def server_leaves(self, session: Session, seconds: int, servers: list[PubKey]) -> None:
        """Look for another server: that of ``session`` leaves in ``seconds`` and names ``servers`` instead."""

    def key_shared(self, address: str) -> None:
        """Warn: another program, at ``address``, is connected with the same key."""


class Session:
    """A client's connection to one server.

    :param accept: returns the factory for streams that others open, or None to refuse them.
    :ivar core: the rules of the family.
    :ivar server: the server's key.
    :ivar lost: fires with None when the connection is gone.
    :ivar keeper: told what the server says of itself and of this client; None: nobody is.
    :ivar connected: whether the session can be used.
    :ivar writable: whether the link takes more; False while it is congested.
    :ivar leaving: whether the server said that it leaves.
    :ivar why_lost: why the connection was lost, once it is.
    :ivar refused_extension: whether the server ended the connection at something that its entry says it knows.
    """

    _handle: Mapping[type, Callable[..., None]]
    """Methods of the family by type of event."""

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
        self.lost: Deferred[None] = Deferred()
        self.keeper: SessionKeeper | None = None

    # --- for a family ---

    @property
    def round_trip(self) -> float | None:
        """Seconds to the server and back; None while not measured."""
        raise NotImplementedError

    @property
    def transports(self) -> int:
        """Number of streams that it carries or is about to carry."""
        raise NotImplementedError

    @property
    def streams(self) -> Sequence[StreamTransport]:
        """The streams that it carries."""
        raise NotImplementedError

    @property
    def _accepts(self) -> bool:
        """Whether streams that others open are offered to the application."""
        return self._accept() is not None

    def _send_all(self) -> None:
        """Send what the core has to send."""
        raise NotImplementedError

    def _close_streams(self) -> None:
        """Close every stream: the link is about to end."""
        raise NotImplementedError

    def _event_lost(self, event: Any) -> None:
        """End the stream of an event whose handler raised: it cannot go on as if it had been told."""
        raise NotImplementedError

    def _forget_streams(self, gone: Failure) -> Callable[[], None]:
        """Take every stream out of the core: the link is gone.

        :returns: tells the streams; called once those who wait for :attr:`lost` know.
        """
        raise NotImplementedError

    # --- what the application does ---

    def close(self) -> None:
        """End the connection; its streams end with it."""
        self.connected = False
        if self._link is not None:
            self._close_streams()
            self._send_all()
            self._link.close()

    # --- the link's side ---

    def link_up(self, link: Link) -> None:
        self._link = link

    def frames_received(self, buffer: bytearray, end: int) -> int:
        core = self.core
        core.accepting = self._accepts
        taken, events = core.receive_frames(buffer, end, FRAMES)
        self._deliver(events)
        link = self._link
        if core.left and link is not None:
            link.left()
        if core.broken is not None:
            self.why_lost = str(core.broken)
            raise core.broken
        if link is not None and link.congested and link.queued() > CLIENT_QUEUE_LIMIT:
            raise RemoteProtocolError(
                DropReason.SEND_BUFFER_FULL, "the server sends frames that need answers, but reads none"
            )
        return taken

    def _deliver(self, events: Sequence[object]) -> None:
        """Hand events of the core to the methods of the family, and send what these have to send."""
        self._receiving = True
        dispatched(events, self._handle, self, self._event_lost)
        self._receiving = False
        self.flush()

    def link_congested(self) -> None:
        self.writable = False

    def link_relieved(self) -> None:
        self.writable = True
        for stream in self.streams:
            isolated(stream.window_opened)

    def link_lost(self, reason: Failure) -> None:
        self._link = None
        self.connected = False
        tell = self._forget_streams(Failure(TransportClosed(CloseReason.PEER_DISCONNECTED, self.why_lost)))
        # first the news that this server is gone: who looks for another must not find this one
        self.lost.callback(None)
        tell()

    def _server_leaves(self, seconds: int, servers: list[PubKey]) -> None:
        """Tell, once, that the server leaves in ``seconds`` and names ``servers`` instead."""
        if not self.leaving:  # told again and again, clients would look for others each time
            self.leaving = True
            if self.keeper is not None:
                self.keeper.server_leaves(self, seconds, servers)

    # --- for the carriers of its streams ---

    def flush(self) -> None:
        """Send what the core has to send, unless :meth:`frames_received` is about to do so for all events of a read."""
        if not self._receiving:
            self._send_all()

    def schedule(self, stream: StreamTransport) -> None:
        """Flush ``stream`` at the end of the reactor turn."""
        self._turn.add_stream(stream)


class Asking(Protocol):
    """A session, as those need it who wait for the answer to what they asked."""

    connected: bool

    def flush(self) -> None:
        """Send what the core has to send."""


def wait_for_answer(
    session: Asking, reactor: IReactorTime, waiting: Deferred[V], timeout: float, give_up: Callable[[], None]
) -> Deferred[V]:
    """Send a question, and wait ``timeout`` seconds for its answer.

    :param waiting: fires with the answer.
    :param give_up: called when it is late or not wanted any more, if the session is still connected.
    """

    def failed(failure: Failure) -> Failure:
        # a refused question is closed already, a lost one too
        if session.connected:
            give_up()
            session.flush()
        return failure

    waiting.addTimeout(timeout, reactor, no_answer)
    waiting.addErrback(failed)
    session.flush()
    return waiting


def no_answer(result: object, seconds: float) -> NoReturn:
    """Fail because the answer did not come in time; see :meth:`~twisted.internet.defer.Deferred.addTimeout`.

    :raises DmsgTimeout: always.
    """
    raise DmsgTimeout(f"no answer within {seconds:.3g} s")


def start_opened(stream: StreamTransport, factory: IProtocolFactory, close: Callable[[int], None]) -> IProtocol:
    """Start the program of a stream that this client opened.

    :param close: tells the remote that the stream is over.
    :raises TransportClosed: the factory built no protocol; the stream is closed.
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
    """Build the program of a stream that another client opened; None if there is none, or if it cannot be built."""
    try:
        return factory.buildProtocol(stream.getPeer()) if factory is not None else None
    except Exception:
        # the application's bug ends its stream, not the connection that carries the others
        _log.failure("unhandled error in buildProtocol of {factory!r}", factory=factory)
        return None
