"""Files of this user, in directories where others may write."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from dmsg.apps import descriptors
from dmsg.apps.descriptors import HELD_DIRECTORIES, Descent, NotOurs, is_ours, make_private, open_ours, open_within
from dmsg.apps.parcels.destination import Destination
from dmsg.apps.parcels.manifest import DIRECTORY, FILE, Item
from dmsg.apps.partial_files import HeldPart, hold_part, part_name, part_of
from dmsg.apps.transfer import TransferError

STRANGER = 65534
"""User id of another user of this machine."""


class DirectoryCase(SynchronousTestCase):
    """Test case with a directory."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        self.root.mkdir()
        self.at = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        self.addCleanup(os.close, self.at)

    def hold(self, *, directory: bool = False) -> HeldPart:
        return hold_part("film", self.at, directory=directory)


class StrangerTests(DirectoryCase):
    """Another user has created a file with the name of a part, as anybody can in /tmp."""

    def setUp(self) -> None:
        super().setUp()
        if os.geteuid() != 0:
            raise SkipTest("only root can make files of another user")
        self.part = part_of(self.root / "film")

    def plant(self, kind: str) -> None:
        if kind == "directory":
            self.part.mkdir()
        elif kind == "link":
            self.part.symlink_to("/etc/passwd")
        else:
            self.part.write_bytes(b"theirs")
        if kind != "link":
            self.part.chmod(0o777)
        os.chown(self.part, STRANGER, STRANGER, follow_symlinks=False)

    def remove(self) -> None:
        self.part.rmdir() if self.part.is_dir() else self.part.unlink()

    def test_a_part_of_another_user_is_not_used(self) -> None:
        """The test runs as root, who could use the part: nothing in it is changed, and the message names its owner."""
        for kind in ("file", "directory", "link"):
            for wanted in (False, True):
                self.plant(kind)
                before = self.part.lstat()
                error = self.assertRaises(NotOurs, self.hold, directory=wanted)
                self.assertIn(f"{part_name('film')} is another user's (uid {STRANGER})", str(error))
                now = self.part.lstat()
                self.assertEqual((now.st_mode, now.st_uid, now.st_mtime), (before.st_mode, STRANGER, before.st_mtime))
                self.assertEqual(os.listdir(self.root), [self.part.name], "nothing of a look is left")
                self.remove()

    def test_a_user_meets_a_file_of_root_that_all_may_write(self) -> None:
        """The file is in a directory such as /tmp."""
        shared = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, shared)
        shared.chmod(0o1777)
        part = part_of(shared / "film")
        part.write_bytes(b"theirs")
        part.chmod(0o666)
        at = os.open(shared, os.O_RDONLY)
        self.addCleanup(os.close, at)
        os.seteuid(STRANGER)
        self.addCleanup(os.seteuid, 0)
        self.assertRaises(NotOurs, hold_part, "film", at)
        self.assertEqual(part.read_bytes(), b"theirs")
        held = hold_part("other", at)
        self.assertEqual(part_of(shared / "other").stat().st_uid, STRANGER)
        held.release()

    def test_entries_of_another_user_in_a_part_are_not_used(self) -> None:
        """The entries were created when another user could write to the part's directory."""
        tree = part_of(self.root / "tree")
        tree.mkdir()
        (tree / "a").write_bytes(b"theirs")
        os.chown(tree / "a", STRANGER, STRANGER)
        place = Destination(self.root)
        self.addCleanup(place.release)
        place.hold([("tree", DIRECTORY)])
        list(place.clear(Item("tree", DIRECTORY)))
        self.assertRaises(NotOurs, list, place.clear(Item("tree/a", FILE, 10)))
        self.assertRaises(NotOurs, place.write_from, Item("tree/a", FILE, 10), 0)
        self.assertEqual((tree / "a").read_bytes(), b"theirs")

    def test_file_systems_that_have_other_owners(self) -> None:
        """Some mounted file systems give all files one owner, whoever creates them."""
        path = self.root / "a"
        path.write_bytes(b"")
        os.chown(path, STRANGER, STRANGER)
        self.assertFalse(is_ours(path.stat(), self.at))
        made = descriptors.new_file

        def of_stranger(at: int, name: str) -> int:
            descriptor = made(at, name)
            os.fchown(descriptor, STRANGER, STRANGER)
            return descriptor

        self.patch(descriptors, "new_file", of_stranger)
        self.assertTrue(is_ours(path.stat(), self.at))
        self.assertEqual(os.listdir(self.root), ["a"])


class ModeTests(DirectoryCase):
    """Files of this user that other users could have written to."""

    def test_a_part_that_others_may_have_open(self) -> None:
        """The part is begun again, so that a user who has the old file open writes to a file that nobody reads."""
        part = part_of(self.root / "film")
        part.write_bytes(b"1")
        part.chmod(0o622)
        theirs = os.open(part, os.O_WRONLY)
        self.addCleanup(os.close, theirs)
        held = self.hold()
        os.write(theirs, b"theirs")
        self.assertEqual((held.size, part.read_bytes(), part.stat().st_mode & 0o777), (0, b"", 0o600))
        held.release()

    def test_a_file_system_without_modes_allows_resuming(self) -> None:
        """All files of such a file system have the same mode, so a part is resumed."""
        path = self.root / "a"
        path.write_bytes(b"1")
        path.chmod(0o666)
        descriptor = open_ours("a", self.at, "a")
        self.addCleanup(os.close, descriptor)
        self.patch(os, "fchmod", lambda descriptor, mode: None)
        self.assertTrue(make_private(descriptor))

    def test_files_without_read_permission_are_errors(self) -> None:
        for kind in ("file", "directory"):
            path = self.root / kind
            path.mkdir() if kind == "directory" else path.write_bytes(b"1")
            path.chmod(0)
            os.close(open_ours(kind, self.at, kind))
            path.chmod(0o700)


