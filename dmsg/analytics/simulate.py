"""A network that never was: its events at any size, always the same for a seed.

Made by Spark's own functions of counters and hashes, so that 20 million events
take minutes and need no memory.  What is drawn, and from what:

* a server's share of transports falls with its rank, as 1 / rank ** 0.6;
* the time of day follows a wave with its peak at noon;
* which client: the square of an even draw, so that few are busy and many are not;
* durations and bytes are log-normal (median 20 s and 30 kB, sigma 1.5 and 2);
* answers: log-normal around a median of its own for each server, 5 to 80 ms;
* one request in 33 is refused by the other end;
* one day in twenty a server is away for two hours, and one in forty it crashes then;
* receipts: both ends for 80 % of transports, one end for 10 %;
* the third server claims 20 % more than it delivered, the fifth does so together with the initiators;
* three clients scan, one floods, one network fails handshakes.
"""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import dataclass
from datetime import date
from hashlib import md5
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from dmsg.analytics.schemas import DAY_MS
from dmsg.telemetry.schema import BUCKETS, EVENTS_PREFIX, RECEIPTS_PREFIX, SCHEMA_VERSION, SEGMENT_SUFFIX

LIAR, COLLUDER = 2, 4
"""Servers, counted from 0, that claim more than they delivered."""
LIE = 1.2
SCANNERS = 3
MINUTES = 1440
AWAY_MINUTES = 120
ROWS_OF_FILE = 100_000
REFUSED_ONE_IN = 33
REASONS = ("unspecified",) * 4 + ("aborted", "timeout", "peer_disconnected", "moved")
"""Why transports end, each as often."""


@dataclass(frozen=True)
class Network:
    """What to simulate.

    :ivar transports: in all; each is two events, or one if it was refused.
    :ivar last_day: of the ``days``.
    :ivar fleet: the servers name clients with one secret.
    """

    transports: int = 100_000
    servers: int = 20
    clients: int = 2_000
    days: int = 3
    seed: int = 1
    last_day: date = date(2026, 1, 31)
    fleet: bool = False

    def __post_init__(self) -> None:
        if min(self.transports, self.servers, self.clients, self.days) < 1:
            raise ValueError("there must be at least one transport, server, client and day")

    def shares(self) -> list[int]:
        """Transports of each server and day."""
        weights = [(rank + 1) ** -0.6 for rank in range(self.servers)]
        total = sum(weights) * self.days
        return [max(1, round(self.transports * weight / total)) for weight in weights]


def _even(seed: int, draw: int, *columns: str) -> Column:
    """An even draw from 0 to 1 for each different value of the columns."""
    mixed = F.xxhash64(*columns, F.lit(seed), F.lit(draw))
    return (F.pmod(mixed, F.lit(2**53)) + F.lit(0.5)) / F.lit(float(2**53))


def _normal(seed: int, draw: int, *columns: str) -> Column:
    """A normal draw (Box and Muller)."""
    radius = F.sqrt(-2 * F.log(_even(seed, draw, *columns)))
    return radius * F.cos(2 * 3.141592653589793 * _even(seed, draw + 1, *columns))


def _hex(length: int, *columns: Column | str) -> Column:
    return F.substring(F.md5(F.concat_ws("/", *columns)), 1, length)


