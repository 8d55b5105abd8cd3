"""What a messaging server does with frames.  No I/O.

A :class:`RelayPeer` is one link; what goes to it is handed to its
:class:`Port`.  A channel is two :class:`End` objects, one in the table of each
link, under the id that the channel has there.

Rules: the seed document, sections Channel Management to Handling
Disconnections.  An end exists at both links or at neither
(:meth:`Relay.check`); a ChannelClosed ends whatever its sender had there.

The protocol has no windows.  A receiver that reads slowly slows down those
sources that send to nobody else, down to one read each ``PAUSE_LIMIT``; each
channel may have ``CHANNEL_QUEUE_LIMIT`` bytes queued, and is closed beyond.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from dmsg.buffers import count_equal
from dmsg.errors import DropReason, KeyFormatError, RemoteProtocolError
from dmsg.keys import PubKey
from dmsg.messaging.policing import Kind, Limits, Police
from dmsg.messaging.wire import (
    CHANNEL_CLOSED,
    CHANNEL_OPENED,
    CLOSE_CHANNEL,
    HEADER_SIZE,
    ID_COUNT,
    ID_OFFSET,
    MIN_SEND_BODY,
    OPEN_CHANNEL,
    OPENED_BODY_SIZE,
    SEND,
    Profile,
    decode_open,
    encode_close,
    encode_closed,
    encode_open,
    encode_opened,
    read_header,
)

MAX_LINKS_PER_KEY = 4
"""Older links of a key keep their channels, but no more than these in all."""
CHANNEL_QUEUE_LIMIT = 2 * 1024 * 1024
"""Bytes that one channel may have in a congested link's queue."""
PEER_QUEUE_LIMIT = 16 * 1024 * 1024
"""Bytes in a link's queue beyond which a channel that adds to it is closed."""
PEER_QUEUE_MAXIMUM = PEER_QUEUE_LIMIT + 4 * 1024 * 1024
"""Bytes that a link's queue never exceeds: beyond, the link is ended."""
SAME_HEADERS = ID_OFFSET + 1
"""Bytes in which frames of one size and one channel are equal."""
FIRST_BURST = 16
"""Frames of one size that are looked for at first; doubles while they are found."""


