"""Who can read the files of the databases, and when they are closed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.databases import prepare_database
from dmsg.discovery.store.sqlite import SQLiteStore
from dmsg.errors import DmsgError
from dmsg.rmb.registry.table import TableRegistry
from dmsg.rmb.relay.queue.sqlite import SQLiteQueue
from dmsg.telemetry.receipts_seen import ReceiptsSeen

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
