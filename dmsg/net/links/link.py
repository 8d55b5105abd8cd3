"""Base of links: a connection with any kind of handshake and its timeout, followed by any kind of frames.

The user of the link (the object that handles its frames) is made after a successful handshake. Frames sent in one
reactor turn are written together (:class:`~dmsg.net.flush.TurnFlush`). The subclasses
:class:`~dmsg.net.links.records.RecordLink` and :class:`~dmsg.net.links.plain.PlainLink` convert between bytes and
frames.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial

from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IPushProducer, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.errors import DropReason, HandshakeError, RemoteProtocolError
from dmsg.keys import PubKey
from dmsg.net.carriers.transport import WebSocketTransport, tcp_of
from dmsg.net.flush import TurnFlush
from dmsg.net.links.interfaces import LinkHandshake, LinkUser
from dmsg.net.links.reading import (
    read_into_shared_buffer,
)
from dmsg.net.links.receiver import LinkReceiver
from dmsg.net.own_pauses import FairTimeout, stop_timeout
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
from dmsg.net.tls_errors import tls_error_text
from dmsg.net.tls_overhead import ITLSOverhead

HANDSHAKE_TIMEOUT = 10.0
"""Seconds from the TCP connection to the last handshake message. After that, the link is closed, as by the reference of
2019."""
CLOSE_TIMEOUT = 3.0
"""Seconds after which a closing link is aborted if its queue has not shrunk during this time."""
CLOSE_LIMIT = 30.0
"""Maximum number of seconds that closing a link may take, even if its queue still shrinks."""
HIGH_WATER = 256 * 1024
"""High-water mark in unsent bytes. Above it the link is congested until its queue is empty."""
MAX_TAIL = 65540
"""Maximum size of an unfinished frame in bytes."""

_log = Logger()

MakeUser = Callable[[PubKey], "LinkUser[Link]"]
"""Factory of the user of a link, called with the peer's key when the handshake is complete."""
OnFailure = Callable[["Link", Failure], None]
"""Callback for a failed handshake, called once with the link and the cause."""
OnFirstBytes = Callable[["Link", bytes], bool]
"""Callback that is called with a link and its first received bytes."""


