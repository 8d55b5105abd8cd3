"""Tables that an earlier version made: a run takes them over, or one line says what to do.

``lakes/format-2.tar.xz`` holds a spool, checked receipts and the tables that the version of 26 November 2026, before
files were read with Arrow, made of them. Silver tables that are views now are stored there for every day.
"""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics.explain import explain
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.listing import receipts_source, spool_source
from dmsg.analytics.report import render
from dmsg.analytics.report_data import collect
from dmsg.analytics.runs import FORMAT, Runs, State
from dmsg.analytics.store import Store
from tests.analytics.comparison import compare
from tests.analytics.support import DAY, NEXT, NOW, S1, Boot, LakeCase, ms, write_file

ARCHIVE = Path(__file__).with_name("lakes") / "format-2.tar.xz"


class TakenOverTests(LakeCase):
    """Tables of the version before this one."""

    def setUp(self) -> None:
        super().setUp()
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(self.root, filter="data")
        self.out = self.root / "lake"

    def test_a_run_goes_on_with_them(self) -> None:
        """The gold tables are those that DuckDB makes of all files, the old and the new."""
        before = Store(str(self.out)).computed_state()
        self.assertEqual((before.run, set(before.days)), (1, {str(DAY)}))
        self.assertIn("dmsg network", render(collect(Store(str(self.out)))))
        again = Boot(S1, "1" * 32, started=ms(DAY, "10:00:00"))
        again.rows = [{}] * 21  # The archive has the events before.
        ends = {"transport": "f" * 32, "src": "a" * 16, "dst": "b" * 16, "secure": True, "by": "src"}
        again.event("transport_close", NEXT, "00:01:00", reason="unspecified", **ends, total_ab=900, total_ba=0)
        again.event("session_close", DAY, "12:00:00", session=1, peer="a" * 16, reason="closed", duration_ms=5)
        late = Boot(S1, "4" * 32)
        late.event("start", DAY, "13:00:00", capacity=10)
        late.beats(DAY, "13:01:00", 4, sessions=1, transports=0, capacity=10)
        write_file(self.spool / "new" / "events-4.jsonl.gz", [*again.rows[21:], *late.rows])
        signed = Boot(S1, "5" * 32)
        for initiator in (True, False):
            one, other = ("1", "2") if initiator else ("2", "1")
            names = {"signer": one * 16, "partner": other * 16, "transport": "f" * 32, "server": S1}
            sums = {"delivered_out": 900, "delivered_in": 0} if initiator else {"delivered_out": 0, "delivered_in": 900}
            signed.event("receipt_checked", NEXT, "00:01:01", initiator=initiator, **names, **sums)
        write_file(self.checked / "new" / "receipts-2.jsonl.gz", signed.rows)
        pipeline = self.pipeline()
        # The tables name the archive's files by their paths on another machine: only the new ones are read here.
        sources = [spool_source(str(self.spool / "new")), receipts_source(str(self.checked / "new"))]
        pipeline.run(sources)
        torn = self.spool / "events-2.jsonl.gz"  # DuckDB takes no file with a line that is no JSON.
        torn.write_bytes(gzip.compress(gzip.decompress(torn.read_bytes()).replace(b"garbage\n", b"")))
        found = compare(pipeline.lake, self.spool, self.checked, NOW.date())
        self.assertEqual([(name, one) for name, what in found.items() for one in what[:3]], [])
        self.assertEqual(self.pipeline().run(sources).events, 0)
        sections = {one.title: one.verdict for one in explain(pipeline.lake, pipeline.lake.computed_state(), S1, NEXT)}
        self.assertEqual(sections["Settlement"], "agrees")


class OtherFormatTests(SynchronousTestCase):
    """Tables that this version cannot use."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()

    def write(self, **said: object) -> None:
        """Write a list of runs with one that has finished and left this state."""
        row = {"run": 1, "at": 5, "phase": "done", "owner": "", "said": json.dumps(said)}
        write_deltalake(str(self.root / "runs"), pa.Table.from_pylist([row]))

    def error(self) -> str:
        text = str(self.assertRaises(LakeError, Store(str(self.root)).state))
        self.assertNotIn("\n", text)
        return text

    def test_tables_of_an_older_format(self) -> None:
        self.write(format=FORMAT - 1, run=1)
        self.assertEqual(
            self.error(),
            f"the tables in {self.root} are of format {FORMAT - 1}, this version of dmsg has format {FORMAT}: "
            "move them away, and make them anew from the files of the spool with `dmsg analytics run`",
        )

    def test_tables_of_a_newer_format(self) -> None:
        self.write(format=FORMAT + 1, something="else")
        self.assertEqual(
            self.error(),
            f"the tables in {self.root} are of format {FORMAT + 1}, this version of dmsg has format {FORMAT}: "
            "update dmsg",
        )

    def test_a_state_with_a_field_more_is_read(self) -> None:
        """A version that only adds to the state does not change the format."""
        self.write(format=FORMAT, run=1, days={"2026-03-10": 1}, added_later=[1])
        self.assertEqual(Runs(str(self.root)).state(), State(run=1, days={"2026-03-10": 1}))

    def test_what_is_no_state(self) -> None:
        for said in (
            {},
            {"format": "x"},
            {"format": FORMAT, "left": 5},
            {"format": FORMAT, "unusable": {"2026-03-10": 5}},
        ):
            self.write(**said)
            self.assertIn("holds a row that is not a run", self.error())
            self.root = self.root.with_name(self.root.name + "x")
