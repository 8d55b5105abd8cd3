"""Bridge between a stream of the agent's client and the program that uses the stream."""

from __future__ import annotations

import json
from typing import Protocol as Interface

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol, IReactorTime
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.agent.wire import (
    END_FRAME,
    MAX_PAYLOAD,
    WINDOW,
    WINDOW_FRAMES,
    Kind,
    WireError,
    encode_close,
    encode_count,
    encode_frame,
    parse_close,
    parse_count,
)
from dmsg.errors import CloseReason
from dmsg.net.streams.address import DmsgAddress, StreamLost
from dmsg.net.streams.stream import StreamTransport
from dmsg.net.turn_end import at_turn_end

MAX_UNREAD = 256 * 1024 * 1024
"""Bytes that the agent may buffer for all programs together.  Above this, each stream may buffer only
``SMALL_WINDOW``.
"""
SMALL_WINDOW = 64 * 1024
"""Bytes that one stream may buffer for its program while ``MAX_UNREAD`` is exceeded."""


class ProgramLink(Interface):
    """Interface of the connection to a program, as a bridge uses it."""

    def stream_opened(self, bridge: Bridge) -> None:
        """Send the description of the stream to the program, because the stream is open."""

    def write(self, data: bytes) -> None:
        """Send bytes to the program."""

    def finish(self) -> None:
        """Stop writing and detach from the stream.  The program closes the connection."""

    def end(self) -> None:
        """Close the connection, because the program has sent its last frame."""


class SharedWindow:
    """Counter of the bytes that all streams of an agent buffer for programs that have not read them yet.

    :ivar unread: number of these bytes.
    """

    def __init__(self) -> None:
        self.unread = 0

    @property
    def window(self) -> int:
        """Number of bytes that one stream may buffer now."""
        return WINDOW if self.unread < MAX_UNREAD else SMALL_WINDOW


