"""The simulated disk: what a power cut keeps, and operations that fail."""

from __future__ import annotations

import errno
from random import Random

from twisted.trial.unittest import SynchronousTestCase

from dmsg.testing.disk import SECTOR_SIZE, Disk, DiskFile, Operation, PowerLost


class DiskTests(SynchronousTestCase):
    """A disk with one file, whose first content is synced."""

    def setUp(self) -> None:
        self.disk, self.file = self.make(0)

    @staticmethod
    def make(seed: int) -> tuple[Disk, DiskFile]:
        disk = Disk(Random(seed))
        file = disk.open("a", create=True)
        disk.write(file, 0, b"1" * 3 * SECTOR_SIZE)
        disk.sync(file)
        disk.sync_names()
        return disk, file

    def after_power_cuts(self, *changes: tuple[int, bytes | None]) -> set[bytes]:
        """Return the contents of the file after power cuts with many seeds."""
        found = set()
        for seed in range(300):
            disk, file = self.make(seed)
            for offset, data in changes:
                if data is None:
                    disk.truncate(file, offset)
                else:
                    disk.write(file, offset, data)
            disk.cut_power()
            disk.restore_power()
            found.add(bytes(disk.open("a").content))
        return found

    def test_what_was_synced_is_kept(self) -> None:
        self.assertEqual({b"1" * 3 * SECTOR_SIZE}, self.after_power_cuts())

    def test_each_sector_of_an_unsynced_write_is_kept_or_lost(self) -> None:
        sectors = {
            one * SECTOR_SIZE + two * SECTOR_SIZE + b"1" * SECTOR_SIZE for one in (b"1", b"2") for two in (b"1", b"2")
        }
        self.assertEqual(sectors, self.after_power_cuts((0, b"2" * 2 * SECTOR_SIZE)))

    def test_a_write_within_a_sector_is_not_torn(self) -> None:
        rest = b"1" * (3 * SECTOR_SIZE - 4)
        self.assertEqual({b"1111" + rest, b"1221" + rest}, self.after_power_cuts((1, b"22")))

    def test_a_sector_keeps_its_changes_up_to_one_of_them(self) -> None:
        """A later change of a sector contains the earlier ones, because a disk writes whole sectors."""
        rest = b"1" * (3 * SECTOR_SIZE - 2)
        self.assertEqual({b"11" + rest, b"21" + rest, b"23" + rest}, self.after_power_cuts((0, b"2"), (1, b"3")))

    def test_a_longer_file_may_have_its_old_size_or_zeros(self) -> None:
        old, new = b"1" * 3 * SECTOR_SIZE, b"2" * SECTOR_SIZE
        self.assertEqual({old, old + new, old + bytes(SECTOR_SIZE)}, self.after_power_cuts((3 * SECTOR_SIZE, new)))

    def test_a_file_may_be_truncated(self) -> None:
        self.assertEqual(
            {b"1" * 3 * SECTOR_SIZE, b"1" * SECTOR_SIZE},
            {one for one in self.after_power_cuts((SECTOR_SIZE, None)) if 0 not in one},
        )

    def test_a_name_is_lost_until_the_directory_is_synced(self) -> None:
        found = set()
        for seed in range(30):
            disk, _ = self.make(seed)
            disk.sync(disk.open("b", create=True))
            disk.delete("a")
            disk.cut_power()
            disk.restore_power()
            found.add((disk.exists("a"), disk.exists("b")))
        self.assertEqual({(True, True), (True, False), (False, True), (False, False)}, found)
        self.disk.sync(self.disk.open("b", create=True))
        self.disk.sync_names()
        self.disk.cut_power()
        self.disk.restore_power()
        self.assertTrue(self.disk.exists("b"))

    def test_without_power_nothing_works(self) -> None:
        self.disk.cut_at = self.disk.operations + 2
        self.disk.write(self.file, 0, b"2")
        self.assertRaises(PowerLost, self.disk.sync, self.file)
        for call in (
            lambda: self.disk.write(self.file, 0, b"2"),
            lambda: self.disk.read(self.file, 0, 1),
            lambda: self.disk.open("a"),
            lambda: self.disk.exists("a"),
            lambda: self.disk.delete("a"),
            self.disk.sync_names,
        ):
            self.assertRaises(PowerLost, call)

    def test_a_full_disk_still_overwrites(self) -> None:
        self.disk.capacity = 3 * SECTOR_SIZE
        error = self.assertRaises(OSError, self.disk.write, self.file, 3 * SECTOR_SIZE, b"2")
        self.assertEqual(errno.ENOSPC, error.errno)
        self.disk.write(self.file, 0, b"2")
        self.disk.capacity = None
        self.disk.write(self.file, 3 * SECTOR_SIZE, b"2")

    def test_one_operation_fails(self) -> None:
        self.disk.fail(Operation.WRITE, after=1)
        self.disk.write(self.file, 0, b"2")
        self.assertRaises(OSError, self.disk.write, self.file, 0, b"3")
        self.disk.write(self.file, 1, b"4")
        self.assertEqual(b"241", self.disk.read(self.file, 0, 3))

    def test_after_a_failed_sync_another_sync_does_not_help(self) -> None:
        """Linux takes the pages for written, although they are not."""
        found = set()
        for seed in range(30):
            disk, file = self.make(seed)
            disk.fail(Operation.SYNC)
            disk.write(file, 0, b"2")
            self.assertRaises(OSError, disk.sync, file)
            disk.sync(file)
            self.assertEqual(b"2", disk.read(file, 0, 1))
            disk.cut_power()
            disk.restore_power()
            found.add(disk.read(disk.open("a"), 0, 1))
        self.assertEqual({b"1", b"2"}, found)
