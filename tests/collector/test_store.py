"""Files that a collector stores."""

from __future__ import annotations

import gzip
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from dmsg.collector import store as store_module
from dmsg.collector.store import PRODUCERS_LIMIT, FileRejected, Store, StoreError, StoreFull
from dmsg.keys import SecKey
from dmsg.telemetry.vouchers import statement
from tests.collector.support import kept_files, offer_of, packed, spool_name

ALICE, BOB = (SecKey.from_seed(name).public for name in (b"alice", b"bob"))
DAY = 86_400.0


class StoreTests(SynchronousTestCase):
    """Plain calls, on a real directory."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        self.store = self.opened()

    def opened(self, **options: int) -> Store:
        store = Store(self.root, **{"limit": 10_000_000, "reserve": 0} | options)
        store.open()
        self.addCleanup(store.close)
        return store

    def bring(
        self, name: str, data: bytes, origin: object = ALICE, now: float = 20_000 * DAY, voucher: str = ""
    ) -> Path:
        part = self.store.open_part(origin)  # type: ignore[arg-type]
        part.write(data)
        try:
            return self.store.keep(origin, replace(offer_of(name, data), voucher=voucher), part, now)  # type: ignore[arg-type]
        except FileRejected:
            self.store.discard(part)
            raise

    def test_a_received_file_is_stored(self) -> None:
        data = packed()
        kept = self.bring(spool_name(1), data)
        self.assertEqual(kept, self.root / ALICE.hex() / "2024-10-04" / spool_name(1))
        self.assertEqual(kept.read_bytes(), data)
        self.assertTrue(self.store.has(ALICE, offer_of(spool_name(1), data)))
        self.assertFalse(self.store.has(BOB, offer_of(spool_name(1), data)))
        self.assertRaisesRegex(
            FileRejected, "another file", self.store.has, ALICE, offer_of(spool_name(1), data + b"x")
        )
        self.assertEqual(self.store.total, len(data))
        self.assertEqual(list(self.root.glob("**/.part-*")), [])

    def test_a_damaged_file_is_rejected(self) -> None:
        whole = packed()
        for data, why in (
            (b"plain text", "not in gzip format"),
            (gzip.compress(b""), "no events"),
            *(
                (
                    gzip.compress(b'{"producer": "a"}\n%b\n{"producer": "a"}\n' % line),
                    "not a JSON object that names its producer",
                )
                # Some JSON parsers accept these lines as events, and others do not.
                for line in (
                    b'{"v": 1}',
                    b"[]",
                    b"nothing",
                    b"{'producer': 'b'}",
                    b'[{"producer": "b"}]',
                    b'{"producer": "b"} x',
                    b'{"producer": "b", "n": -INF}',
                    b'{"producer": "b"',
                    b"\xff",
                )
            ),
            (gzip.compress(b'{"producer": "a"}\r{"producer": "b"}\n'), "is not JSON"),
            (
                gzip.compress(
                    b'{"producer": "a"}\n{"producer": "a", "x": "%b"}\n{"producer": "b"}\n' % (b"x" * 600_000)
                ),
                "longer than",
            ),
            (gzip.compress(b'{"producer": "../../etc"}\n'), "name in the file is malformed"),
            (gzip.compress(b'{"producer": "a"}\n{"producer": "b"}\n'), "several producers"),
        ):
            self.assertRaisesRegex(FileRejected, why, self.bring, spool_name(1), data)
        part = self.store.open_part(ALICE)
        part.write(whole[:-1] + b"\1")
        offer = offer_of(spool_name(1), whole)
        self.assertRaisesRegex(FileRejected, "the bytes differ", self.store.keep, ALICE, offer, part, 0.0)
        with mock.patch.object(store_module, "TEXT_LIMIT", 10_000):
            self.assertRaisesRegex(FileRejected, "bytes after unpacking", self.bring, spool_name(1), packed(count=1000))
        with mock.patch.object(store_module, "LINES_LIMIT", 10):
            self.assertRaisesRegex(FileRejected, "more than 10 lines", self.bring, spool_name(1), packed(count=11))
        self.assertEqual(kept_files(self.root), {})

    def test_a_truncated_file_is_stored(self) -> None:
        """After a crash nothing else of the file exists; the pipeline reads it up to its damaged end."""
        text = b"".join(
            b'{"producer": "02ab", "seq": %d, "x": "%s"}\n' % (n, os.urandom(50).hex().encode()) for n in range(9000)
        )
        data = gzip.compress(text)
        self.bring(spool_name(1), data[: len(data) // 2])
        self.assertEqual(list(kept_files(self.root)), [spool_name(1)])

    def test_a_file_of_several_gzip_members_is_stored(self) -> None:
        """Looking how much text is in it did not end where one was long, and took ever more memory."""
        text = b'{"producer": "02ab"}\n' * 100_000
        data = gzip.compress(text) + gzip.compress(text)
        self.assertEqual(self.bring(spool_name(1), data).read_bytes(), data)

    def test_a_producer_belongs_to_its_first_sender(self) -> None:
        self.bring(spool_name(1), packed("02ab"))
        self.bring(spool_name(2), packed("02ab"))
        self.assertRaisesRegex(FileRejected, "02ab belongs to", self.bring, spool_name(3), packed("02ab"), BOB)
        (self.root / "producers" / "02ab").unlink()  # The producer has moved.
        self.bring(spool_name(3), packed("02ab"), BOB)
        for number in range(PRODUCERS_LIMIT):
            self.bring(spool_name(10 + number), packed(f"a{number}"))
        with self.assertRaisesRegex(FileRejected, "already sent files of 64 entities"):
            self.bring(spool_name(99), packed("one-more"))
        self.bring(spool_name(99), packed("one-more"), BOB)

    def test_a_producer_that_is_a_key_signs_for_its_sender(self) -> None:
        """A sender that is on the list takes the name of another server, and keeps nobody away by that."""
        server = SecKey.from_seed(b"a server")
        name = server.public.hex()
        self.assertRaisesRegex(FileRejected, "signed no voucher", self.bring, spool_name(1), packed(name), BOB)
        for forged in ("00" * 65, SecKey.from_seed(b"x").sign(statement(server.public, BOB)).hex()):
            self.assertRaisesRegex(FileRejected, "signed", self.bring, spool_name(1), packed(name), BOB, voucher=forged)
        for_alice = server.sign(statement(server.public, ALICE)).hex()
        self.assertRaisesRegex(FileRejected, "signed", self.bring, spool_name(1), packed(name), BOB, voucher=for_alice)
        self.bring(spool_name(1), packed(name), voucher=for_alice)
        self.bring(spool_name(2), packed(name))  # The producer is known.
        # The producer has moved to another machine.
        for_bob = server.sign(statement(server.public, BOB)).hex()
        self.bring(spool_name(3), packed(name), BOB, voucher=for_bob)
        self.assertRaisesRegex(FileRejected, "signed no voucher", self.bring, spool_name(4), packed(name))

    def test_a_key_that_was_claimed_before_keys_had_to_sign(self) -> None:
        """The present sender may continue, even if it is not the server's own, until the server signs a voucher for
        another sender.
        """
        server = SecKey.from_seed(b"a server")
        name = server.public.hex()
        (self.root / "producers" / name).write_text(f"{BOB}\n")
        self.bring(spool_name(1), packed(name), BOB)
        self.bring(spool_name(2), packed(name), voucher=server.sign(statement(server.public, ALICE)).hex())
        self.assertRaisesRegex(FileRejected, "signed no voucher", self.bring, spool_name(3), packed(name), BOB)

    def test_the_same_key_in_another_spelling(self) -> None:
        name = SecKey.from_seed(b"a server").public.hex()
        self.assertRaisesRegex(FileRejected, "lower case", self.bring, spool_name(1), packed(name.upper()), BOB)

    def test_the_sender_is_the_producer(self) -> None:
        self.bring(spool_name(1), packed(ALICE.hex()))

    def test_a_claim_that_the_power_cut_is_none(self) -> None:
        (self.root / "producers" / "02ab").touch()
        self.bring(spool_name(1), packed("02ab"), BOB)
        self.assertRaisesRegex(FileRejected, "02ab belongs to", self.bring, spool_name(2), packed("02ab"))

    def test_the_same_name_by_two_streams(self) -> None:
        """The file that was confirmed stays."""
        first, second = packed(count=1), packed(count=2)
        parts = []
        for data in (first, second, first):
            part = self.store.open_part(ALICE)
            part.write(data)
            parts.append(part)
        self.store.keep(ALICE, offer_of(spool_name(1), first), parts[0], 0.0)
        self.assertRaisesRegex(
            FileRejected, "another file", self.store.keep, ALICE, offer_of(spool_name(1), second), parts[1], 0.0
        )
        self.store.discard(parts[1])
        self.store.keep(ALICE, offer_of(spool_name(1), first), parts[2], 0.0)
        self.assertEqual(kept_files(self.root), {spool_name(1): first})
        self.assertEqual(list(self.root.glob("**/.part-*")), [])

    def test_the_limit_of_the_store_holds(self) -> None:
        self.store.close()
        self.store = self.opened(limit=1000)
        self.store.check_room(ALICE, 500)
        self.assertRaisesRegex(StoreFull, "its quota", self.store.check_room, ALICE, 501)
        self.bring(spool_name(1), data := packed())
        self.assertRaisesRegex(StoreFull, "its quota", self.store.check_room, ALICE, 501 - len(data))
        self.store.check_room(BOB, 500)
        self.assertRaisesRegex(StoreFull, "limit", self.store.check_room, BOB, 500, 0, 501 - len(data))
        self.assertRaisesRegex(StoreFull, "its quota", self.store.check_room, BOB, 400, 101, 101)
        next(self.root.glob("*/*/*.gz")).unlink()
        self.store.recount()
        self.store.check_room(ALICE, 500)
        self.store.close()
        self.store = self.opened(reserve=10**18)
        self.assertRaisesRegex(StoreFull, "disk", self.store.check_room, ALICE, 1)

    def test_a_collector_cleans_up_after_a_crash_and_locks_its_directory(self) -> None:
        part = self.store.open_part(ALICE)
        part.write(b"half")
        self.bring(spool_name(1), data := packed())
        self.assertRaisesRegex(StoreError, "in use by another collector", Store(self.root).open)
        self.store.close()
        again = self.opened()
        self.assertFalse(Path(part.name).exists())
        self.assertEqual(again.total, len(data))

    def test_a_directory_that_cannot_be_used_is_an_error(self) -> None:
        self.assertRaisesRegex(StoreError, "cannot be used", Store(Path("/dev/null/x")).open)
