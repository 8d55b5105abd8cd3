"""Power cuts under the stores of bus and discovery, a few of them; ``make long WHICH=power-cuts`` makes many."""

from __future__ import annotations

import sqlite3
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
