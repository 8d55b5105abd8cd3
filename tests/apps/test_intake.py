"""Limit on all that peers leave in a directory, and unfinished files that nobody continues."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from dmsg.apps import intake as module
from dmsg.apps.copy_listener import LEFT_AFTER, CopyPeer
from dmsg.apps.intake import (
    CONTINUE_TIME,
    ENTRY_COST,
    PART_LIFETIME,
    SWEEP_INTERVAL,
    Intake,
    IntakeFull,
    OfferRefused,
    Reservation,
    intake_of,
)
from dmsg.apps.parcels.manifest import DIRECTORY, FILE
from dmsg.apps.parcels.wire import encode
from dmsg.apps.partial_files import hold_part, part_name, part_of
from dmsg.filelock import lock_if_can
from dmsg.keys import PubKey, SecKey
from dmsg.net.streams.address import DmsgAddress

NOW = 1_800_000_000.0
"""Time of the system's clock."""
KNOWN = SecKey.from_seed(b"known").public
STRANGER = SecKey.from_seed(b"stranger").public


def file(name: str, size: int) -> tuple[str, str, int, int, int]:
    """Item of an offer: a file."""
    return name, FILE, size, 1, 0


class IntakeCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()
        self.clock = Clock()

    def intake(self, limit: int = 100_000) -> Intake:
        made = Intake(self.clock, limit, KNOWN.__eq__, wall_clock=lambda: NOW + self.clock.seconds())
        self.addCleanup(made.stop)
        return made

    def reserve(
        self, intake: Intake, *things: tuple[str, str, int, int, int], sender: PubKey | None = KNOWN
    ) -> Reservation:
        return intake.reserve(self.root, list(things), sender)

    def interrupt(self, intake: Intake, name: str, size: int, sender: PubKey | None = KNOWN) -> Path:
        """Leave a partial file by an interrupted transfer."""
        reservation = self.reserve(intake, file(name, size), sender=sender)
        path = self.left(name, size, -self.clock.seconds())
        self.successResultOf(intake.settle(reservation, None))
        return path

    def left(self, name: str, size: int, age: float = 0.0) -> Path:
        """Create a partial file that an interrupted transfer has left."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path = part_of(path)
        path.write_bytes(bytes(size))
        os.utime(path, (NOW - age, NOW - age))
        return path


class LimitTests(IntakeCase):
    """What counts."""

    def test_transfers_count_together_while_they_run_and_afterwards(self) -> None:
        intake = self.intake()
        first = self.reserve(intake, file("a", 50_000))
        error = self.assertRaises(IntakeFull, self.reserve, intake, file("b", 50_000))
        self.assertIn("this side accepts 100.0 kB from all its peers together", str(error))
        self.assertIn(" 45.9 kB of that are left", str(error))
        intake.settle(first, 50_000)
        self.assertRaises(IntakeFull, self.reserve, intake, file("b", 50_000))
        self.reserve(intake, file("b", 40_000))

    def test_many_empty_files_count(self) -> None:
        intake = self.intake()
        self.assertRaises(IntakeFull, self.reserve, intake, ("tree", DIRECTORY, 0, 20, 5))
        self.reserve(intake, ("tree", DIRECTORY, 0, 20, 4))

    def test_a_failed_transfer_counts_what_it_has_left(self) -> None:
        intake = self.intake()
        for number in range(3):
            reservation = self.reserve(intake, file(f"film{number}", 80_000))
            intake.settle(reservation, None)
            self.assertEqual(intake.total, 0, "nothing has arrived")
        reservation = self.reserve(intake, file("film", 80_000))
        self.left("film", 30_000)
        intake.settle(reservation, None)
        self.assertEqual(intake.total, 30_000 + ENTRY_COST)
        self.assertRaises(IntakeFull, self.reserve, intake, file("other", 80_000))
        # The sender of the unfinished file can continue it, because its bytes count once.
        again = self.reserve(intake, file("film", 80_000))
        self.assertEqual(intake.total, 80_000 + ENTRY_COST)
        intake.settle(again, 50_000)
        self.assertEqual(intake.total, 80_000 + ENTRY_COST)

    def test_an_interrupted_transfer_can_continue_before_it_is_measured(self) -> None:
        intake = self.intake()
        first = self.reserve(intake, file("film", 80_000))
        first.is_over = True  # The thread that measures the file has not answered.
        second = self.reserve(intake, file("film", 80_000))
        self.left("film", 30_000)
        intake.settle(first, None)
        self.assertEqual(intake.total, 80_000 + ENTRY_COST, "the bytes of the running transfer count once")
        intake.settle(second, None)
        self.assertEqual(intake.total, 30_000 + ENTRY_COST)

    def test_a_refused_second_sender_hides_no_bytes(self) -> None:
        intake = self.intake()
        first = self.reserve(intake, file("film", 40_000))
        busy = self.reserve(intake, file("film", 40_000))
        self.left("film", 30_000)
        intake.settle(busy, None)
        intake.settle(first, None)
        self.assertEqual(intake.total, 30_000 + ENTRY_COST)

    def test_a_refused_second_sender_adds_no_bytes(self) -> None:
        intake = self.intake()
        first = self.reserve(intake, file("film", 40_000))
        self.left("film", 30_000)
        busy = self.reserve(intake, file("film", 40_000))
        self.successResultOf(intake.settle(busy, None))
        self.successResultOf(intake.settle(first, 40_000))
        self.assertEqual((intake.total, intake.of_strangers), (40_000 + ENTRY_COST, 0))
        self.reserve(intake, file("other", 50_000))

    def test_each_file_of_a_failed_transfer_counts(self) -> None:
        """Otherwise a stranger could use up all inodes of the disk, with directories of empty files."""
        intake = self.intake()
        reservation = self.reserve(intake, ("tree", DIRECTORY, 0, 20, 2))
        below = self.root / part_name("tree") / "below"
        below.mkdir(parents=True)
        for number in range(20):
            (below / str(number)).touch()
        self.successResultOf(intake.settle(reservation, None))
        self.assertEqual(intake.total, 22 * ENTRY_COST)
        self.assertRaises(IntakeFull, self.reserve, intake, file("other", 10_000))

    def test_an_empty_file_of_a_failed_transfer_counts(self) -> None:
        intake = self.intake()
        reservation = self.reserve(intake, *(file(str(number), 0) for number in range(3)))
        self.left("2", 0)
        self.successResultOf(intake.settle(reservation, None))
        self.assertEqual(intake.total, ENTRY_COST)

    def test_texts_count(self) -> None:
        """What strangers write to the log of a listener is on the disk, too."""
        intake = self.intake()
        for _ in range(2):
            intake.add_text("x" * 15_000, STRANGER)
        error = self.assertRaises(IntakeFull, intake.add_text, "x" * 15_000, STRANGER)
        self.assertIn("all peers together that are not in its address book", str(error))
        self.assertGreaterEqual(intake.of_strangers, 2 * (15_000 + ENTRY_COST))
        intake.add_text("x" * 15_000, KNOWN)
        self.assertRaises(IntakeFull, self.reserve, intake, file("film", 60_000))

    def test_a_text_counts_what_a_log_of_json_needs(self) -> None:
        intake = self.intake(1_000_000)
        intake.add_text("\0" * 15_000, STRANGER)
        self.assertGreaterEqual(intake.total, 6 * 15_000)

    def test_a_replaced_file_does_not_count_twice(self) -> None:
        intake = self.intake(200_000)
        for number in range(1, 6):
            intake.settle(self.reserve(intake, file("backup", 80_000)), 80_000)
            (self.root / "backup").write_bytes(bytes(80_000))
            self.assertEqual(intake.total, 80_000 + ENTRY_COST * number)

    def test_a_file_that_exists_already_counts_nearly_nothing(self) -> None:
        intake = self.intake()
        intake.settle(self.reserve(intake, file("same", 90_000)), 0)
        self.assertEqual(intake.total, ENTRY_COST)

    def test_unfinished_files_are_limited_in_number(self) -> None:
        self.patch(module, "PARTS_LIMIT", 3)
        intake = self.intake()
        for name in "abc":
            self.reserve(intake, file(name, 1))
        error = self.assertRaises(IntakeFull, self.reserve, intake, file("d", 1))
        self.assertIn("unfinished files", str(error))

    def test_refused_offers_are_counted_by_reason(self) -> None:
        intake = self.intake()
        full, many = IntakeFull("5 B are too much", "bytes"), IntakeFull("3 unfinished files", "parts")
        self.assertEqual(intake.refusal_line(full, "bob"), "an offer of bob is refused: 5 B are too much")
        self.assertEqual([intake.refusal_line(full, "eve") for _ in range(9)], [None] * 9)
        self.assertIn("unfinished", intake.refusal_line(many, "eve") or "")
        self.clock.advance(60)
        self.assertIn(", and 9 more since the last line", intake.refusal_line(full, "eve") or "")

    def test_only_strangers_have_a_limit_by_default(self) -> None:
        self.assertIsNone(intake_of(self.clock, None, KNOWN.__eq__, anyone=False))
        self.assertIsNotNone(intake_of(self.clock, None, KNOWN.__eq__, anyone=True))
        allowed = intake_of(self.clock, 50_000, KNOWN.__eq__, anyone=False)
        assert allowed is not None
        self.reserve(allowed, file("a", 40_000), sender=STRANGER)  # --allow names each of its peers.

    def test_a_listener_of_copies_tells_the_sender_why(self) -> None:
        intake = self.intake(50_000)
        peer = CopyPeer(self.clock, self.root, writable=True, intake=intake)
        said = StringTransport()
        peer.makeConnection(said)
        peer.dataReceived(encode(op="put-tree", path=""))
        item = {"name": "film", "kind": FILE, "size": 60_000, "files": 1, "directories": 0}
        peer.dataReceived(encode(offer="files", things=[item], size=60_000, files=1))
        self.failureResultOf(peer.done, IntakeFull)
        self.assertIn(b"from all peers together that are not in its address book", said.value())
        self.assertEqual((intake.total, os.listdir(self.root)), (0, []))


class StrangersTests(IntakeCase):
    """Strangers use up only their own part of the limits."""

    def test_known_peers_have_a_reserve(self) -> None:
        intake = self.intake(200_000)
        for number in range(3):
            intake.settle(self.reserve(intake, file(f"s{number}", 25_000), sender=STRANGER), 25_000)
        error = self.assertRaises(
            IntakeFull, self.reserve, intake, file("more", 25_000), sender=SecKey.generate().public
        )
        self.assertIn("accepts 100.0 kB from all peers together that are not in its address book", str(error))
        self.assertIn(" 12.7 kB of that are left", str(error))
        self.assertRaises(IntakeFull, self.reserve, intake, file("more", 25_000), sender=None)
        self.reserve(intake, file("k", 100_000))
        self.assertRaises(IntakeFull, self.reserve, intake, file("more", 10_000), sender=STRANGER)
        self.assertEqual(intake.of_strangers, 3 * (25_000 + ENTRY_COST))

    def test_an_offer_that_is_never_sent_takes_nothing_from_known_peers(self) -> None:
        intake = self.intake(200_000)
        self.reserve(intake, file("endless", 95_000), sender=STRANGER)
        self.reserve(intake, file("k", 95_000))

    def test_unfinished_files_of_strangers_make_room(self) -> None:
        """The oldest goes first, and only as many as needed."""
        intake = self.intake(200_000)
        first = self.interrupt(intake, "first", 30_000, STRANGER)
        self.clock.advance(1)
        second = self.interrupt(intake, "second", 30_000, STRANGER)
        again = self.reserve(intake, file("third", 20_000), sender=STRANGER)
        self.assertRaises(IntakeFull, self.reserve, intake, file("new", 30_000), sender=STRANGER)
        self.clock.advance(CONTINUE_TIME)
        # An offer that does not fit in any case removes nothing.
        self.assertRaises(IntakeFull, self.reserve, intake, file("new", 90_000), sender=STRANGER)
        self.assertTrue(first.exists())
        self.reserve(intake, file("new", 30_000), sender=STRANGER)
        self.assertEqual((first.exists(), second.exists()), (False, True))
        self.assertEqual(intake.of_strangers, 84_000 + 3 * ENTRY_COST - 4_000)
        self.clock.advance(1)
        self.reserve(intake, file("k", 110_000))
        self.assertFalse(second.exists())
        self.successResultOf(intake.settle(again, None))

    def test_files_of_known_peers_and_files_that_are_continued_stay(self) -> None:
        intake = self.intake(200_000)
        known = self.interrupt(intake, "known", 30_000)
        continued = self.interrupt(intake, "continued", 30_000, STRANGER)
        elsewhere = self.interrupt(intake, "elsewhere", 30_000, STRANGER)
        self.clock.advance(CONTINUE_TIME + 1)
        self.reserve(intake, file("continued", 40_000), sender=STRANGER)
        with elsewhere.open("r+b") as file_of_other_program:
            self.assertTrue(lock_if_can(file_of_other_program.fileno()))
            before = intake.total
            self.reserve(intake, file("big", 90_000))
            self.assertEqual(intake.total, before + 90_000 + ENTRY_COST, "the locked file still counts")
        self.assertTrue(known.exists() and continued.exists() and elsewhere.exists())
        self.assertRaises(IntakeFull, self.reserve, intake, file("bigger", 150_000))

    def test_unfinished_files_in_number(self) -> None:
        self.patch(module, "PARTS_LIMIT", 4)
        intake = self.intake()
        for name in "ab":
            self.interrupt(intake, name, 1, STRANGER)
        error = self.assertRaises(IntakeFull, self.reserve, intake, file("c", 1), sender=STRANGER)
        self.assertIn("this side has 2 unfinished files from all peers together that are not", str(error))
        for name in "kl":
            self.reserve(intake, file(name, 1))
        self.assertRaises(IntakeFull, self.reserve, intake, file("m", 1))
        self.clock.advance(CONTINUE_TIME + 1)
        self.reserve(intake, file("c", 1), sender=STRANGER)
        self.reserve(intake, file("m", 1))
        self.assertEqual(os.listdir(self.root), [])

    def test_strangers_do_not_take_over_files_of_known_peers(self) -> None:
        """They would replace the data that has arrived, and learn its hash."""
        intake = self.intake(200_000)
        self.interrupt(intake, "film", 30_000)
        error = self.assertRaises(OfferRefused, self.reserve, intake, file("film", 10), sender=STRANGER)
        self.assertIn("film is unfinished here, and a known peer has sent it", str(error))
        self.assertEqual(intake.of_strangers, 0)
        again = self.reserve(intake, file("film", 30_000))
        self.successResultOf(intake.settle(again, 0))
        self.reserve(intake, file("film", 10), sender=STRANGER)

    def test_strangers_do_not_take_over_a_file_before_it_is_measured(self) -> None:
        intake = self.intake(200_000)
        self.reserve(intake, file("film", 30_000)).is_over = True
        self.assertRaises(OfferRefused, self.reserve, intake, file("film", 10), sender=STRANGER)

    def test_a_stranger_does_not_end_the_interrupted_copy_of_a_known_peer(self) -> None:
        """The stream of the known peer can still be resumed."""
        intake = self.intake(200_000)
        busy: dict[Path, CopyPeer] = {}
        item = {"name": "film", "kind": FILE, "size": 60_000, "files": 1, "directories": 0}
        peers, transports = [], []
        for key in (KNOWN, STRANGER):
            peers.append(CopyPeer(self.clock, self.root, writable=True, intake=intake, busy=busy))
            transports.append(StringTransport(peerAddress=DmsgAddress(key, 1)))
            peers[-1].makeConnection(transports[-1])
            peers[-1].dataReceived(encode(op="put-tree", path=""))
            peers[-1].dataReceived(encode(offer="files", things=[item], size=60_000, files=1))
            transports[0].away_since = self.clock.seconds()  # type: ignore[attr-defined]
            self.clock.advance(LEFT_AFTER + 1)
        self.failureResultOf(peers[1].done, OfferRefused)
        self.assertIn(b"a known peer has sent it", transports[1].value())
        self.assertNoResult(peers[0].done)
        self.assertFalse(transports[0].disconnecting or transports[0].disconnected)
        peers[0].done.addErrback(lambda _: None)
        peers[0].connectionLost()


class SweepTests(IntakeCase):
    """Unfinished files that nobody continues."""

    def test_old_ones_are_removed_and_others_count(self) -> None:
        day = 86400.0
        mine = self.left("mine", 10_000, 30 * day)
        intake = self.intake()
        intake.start()
        self.clock.pump([SWEEP_INTERVAL])
        self.assertEqual(intake.total, 0, "nobody has left it while the command runs")
        old = self.interrupt(intake, "old", 10_000)
        reservation = self.reserve(intake, ("tree", DIRECTORY, 5_000, 1, 1))
        tree = self.root / part_name("tree")
        (tree / "below").mkdir(parents=True)
        (tree / "below" / "film").write_bytes(bytes(5_000))
        for path, age in ((tree / "below" / "film", -2 * day), (tree / "below", 9 * day), (tree, 9 * day)):
            os.utime(path, (NOW - age, NOW - age))
        self.successResultOf(intake.settle(reservation, None))
        (self.root / "film").write_bytes(b"complete")
        os.utime(self.root / "film", (0, 0))
        self.assertGreater(intake.total, 15_000)
        self.clock.advance(6 * day)
        self.assertTrue(old.exists())
        self.clock.advance(1 * day + SWEEP_INTERVAL)
        self.assertFalse(old.exists())
        self.assertTrue(tree.exists(), "a file in it was written later")
        self.clock.advance(2 * day)
        self.assertFalse(tree.exists())
        self.assertTrue(mine.exists())
        self.assertEqual((intake.total, sorted(os.listdir(self.root))), (0, [mine.name, "film"]))

    def test_a_file_that_is_being_written_stays(self) -> None:
        intake = self.intake()
        intake.start()
        path = self.interrupt(intake, "film", 10_000)
        at = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        self.addCleanup(os.close, at)
        held = hold_part("film", at)
        self.clock.advance(PART_LIFETIME + SWEEP_INTERVAL)
        self.assertTrue(path.exists())
        held.release()
        self.clock.advance(SWEEP_INTERVAL)
        self.assertFalse(path.exists())

    def test_a_file_that_the_user_has_removed_does_not_count(self) -> None:
        intake = self.intake()
        intake.start()
        self.interrupt(intake, "film", 10_000).unlink()
        self.clock.advance(SWEEP_INTERVAL)
        self.assertEqual(intake.total, 0)

    def test_a_link_is_not_followed(self) -> None:
        elsewhere = Path(self.mktemp()).absolute()
        elsewhere.mkdir()
        (elsewhere / "mine").write_bytes(b"mine")
        os.utime(elsewhere, (0, 0))
        intake = self.intake()
        intake.start()
        self.interrupt(intake, "film", 10_000).unlink()
        (self.root / part_name("film")).symlink_to(elsewhere)
        self.clock.advance(PART_LIFETIME + SWEEP_INTERVAL)
        self.assertEqual(os.listdir(elsewhere), ["mine"])
