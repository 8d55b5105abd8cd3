"""Changes of several programs to one file."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from dmsg import shared_files
from dmsg.clients.address_book import AddressBook, UnknownName
from dmsg.keys import SecKey
from dmsg.shared_files import FileBusy, exclusive_change, replace_file


class ExclusiveChangeTests(SynchronousTestCase):
    """Locks around a change."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "file"

    def test_no_change_of_several_programs_is_lost(self) -> None:
        self.path.write_text("0")

        def count() -> None:
            for _ in range(20):
                with exclusive_change(self.path):
                    replace_file(self.path, str(int(self.path.read_text()) + 1))

        threads = [threading.Thread(target=count) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        self.assertEqual(self.path.read_text(), "80")
        self.assertEqual(os.listdir(self.directory), ["file"])

    def test_a_lock_that_is_held_ends_the_wait_with_an_error(self) -> None:
        with exclusive_change(self.path), self.assertRaises(FileBusy) as raised:  # noqa: SIM117
            with exclusive_change(self.path, timeout=0.0):
                self.fail("two held the lock")
        self.assertIn(str(self.path), str(raised.exception))

    def test_a_lock_file_of_a_killed_program_blocks_nobody(self) -> None:
        Path(f"{self.path}.lock").touch()
        with exclusive_change(self.path, timeout=0.0):
            replace_file(self.path, "new")
        self.assertEqual(self.path.read_text(), "new")

    def test_a_failed_replacement_leaves_the_old_file_alone(self) -> None:
        self.path.write_text("old")

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        self.patch(os, "fsync", full)
        self.assertRaises(OSError, replace_file, self.path, "new")
        self.assertRaises(OSError, replace_file, self.path, "newer")
        self.assertEqual(self.path.read_text(), "old")
        self.assertEqual(os.listdir(self.directory), ["file"])

    def test_a_link_and_the_mode_of_its_target_stay(self) -> None:
        self.path.write_text("old")
        self.path.chmod(0o640)
        link = self.directory / "link"
        link.symlink_to("file")
        replace_file(link, "new")
        self.assertTrue(link.is_symlink())
        self.assertEqual((self.path.read_text(), self.path.stat().st_mode & 0o777), ("new", 0o640))

    def test_the_address_book_says_that_it_is_being_changed(self) -> None:
        self.patch(shared_files, "LOCK_TIMEOUT", 0.0)
        book = AddressBook(self.path)
        with open(f"{self.path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            error = self.assertRaises(UnknownName, book.add, "alice", SecKey.from_seed(b"alice").public)
        self.assertIn("another program is changing this file", str(error))
