"""What a messaging server does for a receiver that is slower than its senders.  No I/O.

The protocol has no windows, and a link carries many channels: the server
cannot slow one channel alone.  So each channel has a *backlog* of its own
here, and the backlogs of a link are served in turn, a piece each, so that a
long one delays no other.  A source whose channel has a long backlog is *held*:
it is read no more, for a bounded time and again, and for no longer than it
was free before while it has others to send to.  Nothing is closed because a
reader is slow; a receiver that takes nothing at all loses its channels.
"""

from __future__ import annotations

from collections.abc import Callable

from dmsg.errors import DropReason
from dmsg.messaging.core.peers import End, RelayPeer

HOLD_AT = 1024 * 1024
"""Bytes in the backlog of a channel at which its source is held."""
CHANNEL_BACKLOG = 64 * 1024 * 1024
"""Bytes at which it is held whatever else it has to send."""
SCARCE_BACKLOG = 2 * 1024 * 1024
"""The same, while all backlogs together have more than ``BACKLOG_TOTAL``."""
BACKLOG_TOTAL = 256 * 1024 * 1024
"""Bytes of all backlogs of a server; a source may add what one read brings, and is held then."""
OVER_TOTAL = 64 * 1024 * 1024
"""Bytes beyond that, at which a held source that would be read loses its longest channel instead."""
HOLD = 0.1
"""Seconds between looks at a source that is held; one that has others to send to is let go at the first."""
HOLD_LIMIT = 1.0
"""Seconds after which every held source is read once: its kernel would end a link whose window stays closed, and what
it says to end a channel is behind what it has sent."""
TAKES_NOTHING = 15.0
"""Seconds without a byte taken after which a receiver loses the channels that wait for it."""
PIECE = 64 * 1024
"""Bytes of one backlog that are sent before the next one's turn."""
SMALL = 4096
"""Bytes below which pieces of a backlog are kept as one."""
FEED = 256 * 1024
"""Bytes after which what is sent is handed to TCP, to see whether it takes more."""


def _waiting_behind(end: End) -> int:
    return end.other.queued


