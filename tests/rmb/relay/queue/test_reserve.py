"""Disk space that a queue reserves, on a disk of a size that the test sets."""

from __future__ import annotations

import os
from types import SimpleNamespace

from twisted.trial.unittest import SynchronousTestCase

from dmsg.rmb.relay.queue import reserve
from dmsg.rmb.relay.queue.reserve import SUFFIX, Reserve


class ReserveTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(reserve, "MIN_RESERVE", 1000)
        self.path = self.mktemp()
        self.reserve = Reserve(self.path, 10_000)
        self.allocate = os.posix_fallocate

    def make_disk(self, size: int) -> None:
        """Make a disk on which no file can grow beyond ``size`` bytes."""

        def limited(descriptor: int, offset: int, length: int) -> None:
            if offset + length > size:
                raise OSError("no space left on device")
            self.allocate(descriptor, offset, length)

        self.patch(os, "posix_fallocate", limited)

    def reserved(self) -> int:
        return os.path.getsize(self.path + SUFFIX)

    def test_half_as_much_again_must_be_free(self) -> None:
        """Otherwise the first messages that the queue takes would fill the disk again."""
        for disk, enough in ((14_999, False), (15_000, True)):
            self.make_disk(disk)
            self.assertIs(self.reserve.take(), enough)
            self.assertEqual(self.reserved(), 10_000)

    def test_free_pages_of_the_database_count_as_free_space(self) -> None:
        for unused, disk, enough in (
            (1000, 13_999, False),
            (1000, 14_000, True),
            (4999, 10_000, False),
            (4999, 10_001, True),
            (5000, 10_000, True),
            (9000, 10_000, True),
        ):
            self.make_disk(disk)
            self.assertIs(self.reserve.take(unused), enough, (unused, disk))
            self.assertEqual(self.reserved(), 10_000)
            self.reserve.release()

    def test_a_nearly_full_disk_yields_a_smaller_reserve(self) -> None:
        """Half of the reserve, or a quarter, and so on, but no useless crumbs."""
        for disk, reserved in ((9999, 5000), (5000, 5000), (4999, 2500), (1250, 1250), (1249, 0)):
            self.make_disk(disk)
            self.assertFalse(self.reserve.take())
            self.assertEqual(self.reserved(), reserved, disk)
            self.reserve.release()

    def test_systems_that_cannot_allocate_write_the_bytes(self) -> None:
        names = [name for name in dir(os) if name != "posix_fallocate"]
        self.patch(reserve, "os", SimpleNamespace(**{name: getattr(os, name) for name in names}))
        one = Reserve(self.path, 10_001)
        self.assertTrue(one.take())
        self.assertEqual(self.reserved(), 10_001)

    def test_a_file_fits_into_the_reserve_up_to_half_of_its_size(self) -> None:
        """A missing file has nothing that must fit."""
        self.assertTrue(self.reserve.suffices_for(self.path))
        for size, fits in ((0, True), (4999, True), (5000, True), (5001, False), (20_000, False)):
            with open(self.path, "wb") as file:
                file.truncate(size)
            self.assertIs(self.reserve.suffices_for(self.path), fits, size)
