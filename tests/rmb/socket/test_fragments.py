"""Messages in fragments: put together however they are cut, limited, and paid for by who sends them."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.websocket import frames
from dmsg.net.websocket.frames import BEGINNING, ENDING, MIDDLE, FrameTooLarge
from dmsg.rmb.envelope import wire
from dmsg.rmb.errors import Drop
from dmsg.rmb.relay import switch
from dmsg.rmb.socket import fragments
from dmsg.rmb.socket.fragments import FragmentError, Fragments
from tests.rmb.network import RawTwin
from tests.rmb.test_relay import SocketPairCase
from tests.support import asynchronous

EMPTY = frames.encode(MIDDLE, b"", b"mask")
"""The cheapest fragment there is."""


def cut(data: bytes, sizes: list[int]) -> list[tuple[int, bytes]]:
    """``data`` in fragments of these sizes, and one with the rest."""
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    pieces.append(data)
    return [
        (BEGINNING if number == 0 else ENDING if number == len(pieces) - 1 else MIDDLE, piece)
        for number, piece in enumerate(pieces)
    ]


class FragmentsTests(SynchronousTestCase):
    @given(st.binary(max_size=300), st.lists(st.integers(0, 50), min_size=1, max_size=20))
    def test_fragments_cut_anywhere_are_joined(self, data: bytes, sizes: list[int]) -> None:
        one = Fragments(1000)
        for _ in range(2):
            *before, last = cut(data, sizes)
            for first, piece in before:
                self.assertIsNone(one.add(first, piece))
            self.assertGreaterEqual(one.size, fragments.OVERHEAD)
            self.assertEqual(one.add(*last), data)
            self.assertEqual(one.size, 0)

    def test_misplaced_fragments_are_refused(self) -> None:
        one = Fragments(1000)
        for first in (MIDDLE, ENDING):
            self.assertRaises(FragmentError, one.add, first, b"x")
        one.add(BEGINNING, b"x")
        self.assertRaises(FragmentError, one.add, BEGINNING, b"x")
        self.assertEqual(one.add(ENDING, b"y"), b"xy")

    def test_the_limits_of_fragments_hold(self) -> None:
        self.patch(fragments, "MAX_FRAGMENTS", 5)
        one = Fragments(10)
        one.add(BEGINNING, bytes(9))
        self.assertRaises(FrameTooLarge, one.add, MIDDLE, bytes(2))
        for _ in range(4):
            one.add(MIDDLE, b"")
        self.assertRaises(FrameTooLarge, one.add, ENDING, b"")

    def test_only_short_inner_fragments_count_as_small(self) -> None:
        """Go and JavaScript send a fragment when their buffer is full: only the last one of a message is shorter."""
        one = Fragments(1 << 20)
        for first, piece in cut(bytes(100_000), [4082] * 24):
            one.add(first, piece)
        self.assertEqual(one.small, 0)
        for first, piece in cut(bytes(5), [1] * 5):
            one.add(first, piece)
        self.assertEqual(one.small, 5)

    def test_the_bytes_of_all_fragments_count(self) -> None:
        one = Fragments(10)
        one.add(BEGINNING, bytes(6))
        self.assertRaises(FrameTooLarge, one.add, ENDING, bytes(5))
        self.assertEqual(one.add(ENDING, bytes(4)), bytes(10))

    def test_each_fragment_counts_for_the_memory_that_it_takes(self) -> None:
        one = Fragments(1000)
        one.add(BEGINNING, bytes(60))
        for size in (40, 0):
            one.add(MIDDLE, bytes(size))
        self.assertEqual(one.size, 100 + 3 * fragments.OVERHEAD)


class _Counting:
    """TurnShare whose clock advances by a millisecond each time it is read."""

    def __init__(self, share: Any) -> None:
        self._share = share
        self._time = 0.0
        self.taken: list[float] = []

    def now(self) -> float:
        self._time += 0.001
        return self._time

    def allows(self, owner: object) -> bool:
        return True

    def seconds_left(self, owner: object) -> float:
        return 0.002

    def used(self, owner: object, seconds: float, now: float | None = None) -> None:
        self.taken.append(seconds)

    def wait(self, one: Any) -> None:
        self._share.wait(one)


class FloodTests(SocketPairCase):
    """Floods of fragments delay no other session."""

    async def empties(self, number: int) -> RawTwin:
        """Return a session that has sent ``number`` empty fragments of one message."""
        a, self.b = await self.pair()
        a.socket.transport.write(frames.encode(BEGINNING, b"", b"mask") + EMPTY * number)
        return a

    @asynchronous
    async def test_the_clock_is_looked_at_after_each(self) -> None:
        """Two fragments fill the turn, however many came in one read."""
        a, _ = await self.pair()
        server = self.one.switch.sessions[a.session].socket
        server.share = share = _Counting(server.share)
        a.socket.transport.write(frames.encode(BEGINNING, b"", b"mask") + EMPTY * 99)
        await self.until(lambda: server._fragments._count == 100)
        self.assertLess(max(share.taken), 0.0045)

    @asynchronous
    async def test_too_many_end_the_session(self) -> None:
        """Empty fragments are counted, too; data behind them is not parsed."""
        self.patch(switch, "FRAGMENT_BURST", 500.0)
        a = await self.empties(9000)
        self.assertIn("too many small fragments", await a.closed)
        self.assertEqual(self.drops(Drop.FRAGMENTS), 1)
        await self.until(lambda: a.session not in self.one.switch.sessions)
        self.b.send(self.b.envelope(self.b.session), self.now())
        await self.b.messages.get()

    @asynchronous
    async def test_a_message_of_too_many(self) -> None:
        self.patch(fragments, "MAX_FRAGMENTS", 100)
        a = await self.empties(200)
        self.assertIn("fragments", await a.closed)

    @asynchronous
    async def test_data_before_a_lost_connection_is_delivered(self) -> None:
        """The data is delivered in turns; pings are no longer answered."""
        a, b = await self.pair()
        server = self.one.switch.sessions[a.session].socket
        told: list[str] = []
        receiver = server.receiver
        self.patch(type(receiver), "ping_received", lambda self, payload: told.append("ping"))
        server.share = share = _Counting(server.share)
        envelope = a.envelope(b.session)
        envelope.timestamp = int(self.now())
        message = envelope.SerializeToString()
        third = len(message) // 3
        pieces = b"".join(frames.encode(first, piece, b"mask") for first, piece in cut(message, [third, third]))
        server.dataReceived(
            frames.encode(frames.PING, b"1", b"mask") * 10 + pieces + frames.encode(0x82, message, b"abcd")
        )
        server.transport.abortConnection()
        for _ in range(2):
            self.assertEqual((await b.messages.get()).uid, wire.decode(message).uid)
        await self.until(lambda: a.session not in self.one.switch.sessions)
        self.assertLess(len(told), 10)
        self.assertLess(max(share.taken), 0.0045)
