"""Common part of both ends of a websocket. Only the modules of this package use autobahn.

Autobahn performs the opening and closing handshakes.  But it takes about 60 µs for each frame.  So messages, pings and
pongs, which are nearly all frames, bypass autobahn (:mod:`dmsg.net.websocket.frames`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

from autobahn.twisted.websocket import (
    WebSocketServerProtocol,
)
from twisted.internet.interfaces import IPushProducer, IReactorTime
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.net.flush import TurnFlush
from dmsg.net.own_pauses import FairTimeout, stop_timeout
from dmsg.net.socketopts import forget_unsent, queued_bytes, tune, write_now
from dmsg.net.turn_share import SERVER_FRAMES
from dmsg.net.turns import HeldReading, HoldReason, TurnAccount, TurnTaker
from dmsg.net.websocket import frames
from dmsg.rmb.envelope.wire import MAX_MESSAGE
from dmsg.rmb.socket.fragments import FragmentError, Fragments
from dmsg.rmb.socket.plain_upgrade import SocketTransport

HANDSHAKE_TIMEOUT = 10
"""Timeout of the opening handshake in seconds."""
CLOSE_TIMEOUT = 2
"""Timeout of the closing handshake in seconds."""
MAX_UNREAD_PONGS = 1024 * 1024
"""Number of unsent bytes above which a client answers no pings.  A relay stops reading instead."""
MAX_UNSENT = 64 * 1024 * 1024
"""Number of unsent bytes above which a connection is closed. It is larger than a window of messages of the maximum
size."""
NORMAL, GOING_AWAY, BAD_PROTOCOL, BAD_DATA = 1000, 1001, 1002, 1003
TOO_MUCH, TOO_LARGE, FAILED, TRY_LATER = 1008, 1009, 1011, 1013
"""Close codes of RFC 6455, section 7.4.1; the code 1013 is registered at IANA."""

OPTIONS = {
    "maxFramePayloadSize": MAX_MESSAGE,
    "maxMessagePayloadSize": MAX_MESSAGE,
    # Autobahn's timers outlive their connections, so Socket has its own timers.
    "openHandshakeTimeout": 0,
    "closeHandshakeTimeout": 0,
    "tcpNoDelay": True,
    "autoPingInterval": 0,
}
"""Options of autobahn for both ends."""
_TEXT = 0x1
"""Opcode of a text message."""


class Receiver(Protocol):
    """Interface of the object that uses a socket and processes its events."""

    def opened(self, socket: Socket) -> None:
        """Called when the opening handshake is finished. The socket can now be used."""

    def received(self, data: bytes) -> None:
        """Process a binary message."""

    def ping_received(self, payload: bytes) -> None:
        """Process a ping. :meth:`Socket.pong` answers it, now or later."""

    def pong_received(self, payload: bytes) -> None:
        """Process the answer to a ping that this end sent."""

    def lost(self, reason: str) -> None:
        """Called once when the connection is lost, even if its handshake was never finished."""


class _Silence:
    """Replacement for autobahn's logger that writes nothing. Protocol errors of peers are counted instead."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return self._say_nothing

    def _say_nothing(self, *args: object, **kwargs: object) -> None:
        pass


