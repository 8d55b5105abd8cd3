"""Base of links: a connection with any handshake and then any kind of frames.

The user of the link (the object that handles its frames) is made when the handshake is done, and not at all if the
handshake fails. Frames sent in one reactor turn are written together (:class:`~dmsg.net.flush.TurnFlush`). The
subclasses
:class:`~dmsg.net.links.records.RecordLink` and :class:`~dmsg.net.links.plain.PlainLink` convert between bytes and
frames.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IDelayedCall, IPushProducer, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.errors import DropReason, HandshakeError, RemoteProtocolError
from dmsg.keys import PubKey
from dmsg.net.carriers.transport import WebSocketTransport, tcp_of
from dmsg.net.flush import TurnFlush
from dmsg.net.links.interfaces import LinkHandshake, LinkUser
from dmsg.net.links.reading import (
    read_kept,
)
from dmsg.net.links.receiver import LinkReceiver
from dmsg.net.reactor import cancel_call
from dmsg.net.socketopts import (
    can_half_close,
    forget_unsent,
    held_bytes,
    queued_bytes,
    send_more,
    shed_sent_bytes,
    tune,
    unacknowledged_bytes,
    write_now,
)

HANDSHAKE_TIMEOUT = 10.0
"""Seconds from the TCP connection to the last handshake message; then the link is closed (reference of 2019: 10 s)."""
CLOSE_TIMEOUT = 3.0
"""Seconds within which a closing link must send some of its queue; otherwise it is ended at once."""
CLOSE_LIMIT = 30.0
"""Maximum number of seconds for which a link may be closing, even if it sends some of its queue."""
DIRECT_SIZE = 16 * 1024
"""Size in bytes from which data are sealed or written directly instead of being collected."""
HIGH_WATER = 256 * 1024
"""High-water mark in unsent bytes. Above it the link is congested until its queue is empty."""
MAX_TAIL = 65540
"""Maximum size of an unfinished frame in bytes."""

_log = Logger()

MakeUser = Callable[[PubKey], "LinkUser[Link]"]
"""Factory of the user of a link, called with the peer's key when the handshake is done."""
OnFailure = Callable[["Link", Failure], None]
"""Callback called once with a link whose handshake failed, and the cause."""
OnFirstBytes = Callable[["Link", bytes], bool]
"""Callback called with a link and the first bytes that it received."""


