"""Records with nonces of 8 bytes against those of the implementation that made them, and which nonces are new."""

from __future__ import annotations

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DropReason, LocalProtocolError, RemoteProtocolError
from dmsg.noise.nonces import WINDOW, GrowingNonces, NonceWindow
from dmsg.noise.records8 import MAX_NONCE, OVERHEAD, Opener8, Sealer8
from tests.support import vectors

VECTORS = vectors("records8")
KEY = bytes(range(32))


class VectorTests(SynchronousTestCase):
    """records8.json."""

    def test_recorded_records_are_sealed_and_opened(self) -> None:
        for pattern in ("XK", "KK"):
            recorded = VECTORS[pattern]
            for side, key in recorded["keys"].items():
                sealer = Sealer8(bytes.fromhex(key))
                opener = Opener8(bytes.fromhex(key), GrowingNonces())
                mine = [one for one in recorded["records"] if one["from"] == side]
                self.assertGreater(len(mine), 2)
                for one in mine:
                    plaintext = bytes.fromhex(one["plaintext"])
                    self.assertEqual(sealer.seal(plaintext).hex(), one["record"])
                    self.assertEqual(opener.open(bytes.fromhex(one["record"])), plaintext)

    def test_records_that_the_reference_refuses_are_refused(self) -> None:
        """One case differs: the reference stores a nonce before it checks the tag, so one forged record ends its
        stream.
        """
        for pattern in ("XK", "KK"):
            recorded = VECTORS[pattern]
            (key,) = {
                key
                for key in recorded["keys"].values()
                if self.opens(key, bytes.fromhex(recorded["reader_refusals"][0]["record"]))
            }
            opener = Opener8(bytes.fromhex(key), GrowingNonces(4))
            for one in recorded["reader_refusals"]:
                record = bytes.fromhex(one["record"])
                if one["error"] and one["what"] != "the undamaged record 7 after the damaged one":
                    self.assertRaises(RemoteProtocolError, opener.open, record)
                else:
                    opened = opener.open(record)
                    self.assertTrue(one["error"] or opened.hex() == one["plaintext"], one["what"])

    @staticmethod
    def opens(key: str, record: bytes) -> bool:
        try:
            Opener8(bytes.fromhex(key), GrowingNonces()).open(record)
        except RemoteProtocolError:
            return False
        return True

    def test_a_repeated_record_is_refused(self) -> None:
        """The reference's reader of objects accepts the record twice."""
        first, second, zero = VECTORS["XK"]["object_reader"]
        self.assertEqual((first["record"], second["error"]), (second["record"], ""))
        record = bytes.fromhex(first["record"])
        (key,) = {key for key in VECTORS["XK"]["keys"].values() if self.opens(key, record)}
        opener = Opener8(bytes.fromhex(key), NonceWindow())
        self.assertEqual(opener.open(record).hex(), first["plaintext"])
        error = self.assertRaises(RemoteProtocolError, opener.open, record)
        self.assertEqual(error.reason, DropReason.REPLAYED_RECORD)
        self.assertTrue(zero["error"])


class RecordTests(SynchronousTestCase):
    @given(st.lists(st.binary(max_size=300), max_size=8), st.randoms())
    def test_in_any_order_within_a_window(self, plaintexts: list[bytes], random: object) -> None:
        sealer = Sealer8(KEY)
        records = [(plaintext, sealer.seal(plaintext)) for plaintext in plaintexts]
        random.shuffle(records)  # type: ignore[attr-defined]
        opener = Opener8(KEY, NonceWindow())
        for plaintext, record in records:
            self.assertEqual((len(record), opener.open(record)), (len(plaintext) + OVERHEAD, plaintext))
        for _, record in records:
            self.assertRaises(RemoteProtocolError, opener.open, record)

    @given(st.binary(max_size=64))
    def test_random_bytes_are_refused(self, record: bytes) -> None:
        nonces = GrowingNonces()
        self.assertRaises(RemoteProtocolError, Opener8(KEY, nonces).open, record)
        self.assertEqual(nonces.last, 0)

    def test_the_last_nonce(self) -> None:
        sealer = Sealer8(KEY, MAX_NONCE - 1)
        record = sealer.seal(b"last")
        self.assertRaises(LocalProtocolError, sealer.seal, b"")
        self.assertEqual(Opener8(KEY, NonceWindow()).open(record), b"last")


class NonceTests(SynchronousTestCase):
    @given(st.lists(st.integers(-1, 3 * 16), max_size=80))
    def test_a_window_is_a_set_with_a_lower_end(self, numbers: list[int]) -> None:
        window = NonceWindow(16)
        seen: set[int] = set()
        for number in numbers:
            new = number > 0 and number not in seen and number > max(seen, default=0) - 16
            self.assertEqual(window.accepts(number), new, (number, sorted(seen)))
            if new:
                window.record(number)
                seen.add(number)
            self.assertEqual(window.highest, max(seen, default=0))
            self.assertLessEqual(window._seen.bit_length(), 16)

    def test_the_edges_of_the_window_are_right(self) -> None:
        window = NonceWindow()
        window.record(WINDOW)
        self.assertTrue(window.accepts(1))
        window.record(WINDOW + 1)
        self.assertFalse(window.accepts(1))
        window.record(MAX_NONCE)
        self.assertFalse(window.accepts(WINDOW + 2))
        self.assertTrue(window.accepts(MAX_NONCE - WINDOW + 1))
