"""Frames that are made of writes."""

from __future__ import annotations

from hypothesis import given, strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.streams.outbox import JOIN_SIZE, SMALL_WRITE, Outbox, Ticket

FRAME = 65_492


def drained(outbox: Outbox) -> list[bytes]:
    frames = []
    while outbox.waiting:
        frames.append(bytes(outbox.take(FRAME)[0]))
    return frames


class OutboxTests(SynchronousTestCase):
    def test_small_writes_between_large_ones_are_joined(self) -> None:
        outbox = Outbox()
        for number in range(4):
            outbox.add(bytes([number]) * 262_144, None)
        frames = drained(outbox)
        self.assertEqual([len(one) for one in frames[:-1]], [FRAME] * 16)
        self.assertEqual(b"".join(frames), b"".join(bytes([number]) * 262_144 for number in range(4)))

    def test_writes_with_tickets_are_not_joined(self) -> None:
        """A write with a ticket is joined neither with the write before nor with the write after it, because the ticket
        confirms exactly its bytes.
        """
        outbox = Outbox()
        outbox.add(b"a" * (FRAME + 10), None)
        waiting: Deferred[None] = Deferred()
        outbox.add(b"b" * (FRAME + 10), Ticket(waiting))
        outbox.add(b"c" * (FRAME + 10), None)
        self.assertEqual([len(one) for one in drained(outbox)], [FRAME, 10] * 3)

    @given(
        st.lists(
            st.sampled_from([1, SMALL_WRITE, JOIN_SIZE, JOIN_SIZE + 1, FRAME - 1, FRAME, FRAME + 1, 262_144, 300_000]),
            max_size=8,
        ),
        st.integers(0, 8),
    )
    def test_all_bytes_stay_in_order(self, sizes: list[int], again: int) -> None:
        outbox = Outbox()
        expected = b""
        for number, size in enumerate(sizes):
            data = bytes([number + 1]) * size
            expected += data
            outbox.add(data, None)
        self.assertEqual(outbox.size, len(expected))
        frames: list[tuple[bytes | memoryview, Ticket | None]] = []
        while outbox.waiting and len(frames) < again:
            frames.append(outbox.take(FRAME))
        outbox.put_back(frames)
        self.assertEqual(outbox.size, len(expected))
        pieces = drained(outbox)
        self.assertEqual((b"".join(pieces), outbox.size), (expected, 0))
        self.assertLessEqual(max(map(len, pieces), default=0), FRAME)
