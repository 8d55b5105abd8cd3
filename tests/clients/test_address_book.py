"""The address book, as programs that run for long ask it."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from dmsg.clients import address_book
from dmsg.clients.address_book import AddressBook, NoSuchName, UnknownName
from dmsg.directory_checks import read_trusted
from dmsg.keys import SecKey

ALICE, BOB = (SecKey.from_seed(name).public for name in (b"alice", b"bob"))


class ReadingTests(SynchronousTestCase):
    """The file is read when it has changed, and not for each question."""

    def setUp(self) -> None:
        self.path = Path(self.mktemp())
        self.patch(address_book, "_last", {})

    def test_an_unchanged_book_is_read_once(self) -> None:
        read: list[Path] = []
        text_of = read_trusted

        def counted(path: Path) -> str:
            read.append(path)
            return text_of(path)

        self.patch(address_book, "read_trusted", counted)
        self.patch(address_book, "MIN_CACHED_AGE", -1.0)
        AddressBook(self.path).add("alice", ALICE)
        for _ in range(5):
            self.assertEqual(AddressBook(self.path).find("alice"), ALICE)
            self.assertEqual(AddressBook(self.path).name_of(ALICE), "alice")
        self.assertEqual(len(read), 1)

    def test_a_changed_book_is_read_again(self) -> None:
        book = AddressBook(self.path)
        self.assertRaises(NoSuchName, book.find, "alice")
        book.add("alice", ALICE)
        self.assertEqual(book.find("alice"), ALICE)
        book.add("alice", BOB, replace=True)
        self.assertEqual(AddressBook(self.path).find("alice"), BOB)
        self.path.write_text(f"bob {BOB}\n")
        self.assertEqual(list(book.all()), ["bob"])
        before = self.path.stat()
        self.path.write_text(f"bob {ALICE}\n")
        os.utime(self.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        self.assertEqual(book.find("bob"), ALICE, "at once, and with the time of the first")
        self.path.write_text("bob\n")
        self.assertRaises(UnknownName, book.find, "bob")
        self.path.unlink()
        self.assertEqual(book.all(), {})

    def test_the_returned_names_are_a_copy(self) -> None:
        book = AddressBook(self.path)
        book.add("alice", ALICE)
        book.all().clear()
        self.assertEqual(book.find("alice"), ALICE)
