"""Power cuts under the stores of bus and discovery, a few of them; ``make long WHICH=power-cuts`` makes many."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from random import Random

from twisted.trial.unittest import SynchronousTestCase

from dmsg.testing.disk import Disk, Operation
from dmsg.testing.sqlite_disk import sqlite_on
from tests.testing.power_cuts import STORES, cut_power, is_durable


class SimulatedSQLiteTests(SynchronousTestCase):
    """SQLite on a simulated disk."""

    def test_a_database_is_on_the_disk_alone(self) -> None:
        disk = Disk(Random(1))
        with sqlite_on(disk):
            with sqlite3.connect("/nowhere/a.sqlite") as db:
                db.execute("CREATE TABLE t (a)")
            db.close()
            self.assertTrue(disk.exists("/nowhere/a.sqlite"))
        self.assertRaises(sqlite3.OperationalError, sqlite3.connect, "/nowhere/a.sqlite")

    def test_failures_reach_the_program(self) -> None:
        disk = Disk(Random(1))
        with sqlite_on(disk):
            db = sqlite3.connect("a", isolation_level=None)
            db.execute("CREATE TABLE t (a)")
            disk.capacity = disk.used
            self.assertIn("full", str(self.assertRaises(sqlite3.Error, db.execute, "INSERT INTO t VALUES (1)")))
            disk.capacity = None
            disk.fail(Operation.SYNC)
            self.assertIn("I/O error", str(self.assertRaises(sqlite3.Error, db.execute, "INSERT INTO t VALUES (1)")))
            db.execute("INSERT INTO t VALUES (2)")
            self.assertEqual([(2,)], db.execute("SELECT a FROM t").fetchall())
            disk.cut_power()
            self.assertRaises(sqlite3.Error, db.execute, "INSERT INTO t VALUES (3)")
            db.close()


class TornLogTests(SynchronousTestCase):
    """SQLite's log after two power cuts. A change that was lost by the first one can reappear after the second."""

    HEADER, FRAME = 32, 24 + 4096
    """Numbers of bytes of the header of a log, and of each page in it with the page's own header."""

    def test_a_lost_change_returns_with_the_page_that_was_missing(self) -> None:
        path = str(Path(self.mktemp()))
        db = self._open(path)
        db.execute("CREATE TABLE t (a INTEGER PRIMARY KEY AUTOINCREMENT, b)")
        db.executemany("INSERT INTO t (b) VALUES (?)", [("before" * 300,)] * 6)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        lost = self._insert(db, path, "lost")
        # The power cut has kept the change's second page, but not its first.
        db = self._open_again(db, path, lost[: self.HEADER] + bytes(self.FRAME) + lost[self.HEADER + self.FRAME :])
        self.assertEqual(0, self._count(db, "lost"))
        another = self._insert(db, path, "other")
        first = slice(self.HEADER, self.HEADER + self.FRAME)
        self.assertEqual(lost[first], another[first])
        # The next power cut has kept the first page of the new change, but not its second.
        db = self._open_again(db, path, another[: first.stop] + lost[first.stop :])
        self.assertEqual((1, 0), (self._count(db, "lost"), self._count(db, "other")))
        self.assertEqual(("ok",), db.execute("PRAGMA integrity_check").fetchone())
        db.close()

    def _open(self, path: str) -> sqlite3.Connection:
        db = sqlite3.connect(path, isolation_level=None)
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "page_size=4096"):
            db.execute(f"PRAGMA {pragma}")
        return db

    def _open_again(self, db: sqlite3.Connection, path: str, log: bytes) -> sqlite3.Connection:
        """Open the database as it was before its log was written, with another log."""
        content = Path(path).read_bytes()
        db.close()
        Path(path).write_bytes(content)
        Path(path + "-wal").write_bytes(log)
        return self._open(path)

    def _insert(self, db: sqlite3.Connection, path: str, text: str) -> bytes:
        """Insert a row, and return the log."""
        db.execute("INSERT INTO t (b) VALUES (?)", (text,))
        return Path(path + "-wal").read_bytes()

    def _count(self, db: sqlite3.Connection, text: str) -> int:
        return int(db.execute("SELECT count(*) FROM t WHERE b = ?", (text,)).fetchone()[0])


class PowerCutTests(SynchronousTestCase):
    """Stores of the product."""

    def test_a_durable_store_loses_nothing(self) -> None:
        for name in filter(is_durable, STORES):
            losses = cut_power(STORES[name], 1, 500)
            self.assertEqual((0, 0), (losses.lost, losses.damaged), f"{name}: {losses}")
            self.assertGreater(losses.power_cuts, 1, name)

    def test_other_stores_are_not_damaged(self) -> None:
        for name in STORES:
            if not is_durable(name):
                losses = cut_power(STORES[name], 2, 1000)
                self.assertEqual(0, losses.damaged, f"{name}: {losses}")
                # Otherwise the disk would lose nothing, and the test of durable stores would prove nothing.
                self.assertGreater(losses.lost, 0, name)

    def test_a_seed_repeats_its_run(self) -> None:
        self.assertEqual(cut_power(STORES["queue"], 3, 200), cut_power(STORES["queue"], 3, 200))
