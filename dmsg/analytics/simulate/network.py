"""Simulated network: its servers and clients, and when each of its processes runs.

Every random draw is a hash of columns of its row, so a row does not depend on other rows. Spark can therefore produce
any number of rows without storing them in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from pyspark.sql import Column, DataFrame, SparkSession, functions as F

from dmsg.analytics.schemas import DAY_MS
from dmsg.analytics.simulate.ground_truth import (
    CRASHED,
    RANKS_WITHOUT_OUTAGES,
    SILENT,
    SILENT_FROM,
    SKEW_MS,
    SKEWED,
    server_key,
)
from dmsg.telemetry.schema import SCHEMA_VERSION

MINUTES = 1440
MINUTE_MS = 60_000
AWAY_MINUTES = 120
ROWS_OF_FILE = 100_000
TURN = 2 * 3.141592653589793


@dataclass(frozen=True)
class Network:
    """Parameters of a simulation.

    :ivar transports: total number of transports. A transport has two events, or one if it was refused.
    :ivar last_day: last of the simulated days.
    :ivar fleet: whether the servers share one secret, so that they use the same pseudonyms for clients.
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
        """Return the number of transports per day of each server."""
        weights = [(rank + 1) ** -0.6 for rank in range(self.servers)]
        total = sum(weights) * self.days
        return [max(1, round(self.transports * weight / total)) for weight in weights]

    @property
    def first_ms(self) -> int:
        """Midnight of the first day, in ms since 1970."""
        return (self.last_day.toordinal() - date(1970, 1, 1).toordinal() - self.days + 1) * DAY_MS


def draw_uniform(seed: int, draw: int, *columns: str) -> Column:
    """Return a column with uniform random draws between 0 and 1. Rows with the same values in ``columns`` have the same
    draw.

    :param draw: number of the draw; different numbers result in independent draws.
    """
    mixed = F.xxhash64(*columns, F.lit(seed), F.lit(draw))
    return (F.pmod(mixed, F.lit(2**53)) + F.lit(0.5)) / F.lit(float(2**53))


def draw_normal(seed: int, draw: int, *columns: str) -> Column:
    """Return a column with standard normal random draws, by the Box-Muller transform. The parameters are those of
    :func:`draw_uniform`; the draw ``draw`` + 1 is used, too."""
    radius = F.sqrt(-2 * F.log(draw_uniform(seed, draw, *columns)))
    return radius * F.cos(TURN * draw_uniform(seed, draw + 1, *columns))


def name(*columns: Column | str) -> Column:
    """Return a column with the pseudonyms that :func:`~dmsg.analytics.simulate.ground_truth.tag` returns for the values
    of the columns."""
    return F.substring(F.md5(F.concat_ws("/", *columns)), 1, 16)


def union(parts: list[DataFrame]) -> DataFrame:
    """Return the union of all DataFrames."""
    rows = parts[0]
    for part in parts[1:]:
        rows = rows.unionByName(part)
    return rows


class Scenario:
    """Servers and days of the simulated network, from which all events are computed."""

    def __init__(self, spark: SparkSession, network: Network) -> None:
        self.spark = spark
        self.network = network

    def on_last_day(self, server: int) -> Column:
        """Return a boolean column: whether a row belongs to the server with number ``server`` and to the last day."""
        return (F.col("server") == server) & (F.col("day") == self.network.days - 1)

    @property
    def until(self) -> Column:
        """Column with the time of day, in ms, at which the row's server stops writing events."""
        return F.when(self.on_last_day(SILENT), SILENT_FROM * MINUTE_MS).otherwise(DAY_MS)

    def plan(self) -> DataFrame:
        """Return a row for each server and day: id of its process, outage, and number of transports."""
        network = self.network
        shares = network.shares()
        rows = [
            (server, server_key(server), day, shares[server])
            for server in range(network.servers)
            for day in range(network.days)
        ]
        drawn = draw_uniform(network.seed, 90, "server", "day")
        on_the_day_before = (F.col("server") == CRASHED) & (F.col("day") == max(0, network.days - 2))
        away = F.when(F.col("server").isin(*RANKS_WITHOUT_OUTAGES), 1.0).when(on_the_day_before, 0.01).otherwise(drawn)
        return (
            self.spark.createDataFrame(rows, "server int, producer string, day int, n int")
            .repartition(max(4, min(len(rows), network.transports * 2 // ROWS_OF_FILE)))
            .withColumn("boot", F.md5(F.concat_ws("/", F.lit(network.seed), "producer", "day")))
            .withColumn("midnight", F.lit(network.first_ms) + F.col("day").cast("long") * DAY_MS)
            .withColumn("role", F.lit("server"))
            .withColumn("skew", F.when(F.col("server") == SKEWED, SKEW_MS).otherwise(0))
            # ``away`` is the minute in which the server's outage begins. ``crashed`` is whether the server's process
            # ends then without a stop event.
            .withColumn("away", F.when(away < 0.05, F.floor(300 + 4000 * away * 4).cast("int")))
            .withColumn("crashed", away < 0.025)
        )

    @property
    def pseudonym_scope(self) -> Column:
        """Column that identifies the secret of the row's server. Servers with different secrets give the same client
        different pseudonyms."""
        return F.lit("fleet") if self.network.fleet else F.col("server").cast("string")

    def events(self, rows: DataFrame, kind: str, block: int, *fields: Column | str) -> DataFrame:
        """Return a line of JSON for each row.

        :param rows: rows with ``i`` (number of the event in its process) and ``at`` (time of day in ms).
        :param kind: type of the events.
        :param block: number of the type. Each type is written by a separate process (boot), so that its events can be
            numbered without gaps and without sorting.
        """
        skew = F.col("skew") if "skew" in rows.columns else F.lit(0)
        at = F.greatest(F.lit(0), F.least("at", F.lit(DAY_MS - 1) - skew)).cast("long")
        return rows.select(
            F.to_json(
                F.struct(
                    F.lit(SCHEMA_VERSION).alias("v"),
                    F.lit(kind).alias("type"),
                    "producer",
                    "role",
                    F.concat(F.substring("boot", 1, 30), F.lit(f"{block:02x}")).alias("boot"),
                    F.col("i").cast("long").alias("seq"),
                    (F.col("midnight") + at + skew).alias("ts"),
                    at.alias("mono"),
                    *fields,
                )
            ).alias("value")
        )

    def client(self, draw: int) -> Column:
        """Return a column with the number of a client that is drawn for each row. Low numbers are drawn more often."""
        drawn = draw_uniform(self.network.seed, draw, "server", "day", "i")
        return F.floor(self.network.clients * F.pow(drawn, F.lit(2.0))).cast("int")

    @staticmethod
    def processes(plan: DataFrame) -> DataFrame:
        """Return a row for each process of a server and day, with its ``first`` minute and its number of ``minutes``. A
        server with an outage has two processes on that day."""
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
    def minutes_present(plan: DataFrame) -> DataFrame:
        """Return a row for each server, day and minute without an outage. The column ``i`` numbers the rows of a server
        and day."""
        minute, away = F.col("minute"), F.col("away")
        return (
            plan.withColumn("minute", F.explode(F.sequence(F.lit(0), F.lit(MINUTES - 1))))
            .where(away.isNull() | ~minute.between(away, away + AWAY_MINUTES - 1))
            .withColumn(
                "i", F.when(minute < away, minute).otherwise(minute - F.when(away.isNull(), 0).otherwise(AWAY_MINUTES))
            )
        )
