"""The report in a browser, and the transforms' contracts."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from pyspark.sql.types import StructType
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from dmsg.analytics import charts
from dmsg.analytics.delta import LakeError
from dmsg.analytics.report import render
from dmsg.analytics.report_data import Content, collect
from dmsg.analytics.schemas import DAILY, EVENT, GOLD, SILVER
from dmsg.telemetry.schema import columns
from tests.analytics.spark_tables import Story
from tests.analytics.support import S1, S2, S3, LakeCase

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
    """What a script in the page says, as JSON, in headless Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SkipTest("there is no Chromium here")
    probe = page.with_name("probe.html")
    text = page.read_text().replace(
        "</body>", f"<script>document.title = JSON.stringify((() => {{{script}}})())</script></body>"
    )
    probe.write_text(text)
    profile = page.with_name("profile")
    dom = subprocess.run(
        [chromium, *CHROMIUM, f"--user-data-dir={profile}", "--dump-dom", probe.as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    ).stdout
    title = re.search(r"<title>(.*?)</title>", dom, re.S)
    assert title is not None, dom[:500]
    return json.loads(html.unescape(title[1]))


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
              charts: document.querySelectorAll("section > svg").length,
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
        self.assertEqual(seen["lost"], [])
        self.assertGreater(seen["lines"], 3)

    def test_a_report_without_tables_says_so(self) -> None:
        self.assertRaisesRegex(LakeError, "there are no tables", collect, self.pipeline().lake)


class PageTests(SynchronousTestCase):
    """What needs no tables."""

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
        )
        content.tables = {name: [] for name in names}
        return content

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

    def test_lines_have_gaps_where_nothing_is_known(self) -> None:
        chart = charts.lines(["a", "b", "c", "d"], [("x", "red", [1.0, None, 2.0, 3.0])], "", "t")
        self.assertEqual(chart.count("M"), 2)

    def test_tables_hold_every_field_of_an_event(self) -> None:
        self.assertEqual(EVENT.fieldNames(), [field.name for field in columns()])
        for table in (*SILVER.values(), *GOLD.values()):
            self.assertIsInstance(table.schema, StructType)
        self.assertTrue(all("dt" in table.schema.fieldNames() for table in DAILY.values()))