@implementer(IPushProducer)
class Link(LinkReceiver):
    """Connection of two peers, with a handshake and then frames.  A relay core uses the link as its port to the peer.

    :param handshake: handshake of this connection.
    :param make_user: factory of the user of the link, called when the handshake is done.
    :param on_failure: callback called once if the handshake fails.
    :param tuned: whether the socket inherited its options from the listening one.
    """

    remote: PubKey | None = None
    made_at = 0.0
    """Time when TCP was connected, in seconds of the reactor's clock."""
    address = ""
    """IP address of the peer, without its port."""
    written = 0
    """Number of bytes written to TCP."""
    left_behind = 0
    """Number of queued bytes that were never sent, as far as known; set when the connection ends."""
    spoken = False
    """Whether the first handshake message of the peer was valid."""
    is_server_side = False
    """Whether this is the server's side of the link.  A server logs errors of the peer itself."""
    erred = ""
    """Description of the peer's protocol error; empty without one."""
    first_bytes: OnFirstBytes | None = None
    """Callback that gets the received bytes until it returns False; from then on the handshake gets them."""
    places: Sequence[Hashable] = ()
    """Blocks of addresses of the peer, the widest first. Behind a proxy, the connection itself counts as the only
    block."""

    def __init__(
        self,
        reactor: IReactorTime,
        turn: TurnFlush,
        handshake: LinkHandshake,
        make_user: MakeUser,
        *,
        on_failure: OnFailure | None = None,
        timeout: float = HANDSHAKE_TIMEOUT,
        tuned: bool = False,
    ) -> None:
        super().__init__(reactor)
        self._turn = turn
        self._tuned = tuned
        self._handshake: LinkHandshake | None = handshake
        self._make_user: MakeUser | None = make_user
        self._on_failure = on_failure
        self._timeout = timeout
        self._timer: IDelayedCall | None = None
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._dirty = False
        self._congested = False
        self._since_congested = 0

    # --- hooks for subclasses ---

    def _begin(self, handshake: LinkHandshake) -> None:
        """Prepare for frames; called when the handshake is done."""

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Queue whole frames, which are sent at the end of the reactor turn."""
        raise NotImplementedError

    def _take_outgoing(self) -> tuple[Iterable[bytes | bytearray | memoryview], int]:
        """Return the data to write now and their size, and clear them."""
        raise NotImplementedError

    def _release_written(self) -> None:
        """Release the buffers that :meth:`_take_outgoing` returned."""

    def _unwritten_size(self) -> int:
        """Return the number of bytes queued since the last :meth:`flush`."""
        raise NotImplementedError

    # --- calls of Twisted ---

    def connectionMade(self) -> None:
        if isinstance(self.transport, WebSocketTransport):
            self.in_websocket = self.transport
        self._tcp = tcp_of(self.transport)
        if self._tuned:
            send_more(self._tcp)
        else:
            tune(self._tcp)
        self.made_at = self._reactor.seconds()
        # The address is read now, because a closed socket no longer knows it.
        self.address = str(getattr(self.transport.getPeer(), "host", "")) if self.transport is not None else ""
        self._timer = self._reactor.callLater(self._timeout, self._on_timeout)
        read_kept(self._tcp, self._received, self._may_read)
        self._send_handshake()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        # The end is reported later, because data received before it have to be delivered first.
        while (self._left or (self._held and len(self._tail) <= MAX_TAIL)) and self.ended_for is None:
            self._proceed()
        self._is_lost = True
        if self.active_links is not None:
            self.active_links.pop(self, None)
        self._cancel_timer()
        if self.in_websocket is not None:
            self.in_websocket.stop()
        self.left_behind = max(self.left_behind, self.queued())
        self._pending.clear()
        self._take_outgoing()
        self._release_written()
        forget_unsent(self._tcp)
        user, self._user = self._user, None
        if user is not None:
            user.link_lost(reason)
        elif self._on_failure is not None:
            on_failure, self._on_failure = self._on_failure, None
            if self.ended_for is None:
                reason = Failure(HandshakeError("connection lost in the handshake", DropReason.HANDSHAKE_ABANDONED))
            on_failure(self, reason)
        self._make_user = None

    # --- handshake ---

    def _receive_first(self, data: bytes) -> None:
        if self.first_bytes is None or not self.first_bytes(self, data):
            self.first_bytes = None
            self._receive_handshake(data)

    def _send_handshake(self) -> bool:
        assert self._handshake is not None
        data = self._handshake.data_to_send()
        if data:
            write_now(self.transport, data)
        return bool(data)

    def _receive_handshake(self, data: bytes) -> None:
        handshake = self._handshake
        assert handshake is not None and self.transport is not None
        handshake.receive_data(data)
        self.spoken = self._send_handshake() or self.spoken
        if handshake.remote is None:
            return
        self._cancel_timer()
        self._handshake = None
        self._on_failure = None  # From here on the user is notified of the end instead.
        self.remote = handshake.remote
        self._begin(handshake)
        self._up = True
        assert self._make_user is not None
        make_user, self._make_user = self._make_user, None
        self._user = make_user(self.remote)
        self.transport.registerProducer(self, True)  # type: ignore[attr-defined]
        self._user.link_up(self)
        # Frames may have come with the last handshake message; so the user is given the link before these are
        # processed.
        rest = handshake.trailing_data()
        if rest and self.ended_for is None:
            self._take_bytes(rest)

    def _on_timeout(self) -> None:
        self._timer = None
        self._peer_erred(HandshakeError("handshake took too long", DropReason.HANDSHAKE_TIMEOUT))

    def evict(self) -> None:
        """End the handshake to make room for others."""
        self._peer_erred(HandshakeError("too many handshakes under way", DropReason.HANDSHAKE_EVICTED))

    def _peer_erred(self, error: RemoteProtocolError) -> None:
        if self.ended_for is not None or self._is_lost:
            return
        self.erred = str(error)
        if not self.is_server_side:
            peer = self.remote.short if self.remote is not None else "unknown key"
            _log.info("link with {peer} ended: {error}", peer=peer, error=self.erred, reason=error.reason.value)
        self.ended_for = error.reason
        if self._on_failure is not None:
            on_failure, self._on_failure = self._on_failure, None
            on_failure(self, Failure(error))
        self._abort()  # A clean close would first send the queue to a peer that may never read it.

    # --- writing ---

    def _mark_dirty(self) -> None:
        if not self._dirty:
            self._dirty = True
            self._turn.add(self)

    def flush(self) -> None:
        """Write the queued data to TCP."""
        self._dirty = False
        if self._is_lost or not self._up:
            return
        if self.active_links is not None:
            self.active_links[self] = None
        chunks, size = self._take_outgoing()
        self.written += size
        transport = self.transport
        carrier = self.in_websocket
        for chunk in chunks:
            if carrier is None:
                write_now(transport, chunk)
            else:  # The chunk is copied only once, into the frame of the websocket.
                carrier.write(chunk)
        self._release_written()
        if self._congested:
            self._since_congested += size
        else:
            waiting = queued_bytes(self._tcp)
            if waiting is not None and waiting > HIGH_WATER:
                self._congest()

    def queued(self) -> int:
        """Return the number of bytes that wait to be sent."""
        waiting = queued_bytes(self._tcp)
        if waiting is None:
            # This is not plain TCP, whose queue can be measured, so the bytes written since the link became congested
            # are counted.
            waiting = self._since_congested
        return waiting + self._unwritten_size()

    @property
    def user(self) -> LinkUser[Link] | None:
        """User of the link; None before the handshake is done and after the end."""
        return self._user

    @property
    def buffered_bytes(self) -> int:
        """Number of bytes that the link buffers in both directions."""
        received = len(self._tail) + sum(map(len, self._held)) + self._unopened_size()
        if self.in_websocket is not None:
            received += self.in_websocket.reader.held
        return max(held_bytes(self._tcp), self.queued() - self._unwritten_size()) + self._unwritten_size() + received

    def free_buffers(self) -> None:
        """Free buffer space that is not needed."""
        shed_sent_bytes(self._tcp)

    def _unopened_size(self) -> int:
        """Return the number of bytes of an incomplete record."""
        return 0

    def unsent(self) -> int:
        """Return the number of bytes that the peer's TCP has not acknowledged, as far as known."""
        return self.queued() + unacknowledged_bytes(self._tcp)

    @property
    def congested(self) -> bool:
        """Whether the send queue exceeded ``HIGH_WATER`` and has not been emptied since."""
        return self._congested

    def _congest(self) -> None:
        self._congested = True
        self._since_congested = 0
        if self._user is not None:
            self._user.link_congested()

    def pauseProducing(self) -> None:
        # Twisted calls this at a lower mark than ours, and repeatedly, so the call is used only if the queue cannot be
        # measured.
        if not self._congested and queued_bytes(self._tcp) is None:
            self._congest()

    def resumeProducing(self) -> None:
        # Twisted calls this only when the queue is empty, so the user is not stopped and resumed for every chunk.
        if self._congested:
            self._congested = False
            if self._user is not None:
                self._user.link_relieved()

    def stopProducing(self) -> None:
        """Do nothing: connectionLost follows."""

    # --- end of the link ---

    def close(self, reason: DropReason | None = None) -> None:
        """End the link when its queue is sent.

        A client also waits until the server has read all data and closes the connection. The link is ended at once
        after ``CLOSE_LIMIT`` seconds, or if nothing is sent for ``CLOSE_TIMEOUT`` seconds.
        """
        if self._closing or self._is_lost or self.transport is None:
            return
        self.ended_for = self.ended_for or reason
        if self._unwritten_size():
            # This is set first, because flush() may call the user, which must not queue more.
            self._closing = True
            self.flush()
        self._closing = True
        self.transport.unregisterProducer()  # type: ignore[attr-defined]
        # A socket that is closed with unread data resets the connection, and the kernel drops the data that it has not
        # sent: the last frames, which say how the streams end. So a client only ends its own direction, continues to
        # read, and lets the server close the connection. A server does not wait for clients, who could keep its sockets
        # open.
        if self.is_server_side or not self._end_writing():
            self.transport.loseConnection()
        self._cancel_timer()
        until = self._reactor.seconds() + CLOSE_LIMIT
        self._timer = self._reactor.callLater(CLOSE_TIMEOUT, self._close_late, self.unsent(), until)

    def _end_writing(self) -> bool:
        """End the direction to the peer when its queue is sent, and discard what still arrives.

        :returns: whether the transport can do so.
        """
        if not can_half_close(self._tcp):
            return False
        if self.in_websocket is not None:
            self.in_websocket.end_writing()
        else:
            self._tcp.loseWriteConnection()  # type: ignore[attr-defined]
        self._tcp.resumeProducing()  # type: ignore[attr-defined]
        return True

    def _close_late(self, before: int, until: float) -> None:
        self._timer = None
        waiting = self.unsent()
        if 0 < waiting < before and self._reactor.seconds() < until:
            # The queue still shrinks, even if slowly, so the link may go on closing.
            self._timer = self._reactor.callLater(CLOSE_TIMEOUT, self._close_late, waiting, until)
        elif not waiting and not self.is_server_side and can_half_close(self._tcp):
            # The peer's kernel has all data. The peer can still read the data after a clean close, but not after a
            # reset.
            self._tcp.loseConnection()  # type: ignore[attr-defined]
        else:
            self._abort()

    def abort(self, reason: DropReason) -> None:
        """End the link at once."""
        self.ended_for = self.ended_for or reason
        self._abort()

    def abandon(self) -> None:
        """End the link at once, without calling the failure callback."""
        self._on_failure = None
        self._abort()

    def _abort(self) -> None:
        self._closing = True
        self._cancel_timer()
        if self._is_lost or self.transport is None:
            return
        # Unacknowledged bytes are counted before the abort, because they are lost, and afterwards their number is
        # unknown.
        self.left_behind = self.unsent()
        abort = getattr(self.transport, "abortConnection", None)
        if abort is not None:
            abort()
        else:
            self.transport.loseConnection()

    def _cancel_timer(self) -> None:
        timer, self._timer = self._timer, None
        cancel_call(timer)
