"""Back-pressure for receivers that are slower than their senders.  No I/O.

The protocol has no windows, and a link carries many channels, so the server cannot slow one channel alone.  Each
channel therefore has a *backlog* of its own.  The backlogs of a link take turns, a piece each, so that a long backlog
delays no other.

A source whose channel has a long backlog is paused (*held*): the server stops reading from it, for a bounded time,
repeatedly.  A source that also sends to other receivers is then read for at least as long as it was paused.  A slow
reader never causes a channel to be closed, but a receiver that reads nothing at all loses its channels.
"""

from __future__ import annotations

from collections.abc import Callable

from dmsg.errors import DropReason
from dmsg.messaging.core.peers import End, RelayPeer

HOLD_AT = 1024 * 1024
"""Bytes in the backlog of a channel above which its source is paused."""
CHANNEL_BACKLOG = 64 * 1024 * 1024
"""Bytes in the backlog of a channel at which its source is paused even while it sends to other receivers."""
SCARCE_BACKLOG = 2 * 1024 * 1024
"""Value that replaces ``CHANNEL_BACKLOG`` while all backlogs together have ``BACKLOG_TOTAL`` bytes or more."""
BACKLOG_TOTAL = 256 * 1024 * 1024
"""Bytes of all backlogs of a server from which memory counts as scarce; see ``SCARCE_BACKLOG``."""
OVER_TOTAL = 64 * 1024 * 1024
"""Bytes beyond ``BACKLOG_TOTAL`` at which a paused source loses the channel with the longest backlog before it is read
again."""
HOLD = 0.1
"""Seconds between checks of a paused source; a source that also sends to other receivers is resumed at the first
check."""
HOLD_LIMIT = 1.0
"""Seconds after which every paused source is read once.  Its kernel would end a link whose window stays closed, and a
CloseChannel of the source is behind the data that it has sent."""
TAKES_NOTHING = 15.0
"""Seconds without progress after which a receiver loses the channels that wait for it."""
PIECE = 64 * 1024
"""Bytes of one backlog that are sent before the next backlog's turn."""
SMALL = 4096
"""Bytes below which pieces of a backlog are joined, to save memory."""
FEED = 256 * 1024
"""Bytes of backlog to send before each flush; the flush shows whether TCP accepts more."""


def _waiting_behind(end: End) -> int:
    return end.other.queued


class Congestion:
    """Backlogs of one relay.

    :param now: returns seconds of a monotonic clock.
    :param on_held: callback invoked when reading from a link is paused.  The caller calls :meth:`check_source` after
        ``HOLD`` seconds.
    :param give_up: closes a channel whose receiver reads nothing.
    :ivar held: number of times that a source was paused.
    :ivar total: number of bytes in all backlogs.
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

    # --- output to a link ---

    def forward(self, source: RelayPeer, end: End, data: memoryview) -> None:
        """Send or queue frames of ``source`` for the link of ``end``; if that link is slow, all frames must be for
        ``end``."""
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

    def queue_control(self, end: End, frame: bytes) -> bool:
        """Queue a control frame behind a channel's backlog; return False if the channel has no backlog."""
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
            last += data  # Small pieces are joined, so that the bytes counted are the memory that they take.
        else:
            end.backlog.append(bytearray(data) if len(data) < SMALL else data)
        end.queued += len(data)
        self.total += len(data)

    def congest(self, peer: RelayPeer) -> None:
        """Mark ``peer`` congested, because its output queue is above the high-water mark."""
        peer.congested = peer.slow = True

    def relieve(self, peer: RelayPeer) -> None:
        """Send the backlogs of ``peer`` in turn, until it is congested again; called once its queue is empty."""
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
            # A source is resumed only at half of the mark; otherwise it would be paused and resumed for each piece.
            source = end.other.peer
            if source.held and end.queued <= HOLD_AT // 2:
                self._release_source(source, only_if_short=True)
            # Only a flush shows whether TCP takes more.  Without it the whole backlog would move into one output queue,
            # where channels no longer take turns.
            if room <= 0:
                peer.port.flush()
                room = FEED
        peer.slow = peer.congested or bool(waiting)

    # --- input from a link ---

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

    def check_source(self, source: RelayPeer) -> None:
        """Check a paused source: resume it, or end channels whose receivers read nothing."""
        if not source.held:
            return
        # The time is measured from the receiver's last progress, so a receiver that is slow but alive keeps its
        # channels.
        now = self._now()
        for end in list(source.ends.values()):
            receiver = end.other.peer
            if end.other.backlog and now - receiver.progress_at >= TAKES_NOTHING:
                self._give_up(end, DropReason.QUEUE_FULL)
        if not source.held:
            return
        late = now - source.held_at >= HOLD_LIMIT
        if late and self.total >= BACKLOG_TOTAL + OVER_TOTAL:
            # The source has to be read now, so its longest backlog is dropped first to bound the memory.
            self._give_up(max(source.ends.values(), key=_waiting_behind), DropReason.QUEUE_FULL)
            if not source.held:
                return
        # A source with other receivers is resumed early, because they would have to wait for the slow one.
        full = any(self._is_full(end.other) for end in source.ends.values())
        if (source.served and not full) or late:
            self._release_source(source)
        else:
            self._on_held(source)

    def _release_source(self, source: RelayPeer, *, only_if_short: bool = False) -> None:
        if only_if_short and any(end.other.queued > HOLD_AT for end in source.ends.values()):
            return
        now = self._now()
        source.held = False
        # A source that also sends to other receivers is then not paused for as long as it was paused before.
        source.free_until = now + (now - source.held_at if source.served else 0.0)
        source.served = False
        source.port.resume_reading()

    # --- ends of channels and links ---

    def forget(self, end: End) -> None:
        """Drop the backlog of an end that wants no more data."""
        if end.backlog:
            self.total -= end.queued
            end.backlog.clear()
            end.queued = 0
            peer = end.peer
            peer.waiting.remove(end)
            peer.slow = peer.congested or bool(peer.waiting)

    def closed(self, end: End) -> None:
        """Keep sending the backlog of ``end``, whose channel the other end has closed."""
        if end.backlog:
            end.peer.draining[end.id] = end

    def gone(self, peer: RelayPeer) -> None:
        """Drop the backlogs of a lost link."""
        for end in list(peer.waiting):
            self.forget(end)
        peer.draining.clear()

    def check(self, peers: dict[RelayPeer, None]) -> None:
        """Check the counts; for tests.

        :raises AssertionError: a count is wrong.
        """
        total = 0
        for peer in peers:
            for end in peer.waiting:
                assert end.backlog and end.queued == sum(map(len, end.backlog))
                assert peer.ends.get(end.id) is end or peer.draining.get(end.id) is end
                total += end.queued
            assert peer.slow == (peer.congested or bool(peer.waiting))
        assert total == self.total
