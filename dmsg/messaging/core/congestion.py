"""Back-pressure at a server, for receivers that are slower than their senders.  No I/O.

The protocol has no windows, and a link carries many channels, so the server cannot slow down a single channel. Instead,
each channel has its own *backlog*, a queue of data for its receiver.  The server sends the backlogs of a link in turn,
one piece of each, so that a long backlog does not delay the other channels.

A *source* is a link whose client sends data. While a channel has a long backlog, its source is paused: the
server stops reading from it, for a bounded time, and repeats this as needed.  If the source also sends to other
receivers, the server then reads from it for at least as long as it was paused.  A slow receiver keeps its channels, but
a receiver that reads nothing at all loses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dmsg.errors import DropReason
from dmsg.messaging.core.peers import End, RelayPeer

HOLD_AT = 1024 * 1024
"""Size in bytes of a channel's backlog above which the channel's source is paused."""
CHANNEL_BACKLOG = 64 * 1024 * 1024
"""Minimum size in bytes of a channel's backlog at which the channel's source is paused even if the source also sends to
other receivers."""
SCARCE_BACKLOG = 2 * 1024 * 1024
"""Limit that replaces ``CHANNEL_BACKLOG`` while all backlogs together have ``BACKLOG_TOTAL`` bytes or more."""
BACKLOG_TOTAL = 256 * 1024 * 1024
"""Total size in bytes of all backlogs of a server. From this size on, ``SCARCE_BACKLOG`` is the limit of a channel."""
OVER_TOTAL = 64 * 1024 * 1024
"""Number of bytes by which all backlogs together may exceed ``BACKLOG_TOTAL``. If they exceed it by more, a source that
was paused for ``HOLD_LIMIT`` seconds loses its channel with the longest backlog before it is read again."""
PAUSE_CHECK_INTERVAL = 0.1
"""Seconds between two checks of a paused source. A source that also sends to other receivers is resumed at the first
check."""
HOLD_LIMIT = 1.0
"""Maximum seconds for which a source is paused before it is read again. There are two reasons for a limit. If the TCP
window to the source stays closed for long, the source's kernel may end the link. And the server reads a CloseChannel of
the source only after the data that were sent before it.
"""
STALLED_AFTER = 15.0
"""Seconds without progress after which a receiver loses the channels that have a backlog for it. Pauses of this process
do not count."""
PIECE_SIZE = 64 * 1024
"""Number of bytes of one backlog that are sent before the next backlog gets its turn."""
MIN_PIECE_SIZE = 4096
"""Size in bytes below which a piece of a backlog is joined with the next piece, to save memory."""
FLUSH_SIZE = 256 * 1024
"""Number of bytes of backlogs that are sent before each flush. The flush shows whether TCP accepts more."""


def _waiting_behind(end: End) -> int:
    return end.other.queued


class Meter(Protocol):
    """Measurement of time that leaves out the pauses of this process."""

    @property
    def awake(self) -> float:
        """Seconds since the measurement began, without pauses."""

    def stop(self) -> None:
        """End the measurement."""


class Congestion:
    """Backlogs of one relay.

    :param now: function that returns the seconds of a monotonic clock.
    :param on_paused: callback invoked when reading from a link is paused.  The caller must call :meth:`check_source`
        after ``PAUSE_CHECK_INTERVAL`` seconds.
    :param give_up: function that closes a channel whose receiver reads nothing.
    :param measure: function that begins a measurement of time, which runs while there are backlogs. With None, pauses
        of this process count.
    :ivar total: number of bytes in all backlogs.
    """

    def __init__(
        self,
        now: Callable[[], float],
        on_paused: Callable[[RelayPeer], None],
        give_up: Callable[[End, DropReason], None],
        measure: Callable[[], Meter] | None = None,
    ) -> None:
        self._now = now
        self._on_paused = on_paused
        self._give_up = give_up
        self._measure = measure
        self._meter: Meter | None = None
        self.total = 0

    def _add_to_total(self, size: int) -> None:
        self.total += size
        if not self.total and self._meter is not None:
            self._meter.stop()
            self._meter = None
        elif self.total and self._meter is None and self._measure is not None:
            self._meter = self._measure()

    def _awake(self) -> float:
        """Return the time from which the progress of receivers counts. Two times can be compared only if there were
        backlogs all the time between them."""
        return self._now() if self._meter is None else self._meter.awake

    # --- output to a link ---

    def forward(self, source: RelayPeer, end: End, data: memoryview) -> None:
        """Send frames of ``source`` to the link of ``end``, or queue them if that link is slow.

        If the link is slow, all frames must be for ``end``; otherwise they may be for several ends of the link.
        """
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
        """Queue a control frame after the backlog of a channel. Return False, and do nothing, if the channel has no
        backlog."""
        if not end.backlog:
            return False
        self._append(end, frame)
        return True

    def _append(self, end: End, data: bytes) -> None:
        peer = end.peer
        self._add_to_total(len(data))
        if not end.backlog:
            if not peer.waiting:
                peer.progress_at = self._awake()
            peer.waiting.append(end)
            peer.slow = True
        last = end.backlog[-1] if end.backlog else None
        if isinstance(last, bytearray) and len(last) < MIN_PIECE_SIZE:
            # Small pieces are joined, because many small objects would take much more memory than the bytes that are
            # counted.
            last += data
        else:
            end.backlog.append(bytearray(data) if len(data) < MIN_PIECE_SIZE else data)
        end.queued += len(data)

    def congest(self, peer: RelayPeer) -> None:
        """Mark ``peer`` as congested, because the output queue of its link is above the high-water mark."""
        peer.congested = peer.slow = True

    def relieve(self, peer: RelayPeer) -> None:
        """Send the backlogs of ``peer`` in turn until its link is congested again. Called when the link's output queue
        is empty."""
        peer.congested = False
        peer.progress_at = self._awake()
        waiting = peer.waiting
        room = FLUSH_SIZE
        while waiting and not peer.congested:
            end = waiting.popleft()
            share = PIECE_SIZE
            while end.backlog and share > 0:
                data = end.backlog.popleft()
                share -= len(data)
                room -= len(data)
                end.queued -= len(data)
                self._add_to_total(-len(data))
                peer.port.send(data)
            if end.backlog:
                waiting.append(end)
            else:
                peer.draining.pop(end.id, None)
            # A source is resumed only when the backlog is down to half of the limit. Otherwise it would be paused and
            # resumed for each piece.
            source = end.other.peer
            if source.is_paused and end.queued <= HOLD_AT // 2:
                self._release_source(source, only_if_short=True)
            # Only a flush shows whether TCP accepts more. Without it, the backlogs would all move into the link's
            # output queue, where channels do not take turns.
            if room <= 0:
                peer.port.flush()
                room = FLUSH_SIZE
        peer.slow = peer.congested or bool(waiting)

    # --- input from a link ---

    def _hold(self, source: RelayPeer, end: End) -> None:
        now = self._now()
        if source.is_paused or (now < source.free_until and not self._is_full(end)):
            return
        source.is_paused = True
        source.paused_at = now
        source.port.pause_reading()
        self._on_paused(source)

    def _is_full(self, end: End) -> bool:
        return end.queued >= (SCARCE_BACKLOG if self.total >= BACKLOG_TOTAL else CHANNEL_BACKLOG)

    def check_source(self, source: RelayPeer) -> None:
        """Check a paused source: close channels whose receivers read nothing, and resume the source if possible."""
        if not source.is_paused:
            return
        # The time counts from the receiver's last progress, so a receiver that reads slowly keeps its channels.
        awake = self._awake()
        for end in list(source.ends.values()):
            receiver = end.other.peer
            if end.other.backlog and awake - receiver.progress_at >= STALLED_AFTER:
                self._give_up(end, DropReason.QUEUE_FULL)
        if not source.is_paused:
            return
        late = self._now() - source.paused_at >= HOLD_LIMIT
        if late and self.total >= BACKLOG_TOTAL + OVER_TOTAL:
            # The source must not be paused for longer than HOLD_LIMIT, but all backlogs together exceed their limit.
            # So its channel with the longest backlog is closed before the source is read again.
            self._give_up(max(source.ends.values(), key=_waiting_behind), DropReason.QUEUE_FULL)
            if not source.is_paused:
                return
        # A source that also sends to other receivers is resumed early. Otherwise the other receivers would have to wait
        # for the slow one.
        full = any(self._is_full(end.other) for end in source.ends.values())
        if (source.served and not full) or late:
            self._release_source(source)
        else:
            self._on_paused(source)

    def _release_source(self, source: RelayPeer, *, only_if_short: bool = False) -> None:
        if only_if_short and any(end.other.queued > HOLD_AT for end in source.ends.values()):
            return
        now = self._now()
        source.is_paused = False
        # A source that also sends to other receivers is not paused again until it was read for as long as it was
        # paused.
        source.free_until = now + (now - source.paused_at if source.served else 0.0)
        source.served = False
        source.port.resume_reading()

    # --- ends of channels and links ---

    def forget(self, end: End) -> None:
        """Drop the backlog of an end that needs no more data."""
        if end.backlog:
            self._add_to_total(-end.queued)
            end.backlog.clear()
            end.queued = 0
            peer = end.peer
            peer.waiting.remove(end)
            peer.slow = peer.congested or bool(peer.waiting)

    def closed(self, end: End) -> None:
        """Note that the other end has closed the channel of ``end``. The backlog of ``end`` is still sent, and until
        then the channel's id stays in use."""
        if end.backlog:
            end.peer.draining[end.id] = end

    def gone(self, peer: RelayPeer) -> None:
        """Drop all backlogs of a lost link."""
        for end in list(peer.waiting):
            self.forget(end)
        peer.draining.clear()

    def check(self, peers: dict[RelayPeer, None]) -> None:
        """Check that all counts are right; for tests.

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