@implementer(IHalfCloseableProtocol)
class Bridge(Protocol):
    """Protocol of a stream that the agent carries for a program: passes data between the stream and the program.

    :param incoming: whether the peer opened the stream.
    :ivar bytes_in: number of bytes received from the peer.
    :ivar bytes_out: number of bytes that the peer has acknowledged.
    :ivar rate_in: received bytes per second, measured over the last check interval.
    :ivar rate_out: acknowledged bytes per second, measured over the last check interval.
    :ivar is_refused: whether the program has closed the stream with the reason "refused".
    """

    transport: StreamTransport

    def __init__(self, reactor: IReactorTime, shared: SharedWindow, *, incoming: bool) -> None:
        self._reactor = reactor
        self._shared = shared
        self.incoming = incoming
        self.since = reactor.seconds()
        self.bytes_in = self.bytes_out = 0
        self.rate_in = self.rate_out = 0.0
        self.is_refused = False
        self._measured = (0, 0)
        self._link: ProgramLink | None = None
        self._program_half_closes = False
        self._outstanding = self._frames = 0
        self._unconfirmed_count = 0
        self._congested = False
        self._unread = 0
        self._paused = False
        self._closed = self._stopped = False
        self._close_reason: int | None = None
        self._way: tuple[object, bool] = (None, False)

    # --- events of the stream ---

    def connectionMade(self) -> None:
        self._way = self._server_now()
        if self._link is not None:
            self._link.stream_opened(self)
        else:
            self.transport.pauseProducing()  # The stream is not read until a program accepts it.

    def dataReceived(self, data: bytes) -> None:
        self.bytes_in += len(data)
        if self._link is None:
            # The program has closed the stream, which stays open until the peer has acknowledged all data. Data that
            # the peer sends until then is discarded, and acknowledged as on a stream without an agent.
            return
        for start in range(0, len(data), MAX_PAYLOAD):
            self._link.write(encode_frame(Kind.DATA, data[start : start + MAX_PAYLOAD]))
        self._count_unread(len(data))
        if self._unread > self._shared.window:
            self._paused = True
            self.transport.pauseProducing()

    def readConnectionLost(self) -> None:
        """Handle a half-close by the peer: pass it on to the program, or close the stream if the program does not know
        END.
        """
        if self._link is not None and self._program_half_closes:
            self._link.write(END_FRAME)
        else:
            self.transport.loseConnection()

    def writeConnectionLost(self) -> None:
        """Do nothing: this event only means that the peer has acknowledged the end of the program's data."""

    def _count_unread(self, size: int) -> None:
        self._unread += size
        self._shared.unread += size

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        if isinstance(reason.value, StreamLost):
            self._close_reason = reason.value.close_reason
        elif self._stopped:
            self._close_reason = CloseReason.PEER_DISCONNECTED
        else:
            self._close_reason = CloseReason.UNSPECIFIED if reason.check(ConnectionDone) else CloseReason.ABORTED
        self._finish()

    # --- called by the program's connection ---

    @property
    def peer(self) -> DmsgAddress:
        """Address of the peer, with its port."""
        address = self.transport.getPeer()
        assert isinstance(address, DmsgAddress)
        return address

    def take(self, link: ProgramLink, *, half_close: bool = False) -> None:
        """Attach the connection of the program that uses the stream.  The stream need not be open yet.

        :param link: connection to the program.
        :param half_close: whether the program understands END.
        """
        self._link = link
        self._program_half_closes = half_close
        if self.transport is not None:
            link.stream_opened(self)

    def start_forwarding(self) -> None:
        """Start to forward data to the program, to which the description of the stream has been sent."""
        if self._close_reason is None:
            self.transport.resumeProducing()
        else:
            self._finish()

    def _finish(self) -> None:
        self._congested = False
        self._tell()
        self._count_unread(-self._unread)
        link, self._link = self._link, None
        if link is not None and self._close_reason is not None:
            link.write(encode_close(self._close_reason))
            link.finish()

    def describe(self) -> dict[str, object]:
        """Return the description of the stream, which the program receives before any data."""
        host = self.transport.getHost()
        assert isinstance(host, DmsgAddress)
        binding = self.transport.binding
        return {
            "peer": str(self.peer.public_key),
            "peer_port": self.peer.port,
            "host": str(host.public_key),
            "port": host.port,
            "server": _text(self.transport.server),
            "secure": self.transport.secure,
            "half_close": self.transport.can_half_close and self._program_half_closes,
            "binding": None if binding is None else binding.hex(),
        }

    def received(self, kind: Kind, payload: bytes) -> None:
        """Handle a frame from the program.

        :raises WireError: a program may not send this frame, or not now.
        """
        if kind is Kind.CLOSE:
            reason = parse_close(payload)
            self.is_refused = reason == CloseReason.REFUSED
            link, self._link, self._closed = self._link, None, True
            self._count_unread(-self._unread)
            if link is not None:
                link.end()
            if reason == CloseReason.UNSPECIFIED:
                self.transport.loseConnection()
            else:
                self.transport.abort(reason)
        elif kind in (Kind.DATA, Kind.END):
            if self._outstanding > WINDOW or self._frames >= WINDOW_FRAMES:
                raise WireError(
                    f"more than {WINDOW} bytes or {WINDOW_FRAMES} frames were sent without waiting for acknowledgements"
                )
            self._outstanding += len(payload)
            self._frames += 1
            sent = self._send(kind, payload)
            sent.addCallbacks(self._acknowledged, lambda _: None, callbackArgs=(len(payload),))
        elif kind is Kind.READ:
            self._count_unread(-min(self._unread, parse_count(payload)))
            if self._paused and self._unread <= self._shared.window and self._close_reason is None:
                self._paused = False
                self.transport.resumeProducing()
        else:
            raise WireError(f"a program may not send {kind.name}")

    def _send(self, kind: Kind, payload: bytes) -> Deferred[None]:
        """Send the data of a DATA frame, or the half-close of an END frame, to the peer."""
        if kind is Kind.END:
            if not (self.transport.can_half_close and self._program_half_closes) or payload:
                raise WireError("an END frame has a payload, or was sent without an agreement on half-close")
            return self.transport.end_writing()
        if self.transport.writing_ended:
            raise WireError("a DATA frame follows an END frame")
        return self.transport.send(payload)

    def program_lost(self) -> None:
        """Abort the stream, because the program's connection is lost."""
        self._link = None
        self._count_unread(-self._unread)
        if not self._closed and self._close_reason is None and self.transport is not None:
            self.transport.abortConnection()

    def stop(self) -> None:
        """Abort the stream, because the agent stops.

        A normal close would suggest to both ends that all data had arrived.
        """
        self._stopped = True
        if self._close_reason is None and self.transport is not None:
            self.transport.abortConnection()

    def _acknowledged(self, _: None, size: int) -> None:
        self.bytes_out += size
        self._outstanding -= size
        self._frames -= 1
        if not self._unconfirmed_count:
            at_turn_end(self._reactor)(self._tell)
        self._unconfirmed_count += 1

    def _tell(self) -> None:
        """Send the program a TAKEN frame with the number of newly acknowledged frames.

        If the send buffer towards the program is full, the number is sent later.
        """
        if self._congested:
            return
        count, self._unconfirmed_count = self._unconfirmed_count, 0
        if count and self._link is not None:
            self._link.write(encode_count(Kind.TAKEN, count))

    def congested(self, is_congested: bool) -> None:
        """Record whether the send buffer towards the program is full.  While it is, no TAKEN and WAY frames are sent.

        :param is_congested: whether the buffer is full, because the program does not read.
        """
        self._congested = is_congested
        self._tell()

    # --- periodic checks ---

    def update_rates(self, seconds: float) -> None:
        """Update the rates, and send the program a WAY frame if another server carries the stream now.

        :param seconds: time since the last call.
        """
        before = self._measured
        self._measured = self.bytes_in, self.bytes_out
        self.rate_in = (self._measured[0] - before[0]) / seconds
        self.rate_out = (self._measured[1] - before[1]) / seconds
        now = self._server_now()
        if now != self._way and self._link is not None and self._close_reason is None and not self._congested:
            self._way = now
            away = self.seconds_away
            content = {"server": _text(self.transport.server), "away": away}
            self._link.write(encode_frame(Kind.WAY, json.dumps(content).encode()))

    @property
    def seconds_away(self) -> float | None:
        """Seconds since the stream lost its transport; None while a transport carries it."""
        since = self.transport.away_since
        return None if since is None else self._reactor.seconds() - since

    def _server_now(self) -> tuple[object, bool]:
        return self.transport.server, self.transport.away_since is not None


def _text(key: object) -> str | None:
    return None if key is None else str(key)
