"""Computation of the silver tables from bronze. Each family of events has a table with its own columns and types."""

from __future__ import annotations

from datetime import date

from pyspark.sql import Column, DataFrame

from dmsg.analytics import functions as F
from dmsg.analytics.broadcasts import Hint
from dmsg.analytics.event_rules import SILENCE_SECONDS
from dmsg.analytics.functions import Window
from dmsg.analytics.schemas import SILVER

GAP_LIMIT_MS = 10 * 60 * 1000
"""Maximum time in ms between two heartbeats of a process for which the process counts as up in between."""


def _at() -> Column:
    return F.timestamp_millis("ts").alias("at")


def _hour() -> Column:
    # The hours are rounded down before the remainder is taken, because in memory a remainder of whole numbers takes a
    # tenth of the time that a remainder of fractions takes.
    return (F.floor(F.col("ts") / 3_600_000) % 24).cast("int").alias("hour")


def _day() -> Column:
    return F.col("dt").cast("date").alias("dt")


def _columns(table: str) -> list[str]:
    return SILVER[table].schema.fieldNames()


def transports(events: DataFrame) -> DataFrame:
    """Return the silver table of the family of events ``transport``."""
    return events.select(
        F.col("producer").alias("server"),
        "boot",
        _at(),
        _hour(),
        F.substring_index("type", "_", -1).alias("what"),
        "transport",
        "src",
        "dst",
        "secure",
        "reason",
        "by",
        "duration_ms",
        "accept_ms",
        "data_ab",
        "data_ba",
        "frames_ab",
        "frames_ba",
        "acks_ab",
        "acks_ba",
        "rtt",
        "total_ab",
        "total_ba",
        "dropped_ab",
        "dropped_ba",
        "accept_us",
        _day(),
    )


def sessions(
    events: DataFrame, ends: DataFrame, lives: DataFrame, hint: Hint = F.broadcast, *, last_day: date
) -> DataFrame:
    """Return the silver table of the family of events ``session``.

    A session that was opened on a day, but did not end on that day, is *lost* if its process was lost. Its end is then
    the time of the process's last event. Otherwise the session is *open*, and its end is in the rows of the day on
    which it ends.

    A process was lost in two cases: another process of its name started after its last event, or it wrote no event for
    more than ``SILENCE_SECONDS``. The silence is measured from its last event of the day until midnight, or on the last
    day until the newest event of all.

    :param ends: the last event of each process and day (producer, boot, dt, last_ts).
    :param lives: events of the family ``life``.
    :param last_day: the last of all days with events.
    :param hint: function that marks rows for a broadcast join if there are few of them.
    """
    opening = F.col("type") == "session_open"
    put_together = events.groupBy("producer", "boot", "session", "dt").agg(
        F.max("peer").alias("peer"),
        F.min(F.when(opening, F.col("ts"))).alias("opened"),
        F.max(F.when(~opening, F.col("ts"))).alias("closed"),
        F.max(F.when(~opening, F.col("duration_ms"))).alias("lasted"),
        F.max("reason").alias("reason"),
        F.max("handshake_ms").alias("handshake_ms"),
        F.max("frames").alias("frames"),
        F.max("bytes").alias("bytes"),
    )
    newest = ends.groupBy("dt").agg(F.max("last_ts").alias("newest"))
    started = lives.where(F.col("type") == "start").groupBy("producer", "dt").agg(F.max("ts").alias("started"))
    ends = ends.join(hint(newest), "dt").join(hint(started), ["producer", "dt"], "left")
    midnight = F.unix_millis(F.date_add(_day(), 1).cast("timestamp"))
    until = F.when(_day() < F.lit(last_day), midnight).otherwise(F.col("newest"))
    replaced = F.coalesce(F.col("started") > F.col("last_ts"), F.lit(False))
    lost = F.col("closed").isNull() & (replaced | (until - F.col("last_ts") > SILENCE_SECONDS * 1000))
    opened = F.coalesce("opened", F.col("closed") - F.col("lasted"))
    closed = F.coalesce("closed", F.when(lost, F.col("last_ts")))
    return (
        put_together.join(hint(ends), ["producer", "boot", "dt"], "left")
        .select(
            F.col("producer").alias("server"),
            "boot",
            "session",
            "peer",
            F.timestamp_millis(opened).alias("opened_at"),
            F.timestamp_millis(closed).alias("closed_at"),
            F.coalesce("lasted", closed - opened).alias("duration_ms"),
            F.when(F.col("closed").isNotNull(), F.col("reason")).when(lost, "lost").otherwise("open").alias("reason"),
            "handshake_ms",
            "frames",
            "bytes",
            _day(),
        )
        .select(*_columns("sessions"))
    )