@implementer(IPushProducer, ITLSOverhead)
class Link(LinkReceiver):
    """Connection of two peers: a handshake, then frames. A relay core sends frames to the peer through the link.

    :param handshake: handshake of this connection.
    :param make_user: factory of the user of the link, called when the handshake is complete.
    :param on_failure: callback that is called once if the handshake fails.
    :param tuned: whether the socket inherited its options from the listening socket.
    """

    __slots__ = (
        "_congested",
        "_dirty",
        "_handshake",
        "_make_user",
        "_on_failure",
        "_pending",
        "_pending_size",
        "_since_congested",
        "_timeout",
        "_timer",
        "_tuned",
        "_turn",
    )

    remote: PubKey | None = None
    made_at = 0.0
    """Time when TCP was connected, in seconds of the reactor's clock."""
    address = ""
    """IP address of the peer, without its port."""
    written = 0
    """Number of bytes written to TCP."""
    left_behind = 0
    """Number of bytes that were lost when the connection ended, because they were still queued. After an abort, the
    count includes sent bytes that the peer's kernel had not acknowledged, if their number is known."""
    has_spoken = False
    """Whether the peer has sent a valid handshake message."""
    is_server_side = False
    """Whether this is the server's side of the link. A protocol error of the peer is logged by the acceptor on the
    server's side, and by the link itself on the client's side."""
    erred = ""
    """Description of the peer's protocol error; empty if there was none."""
    first_bytes: OnFirstBytes | None = None
    """Callback that receives the bytes of the connection until it returns False. The handshake receives the bytes for
    which the callback returned False, and all later ones."""
    blocks: Sequence[Hashable] = ()
    """Address blocks of the peer, the widest first. Behind a proxy, the only item is the number of the connection."""

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
        self._timer: FairTimeout | None = None
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._dirty = False
        self._congested = False
        self._since_congested = 0

    # --- hooks for subclasses ---

    def _begin(self, handshake: LinkHandshake) -> None:
        """Prepare for frames; called when the handshake is complete."""

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Queue whole frames, which are sent at the end of the reactor turn."""
        raise NotImplementedError

    def _take_outgoing(self) -> tuple[Iterable[bytes | bytearray | memoryview], int]:
        """Remove and return the data to write now, and their size."""
        raise NotImplementedError

    def _release_written(self) -> None:
        """Release the buffers that :meth:`_take_outgoing` returned."""

    def _unwritten_size(self) -> int:
        """Return the number of bytes queued since the last :meth:`flush`."""
        raise NotImplementedError

    # --- methods that Twisted calls ---

    def connectionMade(self) -> None:
        if isinstance(self.transport, WebSocketTransport):
            self.in_websocket = self.transport
        self._tcp = tcp_of(self.transport)
        if self._tuned:
            send_more(self._tcp)
        else:
            tune(self._tcp)
        self.made_at = self._reactor.seconds()
        # The address is stored now, because it cannot be read from a closed socket.
        self.address = str(getattr(self.transport.getPeer(), "host", "")) if self.transport is not None else ""
        self._timer = FairTimeout(self._reactor, self._timeout, self._on_timeout)
        read_into_shared_buffer(self._tcp, self._received, self._may_read)
        self._send_handshake()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        # Buffered data are processed before the user is notified of the loss, because they arrived before it.
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
                text = tls_error_text(reason.value) or "connection lost in the handshake"
                reason = Failure(HandshakeError(text, DropReason.HANDSHAKE_ABANDONED))
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
        self.has_spoken = self._send_handshake() or self.has_spoken
        if handshake.remote is None:
            return
        self._cancel_timer()
        self._handshake = None
        self._on_failure = None  # From here on, the end of the link is reported to its user.
        self.remote = handshake.remote
        self._begin(handshake)
        self._up = True
        assert self._make_user is not None
        make_user, self._make_user = self._make_user, None
        self._user = make_user(self.remote)
        self.transport.registerProducer(self, True)  # type: ignore[attr-defined]
        self._user.link_up(self)
        # Frames may have arrived together with the last handshake message. The user receives the link before these
        # frames.
        rest = handshake.trailing_data()
        if rest and self.ended_for is None:
            self._take_bytes(rest)

    def _on_timeout(self) -> None:
        self._timer = None
        self._peer_erred(HandshakeError("handshake took too long", DropReason.HANDSHAKE_TIMEOUT))

    def tls_overhead_exceeded(self) -> None:
        """End the link, because its peer sends too many TLS messages that carry no data."""
        self._peer_erred(RemoteProtocolError(DropReason.SMALL_PIECES, "TLS carries too little data"))

    def evict(self) -> None:
        """End the link during its handshake, to make room for other handshakes."""
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
        # The link is aborted, because a clean close would first send the queue to a peer that may never read it.
        self._abort()

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
        is_sent = True
        for chunk in chunks:
            if carrier is None:
                is_sent = write_now(transport, chunk)
            else:
                carrier.write(chunk)
                is_sent = False
        self._release_written()
        if self._congested:
            self._since_congested += size
        elif not is_sent:
            waiting = queued_bytes(self._tcp)
            if waiting is not None and waiting > HIGH_WATER:
                self._congest()

    def queued(self) -> int:
        """Return the number of bytes that wait to be sent."""
        waiting = queued_bytes(self._tcp)
        if waiting is None:
            # Only the queue of plain TCP can be measured. For other transports, the bytes written since the link became
            # congested are counted.
            waiting = self._since_congested
        return waiting + self._unwritten_size()

    @property
    def user(self) -> LinkUser[Link] | None:
        """User of the link; None before the handshake is complete, and after the end of the link."""
        return self._user

    @property
    def buffered_bytes(self) -> int:
        """Number of bytes that the link buffers in both directions."""
        received = len(self._tail) + sum(map(len, self._held)) + self._unopened_size()
        if self.in_websocket is not None:
            received += self.in_websocket.reader.held
        return max(held_bytes(self._tcp), self.queued() - self._unwritten_size()) + self._unwritten_size() + received

    def free_buffers(self) -> None:
        """Free the memory of sent bytes in the send buffer."""
        shed_sent_bytes(self._tcp)

    def release_ciphers(self) -> None:
        """Release the cipher objects of an encrypted link. The link makes them again when it is used."""

    def _unopened_size(self) -> int:
        """Return the number of bytes of an incomplete record."""
        return 0

    def unsent(self) -> int:
        """Return the number of bytes that are queued, plus the sent bytes that the peer's kernel has not acknowledged,
        if that number is known."""
        return self.queued() + unacknowledged_bytes(self._tcp)

    @property
    def congested(self) -> bool:
        """Whether the send queue has exceeded ``HIGH_WATER`` and has not been empty since."""
        return self._congested

    def _congest(self) -> None:
        self._congested = True
        self._since_congested = 0
        if self._user is not None:
            self._user.link_congested()

    def pauseProducing(self) -> None:
        # Twisted's high-water mark is lower than HIGH_WATER, so this call does not show that the link is congested. If
        # the queue can be measured, the call is ignored, and the size of the queue decides.
        if not self._congested and queued_bytes(self._tcp) is None:
            self._congest()

    def resumeProducing(self) -> None:
        # Twisted calls this method only when the queue is empty. So the link does not report congestion and relief in
        # turn for every chunk.
        if self._congested:
            self._congested = False
            if self._user is not None:
                self._user.link_relieved()

    def stopProducing(self) -> None:
        """Do nothing, because connectionLost follows."""

    # --- end of the link ---

    def close(self, reason: DropReason | None = None) -> None:
        """Close the link once its queue is sent.

        A client also waits until the server has read all data and closes the connection. The link is aborted after
        ``CLOSE_LIMIT`` seconds, or if its queue does not shrink for ``CLOSE_TIMEOUT`` seconds.
        """
        if self._closing or self._is_lost or self.transport is None:
            return
        self.ended_for = self.ended_for or reason
        if self._unwritten_size():
            # flush() may call the link's user. ``_closing`` is set before, so that the user cannot queue more data.
            self._closing = True
            self.flush()
        self._closing = True
        self.transport.unregisterProducer()  # type: ignore[attr-defined]
        # If a socket with unread data is closed, the kernel resets the connection and drops unsent data. These would
        # include the last frames, which say how the streams end. So a client only half-closes, continues to read, and
        # lets the server close the connection. A server does not wait for its clients, because they could keep its
        # sockets open.
        if self.is_server_side or not self._end_writing():
            self.transport.loseConnection()
        self._cancel_timer()
        self._close_later(self.unsent(), CLOSE_LIMIT)

    def _end_writing(self) -> bool:
        """Half-close the connection once its queue is sent, and discard the data that still arrive.

        :returns: False if the transport does not support half-close.
        """
        if not can_half_close(self._tcp):
            return False
        if self.in_websocket is not None:
            self.in_websocket.end_writing()
        else:
            self._tcp.loseWriteConnection()  # type: ignore[attr-defined]
        self._tcp.resumeProducing()  # type: ignore[attr-defined]
        return True

    def _close_later(self, waiting: int, left: float) -> None:
        """Wait for ``CLOSE_TIMEOUT``.

        :param waiting: number of bytes that are unsent now.
        :param left: seconds that closing the link may still take.
        """
        on_timeout = partial(self._close_late, waiting, left - CLOSE_TIMEOUT)
        self._timer = FairTimeout(self._reactor, CLOSE_TIMEOUT, on_timeout)

    def _close_late(self, before: int, left: float) -> None:
        self._timer = None
        waiting = self.unsent()
        if 0 < waiting < before and left > 0:
            # The queue still shrinks, even if slowly, so the link gets more time.
            self._close_later(waiting, left)
        elif not waiting and not self.is_server_side and can_half_close(self._tcp):
            # The peer's kernel has all data. A clean close lets the peer read them; a reset would not.
            self._tcp.loseConnection()  # type: ignore[attr-defined]
        else:
            self._abort()

    def abort(self, reason: DropReason) -> None:
        """Abort the link.

        :param reason: reason that is recorded, unless the link has ended already for another one.
        """
        self.ended_for = self.ended_for or reason
        self._abort()

    def abandon(self) -> None:
        """Abort the link without calling the failure callback."""
        self._on_failure = None
        self._abort()

    def _abort(self) -> None:
        self._closing = True
        self._cancel_timer()
        if self._is_lost or self.transport is None:
            return
        # Unacknowledged bytes will be lost. They are counted before the abort, because their number is unknown
        # afterwards.
        self.left_behind = self.unsent()
        abort = getattr(self.transport, "abortConnection", None)
        if abort is not None:
            abort()
        else:
            self.transport.loseConnection()

    def _cancel_timer(self) -> None:
        timer, self._timer = self._timer, None
        stop_timeout(timer)