class ReplacedTests(DirectoryCase):
    """Something is put in the place of what was looked at."""

    def place(self, *entries: Item) -> Destination:
        place = Destination(self.root)
        self.addCleanup(place.release)
        place.hold([(entry.path, entry.kind) for entry in entries if "/" not in entry.path])
        for entry in entries:
            list(place.clear(entry))
        return place

    def test_an_entry_replaced_by_a_link_is_not_followed(self) -> None:
        """No byte, mode or time is written to the target of the link."""
        outside = Path(self.mktemp())
        outside.mkdir(mode=0o755)
        (outside / "file").write_bytes(b"mine")
        before = [outside.stat().st_mtime_ns, (outside / "file").stat().st_mtime_ns]
        tree, below, file = Item("tree", DIRECTORY), Item("tree/b", DIRECTORY, 0, 0o700), Item("tree/b/f", FILE, 4)
        place = self.place(tree, below, file)
        inside = part_of(self.root / "tree")
        (inside / "b").rmdir()
        (inside / "b").symlink_to(outside)
        self.assertRaises(OSError, place.write_from, file, 0)
        self.assertRaises(OSError, list, place.finish([tree, below]))
        (inside / "b").unlink()
        (inside / "b").mkdir()
        (inside / "b" / "f").symlink_to(outside / "file")
        self.assertRaises(OSError, place.write_from, file, 0)
        (inside / "b" / "f").unlink()
        os.link(outside / "file", inside / "b" / "f")
        self.assertRaises(TransferError, place.write_from, file, 0)
        self.assertEqual((outside / "file").read_bytes(), b"mine")
        self.assertEqual([outside.stat().st_mtime_ns, (outside / "file").stat().st_mtime_ns], before)
        self.assertEqual(outside.stat().st_mode & 0o777, 0o755)

    def test_a_replaced_item_gets_no_final_name(self) -> None:
        """The item keeps the name of the part."""
        for kind in (FILE, DIRECTORY):
            entry = Item("a", kind, 0, 0o700)
            place = self.place(entry)
            if kind == FILE:
                place.finish_file(entry, place.write_from(entry, 0))
            part = part_of(self.root / "a")
            part.rename(self.root / "aside")
            part.write_bytes(b"theirs") if kind == FILE else part.mkdir()
            error = self.assertRaises(TransferError, list, place.finish([entry]))
            self.assertIn("a: somebody has replaced it", str(error))
            place.release()
            self.assertFalse((self.root / "a").exists())
            for path in (part, self.root / "aside"):
                path.unlink() if kind == FILE else path.rmdir()

    def test_a_replaced_directory_does_not_redirect_the_transfer(self) -> None:
        """The transfer continues in the directory in which it began, whatever directory has that name now."""
        entry = Item("a", FILE, 0)
        place = self.place(entry)
        moved = Path(self.mktemp())
        self.root.rename(moved)
        self.root.mkdir()
        place.finish_file(entry, place.write_from(entry, 0))
        list(place.finish([entry]))
        self.assertEqual((os.listdir(moved), os.listdir(self.root)), (["a"], []))

    def test_a_directory_above_by_a_link(self) -> None:
        (self.root / "in").mkdir()
        os.close(open_within(self.root, self.root / "in" / "made", make=True))
        (self.root / "in" / "made").rmdir()
        (self.root / "in" / "made").symlink_to("/etc")
        self.assertRaises(OSError, open_within, self.root, self.root / "in" / "made")


class DescentTests(DirectoryCase):
    """Directories one below the other."""

    def test_entries_in_any_order_use_few_descriptors(self) -> None:
        """The same as by paths, with few descriptors however deep it is."""
        paths = [(), ("a",), ("a", "b"), ("a", "c"), ("d",), ("d", *"0123456789abcdef"), ("d", *"012345"), ("a", "b")]
        for parts in paths:
            self.root.joinpath(*parts).mkdir(parents=True, exist_ok=True)
        gc.collect()  # Garbage of earlier tests may hold descriptors.
        before = len(os.listdir("/proc/self/fd"))
        descent = Descent(self.at)
        for one in paths:
            for parts in (*paths, one):
                self.assertTrue(os.path.samestat(os.fstat(descent.at(parts)), self.root.joinpath(*parts).stat()), parts)
                self.assertLessEqual(len(os.listdir("/proc/self/fd")) - before, HELD_DIRECTORIES)
        self.assertRaises(FileNotFoundError, descent.at, ("a", "none", "b"))
        descent.at(("a", "b"))
        descent.close()
        descent.close()
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)
