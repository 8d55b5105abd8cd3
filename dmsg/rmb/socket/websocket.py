"""What both ends of a websocket are; the rest of each is in the modules beside, and no other one knows of autobahn.

Its handshake and close are used as they are.  What it does for each frame
costs some 60 us, so messages, whole or in fragments, pings and pongs, which are
nearly all there is, pass it by (:mod:`dmsg.rmb.socket.frames`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

from autobahn.twisted.websocket import (
    WebSocketServerProtocol,
)
from twisted.internet.interfaces import IDelayedCall, IPushProducer, IReactorTime
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.net.flush import TurnFlush
from dmsg.net.reactor import cancel_call
from dmsg.net.socketopts import forget_unsent, queued, tune, write_now
from dmsg.net.turn_share import STEPS
from dmsg.net.turns import HeldReading, Hold, TakesTurns, Turns
from dmsg.rmb.envelope.wire import MAX_MESSAGE
from dmsg.rmb.socket import frames
from dmsg.rmb.socket.fragments import FragmentError, Fragments
from dmsg.rmb.socket.plain_upgrade import SocketTransport

HANDSHAKE_TIMEOUT = 10
"""Seconds for the opening handshake."""
CLOSE_TIMEOUT = 2
"""Seconds for the closing handshake."""
MAX_UNREAD_PONGS = 1024 * 1024
"""Bytes that wait to be sent by a client, above which pings are not answered; a relay reads no pings then."""
MAX_UNSENT = 64 * 1024 * 1024
"""Bytes that wait to be sent over one connection before it is dropped: more than a window of the largest messages."""
NORMAL, GOING_AWAY, BAD_PROTOCOL, BAD_DATA = 1000, 1001, 1002, 1003
TOO_MUCH, TOO_LARGE, FAILED, TRY_LATER = 1008, 1009, 1011, 1013
"""Close codes, RFC 6455, section 7.4.1; 1013 is registered at IANA."""

OPTIONS = {
    "maxFramePayloadSize": MAX_MESSAGE,
    "maxMessagePayloadSize": MAX_MESSAGE,
    # autobahn's timers outlive their connections; Socket has its own
    "openHandshakeTimeout": 0,
    "closeHandshakeTimeout": 0,
    "tcpNoDelay": True,
    "autoPingInterval": 0,
}
"""Of both ends, for autobahn."""
_TEXT = 0x1
"""Opcode of a text message."""


class Receiver(Protocol):
    """What is above a socket."""

    def opened(self, socket: Socket) -> None:
        """The handshake is over."""

    def received(self, data: bytes) -> None:
        """A binary message."""

    def ping_received(self, payload: bytes) -> None:
        """A ping: :meth:`Socket.pong` answers it, now or later."""

    def pong_received(self, payload: bytes) -> None:
        """The answer to one of ours."""

    def lost(self, why: str) -> None:
        """The connection is gone; called once, also when it never opened."""


class _Silence:
    """In place of autobahn's logger: what peers do wrong is counted, and is no news."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return self._say_nothing

    def _say_nothing(self, *args: object, **kwargs: object) -> None:
        pass


