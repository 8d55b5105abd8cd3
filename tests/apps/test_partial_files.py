"""Partial files: each is written by one transfer at a time."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from dmsg.apps import descriptors, partial_files
from dmsg.apps.copy_listener import CopyPeer
from dmsg.apps.parcels import destination
from dmsg.apps.parcels.destination import HELD_PARTS, Destination
from dmsg.apps.parcels.manifest import DIRECTORY, FILE
from dmsg.apps.parcels.wire import encode
from dmsg.apps.partial_files import IS_BUSY, HeldPart, hold_part, part_name, part_of
from dmsg.apps.transfer import TransferError

LOCKS = """
import os
import sys
from pathlib import Path
from dmsg.apps.partial_files import hold_part, part_of
target = Path(sys.argv[1])
hold_part(target.name, os.open(target.parent, os.O_RDONLY))
part_of(target).write_bytes(b"theirs")
print("held", flush=True)
sys.stdin.read()
"""


class HoldTests(SynchronousTestCase):
    """Parts of one target."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        self.root.mkdir()
        self.target = self.root / "film"
        self.part = part_of(self.target)
        self.at = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        self.addCleanup(os.close, self.at)

    def hold(self, name: str = "film", *, directory: bool = False) -> HeldPart:
        return hold_part(name, self.at, directory=directory)

    def busy(self, *, directory: bool = False) -> None:
        error = self.assertRaises(TransferError, self.hold, directory=directory)
        self.assertEqual(str(error), f"film {IS_BUSY}")

    def test_a_part_has_one_writer_at_a_time(self) -> None:
        for directory in (False, True):
            held = self.hold(directory=directory)
            self.busy(directory=directory)
            held.release()
            held.release()
            self.assertEqual(os.listdir(self.root), [], "an empty part is nothing to go on with")
            self.hold(directory=directory).release()

    def test_a_part_keeps_the_bytes_received(self) -> None:
        held = self.hold()
        self.assertEqual(held.size, 0)
        self.part.write_bytes(b"12345")
        held.release()
        again = self.hold()
        self.assertEqual(again.size, 5)
        again.release()
        held = self.hold("tree", directory=True)
        (part_of(self.root / "tree") / "a").write_bytes(b"1")
        held.release()
        self.assertEqual((part_of(self.root / "tree") / "a").read_bytes(), b"1")

    def test_a_part_of_another_kind_is_replaced_unless_in_use(self) -> None:
        """A part in use stays."""
        for directory in (False, True):
            held = self.hold(directory=directory)
            (self.part / "a" if directory else self.part).write_bytes(b"1")
            self.busy(directory=not directory)
            self.assertTrue(self.part.exists())
            held.release()
            other = self.hold(directory=not directory)
            self.assertEqual((self.part.is_dir(), other.size), (not directory, 0))
            other.release()
            self.assertEqual(os.listdir(self.root), [])

    def test_links_and_pipes_in_place_of_a_part_are_removed(self) -> None:
        """Links, which would lead elsewhere, and pipes, at which one would wait."""
        outside = self.root / "outside"
        outside.write_bytes(b"theirs")
        for plant in (
            lambda: self.part.symlink_to(outside),
            lambda: self.part.symlink_to("nowhere"),
            lambda: os.link(outside, self.part),
            lambda: os.mkfifo(self.part),
        ):
            plant()
            held = self.hold()
            self.assertEqual((held.size, self.part.is_symlink(), self.part.stat().st_nlink), (0, False, 1))
            held.release()
            self.assertEqual(os.listdir(self.root), ["outside"])
        self.assertEqual(outside.read_bytes(), b"theirs")

    def test_a_resumed_part_is_made_private(self) -> None:
        """A complete file with its final mode can be resumed as well; its mode is reduced to this user."""
        self.part.write_bytes(b"1")
        for mode in (0o000, 0o644):
            self.part.chmod(mode)
            self.hold().release()
            self.assertEqual(self.part.stat().st_mode & 0o777, 0o600)

    def test_a_finished_part_gets_the_target_name(self) -> None:
        """The target's name may be the name of another target's part, which stays."""
        held = self.hold()
        self.part.write_bytes(b"whole")
        self.part.rename(self.target)
        second = self.hold()
        held.release()
        self.busy()
        second.release()
        self.assertEqual(os.listdir(self.root), ["film"])

    def test_a_part_released_during_the_request_is_begun_again(self) -> None:
        """A process that opened the part just before it was completed begins another part."""
        held = self.hold()
        self.part.write_bytes(b"whole")
        opened = descriptors.open_ours

        def open_and_lose(name: str, at: int, shown: str) -> int:
            descriptor = opened(name, at, shown)
            if not self.target.exists():
                self.part.rename(self.target)
                held.release()
            return descriptor

        self.patch(partial_files, "open_ours", open_and_lose)
        second = self.hold()
        self.assertEqual((second.size, self.target.read_bytes()), (0, b"whole"))
        second.release()

    def test_a_lock_lasts_until_its_process_ends(self) -> None:
        """The lock ends with its process, even if the process is killed."""
        process = subprocess.Popen(
            [sys.executable, "-c", LOCKS, self.target], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        assert process.stdout is not None
        self.assertEqual(process.stdout.readline(), b"held\n")
        self.busy()
        self.busy(directory=True)
        process.kill()
        process.wait()
        held = self.hold()
        self.assertEqual(held.size, 6)
        held.release()

    def test_a_part_that_cannot_be_created_raises_a_clear_error(self) -> None:
        self.root.rmdir()
        self.assertRaises(FileNotFoundError, self.hold)

    def test_a_part_replaced_during_the_transfer_is_not_removed(self) -> None:
        """The file with the part's name is then another file and is not removed."""
        held = self.hold()
        self.part.unlink()
        self.part.symlink_to("elsewhere")
        held.release()
        self.assertTrue(self.part.is_symlink(), "it is not ours to take away")


class PlaceTests(SynchronousTestCase):
    """Names of the parts of a parcel's items."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        self.root.mkdir()

    def test_all_parts_of_a_parcel_are_held_or_none(self) -> None:
        other = Destination(self.root)
        other.hold([("b", FILE)])
        mine = Destination(self.root)
        self.assertRaises(TransferError, mine.hold, [("a", FILE), ("b", FILE)])
        self.assertEqual(os.listdir(self.root), [part_name("b")])
        other.release()
        mine.hold([("a", FILE), ("b", DIRECTORY)])
        self.assertRaises(TransferError, Destination(self.root).hold, [("b", FILE)])
        mine.release()
        self.assertEqual(os.listdir(self.root), [])

    def test_a_parcel_of_a_thousand_items_uses_few_descriptors(self) -> None:
        """A parcel of a thousand things takes no more than its share of them."""
        gc.collect()  # Garbage of earlier tests may hold descriptors.
        before = len(os.listdir("/proc/self/fd"))
        place = Destination(self.root)
        names = [(f"{number:04}", FILE) for number in range(1000)]
        place.hold(names)
        self.assertEqual(len(os.listdir("/proc/self/fd")) - before, HELD_PARTS + 1)
        self.assertRaises(TransferError, Destination(self.root).hold, names)
        place.release()
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)


class PeerTests(SynchronousTestCase):
    """Answer of a listener about a part that cannot be created."""

    def test_the_error_names_the_file(self) -> None:
        root = Path(self.mktemp())
        root.mkdir()

        def hold(name: str, at: int, *, directory: bool) -> None:
            raise PermissionError(13, "Permission denied", part_name(name))

        self.patch(destination, "hold_part", hold)
        peer = CopyPeer(Clock(), root, writable=True)
        transport = StringTransport()
        peer.makeConnection(transport)
        peer.dataReceived(encode(op="put-tree", path=""))
        things = [{"name": "film", "kind": "f", "size": 1, "files": 1, "directories": 0}]
        peer.dataReceived(encode(offer="files", things=things, size=1, files=1))
        self.assertIn(b'"film: Permission denied"', transport.value())
        self.failureResultOf(peer.done, TransferError)
        self.assertTrue(transport.disconnecting)
