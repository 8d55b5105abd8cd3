"""Receiving side of a link, which passes received bytes on in portions, one per reactor turn.

If the link is inside a websocket, this side parses the websocket's frames. Small pieces (TCP reads, TLS records and
websocket frames) are counted, because a sender chooses their size and each piece costs time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from twisted.internet.interfaces import IReactorTime, ISSLTransport
from twisted.internet.protocol import Protocol as TwistedProtocol
from zope.interface import implementer

from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.net.carriers.transport import IUnpacks, WebSocketTransport
from dmsg.net.links.interfaces import LinkUser
from dmsg.net.links.reading import (
    COPIED_READ_SIZE,
    LARGE_RECORD,
    READ_SIZE,
    SMALL_TLS_READ_SIZE,
    TLS_READ_SIZE,
    limit_reads_below_tls,
)
from dmsg.net.links.small_pieces import SMALL_SIZE, SmallPieces
from dmsg.net.turns import HeldReading, HoldReason, TurnAccount, TurnTaker
from dmsg.net.websocket.byte_stream import StreamError

HELD_PIECE = 16 * 1024
"""Maximum size in bytes of a buffered piece that is joined from several pieces of received data."""
COALESCE_TIME = 0.01
"""Seconds for which reading from plain TCP is paused after too many small reads. Meanwhile, the kernel joins the
segments that arrive."""
FRAMES_A_READ = 256
"""Maximum number of websocket frames of one read that are processed in a turn. The rest waits for the next turn,
because a small frame takes more time than its size suggests."""
SMALL_FRAME = 1024
"""Number of payload bytes below which websocket frames of one read are joined before they are processed."""


@implementer(IUnpacks)
class LinkReceiver(HeldReading, TurnTaker, TwistedProtocol):
    """Receiving side of a link, the base of :class:`~dmsg.net.links.link.Link`."""

    # Slots save memory. Twisted's base class gives each link a dictionary as well, and with more than thirty attributes
    # in this dictionary, Python would not share its keys between links: it would take 1.5 KiB.
    __slots__ = (
        "_closing",
        "_error",
        "_held",
        "_is_lost",
        "_left",
        "_reactor",
        "_tail",
        "_tcp",
        "_up",
        "_user",
    )

    ended_for: DropReason | None = None
    """Reason for which this side ended the link; None if the peer or the network ended it."""
    share: TurnAccount | None = None
    """Account that divides the time of a reactor turn fairly among owners. None on a client, which does not limit the
    time of its links."""
    owner: Hashable = None
    """Owner, such as an address block, to which the work of this link is charged in ``share``."""
    in_websocket: WebSocketTransport | None = None
    """Transport of a link inside a websocket; None for a link without a websocket."""
    active_links: dict[Any, None] | None = None
    """Table to which the link adds itself when it reads or writes, so that memory checks can skip idle links."""
    _waits = False
    _reads_little = False
    """Whether the size of TCP reads below TLS is reduced, because the TLS records were small and used up the time of a
    turn."""
    _small_reads: SmallPieces | None = None
    """Account of small TCP reads or TLS records; None if none of the recent ones was small."""
    _small_frames: SmallPieces | None = None
    """Account of small websocket frames; None if none of the recent ones was small."""

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._user: LinkUser[Any] | None = None
        self._up = False
        """Whether the handshake is complete."""
        self._tail = b""
        """Bytes of an incomplete frame, or of frames that are left for the next turn."""
        self._closing = False
        self._is_lost = False
        self._held: deque[bytes] | tuple[()] = ()
        """Received data for later turns. An empty deque would take 760 bytes."""
        self._left = False
        self._error: RemoteProtocolError | None = None
        self._tcp: object = None
        """TCP transport of the link. If the link is inside a websocket, this is the transport below the websocket."""

    # --- hooks for subclasses ---

    def _receive_first(self, data: bytes) -> None:
        """Process bytes received before the handshake is complete."""
        raise NotImplementedError

    def _receive(self, data: bytes | memoryview) -> None:
        """Process at most ``READ_SIZE`` bytes received after the handshake."""
        raise NotImplementedError

    def _peer_erred(self, error: RemoteProtocolError) -> None:
        """End the link because of a protocol error of the peer."""
        raise NotImplementedError

    def close(self, reason: DropReason | None = None) -> None:
        """Close the link once its queue is sent."""
        raise NotImplementedError

    # --- received data ---

    def enter_websocket(self, carrier: WebSocketTransport, data: bytes = b"") -> None:
        """Use a websocket from now on: parse its frames when reading, and write frames.

        :param carrier: transport of the websocket, whose TCP connection delivers its bytes to this link.
        :param data: bytes that arrived after the upgrade request.
        """
        self.in_websocket = carrier
        self.transport = carrier  # type: ignore[assignment]
        if data:
            self._take(data)

    def receive_rest(self, data: bytes) -> None:
        """Process the bytes that follow those which ``first_bytes`` consumed."""
        self._take_bytes(data)

    def dataReceived(self, data: bytes) -> None:
        self._received(data)

    def _may_read(self) -> int:
        # If the owner has used up its share of this turn, the data must be copied from the shared read buffer and kept
        # for the next turn, so fewer bytes are read.
        return READ_SIZE if self._may_work() else COPIED_READ_SIZE

    def _received(self, data: bytes | memoryview) -> None:
        """Process received bytes. A memoryview is valid only until this method returns."""
        # Twisted may still deliver data after this side has ended the link. These data must not reach the user.
        if self._is_lost or self.ended_for is not None or self._closing:
            return
        if self.active_links is not None:
            self.active_links[self] = None
        if (len(data) < SMALL_SIZE or self._small_reads is not None) and self._count_read(len(data)):
            return
        if self._reads_little and len(data) >= LARGE_RECORD:
            self._reads_little = False
            limit_reads_below_tls(self._tcp, TLS_READ_SIZE)
        if self._held or self._left or not self._may_work():
            if not self._reads_little and len(data) < LARGE_RECORD:
                self._reads_little = True
                limit_reads_below_tls(self._tcp, SMALL_TLS_READ_SIZE)
            # The data wait for the next turn, because earlier data still wait or the time is used up. A view is copied.
            if self._held and len(self._held[-1]) + len(data) <= HELD_PIECE:
                self._held[-1] += bytes(data)
            else:
                self._held = self._held or deque()
                self._held.append(bytes(data))
            self._next_turn()
        else:
            # Without a websocket, ``_take_bytes`` is called directly, because a further call would be noticeable for
            # small frames.
            self._spend(self._take_bytes if self.in_websocket is None else self._take, data)

    def _count_read(self, size: int) -> bool:
        """Count a read that is small or follows small ones. Return True if there were too many, so that the link was
        ended."""
        account = self._small_reads or SmallPieces(self._reactor.seconds())
        if not account.are_too_many(1, size, self._reactor.seconds()):
            self._small_reads = account if account.level else None
            return False
        if ISSLTransport.providedBy(self._tcp):
            # The link is ended, because pausing the reading would not help: TLS records keep the size that the sender
            # chose.
            self._peer_erred(RemoteProtocolError(DropReason.SMALL_PIECES, "records of TLS carry too few bytes each"))
            return True
        if HoldReason.COALESCE not in self.held_by:
            self.hold(HoldReason.COALESCE)
            self._reactor.callLater(COALESCE_TIME, self.release, HoldReason.COALESCE)
        return False

    def _take(self, data: bytes | memoryview) -> None:
        if self.in_websocket is not None:
            self._take_frames(self.in_websocket, memoryview(data))
        else:
            self._take_bytes(data)

    def _take_frames(self, carrier: WebSocketTransport, data: memoryview) -> None:
        """Process the payload of the websocket frames in one read."""
        reader = carrier.reader
        start, frames, size = 0, 0, 0
        joined = bytearray()
        """Joined payload of small websocket frames. All of it is processed in one call, because each call copies the
        incomplete frame at the end of its data."""
        try:
            while start < len(data) and frames < FRAMES_A_READ and self._may_take():
                piece, start = reader.read(data, start, 1)
                frames += 1
                size += len(piece)
                if len(piece) >= SMALL_FRAME and not joined:
                    self._take_bytes(piece)
                    continue
                joined += piece
                if len(piece) >= SMALL_FRAME:
                    joined = self._take_joined(joined)
        except StreamError as error:
            self._take_joined(joined)
            self._peer_erred(RemoteProtocolError(DropReason.BAD_WEBSOCKET, str(error)))
            return
        self._take_joined(joined)
        if (frames * SMALL_SIZE > size or self._small_frames is not None) and self._count_frames(frames, size):
            return
        carrier.answer()
        if reader.closed:
            # The link is closed, not only the transport. loseConnection() of the transport alone stops reading, and
            # does not end a connection whose producer was paused: a client could then count towards the
            # server's maximum without being reachable.
            self.close()
        elif start < len(data):
            self._buffer_first(bytes(data[start:]))
            self._next_turn()

    def _count_frames(self, frames: int, size: int) -> bool:
        """Count websocket frames that are small or follow small ones. Return True if there were too many and the link
        was ended."""
        account = self._small_frames or SmallPieces(self._reactor.seconds())
        if account.are_too_many(frames, size, self._reactor.seconds()):
            error = RemoteProtocolError(DropReason.SMALL_PIECES, "frames of the websocket carry too few bytes each")
            self._peer_erred(error)
            return True
        self._small_frames = account if account.level else None
        return False

    def _may_take(self) -> bool:
        return not self._left and self.ended_for is None and not self._is_lost

    def _take_joined(self, data: bytearray) -> bytearray:
        """Process the joined payload of several frames. Return an empty buffer for the next frames."""
        if data and self._may_take():
            self._take_bytes(memoryview(data))
        return bytearray()

    def _take_bytes(self, data: bytes | memoryview) -> None:
        try:
            if not self._up:
                self._receive_first(bytes(data))
            elif len(data) <= READ_SIZE:
                self._receive(data)
            else:
                for start in range(0, len(data), READ_SIZE):
                    if self._left:  # Frames that are left in the buffer must be processed before the rest of this read.
                        self._buffer_first(bytes(data[start:]))
                        return
                    self._receive(data[start : start + READ_SIZE])
        except RemoteProtocolError as error:
            self._peer_erred(error)

    def _buffer_first(self, data: bytes) -> None:
        """Buffer data for the next turn, in front of all other buffered data."""
        self._held = self._held or deque()
        self._held.appendleft(data)

    # --- reading ---

    def _stop_reading(self) -> None:
        if not self._is_lost and not self._closing and self.transport is not None:
            self.transport.pauseProducing()  # type: ignore[attr-defined]

    def _read_on(self) -> None:
        if not self._is_lost and self.ended_for is None and not self._closing and self.transport is not None:
            self.transport.resumeProducing()  # type: ignore[attr-defined]

    def release(self, reason: HoldReason) -> None:
        super().release(reason)
        # Buffered data are processed in the next turn instead of now, because the caller may be in the middle of
        # another link's read.
        if (self._held or self._left) and self.held_by == {HoldReason.TURN}:
            self._next_turn()

    def pause_reading(self) -> None:
        """Pause reading, because too much is queued for the receivers of the peer's data."""
        self.hold(HoldReason.CONGESTED)

    def resume_reading(self) -> None:
        """Resume reading, because the receivers have room again."""
        self.release(HoldReason.CONGESTED)

    # --- processing in the next turn ---

    def note_frames_left(self) -> None:
        """Record that the user has left whole frames in the buffer. The link passes them to the user again in the next
        turn, before new data."""
        self._left = True
        self._next_turn()

    def fail_after_frames(self, error: RemoteProtocolError) -> None:
        """End the link for a protocol error of the peer, after the frames that the peer sent before the error are
        processed.

        :raises RemoteProtocolError: the given error, if no such frame is left.
        """
        if not self._left:
            raise error
        self._error = error

    def _on_work_left(self) -> None:
        self.hold(HoldReason.TURN)

    def _later(self, call: Callable[[], None]) -> None:
        self._reactor.callLater(0, call)

    def _is_idle(self) -> bool:
        if self._is_lost or self.ended_for is not None:
            self._held = ()
            return True
        return bool(self.held_by - {HoldReason.TURN})

    def _work(self) -> None:
        self._spend(self._proceed)

    def _proceed(self) -> None:
        if self._left:
            self._left = False
            self.read_again()
            if not self._left and self._error is not None:
                self._peer_erred(self._error)
        elif self._held:
            data = self._held.popleft()
            # An empty deque is freed, because the link may be idle from now on.
            self._held = self._held or ()
            self._take(data)
        if self._is_lost or self.ended_for is not None:
            return
        if self._left or self._held:
            self._next_turn()
        else:
            self.release(HoldReason.TURN)

    def read_again(self) -> None:
        """Pass the frames that the user left in the buffer to the user again."""
        tail, self._tail = self._tail, b""
        if not tail or self._user is None or self._is_lost or self.ended_for is not None:
            return
        buffer = bytearray(tail)  # The frames are copied, because the core modifies frames in place.
        try:
            taken = self._user.frames_received(buffer, len(buffer))
        except RemoteProtocolError as error:
            self._peer_erred(error)
            return
        self._tail = bytes(buffer[taken:])
