"""Traffic of killed servers: transports that were opened and never closed.

The events of a killed server contain the bytes of such a transport only up to its last progress event. The receipts of
the two ends contain more. Both ends send their receipts when they are connected to the server again
(docs/pipeline/receipts.md). The number of bytes carried in a direction is between the smaller and the larger count of
the two ends. Counts that differ by more than a sender's window contradict each other and are ignored.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame

from dmsg.analytics import functions as F
from dmsg.analytics.broadcasts import Hint
from dmsg.analytics.gold.settlement import are_counts_compatible
from dmsg.analytics.gold.totals import bounded_sum, bounded_sums
from dmsg.analytics.schemas import OVERALL, SILVER

_WORDS = ("a_out", "a_in", "b_out", "b_in", "a_signer", "a_partner", "b_signer", "b_partner")
_TOLD = ("told_ab", "told_ba")
_BYTES = ("counted_bytes", "least_bytes", "most_bytes")


def select_unfinished(
    transports: DataFrame, verdicts: DataFrame, former: DataFrame, hint: Hint = F.broadcast
) -> DataFrame:
    """Return the events and receipts of the transports that were not both opened and closed on one day.

    Nearly all transports are opened and closed on the same day. To find the others cheaply, events are first grouped by
    a number that is computed from the names of server and transport. Only in the groups that remain, the names
    themselves are compared.

    :param verdicts: verdicts. A verdict on a transport that the server does not report contains the counts of its
        receipts.
    :param former: receipts that a restarted server received for transports from before the restart.
    :param hint: function that marks rows for a broadcast join if there are few of them.
    """
    events = transports.where(F.col("transport").isNotNull()).withColumn("pair", F.grouping_key("server", "transport"))
    opened, closed = F.col("what") == "open", F.col("what") == "close"
    halves = events.groupBy("pair").agg(F.bool_or(opened).alias("opened"), F.bool_or(closed).alias("closed"))
    halves = halves.where(~(F.col("opened") & F.col("closed"))).select("pair")
    half = (
        events.join(hint(halves), "pair", "left_semi")
        .groupBy("server", "boot", "transport", "dt")
        .agg(
            F.max("src").alias("src"),
            F.max("dst").alias("dst"),
            F.min(F.when(opened, F.col("at"))).alias("opened_at"),
            F.bool_or(closed).alias("closed"),
            bounded_sum(F.when(~closed, F.col("data_ab"))).alias("told_ab"),
            bounded_sum(F.when(~closed, F.col("data_ba"))).alias("told_ba"),
        )
    )
    words = verdicts.where(F.col("state") == "unclaimed").select("server", "transport", "dt", *_WORDS)
    rows = half
    for part in (words, _as_words(former)):
        rows = rows.unionByName(part, allowMissingColumns=True)
    return rows.select(*SILVER["unfinished"].schema.fieldNames())


def _as_words(receipts: DataFrame) -> DataFrame:
    said = {"out": F.col("delivered_out"), "in": F.col("delivered_in")}
    said |= {name: F.xxhash64(name) for name in ("signer", "partner")}
    return receipts.select(
        *("server", "transport", "dt", "peer"),
        *[
            F.when(end, column).alias(f"{side}_{name}")
            for side, end in (("a", F.col("initiator")), ("b", ~F.col("initiator")))
            for name, column in said.items()
        ],
    )


def _sum_of_ends(choose: object) -> Column:
    """Return a column with the bytes that a transport carried in both directions together.

    :param choose: function that combines the two ends' counts of one direction, such as ``F.least``.
    """
    assert callable(choose)
    total: Column = choose("a_out", "b_in") + choose("b_out", "a_in")
    return total


def lost_transport(rows: DataFrame, boots: DataFrame) -> DataFrame:
    """Return the transports that ended because their server's process ended, with the bytes that they had carried.

    :param rows: rows of :func:`select_unfinished` of all days.
    :param boots: rows of :func:`~dmsg.analytics.gold.uptime.boot`.
    """
    whole = (
        rows.groupBy("server", "transport")
        .agg(
            *[F.max(name).alias(name) for name in ("boot", "src", "dst")],
            F.min("opened_at").alias("opened_at"),
            F.coalesce(F.bool_or("closed"), F.lit(False)).alias("closed"),
            *bounded_sums(*_TOLD),
        )
        .where(F.col("opened_at").isNotNull() & ~F.col("closed"))
    )
    # If the server knew the transport, it has already checked that the receipt comes from one of the ends. After a
    # restart, the server does not know the ends, so the sender of the receipt is compared with the ends in the earlier
    # events.
    of_end = (F.col("a_out").isNotNull() & (F.col("peer") == F.col("src"))) | (
        F.col("b_out").isNotNull() & (F.col("peer") == F.col("dst"))
    )
    words = (
        rows.where(F.coalesce("a_out", "b_out").isNotNull())
        .select("server", "transport", "peer", *_WORDS)
        .join(whole.select("server", "transport", "src", "dst"), ["server", "transport"])
        .where(F.col("peer").isNull() | of_end)
        .groupBy("server", "transport")
        .agg(*[F.min(name).alias(name) for name in _WORDS])
    )
    over = boots.where(F.col("ended").isin("crashed", "silent")).select(
        F.col("producer").alias("server"), "boot", F.col("last_at").alias("lost_at")
    )
    one, other = F.col("a_out").isNotNull(), F.col("b_out").isNotNull()
    # Both ends must name each other as partner, as in :mod:`dmsg.analytics.gold.settlement`. Otherwise one client could
    # sign for both ends.
    mutual = (F.col("a_signer") == F.col("b_partner")) & (F.col("b_signer") == F.col("a_partner"))
    known = one & other & mutual & are_counts_compatible("a_out", "b_in") & are_counts_compatible("b_out", "a_in")
    nothing = F.lit(0).cast("long")
    return (
        whole.join(F.broadcast(over), ["server", "boot"])
        .join(words, ["server", "transport"], "left")
        .withColumns(
            {
                "dt": F.to_date("lost_at"),
                "counted_bytes": F.coalesce("told_ab", nothing) + F.coalesce("told_ba", nothing),
                "words": one.cast("long") + other.cast("long"),
                "least_bytes": F.when(known, _sum_of_ends(F.least)),
                "most_bytes": F.when(known, _sum_of_ends(F.greatest)),
            }
        )
        .select(*OVERALL["lost_transport"].schema.fieldNames())
    )


def with_lost(boots: DataFrame, transports: DataFrame) -> DataFrame:
    """Add to the row of each process the number and bytes of the transports that ended with the process.

    :param boots: rows of :func:`~dmsg.analytics.gold.uptime.boot`.
    :param transports: rows of :func:`lost_transport`.
    """
    sums = transports.groupBy(F.col("server").alias("producer"), "boot").agg(
        F.count(F.lit(1)).alias("lost_transports"),
        F.count("least_bytes").alias("lost_witnessed"),
        *[bounded_sum(name).alias(f"lost_{name}") for name in _BYTES],
    )
    return (
        boots.join(F.broadcast(sums), ["producer", "boot"], "left")
        .fillna(0, ["lost_transports", "lost_witnessed"])
        .select(*OVERALL["boot"].schema.fieldNames())
    )
