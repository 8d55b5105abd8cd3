"""Queries by DuckDB: what Spark wrote, without Spark, and nothing but that."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import queries
from dmsg.analytics.queries import QueryError, run_sql
from dmsg.analytics.refine import Refinement
from dmsg.analytics.schemas import GOLD, SILVER
from dmsg.analytics.store import Store
from dmsg.analytics.table_computation import Computation
from dmsg.analytics.views import VIEWS
from tests.analytics.spark_tables import Story, lines_of
from tests.analytics.support import S1, S2, LakeCase, _in_order, rows_by_spark, run_here, write_file

PROGRAM = (sys.executable, "-c", "from dmsg.cli.entry import entry; entry()")
PAGE = Path(__file__).parents[2] / "docs" / "pipeline" / "questions.md"


def asked(store: Store, sql: str, rows: int = 10_000) -> list[dict[str, Any]]:
    """The rows of a query, with times as Spark's ``collect`` has them."""
    found = run_sql(store, store.computed_state(), sql, rows)
    return [
        {
            name: one.replace(tzinfo=None) if isinstance(one, datetime) else one
            for name, one in zip(found.names, row, strict=True)
        }
        for row in found.rows
    ]


class QueryTests(SynchronousTestCase):
    """SQL queries of the tables of two servers."""

    def setUp(self) -> None:
        self.story = Story.told()
        self.store = Store(str(self.story.out))

    def test_every_table_has_the_rows_that_spark_reads(self) -> None:
        filled = 0
        lake = self.story.pipeline().lake
        for name in (*GOLD, *SILVER):
            wanted = rows_by_spark(lake, "gold" if name in GOLD else "silver", name)
            self.assertEqual(_in_order(asked(self.store, f"SELECT * FROM {name}")), wanted, name)
            # The other tests read the tables in this way.
            self.assertEqual(self.story.table(name, "gold" if name in GOLD else "silver"), wanted, name)
            filled += bool(wanted)
        self.assertGreater(filled, 25)

    def test_tables_of_an_object_store_are_read_into_memory(self) -> None:
        with patch.object(self.store, "local", new=False):
            for name in ("traffic_hour", "transports", "receipts"):
                layer = "gold" if name in GOLD else "silver"
                rows = _in_order(asked(self.store, f"SELECT * FROM {name}"))
                self.assertEqual(rows, self.story.table(name, layer), name)
            self.patch(queries, "REMOTE_LIMIT", 1)
            with self.assertRaisesRegex(QueryError, "copy the tables to a directory"):
                asked(self.store, "SELECT * FROM transports")

    def test_a_query_only_reads_and_opens_no_other_file(self) -> None:
        secret = self.story.root / "secret.csv"
        secret.write_text("a\n1\n")
        for sql in (
            f"COPY (SELECT 1) TO '{secret}'",
            "CREATE TABLE t (a INT)",
            "SELECT 1; SELECT 2",
            "",
            "SET threads = 1",
            "ATTACH 'x.db'",
            "INSTALL httpfs",
            "DROP VIEW boot",
            f"SELECT * FROM read_csv('{secret}')",
            f"SELECT * FROM '{secret}'",
            f"SELECT * FROM glob('{self.story.root}/*')",
            "SELECT * FROM read_text('https://127.0.0.1:1/')",
            f"SELECT * FROM query('COPY (SELECT 1) TO ''{secret}''')",
            "SELECT * FROM nothing",
            "SELEC",
        ):
            with self.assertRaises(QueryError, msg=sql) as caught:
                asked(self.store, sql)
            self.assertNotIn("\n", str(caught.exception))
        self.assertEqual(secret.read_text(), "a\n1\n")

    def test_answers_are_bounded(self) -> None:
        found = run_sql(self.store, self.store.computed_state(), "SELECT * FROM range(100000)", 7)
        self.assertEqual(([row[0] for row in found.rows], found.more), ([0, 1, 2, 3, 4, 5, 6], True))
        self.assertFalse(run_sql(self.store, self.store.computed_state(), "SELECT * FROM range(7)", 7).more)

    def test_values_are_those_of_python(self) -> None:
        (row,) = asked(
            self.store,
            "SELECT sum(2::BIGINT) AS s, 1.5::DECIMAL(9, 2) AS d, [1] AS l, NULL AS n, TIMESTAMPTZ '2026-01-01' AS t",
        )
        self.assertEqual(row, {"s": 2, "d": 1.5, "l": [1], "n": None, "t": datetime(2026, 1, 1)})
        self.assertIs(type(row["s"]), int)

    def test_the_ten_questions_of_the_page(self) -> None:
        text = PAGE.read_text()
        found = re.findall(r"^## ([^\n]+\?)$.*?^```sql\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        self.assertEqual(len(found), 10)
        answers = {question: asked(self.store, sql) for question, sql in found}
        self.assertEqual([question for question, rows in answers.items() if not rows], [])
        down = answers["Which servers were down, and for how long?"]
        self.assertIn(S2[:8], {row["server"] for row in down})
        (worst, *_) = answers["Which transports contradict a server, and who signed?"]
        self.assertEqual(worst["server"], S2[:8])

    def test_polars_opens_the_tables(self) -> None:
        (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(code.replace("/srv/tables", str(self.story.out)), {})
        self.assertIn("credited_bytes", said.getvalue())
        import polars

        rows = polars.scan_delta(f"{self.story.out}/gold/traffic_hour").collect().to_dicts()
        self.assertEqual(_in_order(rows), self.story.table("traffic_hour"))

    def test_the_command_works_without_java(self) -> None:
        sql = "SELECT server, sum(accepted) AS n, max(last) AS t FROM traffic_hour, ends GROUP BY 1 ORDER BY 1"
        sql = f"WITH ends AS (SELECT max(last_at) AS last FROM boots) {sql}"
        options = ("sql", "--out", str(self.story.out))
        command = (*PROGRAM, "analytics", *options, sql, "--json")
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": "/nonexistent"})
        self.assertEqual((done.stderr, done.returncode), ("", 0))
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual([row["server"] for row in rows][:2], [S1, S2])
        out, err, status = run_here(*options, sql, "--csv", "--rows", "1")
        self.assertEqual(status, 0)
        table = list(csv.DictReader(io.StringIO(out)))
        self.assertEqual([(row["server"], int(row["n"])) for row in table], [(S1, rows[0]["n"])])
        self.assertIn("only the first 1 rows are shown (--rows)", err)
        out, err, status = run_here(*options, "DELETE FROM boot")
        self.assertEqual((out, status), ("", 1))
        self.assertEqual(err, "dmsg: the query must be one SELECT, because the tables are only read\n")


class StoredDayTests(LakeCase):
    """Days on which events came twice, of which silver stores rows."""

    def test_a_view_joins_stored_days_with_those_of_bronze(self) -> None:
        story = Story.written()
        write_file(
            story.spool / "again" / "events-9.jsonl.gz", lines_of(story.spool / "one" / "events-1.jsonl.gz")[:200]
        )
        self.refine(story)
        store, lake = Store(str(story.out)), story.pipeline().lake
        self.assertTrue(store.stored_days("transports", store.computed_state()))
        for name in VIEWS:
            self.assertEqual(
                _in_order(asked(store, f"SELECT * FROM {name}")), rows_by_spark(lake, "silver", name), name
            )

    def refine(self, story: Story) -> None:
        """Make the views; ``long_rules`` has a whole run."""

        def write_views(computation: Computation, layer: str, names: Iterable[str], *plans: Any) -> None:
            write_days(computation, layer, [name for name in names if name in VIEWS], *plans)

        write_days = Computation.write_days
        with patch.object(Computation, "write_days", write_views), patch.object(Refinement, "gold_overall"):
            story.run_jobs()
