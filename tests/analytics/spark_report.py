"""The report in a browser, and the transforms' contracts."""

from __future__ import annotations

import html
import json
import re
import subprocess
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyspark.sql.types import StructType
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from dmsg.analytics import charts, report_data
from dmsg.analytics.attention import shorten_findings
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.report import render
from dmsg.analytics.report_data import Content, collect
from dmsg.analytics.schemas import DAILY, EVENT, GOLD, SILVER
from dmsg.analytics.table_queries import run_query
from dmsg.telemetry.schema import columns
from tests.analytics.spark_tables import Story
from tests.analytics.support import S1, S2, S3, LakeCase
from tests.pages.browser import Browser, chromium

CHROMIUM = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def browse(page: Path, script: str) -> Any:
    """Return the value of a script in the page as JSON, in headless Chromium."""
    program = chromium()
    if program is None:
        raise SkipTest("there is no Chromium here")
    probe = page.with_name("probe.html")
    text = page.read_text().replace(
        "</body>", f"<script>document.title = JSON.stringify((() => {{{script}}})())</script></body>"
    )
    probe.write_text(text)
    profile = page.with_name("profile")
    dom = subprocess.run(
        [program, *CHROMIUM, f"--user-data-dir={profile}", "--dump-dom", probe.as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    ).stdout
    title = re.search(r"<title>(.*?)</title>", dom, re.S)
    assert title is not None, dom[:500]
    return json.loads(html.unescape(title[1]))


def alignments(table: str) -> list[set[tuple[bool, bool]]]:
    """Return for each column of a table whether its head and its cells are aligned at the right."""
    heads = ["n" in classes.split() for classes in re.findall('<th class="(.*?)"', table)]
    lines = [re.findall('<td class="(.*?)"', line) for line in re.findall("<tr>(<td.*?)</tr>", table)]
    return [{(head, "n" in line[at].split()) for line in lines} for at, head in enumerate(heads)]


class ReportTests(LakeCase):
    """The page that people see."""

    def test_the_report_renders_in_a_browser(self) -> None:
        page = self.root / "report.html"
        page.write_text(render(collect(Story.told().pipeline().lake)))
        self.assertNotRegex(page.read_text(), r"(?:src|href)=[\"']?(?:https?:)?//")
        seen = browse(
            page,
            """
            const table = document.querySelectorAll("table.sort")[0];
            const head = [...table.tHead.rows[0].cells].find((one) => one.textContent.startsWith("up"));
            const column = () => [...table.tBodies[0].rows].map((row) => row.cells[0].dataset.value);
            head.querySelector("button").click(); const up = column();
            head.querySelector("button").click(); const down = column();
            const light = getComputedStyle(document.body).backgroundColor;
            document.documentElement.dataset.theme = "dark";
            const dark = getComputedStyle(document.body).backgroundColor;
            return {
              up, down, light, dark,
              sections: [...document.querySelectorAll("h2")].map((one) => one.textContent),
              lost: [...document.querySelectorAll("#attention a")].map((one) => one.hash)
                .filter((one) => !document.querySelector(one)),
              lines: document.querySelectorAll("#attention li").length,
              cells: document.querySelectorAll("svg.strip .cell").length,
              charts: document.querySelectorAll("svg.chart").length,
              tiles: [...document.querySelectorAll(".card")].map((one) => Number(one.dataset.value)),
              sums: Object.fromEntries([...document.querySelectorAll("table.sort")].slice(0, 2).flatMap((table, of) =>
                [...table.tHead.rows[0].cells].map((head, column) => [of + head.textContent,
                  [...table.tBodies[0].rows].map((row) => Number(row.cells[column].dataset.value))]))),
              titles: [...document.querySelectorAll("svg.strip title")].map((one) => one.textContent),
              wide: document.documentElement.scrollWidth <= window.innerWidth,
              verdicts: [...document.querySelectorAll("td.warn")].map((one) => one.textContent),
            };
            """,
        )
        self.assertEqual(seen["up"], [S3, S2, S1])
        self.assertEqual(seen["down"], [S1, S2, S3])
        self.assertNotEqual(seen["light"], seen["dark"])
        self.assertEqual(
            seen["sections"],
            [
                "What needs attention",
                "Servers",
                "By server",
                "Traffic",
                "Latency",
                "Refusals",
                "Capacity",
                "Settlement",
                "Discovery",
                "Placement",
                "Public",
                "Data",
            ],
        )
        self.assertGreaterEqual(seen["cells"], 6)
        self.assertEqual(seen["charts"], 4)
        self.assertTrue(seen["wide"])
        self.assertIn("claims more than both ends", seen["verdicts"])
        self.check_tiles(seen["tiles"], seen["sums"])
        self.assertEqual(seen["lost"], [])
        self.assertGreater(seen["lines"], 3)

    def check_tiles(self, tiles: list[float], sums: dict[str, list[float]]) -> None:
        """Assert that each tile is the sum of its table or of its chart."""
        servers, clients, transports, carried, uptime, refused, complete = tiles
        self.assertEqual(servers, len(sums["0server"]))
        self.assertEqual(clients, sum(sums["1clients, last day"]))
        self.assertEqual(transports, sum(sums["1transports"]))
        self.assertEqual(carried, sum(sums["1carried"]))
        self.assertAlmostEqual(uptime, sum(sums["0uptime"]) / servers, 3)
        story = Story.lines
        self.assertEqual(refused, sum(row["n"] for row in story["refusal_hour"] if row["what"] != "drop"))
        expected, arrived = (sum(row[name] for row in story["quality_day"]) for name in ("expected", "distinct_events"))
        self.assertAlmostEqual(complete, arrived / expected, 6)
        self.assertGreater(min(servers, transports, carried, refused), 0)

    def test_tiles_count_rows_that_the_tables_leave_out(self) -> None:
        """The page shows 1000 rows of a table and 300 servers; the tiles are of all."""
        lake = Story.told().pipeline().lake
        whole = collect(lake).totals
        for name in ("MAX_ROWS", "MAX_SERVERS", "MAX_AGREEING_ROWS"):
            self.patch(report_data, name, 1)
        self.assertEqual(collect(lake).totals, whole)

    def test_a_phone_shows_the_report_without_moving_it(self) -> None:
        if chromium() is None:
            raise SkipTest("there is no Chromium here")
        page = self.root / "report.html"
        content = collect(Story.told().pipeline().lake)
        page.write_text(render(content))
        browser = Browser()
        self.addCleanup(browser.close)
        browser.look_by_phone()
        browser.go(page.absolute().as_uri())
        self.assertEqual(browser.too_wide(), [])
        found = shorten_findings(content.attention)
        self.assertGreater(len(found), 3)
        texts = browser.texts("#attention li span")
        self.assertEqual(len(texts), len(found))
        self.assertIn(found[0].text, texts[0])
        # The texts have the width of the page, and not that of a narrow column.
        widths = "[...document.querySelectorAll('#attention li span')].map((one) => one.getBoundingClientRect().width)"
        self.assertGreater(max(browser.value(widths)), 300)
        # The first column of each table can be read before a table is moved in its box.
        cells = browser.value("document.querySelectorAll('table.sort tr > :first-child').length")
        self.assertGreater(cells, 10)
        self.assertEqual(len(browser.texts("table.sort tr > :first-child")), cells)

    def test_a_report_without_tables_says_so(self) -> None:
        self.assertRaisesRegex(LakeError, "there are no tables", collect, self.pipeline().lake)


class PageTests(SynchronousTestCase):
    """Parts of the report that need no tables."""

    def empty(self) -> Content:
        content = Content(datetime(2026, 1, 1, tzinfo=UTC), 1)
        names = (
            *GOLD,
            "uptime",
            "traffic",
            "latency",
            "refused",
            "quarantine",
            "files",
            "gone",
            "servers",
            "discovery",
            "lost",
            "observed",
        )
        content.tables = {name: [] for name in names}
        content.totals = dict.fromkeys(("servers", "up", "uptime_servers", "clients", "clients_of_one"), 0)
        content.totals |= dict.fromkeys(("transports", "bytes", "refused", "lookups"), 0)
        content.totals |= {"uptime": None, "complete": None}
        return content

    def test_sums_are_bounded(self) -> None:
        """Sums that gold has bounded are added again for the page."""
        root = self.mktemp()
        numbers = [("many", 2**53)] * 1025 + [("few", 3), ("few", None), ("none", None)]
        keys, counts = zip(*numbers, strict=True)
        write_deltalake(root, pa.table({"k": keys, "n": pa.array(counts, pa.int64())}))
        found = run_query(DeltaTable(root), f"SELECT k, {report_data.total('n')} FROM it GROUP BY k")  # noqa: S608
        self.assertEqual({row["k"]: row["n"] for row in found.to_pylist()}, {"many": 2**53, "few": 3, "none": None})

    def test_cells_are_aligned_like_their_head(self) -> None:
        """Also a date, and a text in place of an unknown number, in a column of numbers."""
        content = self.empty()
        numbers = ("peak_sessions", "capacity", "growth_per_day", "fit", "days_left")
        forecast = dict.fromkeys(numbers, 1.0) | {"server": S1}
        content.tables["capacity_forecast"] = [{**forecast, "full_on": day} for day in (None, date(2026, 1, 2))]
        actor: dict[str, Any] = dict.fromkeys(
            ("score", "servers", "days", "requests", "refused", "targets", "posts"), 1
        )
        actor |= {"who": "a", "kind": "scan", "most_at": S1, "last_day": date(2026, 1, 2)}
        content.tables["actor"] = [{**actor, "names": names} for names in (True, False)]
        tables = re.findall('<table class="sort">.*?</table>', render(content), re.DOTALL)
        self.assertEqual(len(tables), 2)
        for table in map(alignments, tables):
            self.assertGreater(len(table), 7)
            for at, found in enumerate(table):
                self.assertIn(found, ({(True, True)}, {(False, False)}), at)

    def test_a_page_without_rows_renders(self) -> None:
        self.assertIn("Nothing", render(self.empty()))

    def test_text_of_strangers_is_escaped(self) -> None:
        content = self.empty()
        evil = "<script>alert(1)</script>\"'"
        numbers = dict.fromkeys(("servers", "days", "requests", "refused", "targets", "posts"), 1)
        content.tables["actor"] = [
            {"who": evil, "kind": evil, "score": 1.0, "names": evil, "last_day": date(2026, 1, 1), **numbers}
            | {"most_at": evil}
        ]
        content.tables["uptime"] = [
            {"server": evil, "uptime": 1.0, "availability": 1.0, "crashes": 1, "flags": [evil], "missing": 1}
        ]
        content.tables["refused"] = [{"what": evil, "reason": evil, "n": 3, "dt": date(2026, 1, 1), "hour": 1}]
        content.tables["servers"] = [{"server": evil, "ends": [(1, evil)]}]
        content.tables["quarantine"] = [{"problem": evil, "lines": 1}]
        content.tables["files"] = [{"file": evil, "lines": 1, "problem": evil}]
        self.assertNotIn("<script>alert", render(content))

    def test_numbers_have_units_for_people(self) -> None:
        shown = [charts.human(value, "B") for value in (None, 0, 999, 999.9, 1000, 999_499, 999_900, 1_234_567, 2.5e12)]
        self.assertEqual(shown, ["\N{EN DASH}", "0 B", "999 B", "1 kB", "1 kB", "999 kB", "1 MB", "1.23 MB", "2.5 TB"])

    def test_short_hours_are_no_downtime(self) -> None:
        """The present hour has begun only, and a day may be short: nobody can have been up in the rest."""
        day = date(2026, 1, 1)
        noon = int(datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp()) // 60
        content = self.empty()
        content.tables["observed"] = [{"dt": day, "first": noon - 20, "last": noon + 2 * 60 + 9}]
        names = {"always": {11: 21, 12: 60, 13: 60, 14: 10}, "late": {13: 30, 14: 10}, "unheard": {11: 0, 12: 0}}
        content.tables["server_hour"] = [
            {"server": server, "dt": day, "hour": hour, "alive_minutes": minutes}
            | {"seen_minutes": 20 if server == "unheard" else 0}
            for server, hours in names.items()
            for hour, minutes in hours.items()
        ]
        content.tables["uptime"] = [
            {"server": server, "uptime": 1.0, "availability": 1.0, "crashes": 0, "flags": [], "missing": 0}
            for server in names
        ]
        kinds = [re.findall(r'class="cell (\w+)"', row) for row in render(content).split("<tr>") if "<svg" in row]
        self.assertEqual(kinds, [["good"] * 4, ["bad", "bad", "poor", "good"], ["none", "none", "bad", "bad"]])
        self.assertIn("01 Jan 14h: 100%, 10 of 10 minutes", render(content))
        content.tables["observed"] = []
        content.tables["server_hour"] = content.tables["server_hour"][:1] + content.tables["server_hour"][3:4]
        self.assertIn("01 Jan 12h: no events of anybody have arrived", render(content))

    def test_lines_have_gaps_where_nothing_is_known(self) -> None:
        chart = charts.lines(["a", "b", "c", "d"], [("x", "red", [1.0, None, 2.0, 3.0])], "", "t")
        self.assertEqual(chart.count("M"), 2)

    def test_tables_hold_every_field_of_an_event(self) -> None:
        self.assertEqual(EVENT.fieldNames(), [field.name for field in columns()])
        for table in (*SILVER.values(), *GOLD.values()):
            self.assertIsInstance(table.schema, StructType)
        self.assertTrue(all("dt" in table.schema.fieldNames() for table in DAILY.values()))
