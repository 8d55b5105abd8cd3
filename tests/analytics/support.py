"""One Spark session for all tests, and spools written by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics.jobs import Outcome, Pipeline, receipts_source, spool_source
from dmsg.analytics.session import make_session

DAY = date(2026, 3, 10)
NEXT = date(2026, 3, 11)
NOW = datetime(2026, 3, 13, 12, tzinfo=UTC)


def key(number: int) -> str:
    """Of a server."""
    return f"02{number:064x}"


S1, S2, S3 = (key(number) for number in (1, 2, 3))
DISCOVERY = "discovery-1"

_spark: list[SparkSession] = []


def spark() -> SparkSession:
    """The session; its Java ends with this process."""
    if not _spark:
        _spark.append(make_session("local[2]", quick=True, settings={"spark.sql.shuffle.partitions": "2"}))
    return _spark[0]


def ms(day: date, time: str) -> int:
    """``HH:MM:SS[.fff]`` of a day as ms since 1970."""
    return int(datetime.fromisoformat(f"{day}T{time}+00:00").timestamp() * 1000)


class Boot:
    """One process that writes events."""

    def __init__(self, producer: str, name: str, role: str = "server", *, started: int | None = None) -> None:
        self.producer, self.boot, self.role = producer, name, role
        self.rows: list[dict[str, Any]] = []
        self._first = started

    def event(self, kind: str, day: date, time: str, **fields: Any) -> dict[str, Any]:
        """Write one; numbers follow each other."""
        ts = ms(day, time)
        self._first = ts if self._first is None else self._first
        row = {
            "v": 1,
            "type": kind,
            "producer": self.producer,
            "role": self.role,
            "boot": self.boot,
            "seq": len(self.rows),
            "ts": ts,
            "mono": ts - self._first,
            **fields,
        }
        self.rows.append(row)
        return row

    def beats(self, day: date, first: str, count: int, **fields: Any) -> None:
        """A heartbeat each minute."""
        start = ms(day, first)
        for number in range(count):
            at = datetime.fromtimestamp(start / 1000 + 60 * number, UTC)
            self.event("heartbeat", at.date(), f"{at:%H:%M:%S}", interval_ms=60_000, **fields)


def write_file(path: Path, rows: Iterable[dict[str, Any]], *, end: bool = True, garbage: Iterable[bytes] = ()) -> None:
    """A finished file of a spool."""
    lines = [json.dumps(row).encode() for row in rows]
    lines += list(garbage)
    if end:
        last = {"v": 1, "type": "segment_end", "producer": S1, "role": "server", "boot": path.name, "seq": 0}
        stamp = json.loads(lines[0]) if lines and lines[0].startswith(b"{") else {"ts": ms(DAY, "00:00:00"), "mono": 0}
        last |= {"ts": stamp["ts"], "mono": 0, "lines": len(lines)}
        lines.append(json.dumps(last).encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(b"".join(line + b"\n" for line in lines)))


class LakeCase(SynchronousTestCase):
    """A spool and the tables made of it, in directories of the test."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.spool, self.checked, self.out = (self.root / name for name in ("spool", "checked", "out"))
        self.spool.mkdir(parents=True)
        self.checked.mkdir()

    def pipeline(self, out: Path | None = None, **options: Any) -> Pipeline:
        """The jobs over this test's tables."""
        return Pipeline(spark(), str(out or self.out), now=NOW, **options)

    def run_jobs(self, out: Path | None = None, **options: Any) -> Outcome:
        """One run."""
        return self.pipeline(out, **options).run([spool_source(str(self.spool)), receipts_source(str(self.checked))])

    def table(self, name: str, layer: str = "gold", out: Path | None = None) -> list[dict[str, Any]]:
        """The current rows, in an order of their own."""
        lake = self.pipeline(out).lake
        rows = [row.asDict(recursive=True) for row in lake.read(layer, name, lake.state()).collect()]
        return sorted(rows, key=lambda row: json.dumps(row, default=str, sort_keys=True))

    def tables(self, names: Iterable[str], out: Path | None = None) -> dict[str, list[dict[str, Any]]]:
        """Several of them."""
        return {name: self.table(name, out=out) for name in names}