def heartbeats(events: DataFrame) -> DataFrame:
    """Return the silver table of the family of events ``beat``.  A process counts as up during gaps of at most
    :data:`GAP_LIMIT_MS` between its heartbeats."""
    one_process = Window.partitionBy("producer", "boot", "dt").orderBy("ts", "seq").rowsBetween(-1, -1)
    before = F.max("ts").over(one_process)
    told = F.col("ts") - F.coalesce("interval_ms", F.lit(0))
    covers = F.when(F.col("ts") - before <= GAP_LIMIT_MS, F.least(before, told)).otherwise(
        F.greatest(told, F.col("ts") - GAP_LIMIT_MS)
    )
    return events.withColumn("covers", covers).select(
        "producer",
        "role",
        "boot",
        _at(),
        F.timestamp_millis("covers").alias("covers_from"),
        *(
            name
            for name in _columns("heartbeats")
            if name not in ("producer", "role", "boot", "at", "covers_from", "dt")
        ),
        _day(),
    )


def refusals(events: DataFrame) -> DataFrame:
    """Return the silver table of the family of events ``refusal``. The column ``who`` is the pseudonym of a client or a
    network; it is NULL for drops."""
    what = (
        F.when(F.col("type") == "handshake_fail", "handshake")
        .when(F.col("type") == "transport_refuse", "request")
        .when(F.col("type") == "entry_refuse", "entry")
        .when(F.col("type") == "lookup_fail", "lookup")
        .otherwise("drop")
    )
    return events.select(
        "producer",
        _at(),
        _hour(),
        what.alias("what"),
        F.coalesce("src", "source").alias("who"),
        "reason",
        F.coalesce("n", F.lit(1)).alias("n"),
        F.coalesce("targets", F.lit(0)).alias("targets"),
        _day(),
    )


def entries(events: DataFrame) -> DataFrame:
    """Return the silver table of the family of events ``entry``."""
    return events.select(
        "producer",
        _at(),
        _hour(),
        "subject",
        F.coalesce("is_server", F.lit(False)).alias("is_server"),
        "result",
        "sequence",
        "available",
        "delegated",
        "clock_ms",
        _day(),
    )


def accepted_receipts(events: DataFrame) -> DataFrame:
    """Return the accepted receipts of the family of events ``receipt``, with the columns of :func:`receipts`. If an end
    of a transport sent several receipts, each of them has a row."""
    return events.where(F.col("reason").isNull() & F.col("transport").isNotNull() & F.col("signer").isNotNull()).select(
        "server",
        "transport",
        "signer",
        "partner",
        "initiator",
        "delivered_out",
        "delivered_in",
        F.lit(1).cast("long").alias("words"),
        F.coalesce("former", F.lit(False)).alias("former"),
        "peer",
        _at(),
        _day(),
    )


def receipts(events: DataFrame) -> DataFrame:
    """Return the silver table of the family of events ``receipt``. It has one row for each end of a transport, with the
    smallest counts in the accepted receipts of this end."""
    return receipts_of_ends(accepted_receipts(events))


def receipts_of_ends(accepted: DataFrame) -> DataFrame:
    """Return the silver table of receipts, computed from the rows of :func:`accepted_receipts`."""
    # Text columns are grouping keys only. If texts were aggregated, Spark would sort the rows, which is slower than
    # hashing.
    return (
        accepted.groupBy("server", "transport", "signer", "partner", "initiator", "former")
        .agg(
            F.min("delivered_out").alias("delivered_out"),
            F.min("delivered_in").alias("delivered_in"),
            F.sum("words").alias("words"),
            F.min("peer").alias("peer"),
            F.min("at").alias("at"),
            F.min("dt").alias("dt"),
        )
        .select(*_columns("receipts"))
    )


def boots(lives: DataFrame, beats: DataFrame, ends: DataFrame, hint: Hint = F.broadcast) -> DataFrame:
    """Return the table of processes, from the families ``life`` and ``beat``.

    The table has every process that started, stopped or wrote a heartbeat. Events with checked receipts are ignored:
    the program that checks receipts writes and numbers these events.

    :param ends: the first and last event of each process and day (producer, boot, dt, first_ts, last_ts).
    :param hint: function that marks rows for a broadcast join if there are few of them.
    """
    told = lives.where(F.col("type").isin("start", "stop")).select("producer", "role", "boot", "type", "names", "dt")
    told = told.unionByName(beats.select("producer", "role", "boot", "type", "names", "dt"))
    return (
        told.groupBy("producer", "boot", "dt")
        .agg(
            F.min("role").alias("role"),
            F.count_if(F.col("type") == "start").alias("starts"),
            F.count_if(F.col("type") == "stop").alias("stops"),
            F.max("names").alias("names"),
        )
        .join(hint(ends), ["producer", "boot", "dt"])
        .select(
            "producer",
            "role",
            "boot",
            F.timestamp_millis("first_ts").alias("first_at"),
            F.timestamp_millis("last_ts").alias("last_at"),
            "starts",
            "stops",
            "names",
            _day(),
        )
    )