@implementer(IPushProducer)
class Socket(HeldReading, TurnTaker):
    """Common part of both ends of a connection, which is mixed into autobahn's protocol classes.

    :ivar has_received: whether any data arrived since this attribute was last set to False.
    """

    receiver: Receiver
    reactor: IReactorTime
    turn: TurnFlush
    state: int
    data: bytes
    transport: SocketTransport
    log = _Silence()
    masked_here = False
    """Whether this end masks the frames that it sends. Clients must do so."""
    has_received = True
    _frames: frames.Frames | None = None
    _fragments: Fragments
    _loss: Failure | None = None
    """Reason why the connection was lost, while data that were received before are still being processed; else None."""
    _out: list[bytes] | None = None
    _opened = False
    _is_over_mark = False
    _unsent_at_mark = 0
    _timer: FairTimeout | None = None
    share: TurnAccount | None = None
    _feeding: Iterator[tuple[int, bytes]] | None = None
    _waits = False
    _unread: deque[bytes]
    grew: Callable[[int], None] | None = None
    """Callback invoked after each read, with the number of bytes of the incomplete message."""
    on_fragments: Callable[[int], None] | None = None
    """Callback invoked after each read that contained small fragments, with their number."""
    _bounded = False
    """Whether this end stops reading while it cannot send. Only servers do so; if both ends did, they could wait for
    each other for ever."""

    def connectionMade(self) -> None:
        self._give_up_after(HANDSHAKE_TIMEOUT)
        super().connectionMade()  # type: ignore[misc]

    def _give_up_after(self, seconds: float) -> None:
        self._on_timeout()
        self._timer = FairTimeout(self.reactor, seconds, self.abort)

    def _on_timeout(self) -> None:
        timer, self._timer = self._timer, None
        stop_timeout(timer)

    # --- inbound ---

    def dataReceived(self, data: bytes) -> None:
        self.has_received = True
        if self._frames is None:
            super().dataReceived(data)  # type: ignore[misc]
            return
        if HoldReason.CLOSING in self.held_by:
            return
        if self._feeding is not None or not self._may_work():
            self._unread.append(data)
            self._next_turn()
            return
        self._feed(self._frames.feed(data))

    @property
    def owner(self) -> Hashable:  # type: ignore[override]
        """Key to which the socket's time in a reactor turn is charged: the twin, so that all sessions of a twin share
        one limit."""
        return getattr(self.receiver, "owner", id(self))

    def _feed(self, messages: Iterator[tuple[int, bytes]]) -> None:
        self._feeding = messages
        try:
            self._spend(self._take_all, messages)
        except frames.FrameTooLarge as error:
            self._give_up(TOO_LARGE, str(error))
        except FragmentError as error:
            self._give_up(BAD_PROTOCOL, str(error))
        except BaseException:
            self._feeding = None
            raise
        small, self._fragments.small = self._fragments.small, 0
        if small and self.on_fragments is not None:
            self.on_fragments(small)
        if self.grew is not None:
            self.grew(self.unfinished)

    def _take_all(self, messages: Iterator[tuple[int, bytes]]) -> None:
        """Process as many frames as the owner's time in this reactor turn allows, and at most :data:`SERVER_FRAMES`."""
        share = self.share
        until = share.now() + share.seconds_left(self.owner) if share is not None else 0.0
        for steps, (first, content) in enumerate(messages, 1):
            self._take(first, content)
            # If a callback has called ``forget``, the rest of the data is dropped.
            if self._feeding is not messages:
                return
            # Both the frames and the time are limited, because a frame costs from 1 to 100 µs.
            if steps >= SERVER_FRAMES or (share is not None and share.now() >= until):
                self._next_turn()
                return
        self._feeding = None

    def _take(self, first: int, content: bytes) -> None:
        """Process one frame."""
        receiver = self.receiver
        if first == frames.BINARY:
            receiver.received(content)
        elif first == frames.PONG:
            receiver.pong_received(content)
        elif first == frames.PING:
            if self._loss is None:  # No pong can be sent over a lost connection.
                receiver.ping_received(content)
        elif first != frames.OTHER_FRAME:
            whole = self._fragments.add(first, content)
            if whole is not None:
                receiver.received(whole)
        elif content[0] & 0x7F == _TEXT:
            self._give_up(BAD_DATA, "only binary messages")
        else:
            self._wake()
            self._dataReceived(content)  # type: ignore[attr-defined]
            if self.state == WebSocketServerProtocol.STATE_CLOSED:
                # The data were not a valid frame, and the connection was closed. The rest of the received data is
                # dropped, because it could contain thirty thousand more invalid frames.
                self._feeding = None
                self._unread.clear()

    def _give_up(self, code: int, reason: str) -> None:
        """Close the connection because of an error of the other end, and ignore all further data."""
        self.close(code, reason)
        self.forget()

    def _on_work_left(self) -> None:
        if self._loss is None:
            self.hold(HoldReason.TURN)

    def _later(self, call: Callable[[], None]) -> None:
        self.reactor.callLater(0, call)

    def _is_idle(self) -> bool:
        return self._is_over_mark

    def _work(self) -> None:
        self._feed_next()
        if self._has_more:
            self._next_turn()
        elif self._loss is not None:
            self._ended(self._loss)
        else:
            self.release(HoldReason.TURN)

    def _feed_next(self) -> None:
        if self._feeding is not None:
            self._feed(self._feeding)
        elif self._unread and self._frames is not None:
            self._feed(self._frames.feed(self._unread.popleft()))

    @property
    def _has_more(self) -> bool:
        """Whether received data are waiting to be processed."""
        return self._feeding is not None or bool(self._frames is not None and self._unread)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        # Data received before the loss are processed first, spread over reactor turns as usual.
        if self._has_more and not self._is_over_mark:
            self._loss = reason
            self._next_turn()
        else:
            self._ended(reason)

    def _ended(self, reason: Failure) -> None:
        """Report the loss of the connection. Called after all received data were processed."""
        super().connectionLost(reason)  # type: ignore[misc]

    @property
    def unfinished(self) -> int:
        """Number of bytes of the incomplete message: its current frame and its earlier fragments."""
        return self._frames.held + self._fragments.size if self._frames is not None else 0

    @property
    def unsent(self) -> int:
        """Number of bytes that are not sent yet. For a closed connection, the number of bytes that were never sent."""
        if self._is_over_mark:
            return self._unsent_at_mark
        waiting = sum(map(len, self._out)) if self._out else 0
        return waiting + ((queued_bytes(self.transport) or 0) if self.transport is not None else 0)

    def onOpen(self) -> None:
        self._opened = True
        self._on_timeout()
        self._begin_frames()
        tune(self.transport)
        # These attributes are deleted, because they take some kilobytes for each idle session.
        for name in ("http_headers", "http_request_data", "http_response_data", "_perMessageCompress"):
            if name in self.__dict__:
                self.__dict__[name] = None
        if self._bounded:
            # The HTTP channel was registered as the producer. The connection no longer uses it, so this socket replaces
            # it.
            self.transport.unregisterProducer()
            self.transport.registerProducer(self, True)
        # Bytes after the handshake in the same read belong to this parser, not to autobahn's.
        rest, self.data = self.data, b""
        self.receiver.opened(self)
        if rest:
            self.dataReceived(rest)

    def _begin_frames(self) -> None:
        self._unread = deque()
        self._fragments = Fragments(MAX_MESSAGE)
        self._frames = frames.Frames(not self.masked_here, MAX_MESSAGE)

    def _wake(self) -> None:
        """Initialise autobahn's state for the connection, unless it is initialised already."""

    # --- back-pressure: read no more than can be answered ---

    def _stop_reading(self) -> None:
        if self.transport is not None:
            self.transport.pauseProducing()

    def _read_on(self) -> None:
        if self.sendable:
            self.transport.resumeProducing()

    def pauseProducing(self) -> None:
        """Stop reading, because the other end does not read. Until reading resumes, neither messages nor pings of the
        other end are processed."""
        self.hold(HoldReason.UNSENT)

    def resumeProducing(self) -> None:
        """Resume reading, because the other end reads again."""
        self.release(HoldReason.UNSENT)

    def stopProducing(self) -> None:
        """Do nothing, because ``connectionLost`` follows."""

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:
        self._on_timeout()
        if not self._is_over_mark:
            self._unsent_at_mark = self.unsent
            self._is_over_mark = True
            why = self._close_reason(code, reason)
            self._drop_data()
            self._out = None
            forget_unsent(self.transport)
            self.receiver.lost(why)

    def _close_reason(self, code: int | None, reason: str | None) -> str:
        return reason or f"connection closed ({code or 'no code'})"

    # --- outbound ---

    @property
    def sendable(self) -> bool:
        """Whether messages can be sent."""
        return self._opened and self.state == WebSocketServerProtocol.STATE_OPEN

    def _write(self, first: int, data: bytes) -> None:
        if not self.sendable:
            return
        frame = frames.encode(first, data, os.urandom(4) if self.masked_here else None)
        if self._out is None:
            self._out = [frame]
            self.turn.add(self)
        else:
            self._out.append(frame)

    def flush(self) -> None:
        """Write the frames of this reactor turn. Called by :class:`~dmsg.net.flush.TurnFlush`."""
        out, self._out = self._out, None
        if out and self.sendable:
            write_now(self.transport, b"".join(out))
            if self.unsent > MAX_UNSENT:
                self.abort()  # The other end does not read what is sent to it.

    def send(self, data: bytes) -> None:
        """Send a binary message. It is written at the end of the reactor turn."""
        self._write(frames.BINARY, data)

    def ping(self, payload: bytes) -> None:
        """Send a ping with a payload of at most 125 bytes."""
        self._write(frames.PING, payload)

    def pong(self, payload: bytes) -> None:
        """Answer a ping, unless too many bytes are unsent because the other end does not read."""
        if not self._bounded and self.transport is not None and (queued_bytes(self.transport) or 0) > MAX_UNREAD_PONGS:
            return
        self._write(frames.PONG, payload)

    def close(self, code: int = NORMAL, reason: str = "") -> None:
        """Send the queued messages, then begin the closing handshake."""
        if self._opened and self.state == WebSocketServerProtocol.STATE_OPEN:
            self._wake()
            self.flush()
            self._give_up_after(CLOSE_TIMEOUT)
            self.sendCloseFrame(code, reason.encode()[:100], False)  # type: ignore[attr-defined]
        elif self.state != WebSocketServerProtocol.STATE_CLOSED:
            self.abort()

    def forget(self) -> None:
        """Stop reading, and free the incomplete message."""
        self.hold(HoldReason.CLOSING)
        self._feeding = None
        self._drop_data()

    def _drop_data(self) -> None:
        """Free received data. Otherwise they would live until the garbage collector breaks a reference cycle."""
        if "data" in self.__dict__:
            self.data = b""
        if self._frames is not None:
            self._begin_frames()

    def abort(self) -> None:
        """Close the connection at once, without a closing handshake."""
        if self.transport is not None:
            self.transport.abortConnection()