class Simulation:
    """The events of a network as rows of JSON."""

    def __init__(self, spark: SparkSession, network: Network) -> None:
        self.spark = spark
        self.network = network
        self._first = (network.last_day.toordinal() - date(1970, 1, 1).toordinal() - network.days + 1) * DAY_MS

    # --- who and when ---

    def _plan(self) -> DataFrame:
        """A row for each server and day."""
        shares = self.network.shares()
        rows = [
            (server, f"02{md5(f'server {server}'.encode()).hexdigest()}{server:032x}"[:66], day, shares[server])  # noqa: S324
            for server in range(self.network.servers)
            for day in range(self.network.days)
        ]
        away = _even(self.network.seed, 90, "server", "day")
        return (
            self.spark.createDataFrame(rows, "server int, producer string, day int, n int")
            .repartition(max(4, min(len(rows), self.network.transports * 2 // ROWS_OF_FILE)))
            .withColumn("boot", F.md5(F.concat_ws("/", F.lit(self.network.seed), "producer", "day")))
            .withColumn("midnight", F.lit(self._first) + F.col("day").cast("long") * DAY_MS)
            .withColumn("role", F.lit("server"))
            # minutes in which it was away, and whether it ended without a word
            .withColumn("away", F.when(away < 0.05, F.floor(300 + 4000 * away * 4).cast("int")))
            .withColumn("crashed", away < 0.025)
        )

    @property
    def _where(self) -> Column:
        """Who names a client differs from who does not share its secret."""
        return F.lit("fleet") if self.network.fleet else F.col("server").cast("string")

    def _events(self, rows: DataFrame, kind: Column | str, block: int, *fields: Column | str) -> DataFrame:
        """Rows with ``i`` (their number within the block) and ``at`` (ms of the day) -> lines."""
        name = F.lit(kind) if isinstance(kind, str) else kind
        at = F.greatest(F.lit(0), F.least("at", F.lit(DAY_MS - 1))).cast("long")
        return rows.select(
            F.to_json(
                F.struct(
                    F.lit(SCHEMA_VERSION).alias("v"),
                    name.alias("type"),
                    "producer",
                    "role",
                    # a block of numbers of its own for each kind: a process's numbers without gaps need no sorting
                    F.concat(F.substring("boot", 1, 30), F.lit(f"{block:02x}")).alias("boot"),
                    F.col("i").cast("long").alias("seq"),
                    (F.col("midnight") + at).alias("ts"),
                    at.alias("mono"),
                    *fields,
                )
            ).alias("value")
        )

    def _client(self, draw: int) -> Column:
        """Which client: few are busy."""
        even = _even(self.network.seed, draw, "server", "day", "i")
        return F.floor(self.network.clients * F.pow(even, F.lit(2.0))).cast("int")

    # --- transports ---

    def _transports(self) -> DataFrame:
        seed = self.network.seed
        rows = self._plan().withColumn("i", F.explode(F.sequence(F.lit(0), F.col("n") - 1)))
        key = ("server", "day", "i")
        wave = (F.col("i") + _even(seed, 1, *key)) / F.col("n")

        def lognormal(median: Column | float, sigma: float, draw: int) -> Column:
            return median * F.exp(sigma * _normal(seed, draw, *key))

        return (
            rows.withColumn("start", (DAY_MS * (wave + F.sin(2 * 3.141592653589793 * wave) / 10)).cast("long"))
            .withColumn("a", self._client(2))
            .withColumn("b0", self._client(3))
            .withColumn(
                "b",
                F.when(F.col("b0") == F.col("a"), (F.col("b0") + 1) % (self.network.clients + 1)).otherwise(
                    F.col("b0")
                ),
            )
            .withColumn("transport", F.md5(F.concat_ws("/", F.lit(seed), "server", "day", "i")))
            # by number, so that the numbers of openings and receipts have no gaps either
            .withColumn("accepted", F.col("i") % REFUSED_ONE_IN != REFUSED_ONE_IN - 1)
            .withColumn("taken", F.col("i") - F.floor(F.col("i") / REFUSED_ONE_IN))
            .withColumn("lasted", F.least(F.lit(3_600_000), lognormal(20_000.0, 1.5, 6)).cast("long"))
            .withColumn("open_us", F.least(F.lit(9_000_000), lognormal(12_000.0, 0.8, 8)).cast("long"))
            .withColumn("open_ms", F.round(F.col("open_us") / 1000).cast("long"))
            .withColumn("out", F.least(F.lit(10**10), lognormal(30_000.0, 2.0, 10)).cast("long"))
            .withColumn("back", F.least(F.lit(10**10), lognormal(8_000.0, 2.0, 12)).cast("long"))
            .withColumn("median", 5 + 75 * _even(seed, 14, "server"))
            .withColumn("samples", F.floor(4 * _even(seed, 15, *key)).cast("int"))
        )

    def transport_lines(self) -> DataFrame:
        """transport_open and transport_close."""
        rows = self._transports()
        lie = F.when(F.col("server").isin(LIAR, COLLUDER), LIE).otherwise(1.0)
        out, back = ((F.col(name) * lie).cast("long") for name in ("out", "back"))

        def tag(name: str) -> Column:
            return _hex(16, F.lit("client"), self._where, name)

        def bucket(draw: int) -> Column:
            answer = F.col("median") * F.exp(0.5 * _normal(self.network.seed, draw, "server", "day", "i"))
            return F.greatest(F.lit(0), F.least(F.lit(BUCKETS - 1), F.ceil(2 * F.log2(answer / 0.1)))).cast("int")

        filled = rows.withColumn("at", F.col("start")).withColumns(
            {f"x{one}": bucket(20 + 2 * one) for one in range(3)}
        )
        histogram = F.when(
            F.col("accepted") & (F.col("samples") > 0),
            F.transform(
                F.sequence(F.lit(0), F.lit(BUCKETS - 1)),
                lambda index: sum(
                    (
                        F.when((F.col("samples") > one) & (F.col(f"x{one}") == index), 1).otherwise(0)
                        for one in range(1, 3)
                    ),
                    F.when(F.col("x0") == index, 1).otherwise(0),
                ),
            ),
        )
        common = (
            F.when(F.col("accepted"), F.col("transport")).alias("transport"),
            tag("a").alias("src"),
            tag("b").alias("dst"),
            F.lit(True).alias("secure"),
        )
        opened = self._events(
            filled.where("accepted").withColumn("i", F.col("taken")),
            "transport_open",
            1,
            *common,
            F.col("open_ms").alias("accept_ms"),
            F.col("open_us").alias("accept_us"),
        )

        def counted(amount: Column, name: str) -> Column:
            return F.when(F.col("accepted"), amount).alias(name)

        reason = F.element_at(
            F.array(
                *[
                    F.lit(one)
                    for one in (
                        "unspecified",
                        "unspecified",
                        "unspecified",
                        "unspecified",
                        "aborted",
                        "timeout",
                        "peer_disconnected",
                        "moved",
                    )
                ]
            ),
            F.floor(8 * _even(self.network.seed, 30, "server", "day", "i")).cast("int") + 1,
        )
        closed = self._events(
            filled.withColumn("at", F.col("start") + F.col("lasted")),
            "transport_close",
            2,
            *common,
            F.when(F.col("accepted"), reason).otherwise("refused").alias("reason"),
            F.when(F.col("accepted"), F.lit("src")).otherwise("dst").alias("by"),
            F.when(F.col("accepted"), F.col("lasted")).otherwise(F.col("open_ms")).alias("duration_ms"),
            F.when(F.col("accepted"), F.col("open_ms")).alias("accept_ms"),
            F.when(F.col("accepted"), F.col("open_us")).alias("accept_us"),
            counted(out, "data_ab"),
            counted(back, "data_ba"),
            counted(F.ceil(out / 1024), "frames_ab"),
            counted(F.ceil(back / 1024), "frames_ba"),
            counted(F.ceil(out / 4096), "acks_ab"),
            counted(F.ceil(back / 4096), "acks_ba"),
            histogram.alias("rtt"),
            counted(out, "total_ab"),
            counted(back, "total_ba"),
        )
        return opened.unionByName(closed)

    def receipt_lines(self) -> DataFrame:
        """receipt_checked, of both ends."""
        lie = F.when(F.col("server") == COLLUDER, LIE).otherwise(1.0)
        tens, ones = F.floor(F.col("taken") / 10), F.col("taken") % 10
        rows = self._transports().where(F.col("accepted")).withColumn("at", F.col("start") + F.col("lasted") + 5)
        ends = []
        for block, mine, other, initiator, sent, received, share in (
            (3, "a", "b", True, (F.col("out") * lie).cast("long"), (F.col("back") * lie).cast("long"), 9),
            (4, "b", "a", False, F.col("back"), F.col("out"), 8),
        ):
            ends.append(
                self._events(
                    rows.where(ones < share).withColumn("i", tens * share + ones),
                    "receipt_checked",
                    block,
                    "transport",
                    F.col("producer").alias("server"),
                    _hex(16, F.lit("signer"), mine).alias("signer"),
                    _hex(16, F.lit("signer"), other).alias("partner"),
                    F.lit(initiator).alias("initiator"),
                    sent.alias("delivered_out"),
                    received.alias("delivered_in"),
                )
            )
        return ends[0].unionByName(ends[1])

    # --- all else ---

    def server_lines(self) -> DataFrame:
        """start, stop, heartbeat, session_open, session_close, transport_refuse, handshake_fail, drop."""
        seed = self.network.seed
        plan = self._plan()
        minute = F.col("minute")
        wave = 0.5 + 0.4 * F.sin(2 * 3.141592653589793 * (minute / MINUTES - 0.35))
        most = float(max(self.network.shares()))
        busy = F.least(F.lit(990), 5 + 700 * F.col("n") / most * wave * (1 + F.col("day") * 0.03))
        lives = self._lives(plan)
        beats = lives.withColumn("i", F.explode(F.sequence(F.lit(1), F.col("minutes")))).withColumn(
            "minute", F.col("first") + F.col("i") - 1
        )
        lines = [
            self._events(
                beats.withColumn("at", minute * 60_000 + 30_000),
                "heartbeat",
                5,
                F.lit(60_000).alias("interval_ms"),
                busy.cast("long").alias("sessions"),
                (busy * 2).cast("long").alias("transports"),
                F.lit(1000).alias("capacity"),
                (busy * 900).cast("long").alias("frames"),
                (busy * 700_000).cast("long").alias("bytes"),
                (5 + 20 * _even(seed, 50, "server", "day", "i")).cast("long").alias("lag_ms"),
                (busy * 20).cast("long").alias("cpu_ms"),
                F.lit(80_000).alias("rss_kb"),
                F.lit(True).alias("registered"),
                F.lit(0).alias("lost"),
            ),
            self._events(
                lives.withColumn("i", F.lit(0)).withColumn("at", F.col("first") * 60_000 + 1),
                "start",
                5,
                F.lit("0.1.0").alias("version"),
                F.substring(F.md5(self._where), 1, 8).alias("names"),
                F.lit(1000).alias("capacity"),
            ),
            self._events(
                lives.where("NOT crashed OR life > 0")
                .withColumn("i", F.col("minutes") + 1)
                .withColumn("at", (F.col("first") + F.col("minutes")) * 60_000 - 2),
                "stop",
                5,
            ),
        ]
        sessions = (
            plan.withColumn("i", F.explode(F.sequence(F.lit(0), F.ceil(F.col("n") / 4).cast("int"))))
            .withColumn("key", F.col("i"))
            .withColumn("start", (DAY_MS * _even(seed, 51, "server", "day", "i") * 0.95).cast("long"))
            .withColumn(
                "lasted",
                F.least(F.lit(DAY_MS / 20), 600_000 * F.exp(_normal(seed, 52, "server", "day", "i"))).cast("long"),
            )
            .withColumn(
                "who",
                _hex(
                    16,
                    F.lit("client"),
                    self._where,
                    F.floor(self.network.clients * F.pow(_even(seed, 54, "server", "day", "i"), F.lit(2.0))).cast(
                        "int"
                    ),
                ),
            )
        )
        peer, session = F.col("who").alias("peer"), F.col("key").cast("long").alias("session")
        # both events of a session are of one process: even and odd numbers
        lines += [
            self._events(
                sessions.withColumn("at", F.col("start")).withColumn("i", 2 * F.col("key")),
                "session_open",
                8,
                peer,
                session,
                F.lit(4).alias("handshake_ms"),
            ),
            self._events(
                sessions.withColumn("at", F.col("start") + F.col("lasted")).withColumn("i", 2 * F.col("key") + 1),
                "session_close",
                8,
                peer,
                session,
                F.lit("connection_lost").alias("reason"),
                F.col("lasted").alias("duration_ms"),
                (F.col("lasted") / 100).cast("long").alias("frames"),
                F.col("lasted").alias("bytes"),
            ),
        ]
        hours = plan.withColumn("i", F.explode(F.sequence(F.lit(0), F.lit(23)))).withColumn(
            "at", F.col("i") * 3_600_000 + 1_800_000
        )
        few = (1 + 5 * _even(seed, 60, "server", "day", "i")).cast("long")
        lines += [
            self._events(
                hours.withColumn("i", F.col("i") * SCANNERS + scanner),
                "transport_refuse",
                9,
                _hex(16, F.lit("scanner"), self._where, F.lit(scanner)).alias("src"),
                F.lit("no_such_peer").alias("reason"),
                (few * (40 if scanner == 0 else 1)).alias("n"),
                (few * (30 if scanner == 0 else 1)).alias("targets"),
            )
            for scanner in range(SCANNERS)
        ]
        lines += [
            self._events(
                hours,
                "transport_refuse",
                10,
                _hex(16, F.lit("flooder"), self._where).alias("src"),
                F.lit("rate_limited").alias("reason"),
                (few * 100).alias("n"),
                F.lit(1).alias("targets"),
            ),
            self._events(
                hours,
                "handshake_fail",
                11,
                F.lit("handshake_failed").alias("reason"),
                _hex(16, F.lit("network"), self._where, "day").alias("source"),
                (few * 10).alias("n"),
            ),
            self._events(hours, "drop", 12, F.lit("too_many_connections").alias("reason"), few.alias("n")),
        ]
        return self._union(lines)

    def discovery_lines(self) -> DataFrame:
        """entry, entry_refuse, heartbeat."""
        seed = self.network.seed
        days = self._plan().where("server = 0").withColumn("role", F.lit("discovery"))
        days = days.withColumn("producer", F.lit("discovery-1")).withColumn("boot", F.md5(F.concat("producer", "boot")))
        minutes = days.withColumn("i", F.explode(F.sequence(F.lit(0), F.lit(MINUTES - 1)))).withColumn(
            "at", F.col("i") * 60_000 + 20_000
        )
        posts = (
            self._minutes_there(self._plan())
            .withColumn("at", F.col("minute") * 60_000 + 10_000)
            .withColumn("subject", F.col("producer"))
            .withColumn("producer", F.lit("discovery-1"))
            .withColumn("role", F.lit("discovery"))
            .withColumn("boot", F.md5(F.concat_ws("/", F.lit("posts"), "day", "server")))
        )
        clients = (
            days.withColumn("i", F.explode(F.sequence(F.lit(0), F.lit(4 * self.network.clients - 1))))
            .withColumn("at", (DAY_MS * _even(seed, 70, "day", "i")).cast("long"))
            .withColumn("subject", _hex(16, F.lit("entry"), (F.col("i") % self.network.clients).cast("string")))
        )
        return self._union(
            [
                self._events(
                    minutes,
                    "heartbeat",
                    20,
                    F.lit(60_000).alias("interval_ms"),
                    F.lit(self.network.clients).alias("entries"),
                    F.lit(500).alias("requests"),
                ),
                self._events(
                    posts,
                    "entry",
                    21,
                    "subject",
                    F.lit(True).alias("is_server"),
                    F.lit("next").alias("result"),
                    F.col("minute").cast("long").alias("sequence"),
                    F.lit(100).alias("available"),
                ),
                self._events(
                    clients,
                    "entry",
                    22,
                    "subject",
                    F.lit(False).alias("is_server"),
                    F.lit("next").alias("result"),
                    F.col("i").cast("long").alias("sequence"),
                    F.lit(2).alias("delegated"),
                ),
                self._events(
                    minutes.where("i % 10 = 0").withColumn("i", (F.col("i") / 10).cast("int")),
                    "entry_refuse",
                    23,
                    F.lit("invalid").alias("reason"),
                    _hex(16, F.lit("poster"), "day").alias("source"),
                    (1 + 9 * _even(seed, 71, "day", "i")).cast("long").alias("n"),
                ),
            ]
        )

    @staticmethod
    def _lives(plan: DataFrame) -> DataFrame:
        """A row for each process: from the ``first`` minute on, so many ``minutes``; two where a server was away."""
        away, life = F.col("away"), F.col("life")
        return (
            plan.withColumn(
                "life", F.explode(F.when(away.isNull(), F.array(F.lit(0))).otherwise(F.array(F.lit(0), F.lit(1))))
            )
            .withColumn("first", F.when(life == 0, 0).otherwise(away + AWAY_MINUTES))
            .withColumn(
                "minutes",
                F.when(away.isNull(), MINUTES).when(life == 0, away).otherwise(MINUTES - away - AWAY_MINUTES),
            )
            .withColumn("boot", F.md5(F.concat_ws("/", "boot", "life")))
        )

    @staticmethod
    def _minutes_there(plan: DataFrame) -> DataFrame:
        """A row for each minute in which a server was not away, with its number."""
        minute, away = F.col("minute"), F.col("away")
        return (
            plan.withColumn("minute", F.explode(F.sequence(F.lit(0), F.lit(MINUTES - 1))))
            .where(away.isNull() | ~minute.between(away, away + AWAY_MINUTES - 1))
            .withColumn(
                "i", F.when(minute < away, minute).otherwise(minute - F.when(away.isNull(), 0).otherwise(AWAY_MINUTES))
            )
        )

    @staticmethod
    def _union(parts: list[DataFrame]) -> DataFrame:
        rows = parts[0]
        for part in parts[1:]:
            rows = rows.unionByName(part)
        return rows

    # --- files ---

    def write(self, directory: Path) -> dict[str, int]:
        """Write a spool, and receipts as if they had been checked.

        :param directory: gets ``spool/`` and ``checked/``.
        :returns: files of each.
        """
        spool, checked = directory / "spool", directory / "checked"
        written = {"spool": 0, "checked": 0}
        for target, prefix, name, lines in (
            (spool, EVENTS_PREFIX, "transports", self.transport_lines()),
            (spool, EVENTS_PREFIX, "servers", self.server_lines().coalesce(8)),
            (spool, EVENTS_PREFIX, "discovery", self.discovery_lines().coalesce(4)),
            (checked, RECEIPTS_PREFIX, "receipts", self.receipt_lines()),
        ):
            fresh = directory / f".{name}"
            lines.write.mode("overwrite").option("compression", "gzip").text(str(fresh))
            target.mkdir(parents=True, exist_ok=True)
            for number, part in enumerate(sorted(fresh.glob("part-*.gz"))):
                stem = f"{prefix}{name}-{self.network.seed}-{number:06d}"
                with open(part, "ab") as file:  # another member of the gzip file: its last line
                    file.write(gzip.compress(self._end(stem)))
                part.replace(target / f"{stem}{SEGMENT_SUFFIX}")
                written[target.name] += 1
            shutil.rmtree(fresh)
        return written

    def _end(self, stem: str) -> bytes:
        row = {
            "v": SCHEMA_VERSION,
            "type": "segment_end",
            "producer": "02" + md5(b"server 0").hexdigest() + f"{0:032x}",  # noqa: S324
            "role": "server",
            "boot": md5(stem.encode()).hexdigest(),  # noqa: S324
            "seq": 0,
            "ts": self._first,
            "mono": 0,
        }
        return json.dumps(row).encode() + b"\n"
