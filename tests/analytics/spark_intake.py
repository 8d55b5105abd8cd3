"""Arrow's reader for bronze, compared with Spark's: lines that Arrow accepts have the same values in Spark."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from pyspark.sql import functions as F
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import bronze, listing, sealed_files
from dmsg.analytics.attention import needs_attention
from dmsg.analytics.jobs import READ_OPTIONS
from dmsg.analytics.listing import AS_NAMED, Source, list_local, list_remote, open_files, spool_source, unreadable
from dmsg.analytics.parquet import Part
from dmsg.analytics.schemas import CORRUPT, EVENT, QUARANTINE, RAW
from dmsg.analytics.sealed_files import Refused, Sealed, Target, convert, read
from dmsg.telemetry.schema import BUCKETS
from dmsg.telemetry.spool_listing import Reason, shorten_path
from tests.analytics.support import DAY, NOW, S1, Boot, LakeCase, spark, write_file

NOW_MS = int(NOW.timestamp() * 1000)


def event(**fields: Any) -> dict[str, Any]:
    """An event that is valid but for these fields."""
    row = {"v": 1, "type": "heartbeat", "producer": S1, "role": "server", "boot": "b", "seq": 1}
    return {**row, "ts": NOW_MS - 5000, "mono": 7, "bytes": 3, **fields}


def line(**fields: Any) -> bytes:
    """The same as a line without its end."""
    return json.dumps(event(**fields), separators=(",", ":")).encode()


def inside(text: bytes) -> bytes:
    """A valid event with one more member, as text."""
    return line()[:-1] + b"," + text + b"}"


FULL = [3] * BUCKETS
ACCEPTED = (
    line(),
    line(rtt=FULL),
    line(type="transport_close", src="a", dst="b"),
    line(type="entry", subject="a"),
    line(rtt=None, bytes=None),
    line(unknown="x", other=5, third=None, fourth=1.5),
    line(producer="discovery \u00fc", role="discovery"),
    json.dumps(event(boot="\u00fc\u20ac"), ensure_ascii=False, separators=(",", ":")).encode(),
    line(registered=True),
    line(seq=0, bytes=2**50),
    line(sequence=-5, clock_ms=-(2**60)),
    inside(b'"\\u0062oot2":1'),
    inside(b'"x":"\\/\\n\\t\\\\"'),
    line(role=None),
    inside(b'"lag_ms":-0'),
    inside(b' "lag_ms" :\t4 '),
    inside(b'"x":' + b"9" * 999),
)
"""Lines that both readers take for an event."""
REFUSED = (
    b"",
    b"{}",
    b" ",
    b"[]",
    b"hello",
    b"null",
    b" " + line(),
    line() + b" ",
    line() + b"\r",
    line() + line(),
    line() + b"," + line(),
    line()[:-1],
    line()[:20] + b"\n" + line()[20:],
    b"\xef\xbb\xbf" + line(),
    line(v=2),
    line(type="something"),
    line(type="receipt_checked"),
    line(producer=None),
    line(producer="[/foo]"),
    line(producer=S1 + "\n"),
    line(seq=-1),
    line(seq=2**63 - 1),
    line(mono=None),
    line(type="transport_close", dst="b"),
    line(type="transport_close", src=None, dst="b"),
    line(type="transport_open", src="a"),
    line(type="transport_progress", src="a"),
    line(type="session_open"),
    line(type="session_close", peer=None),
    line(type="entry", result="first"),
    line(bytes=2**50 + 1),
    line(bytes=2**63),
    line(bytes=-1),
    line(bytes="1"),
    line(bytes=1.0),
    line(bytes=True),
    line(boot=5),
    line(registered="true"),
    line(ts=NOW_MS + 11 * 60_000),
    line(ts=1),
    line(rtt=[1, 2]),
    line(rtt=[]),
    line(rtt=[None, *FULL[1:]]),
    line(rtt=[-1, *FULL[1:]]),
    line(rtt=[2**31, *FULL[1:]]),
    line(rtt=[1.5, *FULL[1:]]),
    line(rtt=5),
    line(unknown=[1]),
    line(unknown={"a": 1}),
    line(unknown="{"),
    inside(b'"bytes":4'),
    inside(b'"lag_ms":1e3'),
    inside(b'"lag_ms":01'),
    inside(b'"lag_ms":+1'),
    inside(b'"lag_ms":NaN'),
    inside(b'"lag_ms":0x10'),
    inside(b"'lag_ms':1"),
    inside(b"lag_ms:1"),
    inside(b'"x":"\\ud800"'),
    inside(b'"x":"\\q"'),
    inside(b'"x":"a\tb"'),
    inside(b'"x":"\xff"'),
    inside(b'"x":1//'),
    inside(b'"x":1,'),
    inside(b'"x":' + b"9" * 1001),
    inside(b'"x":"' + b"y" * 20_000 + b'"'),
)
"""Lines that Arrow leaves to Spark, whether Spark takes them for an event or not."""


class BesideSparkTests(LakeCase):
    """Files of one odd line, read by both."""

    def both(self, texts: list[bytes]) -> list[tuple[list[dict[str, Any]] | None, list[dict[str, Any]], int]]:
        """:returns: for each text Arrow's rows or None, Spark's rows, and how many lines Spark has in quarantine."""
        for number, text in enumerate(texts):
            (self.spool / f"events-{number:05}.jsonl.gz").write_bytes(gzip.compress(text + b"\n"))
        lines = spark().read.schema(RAW).options(**READ_OPTIONS, **AS_NAMED).json(str(self.spool))
        rows = bronze.bronze_rows(lines.withColumn("file", F.col("_metadata.file_path")), now_ms=NOW_MS)
        names = EVENT.fieldNames()
        by_spark: dict[int, list[dict[str, Any]]] = {}
        bad: dict[int, int] = {}
        for row in rows.coalesce(1).toArrow().to_pylist():
            number = int(row["file"][-14:-9])
            if row["family"] == QUARANTINE:
                bad[number] = bad.get(number, 0) + 1
            else:
                by_spark.setdefault(number, []).append({name: row[name] for name in names})
        found = []
        for number in range(len(texts)):
            try:
                table, _ = read(str(self.spool / f"events-{number:05}.jsonl.gz"), NOW_MS, checked=False)
                mine = [{name: row.get(name) for name in names} for row in table.to_pylist()]
            except Refused:
                mine = None
            found.append((mine, by_spark.get(number, []), bad.get(number, 0)))
        return found

    def test_odd_lines(self) -> None:
        texts = [*ACCEPTED, *REFUSED]
        for number, (mine, others, bad) in enumerate(self.both(texts)):
            told = texts[number][:300]
            if number < len(ACCEPTED):
                self.assertIsNotNone(mine, told)
            else:
                self.assertIsNone(mine, told)
            if mine is not None:
                self.assertEqual((mine, 0), (others, bad), told)

    def test_lines_that_were_changed_at_random(self) -> None:
        random = Random(5)
        signs = b'{}[]",:\\\n\r\t 0123456789-+.eE\x00\xff\xc3uabnulltrue'
        texts = []
        for _ in range(240):
            text = bytearray(
                b"\n".join(random.choices((*ACCEPTED[:14] * 5, *REFUSED[20:50]), k=random.choice((1, 1, 2))))
            )
            for _ in range(random.choice((0, 1, 1))):
                place = random.randrange(len(text))
                text[place : place + random.choice((0, 1, 3))] = bytes(
                    random.choices(signs, k=random.choice((0, 1, 2)))
                )
            texts.append(bytes(text))
        accepted = 0
        for number, (mine, others, bad) in enumerate(self.both(texts)):
            if mine is not None:
                accepted += 1
                self.assertEqual((mine, 0), (others, bad), texts[number])
        self.assertGreater(accepted, 40)


class FilesOfTestsTests(LakeCase):
    """Files that tests write are read by the engine that the test means."""

    def test_arrow_reads_a_file_unless_it_is_for_spark(self) -> None:
        rows = [event(), event(seq=1, rtt=[0] * BUCKETS)]
        path = self.spool / "events-1.jsonl.gz"
        write_file(path, rows)
        table, _ = read(str(path), NOW_MS, checked=False)
        write_file(path, rows, for_spark=True)
        self.assertRaisesRegex(
            Refused, "an array is in a field other than the histogram", read, str(path), NOW_MS, checked=False
        )
        found = spark().read.schema(RAW).options(**READ_OPTIONS).json(str(path)).collect()
        self.assertEqual([one[CORRUPT] for one in found], [None] * table.num_rows)


NAMES = (
    *("sp ace", "h#1", "p%41", "new\nline", "\u00fc\u20ac", "q?u", "semi;c", "tab\t", "q\"'`", "b\\s", "a:b", "x=1"),
    *("nb\u00a0sp", "c\u0085x", "br[1]{2}", "st*r", "a|b<c>^~", "d&+$,@!()", "\U0001f600", "_a=1", "_a", ".a"),
)
"""Names of directories; Spark passes over the last two."""


class ListingTests(LakeCase):
    """Names and kinds of files in a spool."""

    def listed(self, sources: list[Source]) -> tuple[set[tuple[str, str, int]], list[Mapping[Reason, set[str]]]]:
        left: list[Mapping[Reason, set[str]]] = []
        found = {(one.uri, one.path, one.size) for one in list_local(sources, left)}
        if (rows := list_remote(spark, sources)) is not None:
            found |= {(row.file, row.path, row.length) for row in rows.collect()}
        return found, left

    def test_names_are_those_that_spark_gives(self) -> None:
        for name in NAMES:
            write_file(self.spool / name / "events-1.jsonl.gz", [event()])
        source = spool_source(str(self.spool))
        here, _ = self.listed([source])
        spool, self.spool = self.spool, self.spool / "nowhere"
        self.patch(listing, "local_path", lambda uri: None)
        theirs, _ = self.listed([source])
        self.assertEqual(here, theirs)
        self.assertEqual(len(here), len(NAMES) - 2)
        self.assertIn(f"file:{spool}/new%0Aline/events-1.jsonl.gz", {uri for uri, _, _ in here})

    def test_files_that_are_removed_while_they_are_read(self) -> None:
        for number in range(3):
            write_file(self.spool / f"events-{number}.jsonl.gz", [event(seq=number)])
        paths = [f"file:{self.spool}/events-{number}.jsonl.gz" for number in range(3)]
        (self.spool / "events-1.jsonl.gz").unlink()
        reader = spark().read.options(**AS_NAMED).format("text")
        rows = open_files(reader, paths)
        assert rows is not None
        self.assertEqual({row.file for row in rows.select("file").distinct().collect()}, {paths[0], paths[2]})
        self.assertIsNone(open_files(reader, paths[1:2]))
        self.assertIsNone(open_files(reader, []))

    def test_a_stream_knows_what_it_cannot_read(self) -> None:
        """Spark passes over it without a word."""
        (self.spool / "receipts-1.jsonl.gz").symlink_to("nowhere")
        left = unreadable([*self.sources(), spool_source("s3a://bucket/spool"), spool_source(str(self.root / "gone"))])
        expected = [{Reason.DANGLING: {f"{self.spool}/receipts-1.jsonl.gz"}}, {}]
        self.assertEqual(left, [*expected, {Reason.UNREADABLE: {f"{self.root}/gone"}}])
        # A directory that was quiet and readable is not listed each time.
        quiet: dict[Path, Mapping[str, int]] = {}
        os.utime(self.checked, (1, 1))
        for _ in range(2):
            self.assertEqual(unreadable(self.sources(), quiet), expected)
            self.assertEqual(quiet, {self.spool: {}, self.checked: {str(self.checked): 1_000_000_000}})

    def test_what_cannot_be_read_ends_no_run(self) -> None:
        """Files that cannot be read are reported until they can be read; then they are read.

        The lines are no events, so that the runs compute no tables of days.
        """
        write_file(self.spool / "events-1.jsonl.gz", [], garbage=[b"one"], end=False)
        write_file(self.root / "outside" / "events-2.jsonl.gz", [], garbage=[b"two", b"three"], end=False)
        (self.spool / "relay").symlink_to(self.root / "not yet")
        os.mkfifo(self.spool / "events-3.jsonl.gz")
        vanishing = self.spool / "events-4.jsonl.gz"
        write_file(vanishing, [], garbage=[b"hello"])
        pipeline = self.pipeline(left={Reason.FORBIDDEN: {"/receipts"}})

        def vanish(what: str, done: int, total: int) -> None:
            if what == "bronze: spool":
                vanishing.unlink()

        pipeline._progress = vanish
        first = pipeline.run(self.sources())
        self.assertEqual((first.events, first.quarantined), (0, 1))
        expected = {
            Reason.DANGLING: (1, shorten_path(f"{self.spool}/relay")),
            Reason.SPECIAL: (1, shorten_path(f"{self.spool}/events-3.jsonl.gz")),
            Reason.GONE: (1, shorten_path(str(vanishing))),
            Reason.FORBIDDEN: (1, "/receipts"),
        }
        self.assertEqual(first.left, expected)
        lake = pipeline.lake
        self.assertEqual(lake.state().left, expected)
        found = needs_attention(lake, lake.state(), now=NOW)
        self.assertEqual({one.kind for one in found}, {"not read", "unusable"})
        told = [one.text for one in found if one.kind == "not read"]
        self.assertEqual(len(told), 4)
        self.assertIn("not read, because the link leads to nothing: " + shorten_path(f"{self.spool}/relay"), told)
        # Nothing new, but fewer faults: attention has to know.
        (self.spool / "events-3.jsonl.gz").unlink()
        second = self.run_jobs()
        self.assertEqual((second.days, set(second.left)), ([], {Reason.DANGLING}))
        self.assertEqual(set(lake.state().left), {Reason.DANGLING})
        self.assertEqual(lake.state().versions, first.state.versions)
        (self.root / "outside").rename(self.root / "not yet")
        write_file(vanishing, [], garbage=[b"four"], end=False)
        third = self.run_jobs()
        self.assertEqual((third.events, third.quarantined, third.left), (0, 3, {}))
        self.assertEqual(
            sorted(row.line for row in lake.bronze([QUARANTINE]).collect()), ["four", "one", "three", "two"]
        )
        self.assertEqual(lake.state().left, {})
        self.assertEqual(self.run_jobs().state, lake.state())


class FilesTests(SynchronousTestCase):
    """Sealed files, without Spark."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir(parents=True)

    def refusal(self, packed: bytes) -> str:
        (self.root / "events-x.jsonl.gz").write_bytes(packed)
        return str(self.assertRaises(Refused, read, str(self.root / "events-x.jsonl.gz"), NOW_MS, checked=False))

    def test_files_that_are_not_whole(self) -> None:
        text = line() + b"\n"
        whole = gzip.compress(text)
        self.assertIn("incomplete", self.refusal(whole[:-9]))
        self.assertIn("incomplete", self.refusal(gzip.compress(text) + whole[:5]))
        self.refusal(b"")
        self.refusal(b"hello")
        self.refusal(whole + b"\0\0")
        self.assertIn("incomplete", self.refusal(whole * (sealed_files.MEMBER_LIMIT + 1)))
        self.assertRaises(Refused, read, str(self.root / "nowhere"), NOW_MS, checked=False)
        self.patch(sealed_files, "TEXT_LIMIT", 1000)
        bomb = zlib.compress(b"\n" * 10_000, wbits=31)
        self.assertIn("too large", self.refusal(bomb))
        self.assertIn("too large", self.refusal(bomb + bytes(1000)))

    def test_a_file_of_several_members_and_types(self) -> None:
        """A rare type in the middle of a file is found, although neither end of the file contains it."""
        self.patch(sealed_files, "SAMPLE_BYTES", 300)
        boot = Boot(S1, "b")
        boot.event("start", DAY, "23:00:00", capacity=5, names="clear")
        boot.beats(DAY, "23:30:30", 50, sessions=1)
        boot.rows[25]["type"], boot.rows[25]["peer"] = "session_open", "p"
        path = self.root / "events-1.jsonl.gz"
        write_file(path, boot.rows)
        bad = self.root / "events-2.jsonl.gz"
        write_file(bad, boot.rows, garbage=[b"hello"])
        torn = self.root / "events-3.jsonl.gz"
        write_file(torn, boot.rows[:3], end=False)
        files = [Sealed(f"file:{one}", str(one)) for one in (path, bad, torn)]
        found = list(convert(files, Target(str(self.root), "run=spool.0.x", "spool", 0, NOW_MS, False)))
        self.assertEqual([one for one in found if isinstance(one, Sealed)], [files[1]])
        parts = [one for one in found if isinstance(one, Part)]
        sizes = {dict(one.values)["family"] + dict(one.values)["dt"][-3:]: one.rows for one in parts}
        self.assertEqual(sizes, {"beat-10": 31, "beat-11": 20, "session-10": 1, "life-10": 3, "file-13": 2})
        (life,) = [one for one in parts if ("family", "life") in one.values]
        self.assertEqual((life.first, life.last), (boot.rows[0]["ts"], boot.rows[0]["ts"]))


