"""Records: any chunking, damage, limits."""

from __future__ import annotations

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DropReason, LocalProtocolError, RemoteProtocolError
from dmsg.noise.records import COPY_LIMIT, MAX_PLAINTEXT, MAX_SEQUENCE, RecordOpener, RecordSealer

KEY = bytes(range(32))


def opened(stream: bytes, sizes: list[int]) -> bytes:
    """Return the whole plaintext of a stream that arrives in pieces."""
    opener = RecordOpener(KEY)
    buffer = bytearray(len(stream) + 70_000)
    end = 0
    for size in [*sizes, len(stream)]:
        end = opener.open_into(stream[:size], buffer, end)
        stream = stream[size:]
    if opener.broken is not None:
        raise opener.broken
    return bytes(buffer[:end])


class RecordTests(SynchronousTestCase):
    """Sealing and opening."""

    @given(
        st.lists(st.integers(0, 3 * COPY_LIMIT), max_size=8),
        st.lists(st.integers(0, 9000), max_size=30),
    )
    def test_any_sizes_and_chunking(self, sizes: list[int], cuts: list[int]) -> None:
        sealer = RecordSealer(KEY)
        plain = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
        stream = b"".join(bytes(sealer.seal(one)) for one in plain)
        self.assertEqual(opened(stream, cuts), b"".join(plain))

    def test_an_incomplete_record_holds_only_its_bytes(self) -> None:
        """The opener holds as many bytes as arrived, in however small pieces."""
        opener = RecordOpener(KEY)
        stream = bytes(RecordSealer(KEY).seal(bytes(60_000)))
        for start in range(0, 50_000, 2):
            self.assertEqual(opener.open_into(stream[start : start + 2], bytearray(200_000), 0), 0)
        self.assertEqual(opener.held, 50_000)
        buffer = bytearray(200_000)
        self.assertEqual(opener.open_into(stream[50_000:], buffer, 0), 60_000)
        self.assertEqual(opener.held, 0)

    def test_the_largest_record(self) -> None:
        plain = bytes(range(256)) * 255 + bytes(MAX_PLAINTEXT - 256 * 255)
        stream = bytes(RecordSealer(KEY).seal(plain))
        self.assertEqual(len(stream), 2 + 65535)
        self.assertEqual(opened(stream, [1, 40_000]), plain)
        self.assertRaises(LocalProtocolError, RecordSealer(KEY).seal, plain + b"x")

    def test_a_record_into_a_buffer(self) -> None:
        """The same bytes, and the same limits."""
        for size in (0, COPY_LIMIT, COPY_LIMIT + 1, MAX_PLAINTEXT):
            buffer = bytearray(MAX_PLAINTEXT + 100)
            end = RecordSealer(KEY).seal_into(bytes(size), memoryview(buffer))
            self.assertEqual(buffer[:end], RecordSealer(KEY).seal(bytes(size)))
        room = memoryview(bytearray(MAX_PLAINTEXT + 100))
        self.assertRaises(LocalProtocolError, RecordSealer(KEY).seal_into, bytes(MAX_PLAINTEXT + 1), room)
        self.assertRaises(LocalProtocolError, RecordSealer(KEY, MAX_SEQUENCE).seal_into, b"x", room)
        RecordSealer(KEY, MAX_SEQUENCE - 1).seal_into(b"x", room)

    def test_empty_records_are_ignored(self) -> None:
        self.assertEqual(opened(bytes(RecordSealer(KEY).seal(b"")), []), b"")

    @given(st.integers(0, 19))
    def test_short_records_are_refused(self, length: int) -> None:
        """Section 7.1b: a body of less than 4 bytes ends the reference's process."""
        for cut in (2, 2 + length):
            error = self.assertRaises(
                RemoteProtocolError, opened, (length.to_bytes(2, "big") + bytes(length))[:cut], []
            )
            self.assertIs(error.reason, DropReason.BAD_RECORD)

    @given(st.binary(max_size=300), st.lists(st.integers(0, 50), max_size=10))
    def test_random_bytes_are_a_named_error(self, data: bytes, cuts: list[int]) -> None:
        try:
            self.assertEqual(opened(data, cuts), b"")
        except RemoteProtocolError as error:
            self.assertIn(error.reason, (DropReason.BAD_RECORD, DropReason.REPLAYED_RECORD))

    def test_replays_and_old_sequences_are_refused(self) -> None:
        sealer = RecordSealer(KEY)
        one, two, three = (bytes(sealer.seal(text)) for text in (b"1", b"2", b"3"))
        self.assertEqual(opened(one + three, []), b"13")  # A gap is not treated as an attack.
        for stream in (one + one, one + two + one, three + two):
            error = self.assertRaises(RemoteProtocolError, opened, stream, [])
            self.assertIs(error.reason, DropReason.REPLAYED_RECORD)

    def test_sequence_0_is_refused(self) -> None:
        sealer = RecordSealer(KEY, -1)
        self.assertRaises(RemoteProtocolError, opened, bytes(sealer.seal(b"x")), [])

    def test_the_sequence_does_not_wrap(self) -> None:
        sealer = RecordSealer(KEY, MAX_SEQUENCE - 1)
        sealer.seal(b"last")
        self.assertTrue(sealer.exhausted)
        self.assertRaises(LocalProtocolError, sealer.seal, b"one too many")

    def test_a_dripping_peer_costs_no_more_than_its_bytes(self) -> None:
        """Pieces of an unfinished record are kept, not joined again and again."""
        plain = bytes(60_000)
        stream = bytes(RecordSealer(KEY).seal(plain))
        opener = RecordOpener(KEY)
        buffer = bytearray(140_000)
        for position in range(len(stream) - 1):
            self.assertEqual(opener.open_into(stream[position : position + 1], buffer, 0), 0)
        self.assertEqual(opener.open_into(stream[-1:], buffer, 0), len(plain))

    def test_records_behind_a_broken_record_stay_closed(self) -> None:
        """After a broken record, even a valid record is refused."""
        sealer = RecordSealer(KEY)
        first, second, third = (bytes(sealer.seal(b"%d" % number)) for number in range(3))
        opener = RecordOpener(KEY)
        buffer = bytearray(200_000)
        end = opener.open_into(first + second[:-1] + bytes((second[-1] ^ 1,)), buffer, 0)
        self.assertIsNotNone(opener.broken)
        self.assertEqual((opener.open_into(third, buffer, end), end, opener.held), (1, 1, 0))

    def test_the_length_of_an_empty_record_alone(self) -> None:
        record = bytes(RecordSealer(KEY).seal(b""))
        opener = RecordOpener(KEY)
        for cut in (2, 5, len(record)):
            self.assertEqual(opener.open_into(record[:cut], bytearray(200_000), 0), 0)
            record = record[cut:]
            self.assertIsNone(opener.broken)
        self.assertEqual((opener.sequence, opener.held), (1, 0))

    def test_an_exhausted_nonce_counter_is_an_error(self) -> None:
        self.assertIs(RecordSealer(KEY, MAX_SEQUENCE - 1).exhausted, False)
        self.assertIs(RecordSealer(KEY, MAX_SEQUENCE).exhausted, True)
