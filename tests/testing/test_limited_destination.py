"""Directory for received files on a disk that may become full."""

from __future__ import annotations

import errno
from collections import deque
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from dmsg.apps.parcels.manifest import FILE, Item
from dmsg.testing.limited_destination import LimitedDestination


class LimitedDestinationTests(SynchronousTestCase):
    """A file of five bytes on a disk that has room for two."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.place = LimitedDestination(self.directory)
        self.addCleanup(self.place.release)
        self.item = Item("thing", FILE, 5, 0o644, 0)
        deque(self.place.clear(self.item), 0)

    def test_a_full_disk_takes_a_part_of_a_write_and_then_refuses(self) -> None:
        self.place.room = 2
        with self.place.write_from(self.item, 0) as file:
            self.assertEqual(file.write(b"hello"), 2)
            self.assertEqual(self.place.free(), 0)
            self.assertEqual(self.assertRaises(OSError, file.write, b"llo").errno, errno.ENOSPC)
        self.assertEqual((self.directory / ".thing.dmsg-part").read_bytes(), b"he")

    def test_a_disk_that_is_freed_soon_takes_the_rest(self) -> None:
        self.place.room, self.place.is_freed_soon = 2, True
        with self.place.write_from(self.item, 0) as file:
            self.assertEqual((file.write(b"hello"), file.write(b"llo")), (2, 3))
        self.assertEqual((self.directory / ".thing.dmsg-part").read_bytes(), b"hello")