class Congestion:
    """The backlogs of one relay.

    :param now: seconds of a monotonic clock.
    :param on_held: told that a link is read no more; :meth:`look` is to follow after ``HOLD`` seconds.
    :param give_up: closes a channel whose receiver takes nothing.
    :ivar held: how often a source was held.
    :ivar total: bytes in all backlogs.
    """

    def __init__(
        self,
        now: Callable[[], float],
        on_held: Callable[[RelayPeer], None],
        give_up: Callable[[End, DropReason], None],
    ) -> None:
        self._now = now
        self._on_held = on_held
        self._give_up = give_up
        self.held = 0
        self.total = 0

    # --- what goes to a link ---

    def forward(self, source: RelayPeer, end: End, data: memoryview) -> None:
        """Frames of a source for ``end`` at another link; of that channel alone, if the link is slow."""
        peer = end.peer
        if not peer.slow:
            source.served = True
            peer.port.send(data)
            return
        self._append(end, bytes(data))
        if end.queued > HOLD_AT:
            self._hold(source, end)
        else:
            source.served = True

    def say(self, end: End, frame: bytes) -> bool:
        """A control frame of a channel, behind what waits of it; False when nothing does."""
        if not end.backlog:
            return False
        self._append(end, frame)
        return True

    def _append(self, end: End, data: bytes) -> None:
        peer = end.peer
        if not end.backlog:
            if not peer.waiting:
                peer.progress_at = self._now()
            peer.waiting.append(end)
            peer.slow = True
        last = end.backlog[-1] if end.backlog else None
        if isinstance(last, bytearray) and len(last) < SMALL:
            last += data  # whole frames behind each other: what is counted is what memory they take
        else:
            end.backlog.append(bytearray(data) if len(data) < SMALL else data)
        end.queued += len(data)
        self.total += len(data)

    def congest(self, peer: RelayPeer) -> None:
        """More waits for ``peer`` than it takes."""
        peer.congested = peer.slow = True

    def relieve(self, peer: RelayPeer) -> None:
        """All that was sent has left: the backlogs go on, in turn, until it is congested again."""
        peer.congested = False
        peer.progress_at = self._now()
        waiting = peer.waiting
        room = FEED
        while waiting and not peer.congested:
            end = waiting.popleft()
            share = PIECE
            while end.backlog and share > 0:
                data = end.backlog.popleft()
                share -= len(data)
                room -= len(data)
                end.queued -= len(data)
                self.total -= len(data)
                peer.port.send(data)
            if end.backlog:
                waiting.append(end)
            else:
                peer.draining.pop(end.id, None)
            source = end.other.peer
            if source.held and end.queued <= HOLD_AT // 2:
                self._let_go(source, only_if_short=True)
            if room <= 0:
                peer.port.flush()
                room = FEED
        peer.slow = peer.congested or bool(waiting)

    # --- what comes from a link ---

    def _hold(self, source: RelayPeer, end: End) -> None:
        now = self._now()
        if source.held or (now < source.free_until and not self._is_full(end)):
            return
        source.held = True
        source.held_at = now
        self.held += 1
        source.port.pause_reading()
        self._on_held(source)

    def _is_full(self, end: End) -> bool:
        return end.queued >= (SCARCE_BACKLOG if self.total >= BACKLOG_TOTAL else CHANNEL_BACKLOG)

    def look(self, source: RelayPeer) -> None:
        """Time has passed for a source that is held."""
        if not source.held:
            return
        now = self._now()
        for end in list(source.ends.values()):
            receiver = end.other.peer
            if end.other.backlog and now - receiver.progress_at >= TAKES_NOTHING:
                self._give_up(end, DropReason.QUEUE_FULL)
        if not source.held:
            return
        late = now - source.held_at >= HOLD_LIMIT
        if late and self.total >= BACKLOG_TOTAL + OVER_TOTAL:
            # it would be read all the same: then the longest of its channels goes
            self._give_up(max(source.ends.values(), key=_waiting_behind), DropReason.QUEUE_FULL)
            if not source.held:
                return
        full = any(self._is_full(end.other) for end in source.ends.values())
        if (source.served and not full) or late:
            self._let_go(source)
        else:
            self._on_held(source)

    def _let_go(self, source: RelayPeer, *, only_if_short: bool = False) -> None:
        if only_if_short and any(end.other.queued > HOLD_AT for end in source.ends.values()):
            return
        now = self._now()
        source.held = False
        # who has others to send to is free for as long as it was held
        source.free_until = now + (now - source.held_at if source.served else 0.0)
        source.served = False
        source.port.resume_reading()

    # --- ends ---

    def forget(self, end: End) -> None:
        """This end of a channel wants no more."""
        if end.backlog:
            self.total -= end.queued
            end.backlog.clear()
            end.queued = 0
            peer = end.peer
            peer.waiting.remove(end)
            peer.slow = peer.congested or bool(peer.waiting)

    def closed(self, end: End) -> None:
        """A channel is over whose other end closed it: what waits for ``end`` still goes there."""
        if end.backlog:
            end.peer.draining[end.id] = end

    def gone(self, peer: RelayPeer) -> None:
        """A link is gone, and all that waited for it."""
        for end in list(peer.waiting):
            self.forget(end)
        peer.draining.clear()

    def check(self, peers: dict[RelayPeer, None]) -> None:
        """:raises AssertionError: the books are wrong."""
        total = 0
        for peer in peers:
            for end in peer.waiting:
                assert end.backlog and end.queued == sum(map(len, end.backlog))
                assert peer.ends.get(end.id) is end or peer.draining.get(end.id) is end
                total += end.queued
            assert peer.slow == (peer.congested or bool(peer.waiting))
        assert total == self.total