class FilesByZlibTests(FilesTests):
    """The same without the package isal, as on workers that lack it."""

    def setUp(self) -> None:
        super().setUp()
        self.patch(sealed_files, "zlib", zlib)


class RegisterTests(LakeCase):
    """The table ``files``, the register of all files that were read."""

    def test_each_file_has_its_size_its_hash_and_its_batch(self) -> None:
        boot = Boot(S1, "1" * 32)
        boot.beats(DAY, "10:00:00", 3, sessions=1)
        write_file(self.spool / "events-1.jsonl.gz", boot.rows[:2])
        # Spark reads this file, because a line is no event.
        write_file(self.spool / "events-2.jsonl.gz", boot.rows[2:], garbage=[b"hello"])
        self.run_jobs()
        lake = self.pipeline().lake
        rows = {Path(row["file"]).name: row for row in lake.stored("silver", "files", lake.state()).to_pylist()}
        self.assertEqual(set(rows), {"events-1.jsonl.gz", "events-2.jsonl.gz"})
        for name, row in rows.items():
            content = (self.spool / name).read_bytes()
            expected = (len(content), hashlib.sha256(content).hexdigest(), "spool", 0)
            self.assertEqual(tuple(row[key] for key in ("file_bytes", "file_sha256", "origin", "batch")), expected)