class Port(Protocol):
    """How bytes leave for a link."""

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Queue whole frames; the data is copied or used before this returns."""

    def queued(self) -> int:
        """Bytes that wait to be sent."""

    def pause_reading(self) -> None:
        """Read no more from this link for now; may be repeated."""

    def resume_reading(self) -> None:
        """Read again."""

    def close(self, reason: DropReason) -> None:
        """End this link; :meth:`Relay.remove` follows, never before this returns."""


class End:
    """One end of a channel.

    :ivar open: the remote has accepted.
    :ivar opener: this end asked for it.
    :ivar closed: it sent CloseChannel: what it sends after that is dropped.
    :ivar queued: bytes of this end's in a congested receiver's queue: never less than there are,
        at most about twice as many.
    """

    __slots__ = ("closed", "id", "open", "opener", "other", "peer", "queued")

    def __init__(self, peer: RelayPeer, number: int, opener: bool) -> None:
        self.peer = peer
        self.id = number
        self.opener = opener
        self.open = False
        self.closed = False
        self.queued = 0
        self.other: End


class RelayPeer:
    """One link, as the relay sees it."""

    __slots__ = ("bytes_in", "closing", "congested", "ends", "frames_in", "ids", "key", "paused_for", "police", "port")

    def __init__(self, key: PubKey, port: Port) -> None:
        self.key = key
        self.port = port
        self.ends: dict[int, End] = {}
        self.ids = deque(range(ID_COUNT - 1, ID_COUNT // 2 - 1, -1))
        """Upper ids in the order in which to take them: the one that was used last comes last."""
        self.congested = False
        self.paused_for = False
        self.closing = False
        self.frames_in = 0
        self.bytes_in = 0
        self.police = Police()


def descending(peer: RelayPeer) -> int | None:
    """A free id of a link: from 255 down, the least recently used first; the lower half when all are used."""
    ids = peer.ids
    for _ in range(len(ids)):
        number = ids.popleft()
        ids.append(number)
        if number not in peer.ends:
            return number
    return next((number for number in range(ID_COUNT // 2 - 1, -1, -1) if number not in peer.ends), None)


class Relay:
    """The table of a messaging server.

    :param choose: the id for a channel that is opened to a link; None when none is free.
    :ivar newest: key -> the newest link of that key.
    :ivar drops: how often each :class:`DropReason` occurred.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        limits: Limits | None = None,
        now: Callable[[], float] = lambda: 0.0,
        choose: Callable[[RelayPeer], int | None] = descending,
        on_paused: Callable[[RelayPeer], None] = lambda peer: None,
    ) -> None:
        """:param now: seconds of a monotonic clock.

        :param on_paused: told that a link is read no more, so that :meth:`let_read` can follow after a time.
        """
        self._profile = profile
        self._now = now
        self._choose = choose
        self._on_paused = on_paused
        self.limits = limits or Limits()
        self.newest: dict[bytes, RelayPeer] = {}
        self.peers: dict[RelayPeer, None] = {}
        self._of_key: dict[bytes, list[RelayPeer]] = {}
        self.drops: Counter[DropReason] = Counter()
        self.channels_opened = 0
        self.channel_count = 0
        self.frames_gone = 0
        self.bytes_gone = 0
        self.draining = False

    # --- links ---

    def add(self, key: PubKey, port: Port) -> RelayPeer:
        """A link of ``key`` is there; it is the newest of that key from now on."""
        peer = RelayPeer(key, port)
        self.peers[peer] = None
        self.newest[key] = peer
        same = self._of_key.setdefault(key, [])
        same.append(peer)
        if len(same) > MAX_LINKS_PER_KEY:
            oldest = next((one for one in same if not one.closing), None)
            if oldest is not None:
                self._end_peer(oldest, DropReason.REPLACED)
        return peer

    def remove(self, peer: RelayPeer) -> None:
        """The link ended: its channels are closed at their other ends."""
        if peer not in self.peers:
            return
        del self.peers[peer]
        same = self._of_key[peer.key]
        same.remove(peer)
        if not same:
            del self._of_key[peer.key], self.newest[peer.key]
        elif self.newest[peer.key] is peer:
            self.newest[peer.key] = same[-1]
        self.frames_gone += peer.frames_in
        self.bytes_gone += peer.bytes_in
        others = {end.other.peer for end in peer.ends.values()}
        for end in list(peer.ends.values()):
            self.drops[DropReason.PEER_DISCONNECTED] += 1
            self._close(end, tell=False)
        for other in others:
            self._reconsider(other)

    def _end_peer(self, peer: RelayPeer, reason: DropReason) -> None:
        if not peer.closing:
            peer.closing = True
            self.drops[reason] += 1
            peer.port.close(reason)

    def close_all(self) -> None:
        """Close every channel, take no new ones."""
        self.draining = True
        for peer in list(self.peers):
            for end in list(peer.ends.values()):
                if peer.ends.get(end.id) is end:
                    self._close(end)

    @property
    def frames(self) -> int:
        """Frames received since the start."""
        return self.frames_gone + sum(peer.frames_in for peer in self.peers)

    @property
    def frame_bytes(self) -> int:
        """Bytes of frames received since the start."""
        return self.bytes_gone + sum(peer.bytes_in for peer in self.peers)

    # --- frames ---

    def receive_frames(self, peer: RelayPeer, buffer: bytearray, end: int) -> int:
        """Take the whole frames at the start of ``buffer``; ids are rewritten in place.

        :returns: how many bytes were taken; the rest is an unfinished frame.
        :raises RemoteProtocolError: ``peer`` has to be disconnected.
        """
        ends = peer.ends
        profile = self._profile
        position = start = frames = 0
        run: End | None = None  # whose frames lie from start to position
        last = -1
        burst = FIRST_BURST
        view = memoryview(buffer)
        try:
            while position + HEADER_SIZE <= end:
                try:
                    frame_type, size = read_header(profile, buffer, position)
                except RemoteProtocolError:
                    if run is not None:  # what came before is passed on
                        self._forward(peer, run, view[start:position])
                    raise
                following = position + HEADER_SIZE + size
                if following > end:
                    break
                frames += 1
                if frame_type == SEND and size >= MIN_SEND_BODY:
                    number = buffer[position + ID_OFFSET]
                    source = ends.get(number)
                    if source is not None and source.open and not source.closed:
                        other = source.other
                        if source is not run:
                            if run is not None and (other.peer is not run.other.peer or other.peer.congested):
                                self._forward(peer, run, view[start:position])
                                start = position
                            elif run is None:
                                start = position
                            run = source
                        step = following - position
                        if step == last:
                            # perhaps many frames of one size and channel: a stride
                            most = min((end - position) // step, burst)
                            if most >= FIRST_BURST:
                                count = count_equal(buffer, position, step, most, SAME_HEADERS)
                                burst = burst * 2 if count == most else FIRST_BURST
                                following = position + count * step
                                frames += count - 1
                                buffer[position + ID_OFFSET : following : step] = bytes((other.id,)) * count
                                position = following
                                continue
                        last = step
                        buffer[position + ID_OFFSET] = other.id
                        position = following
                        continue
                # everything else leaves the fast path: first what came before it
                if run is not None:
                    self._forward(peer, run, view[start:position])
                    run = None
                last = -1
                body = bytes(view[position + HEADER_SIZE : following])
                position = following
                self._control(peer, frame_type, body)
        finally:
            peer.frames_in += frames
            peer.bytes_in += position
        if run is not None:
            self._forward(peer, run, view[start:position])
        return position

    def _forward(self, source: RelayPeer, run: End, data: memoryview) -> None:
        """Frames of one or more channels to one and the same link."""
        peer = run.other.peer
        if not peer.congested:
            peer.port.send(data)
            return
        # now every run is of one channel
        queued = peer.port.queued()
        run.queued += len(data)
        if run.queued > CHANNEL_QUEUE_LIMIT:
            run.queued = min(run.queued, queued + len(data))
        if queued > PEER_QUEUE_MAXIMUM:
            self._end_peer(peer, DropReason.SEND_BUFFER_FULL)
            return
        if run.queued > CHANNEL_QUEUE_LIMIT or queued > PEER_QUEUE_LIMIT:
            self.drops[DropReason.QUEUE_FULL] += 1
            self._close(run)
            return
        peer.port.send(data)
        self._reconsider(source)

    # --- congestion ---

    def congest(self, peer: RelayPeer) -> None:
        """More waits for ``peer`` than it takes."""
        peer.congested = True
        for end in peer.ends.values():
            self._reconsider(end.other.peer)

    def relieve(self, peer: RelayPeer) -> None:
        """All of it is sent."""
        peer.congested = False
        for end in peer.ends.values():
            end.other.queued = 0
            self._reconsider(end.other.peer)

    def _reconsider(self, peer: RelayPeer) -> None:
        """Read a link no more while all that it may send goes where nothing goes on."""
        pause = bool(peer.ends) and all(end.other.peer.congested for end in peer.ends.values())
        if pause != peer.paused_for:
            peer.paused_for = pause
            if pause:
                peer.port.pause_reading()
                self._on_paused(peer)
            else:
                peer.port.resume_reading()

    def let_read(self, peer: RelayPeer) -> None:
        """Read a paused link once: what it sends then pauses it again.

        Its own kernel would end it if its window stayed closed, and what it says to end a channel is behind what it
        has sent.  So a channel whose receiver is too slow for that grows, up to its limit.
        """
        if peer.paused_for and peer in self.peers:
            peer.paused_for = False
            peer.port.resume_reading()

    # --- control frames ---

    def _answer(self, peer: RelayPeer, frame: bytes) -> None:
        peer.port.send(frame)
        if peer.congested and peer.port.queued() > PEER_QUEUE_MAXIMUM:
            self._end_peer(peer, DropReason.SEND_BUFFER_FULL)

    def _control(self, peer: RelayPeer, frame_type: int, body: bytes) -> None:
        now = self._now()
        if not body or frame_type > SEND:
            self.drops[DropReason.UNKNOWN_FRAME] += 1
            peer.police.allows(Kind.STRAY, self.limits, now)
            return
        if frame_type == OPEN_CHANNEL:
            self._open(peer, body, now)
            return
        end = peer.ends.get(body[0])
        if frame_type == SEND:
            if end is not None and len(body) < MIN_SEND_BODY:
                self.drops[DropReason.BAD_FRAME] += 1
                self._close(end)
            else:
                # of a channel that is not there, not open yet, or closed by its sender: a lot of it may be on its way
                self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
            return
        # what ends or answers a channel is paid for by the OpenChannel of whoever opened it
        if (
            end is None
            or (frame_type == CHANNEL_OPENED and (end.open or end.opener))
            or (frame_type == CLOSE_CHANNEL and end.closed)
        ):
            peer.police.allows(Kind.STRAY, self.limits, now)
        if end is None:
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
        elif frame_type == CHANNEL_OPENED:
            self._opened(end, body)
        elif frame_type == CHANNEL_CLOSED:
            self._close(end, tell=False)
        elif len(body) != 1:
            self.drops[DropReason.BAD_FRAME] += 1
        else:
            assert frame_type == CLOSE_CHANNEL
            self._closing(end)

    def _open(self, peer: RelayPeer, body: bytes, now: float) -> None:
        reason: DropReason | None = None
        remote: RelayPeer | None = None
        number: int | None = None
        there = peer.ends.get(body[0])
        if not peer.police.allows(Kind.OPEN, self.limits, now):
            reason = DropReason.RATE_LIMITED
        elif there is not None:
            reason = DropReason.ID_IN_USE
        elif self.draining:
            reason = DropReason.DRAINING
        else:
            try:
                key, message = decode_open(body)
            except KeyFormatError:
                reason = DropReason.BAD_REQUEST
            else:
                remote = self.newest.get(key)
                if remote is None or remote.closing:
                    reason = DropReason.NO_SUCH_PEER
                elif remote.key == peer.key:
                    reason = DropReason.REFUSED
                elif sum(e.other.peer is remote for e in peer.ends.values()) >= self.limits.max_per_pair:
                    reason = DropReason.TOO_MANY_PER_PAIR
                else:
                    number = self._choose(remote)
                    if number is None:
                        reason = DropReason.TOO_MANY_TRANSPORTS
                    elif not remote.police.allows(Kind.OFFER, self.limits, now):
                        # many together must not ask one for more than it can answer
                        reason, number = DropReason.RATE_LIMITED, None
        if reason is not None or remote is None or number is None:
            assert reason is not None
            self.drops[reason] += 1
            if there is not None:
                # a ChannelClosed with this id ends what its receiver has there: so does it here
                self._close(there)
            else:
                self._answer(peer, encode_closed(self._profile, body[0]))
            return
        here, far = End(peer, body[0], True), End(remote, number, False)
        here.other, far.other = far, here
        peer.ends[here.id] = here
        remote.ends[far.id] = far
        self.channel_count += 1
        self.channels_opened += 1
        self._reconsider(peer)
        self._reconsider(remote)
        self._answer(remote, encode_open(self._profile, number, peer.key, message))

    def _opened(self, end: End, body: bytes) -> None:
        if end.open or end.opener:
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
        elif len(body) != OPENED_BODY_SIZE:
            self.drops[DropReason.BAD_FRAME] += 1
            self._close(end)
        else:
            end.open = end.other.open = True
            self._answer(end.other.peer, encode_opened(self._profile, end.other.id, body[1:]))

    def _closing(self, end: End) -> None:
        if not end.open:
            # the opener gives up, or the remote misuses it for a refusal
            self._close(end)
        elif end.closed:
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
        else:
            end.closed = True
            self._answer(end.other.peer, encode_close(self._profile, end.other.id))

    def _close(self, end: End, *, tell: bool = True) -> None:
        """A channel is over: ChannelClosed for its other end, and for this one if it is to be told."""
        other = end.other
        del end.peer.ends[end.id]
        del other.peer.ends[other.id]
        self.channel_count -= 1
        if tell:
            self._answer(end.peer, encode_closed(self._profile, end.id))
        if other.peer in self.peers:
            self._answer(other.peer, encode_closed(self._profile, other.id))
        self._reconsider(end.peer)
        self._reconsider(other.peer)

    # --- for tests ---

    def check(self) -> None:
        """:raises AssertionError: the two sides of the table disagree."""
        ends = 0
        for peer in self.peers:
            for number, end in peer.ends.items():
                ends += 1
                assert end.id == number and end.peer is peer
                assert end.other.other is end and end.other.peer.ends[end.other.id] is end.other
                assert end.other.peer in self.peers and end.open == end.other.open
        assert ends == 2 * self.channel_count
        assert all(peer in self.peers for peer in self.newest.values())
