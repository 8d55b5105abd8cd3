"""Who can read the files of the databases, and when they are closed."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path

from twisted.internet.task import Clock
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from dmsg.databases import prepare_database
from dmsg.discovery.store.sqlite import SQLiteStore
from dmsg.errors import DmsgError
from dmsg.rmb.registry.table import TableRegistry
from dmsg.rmb.relay.queue.reserve import Reserve
from dmsg.rmb.relay.queue.sqlite import SQLiteQueue
from dmsg.telemetry.receipts_seen import ReceiptsSeen

STRANGER = 65534
"""Id of another user."""
KINDS: tuple[Callable[[str], object], ...] = (
    SQLiteStore,
    lambda path: SQLiteQueue(path, Clock()),
    TableRegistry,
    lambda path: ReceiptsSeen(Path(path)),
)
"""The databases: of discovery, of a relay of the bus, of a registry and of a server's receipts."""


class ModeTests(SynchronousTestCase):
    """Modes of the files of a database, with a umask that lets others read."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "database"
        self.addCleanup(os.umask, os.umask(0o022))

    def modes(self) -> dict[str, int]:
        return {path.name: path.stat().st_mode & 0o777 for path in self.directory.iterdir()}

    def test_only_this_user_can_read_a_new_database(self) -> None:
        for make in KINDS:
            database = make(str(self.path))
            modes = self.modes()
            del database
            self.assertIn("database", modes)
            self.assertEqual({0o600}, {mode for name, mode in modes.items() if not name.endswith("-reserve")}, modes)
            for path in self.directory.iterdir():
                path.unlink()

    def test_an_existing_database_keeps_its_mode_and_content(self) -> None:
        with prepare_database(str(self.path), 1.0) as first:
            first.execute("CREATE TABLE numbers (number INTEGER)")
        first.close()
        self.path.chmod(0o640)
        with prepare_database(str(self.path), 1.0) as second:
            self.addCleanup(second.close)
        self.assertEqual([], second.execute("SELECT * FROM numbers").fetchall())
        self.assertEqual({"database": 0o640}, self.modes())

    def test_a_database_in_memory_has_no_file(self) -> None:
        with prepare_database(":memory:", 1.0) as database:
            database.close()
        self.assertFalse(Path(":memory:").exists())


class PlantedTests(SynchronousTestCase):
    """Another user creates a file of the database before this user does, in a directory such as /tmp."""

    def setUp(self) -> None:
        if os.geteuid() != 0:
            raise SkipTest("only root can create files of other users")
        self.root = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        self.shared, self.theirs = self.root / "shared", self.root / "theirs"
        for one, mode in ((self.shared, 0o1777), (self.theirs, 0o700)):
            one.mkdir()
            one.chmod(mode)
        os.chown(self.theirs, STRANGER, -1)
        self.path = self.shared / "database"

    def plant(self, name: str, target: Path | None = None) -> None:
        path = self.shared / name
        if target is None:
            path.touch(0o666)
        else:
            path.symlink_to(target)
        os.lchown(path, STRANGER, -1)

    def test_a_planted_file_is_refused(self) -> None:
        """Its owner could read all that the database stores, and change it."""
        for suffix in ("", "-wal", "-journal", "-shm"):
            for target in (None, self.theirs / "database"):
                self.plant(f"database{suffix}", target)
                for make in KINDS:
                    error = self.assertRaises(DmsgError, make, str(self.path))
                    self.assertIn(f"database{suffix} is another user's (uid {STRANGER})", str(error))
                self.assertEqual([], list(self.theirs.iterdir()))
                for path in self.shared.iterdir():
                    path.unlink()

    def test_a_directory_in_which_everybody_may_replace_the_database_is_refused(self) -> None:
        self.shared.chmod(0o777)
        os.chown(self.shared, STRANGER, -1)
        for make in KINDS:
            error = self.assertRaises(DmsgError, make, str(self.path))
            self.assertIn(f"shared is a directory of another user (uid {STRANGER}) where others may write", str(error))
        self.assertEqual([], list(self.shared.iterdir()), "nothing was created there")
        # Containers mount an empty volume as a directory of root with this mode.
        os.chown(self.shared, 0, -1)
        for make in KINDS:
            make(str(self.path))
            for path in self.shared.iterdir():
                path.unlink()

    def test_a_file_that_is_planted_while_the_database_is_opened_is_noticed(self) -> None:
        def open_database() -> None:
            with prepare_database(str(self.path), 1.0):
                self.plant("database-wal")

        self.assertRaises(sqlite3.OperationalError, open_database)

    def test_a_file_of_this_user_is_used(self) -> None:
        with prepare_database(str(self.path), 1.0) as database:
            self.addCleanup(database.close)
            database.execute("CREATE TABLE numbers (number INTEGER)")

    def test_the_reserve_of_a_queue_destroys_no_file(self) -> None:
        """A link in its place leads to a file of this user."""
        mine = self.root / "mine"
        for plant in (os.symlink, os.link):
            mine.write_bytes(b"mine")
            plant(mine, self.shared / "database-reserve")
            reserve = Reserve(str(self.path), 10_000)
            self.assertFalse(reserve.take())
            reserve.release()
            self.assertEqual(b"mine", mine.read_bytes())
            reserve.remove()
        self.plant("database-reserve")
        self.assertFalse(Reserve(str(self.path), 10_000).take())
        self.assertEqual(0, (self.shared / "database-reserve").stat().st_size)


class UnusableTests(SynchronousTestCase):
    """Databases that cannot be used."""

    def test_it_is_closed_at_once(self) -> None:
        path = Path(self.mktemp()).absolute()
        path.write_bytes(b"no database" * 1000)
        failures: list[Exception] = []
        for make in KINDS:
            try:
                make(str(path))
            except DmsgError as error:
                failures.append(error)  # Its traceback would keep an open connection alive.
            links = [one.readlink() for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
            self.assertNotIn(path, links)
        self.assertEqual(4, len(failures))
