"""A file that is there as a whole, or not at all."""

import os
import stat
import threading
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from dmsg.analytics.atomic_write import write_atomically
from dmsg.errors import DmsgError


class AtomicWriteTests(SynchronousTestCase):
    """Writes on a real disk."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "report.html"

    def left(self) -> list[str]:
        """Return the names in the directory."""
        return sorted(path.name for path in self.directory.iterdir())

    def test_an_existing_file_is_replaced(self) -> None:
        for data in (b"one", b"two"):
            write_atomically(self.path, data)
            self.assertEqual(self.path.read_bytes(), data)
        self.assertEqual(self.left(), ["report.html"])

    def test_a_link_stays_one(self) -> None:
        self.path.symlink_to("elsewhere.html")
        write_atomically(self.path, b"one")
        self.assertTrue(self.path.is_symlink())
        self.assertEqual((self.directory / "elsewhere.html").read_bytes(), b"one")

    def test_devices_and_pipes_are_written_in_place(self) -> None:
        os.mkfifo(self.path)
        read: list[bytes] = []
        reader = threading.Thread(target=lambda: read.append(self.path.read_bytes()))
        reader.start()
        write_atomically(self.path, b"one")
        reader.join()
        self.assertEqual(read, [b"one"])
        self.assertTrue(stat.S_ISFIFO(self.path.stat().st_mode))

    def test_a_disk_that_is_full(self) -> None:
        if not Path("/dev/full").is_char_device():
            raise SkipTest("there is no /dev/full")
        why = "/dev/full cannot be written: No space left"
        self.assertRaisesRegex(DmsgError, why, write_atomically, Path("/dev/full"), b"x")
        self.assertTrue(Path("/dev/full").is_char_device())

    def test_a_failed_write_leaves_no_file(self) -> None:
        write_atomically(self.path, b"one")
        self.patch(Path, "replace", self.fails)
        self.assertRaisesRegex(DmsgError, "report.html cannot be written", write_atomically, self.path, b"two")
        self.assertEqual((self.left(), self.path.read_bytes()), (["report.html"], b"one"))
        self.assertRaises(DmsgError, write_atomically, self.directory / "nowhere" / "x", b"two")

    @staticmethod
    def fails(*arguments: object) -> None:
        raise OSError(28, "No space left on device")