@implementer(IPushProducer)
class Socket(HeldReading, TakesTurns):
    """What both ends of a connection can do; mixed into autobahn's protocols.

    :ivar heard: something came since this was set to False.
    """

    receiver: Receiver
    reactor: IReactorTime
    turn: TurnFlush
    state: int
    data: bytes
    transport: SocketTransport
    log = _Silence()
    masked_here = False
    """What this end sends is masked: it is a client."""
    heard = True
    _frames: frames.Frames | None = None
    _fragments: Fragments
    _lost: Failure | None = None
    """Why the connection is gone, while what came before is still being told."""
    _out: list[bytes] | None = None
    _opened = False
    _told = False
    _left = 0
    _timer: IDelayedCall | None = None
    share: Turns | None = None
    _feeding: Iterator[tuple[int, bytes]] | None = None
    _waits = False
    _behind: deque[bytes]
    grew: Callable[[int], None] | None = None
    """Told of the bytes of a message that is not whole, after each read, in whatever turn it is looked at."""
    fragmented: Callable[[int], None] | None = None
    """Told of the number of small fragments, after each read that had some."""
    _bounded = False
    """Both ends must not wait for each other: only servers stop reading when they cannot send."""

    def connectionMade(self) -> None:
        self._give_up_after(HANDSHAKE_TIMEOUT)
        super().connectionMade()  # type: ignore[misc]

    def _give_up_after(self, seconds: float) -> None:
        self._patience_over()
        self._timer = self.reactor.callLater(seconds, self.abort)

    def _patience_over(self) -> None:
        timer, self._timer = self._timer, None
        cancel_call(timer)

    # --- inbound ---

    def dataReceived(self, data: bytes) -> None:
        self.heard = True
        if self._frames is None:
            super().dataReceived(data)  # type: ignore[misc]
            return
        if Hold.OVER in self.held_by:
            return
        if self._feeding is not None or not self._may_work():
            self._behind.append(data)
            self._next_turn()
            return
        self._feed(self._frames.feed(data))

    @property
    def owner(self) -> Hashable:  # type: ignore[override]
        """Whose part of a turn it uses: a twin's, by however many sessions."""
        return getattr(self.receiver, "owner", id(self))

    def _feed(self, found: Iterator[tuple[int, bytes]]) -> None:
        self._feeding = found
        try:
            self._spend(self._take_all, found)
        except frames.FrameTooLarge as error:
            self._give_up(TOO_LARGE, str(error))
        except FragmentError as error:
            self._give_up(BAD_PROTOCOL, str(error))
        except BaseException:
            self._feeding = None
            raise
        small, self._fragments.small = self._fragments.small, 0
        if small and self.fragmented is not None:
            self.fragmented(small)
        if self.grew is not None:
            self.grew(self.unfinished)

    def _take_all(self, found: Iterator[tuple[int, bytes]]) -> None:
        """Take as many frames as the owner's part of this turn pays for."""
        share = self.share
        until = share.now() + share.left(self.owner) if share is not None else 0.0
        for steps, (first, content) in enumerate(found, 1):
            self._take(first, content)
            if self._feeding is not found:
                return  # it was forgotten
            # a frame costs from one to a hundred microseconds, so their number alone says little
            if steps >= STEPS or (share is not None and share.now() >= until):
                self._next_turn()
                return
        self._feeding = None

    def _take(self, first: int, content: bytes) -> None:
        """One frame."""
        receiver = self.receiver
        if first == frames.BINARY:
            receiver.received(content)
        elif first == frames.PONG:
            receiver.pong_received(content)
        elif first == frames.PING:
            if self._lost is None:  # else nobody gets the answer
                receiver.ping_received(content)
        elif first != frames.OTHER:
            whole = self._fragments.add(first, content)
            if whole is not None:
                receiver.received(whole)
        elif content[0] & 0x7F == _TEXT:
            self._give_up(BAD_DATA, "only binary messages")
        else:
            self._wake()
            self._dataReceived(content)  # type: ignore[attr-defined]
            if self.state == WebSocketServerProtocol.STATE_CLOSED:
                # that was no frame: what is behind it is nothing either, and may be thirty thousand times that
                self._feeding = None
                self._behind.clear()

    def _give_up(self, code: int, why: str) -> None:
        """Close for a mistake of the other end; what is behind it is not looked at."""
        self.close(code, why)
        self.forget()

    def _turn_is_over(self) -> None:
        if self._lost is None:
            self.hold(Hold.TURN)

    def _later(self, call: Callable[[], None]) -> None:
        self.reactor.callLater(0, call)

    def _is_idle(self) -> bool:
        return self._told

    def _work(self) -> None:
        self._feed_next()
        if self._has_more:
            self._next_turn()
        elif self._lost is not None:
            self._ended(self._lost)
        else:
            self.release(Hold.TURN)

    def _feed_next(self) -> None:
        if self._feeding is not None:
            self._feed(self._feeding)
        elif self._behind and self._frames is not None:
            self._feed(self._frames.feed(self._behind.popleft()))

    @property
    def _has_more(self) -> bool:
        """Something has come that was not looked at yet."""
        return self._feeding is not None or bool(self._frames is not None and self._behind)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        # what came before is told before, in turns as it would have been
        if self._has_more and not self._told:
            self._lost = reason
            self._next_turn()
        else:
            self._ended(reason)

    def _ended(self, reason: Failure) -> None:
        """The connection is gone, and all is told that came over it."""
        super().connectionLost(reason)  # type: ignore[misc]

    @property
    def unfinished(self) -> int:
        """Bytes of a message that is not whole: of its frame, and of its fragments before."""
        return self._frames.held + self._fragments.size if self._frames is not None else 0

    @property
    def unsent(self) -> int:
        """Bytes that this process still has to send; of a connection that is gone those that it did not send."""
        if self._told:
            return self._left
        waiting = sum(map(len, self._out)) if self._out else 0
        return waiting + ((queued(self.transport) or 0) if self.transport is not None else 0)

    def onOpen(self) -> None:
        self._opened = True
        self._patience_over()
        self._begin_frames()
        tune(self.transport)
        # some kilobytes for each session that is idle
        for name in ("http_headers", "http_request_data", "http_response_data", "_perMessageCompress"):
            if name in self.__dict__:
                self.__dict__[name] = None
        if self._bounded:
            # the HTTP channel, which is out of the way by now, had the place
            self.transport.unregisterProducer()
            self.transport.registerProducer(self, True)
        # what came behind the handshake, in the same piece; autobahn shall not begin with it
        rest, self.data = self.data, b""
        self.receiver.opened(self)
        if rest:
            self.dataReceived(rest)

    def _begin_frames(self) -> None:
        self._behind = deque()
        self._fragments = Fragments(MAX_MESSAGE)
        self._frames = frames.Frames(not self.masked_here, MAX_MESSAGE)

    def _wake(self) -> None:
        """What autobahn keeps of a connection is there from now on."""

    # --- reading no more than can be answered ---

    def _stop_reading(self) -> None:
        if self.transport is not None:
            self.transport.pauseProducing()

    def _read_on(self) -> None:
        if self.sendable:
            self.transport.resumeProducing()

    def pauseProducing(self) -> None:
        """The other end does not read what it is sent: then its pings are not read either."""
        self.hold(Hold.UNSENT)

    def resumeProducing(self) -> None:
        """It does again."""
        self.release(Hold.UNSENT)

    def stopProducing(self) -> None:
        """The connection is gone."""

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:
        self._patience_over()
        if not self._told:
            self._left = self.unsent
            self._told = True
            why = self._why(code, reason)
            self._drop_data()
            self._out = None
            forget_unsent(self.transport)
            self.receiver.lost(why)

    def _why(self, code: int | None, reason: str | None) -> str:
        return reason or f"connection closed ({code or 'no code'})"

    # --- outbound ---

    @property
    def sendable(self) -> bool:
        """Messages can be sent."""
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
        """For :class:`~dmsg.net.flush.TurnFlush`."""
        out, self._out = self._out, None
        if out and self.sendable:
            write_now(self.transport, b"".join(out))
            if self.unsent > MAX_UNSENT:
                self.abort()  # who sends pings and does not read the answers

    def send(self, data: bytes) -> None:
        """A binary message; it leaves at the end of the reactor turn."""
        self._write(frames.BINARY, data)

    def ping(self, payload: bytes) -> None:
        """At most 125 bytes."""
        self._write(frames.PING, payload)

    def pong(self, payload: bytes) -> None:
        """The answer to a ping; who reads none of them gets no more."""
        if not self._bounded and self.transport is not None and (queued(self.transport) or 0) > MAX_UNREAD_PONGS:
            return
        self._write(frames.PONG, payload)

    def close(self, code: int = NORMAL, why: str = "") -> None:
        """Send what there is, then say good-bye."""
        if self._opened and self.state == WebSocketServerProtocol.STATE_OPEN:
            self._wake()
            self.flush()
            self._give_up_after(CLOSE_TIMEOUT)
            self.sendCloseFrame(code, why.encode()[:100], False)  # type: ignore[attr-defined]
        elif self.state != WebSocketServerProtocol.STATE_CLOSED:
            self.abort()

    def forget(self) -> None:
        """Read nothing more, and let go of what has come of a message."""
        self.hold(Hold.OVER)
        self._feeding = None
        self._drop_data()

    def _drop_data(self) -> None:
        """It would be kept for as long as there is the object, and that is part of a circle."""
        if "data" in self.__dict__:
            self.data = b""
        if self._frames is not None:
            self._begin_frames()

    def abort(self) -> None:
        """Drop the connection."""
        if self.transport is not None:
            self.transport.abortConnection()
