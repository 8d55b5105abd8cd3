"""Simulated transports: the servers' events and the receipts of both ends."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, functions as F

from dmsg.analytics.simulate.ground_truth import (
    BURST,
    BURST_FROM,
    BURST_MINUTES,
    COLLUDER,
    LIAR,
    LIE_FACTOR,
    LOSER,
    LOST_FROM,
    LOST_MINUTES,
    OWN_KEYS,
    RING,
    RING_KEYS,
    SELF_DEALING_FACTOR,
    SLOW,
    SLOW_READER_ONE_IN,
    SLOW_READERS,
    SLOW_TIMES,
)
from dmsg.analytics.simulate.network import MINUTE_MS, TURN, Scenario, draw_normal, draw_uniform, name
from dmsg.telemetry.schema import BUCKETS

REFUSED_ONE_IN = 33
REASONS = ("unspecified",) * 4 + ("aborted", "timeout", "peer_disconnected", "moved")
"""Reasons for the ends of transports. Each item is drawn with the same probability, so a repeated reason is more
frequent."""
_KEY = ("server", "day", "i")


def _transports(stage: Scenario) -> DataFrame:
    seed = stage.network.seed
    plan = stage.plan()
    dealt = stage.on_last_day(RING) | stage.on_last_day(OWN_KEYS) | stage.on_last_day(BURST)
    last = F.col("n") * (1 + F.when(dealt, SELF_DEALING_FACTOR).otherwise(0)) - 1
    rows = plan.withColumn("i", F.explode(F.sequence(F.lit(0), last.cast("int"))))
    more = F.col("i") >= F.col("n")
    among = (F.col("i") - F.when(more, F.col("n")).otherwise(0)) / F.when(more, SELF_DEALING_FACTOR).otherwise(1)
    part = (among + draw_uniform(seed, 1, *_KEY)) / (F.col("n") + F.when(more, 1).otherwise(0))
    keys = F.when(F.col("server") == RING, RING_KEYS).otherwise(2)
    # The clients by which an operator fakes traffic with its own servers have numbers above those of all other clients.
    own = more & F.col("server").isin(RING, OWN_KEYS)

    def own_key(number: Column) -> Column:
        return stage.network.clients + 1 + F.col("server") * RING_KEYS + number % keys

    def lognormal(median: float, sigma: float, draw: int) -> Column:
        return median * F.exp(sigma * draw_normal(seed, draw, *_KEY))

    clients = stage.network.clients
    # Self-dealing transports have similar sizes, about the mean of the other transports.
    out = F.when(more, lognormal(400_000.0, 0.2, 10)).otherwise(lognormal(30_000.0, 2.0, 10))
    in_burst = MINUTE_MS * (BURST_FROM + BURST_MINUTES * part)
    spread = stage.until * (part + F.sin(TURN * part) / 10)
    start = F.when(more & (F.col("server") == BURST), in_burst).otherwise(spread)
    slow = F.when(stage.on_last_day(SLOW), SLOW_TIMES).otherwise(1.0)
    lasted = F.least(F.lit(3_600_000), lognormal(20_000.0, 1.5, 6))
    return (
        rows.withColumn("start", start.cast("long"))
        .withColumn("a", F.when(own, own_key(F.col("i"))).otherwise(stage.client(2)))
        .withColumn("b0", F.when(own, own_key(F.col("i") + 1)).otherwise(stage.client(3)))
        .withColumn("b", F.when(F.col("b0") == F.col("a"), (F.col("b0") + 1) % (clients + 1)).otherwise(F.col("b0")))
        .withColumn("transport", F.md5(F.concat_ws("/", F.lit(seed), *_KEY)))
        # A transport's number decides whether it is refused. With random refusals, the events of accepted transports
        # and their receipts could not be numbered without gaps.
        .withColumn("accepted", F.col("i") % REFUSED_ONE_IN != REFUSED_ONE_IN - 1)
        .withColumn("taken", F.col("i") - F.floor(F.col("i") / REFUSED_ONE_IN))
        .withColumn("lasted", F.least(lasted, stage.until - 1 - F.col("start")).cast("long"))
        .withColumn("open_us", F.least(F.lit(9_000_000), lognormal(12_000.0, 0.8, 8)).cast("long"))
        .withColumn("open_ms", F.round(F.col("open_us") / 1000).cast("long"))
        .withColumn("out", F.least(F.lit(10**10), out).cast("long"))
        .withColumn("back", F.least(F.lit(10**10), lognormal(8_000.0, 2.0, 12)).cast("long"))
        .withColumn("median", (5 + 75 * draw_uniform(seed, 14, "server")) * slow)
        .withColumn("samples", F.floor(4 * draw_uniform(seed, 15, *_KEY)).cast("int"))
    )


def _is_lost(stage: Scenario) -> Column:
    """Return a column: whether the transport's events are missing because the server lost a file of its spool."""
    lost = F.col("start").between(LOST_FROM * MINUTE_MS, (LOST_FROM + LOST_MINUTES) * MINUTE_MS - 1)
    return stage.on_last_day(LOSER) & lost


def transport_lines(stage: Scenario) -> DataFrame:
    """Return the lines of events ``transport_open`` and ``transport_close``."""
    seed = stage.network.seed
    rows = _transports(stage)
    lie = F.when(F.col("server").isin(LIAR, COLLUDER), LIE_FACTOR).otherwise(1.0)
    out, back = ((F.col(way) * lie).cast("long") for way in ("out", "back"))

    def bucket(draw: int) -> Column:
        answer = F.col("median") * F.exp(0.5 * draw_normal(seed, draw, *_KEY))
        return F.greatest(F.lit(0), F.least(F.lit(BUCKETS - 1), F.ceil(2 * F.log2(answer / 0.1)))).cast("int")

    filled = rows.withColumn("at", F.col("start")).withColumns({f"x{one}": bucket(20 + 2 * one) for one in range(3)})

    def counts(index: Column) -> Column:
        return sum(
            (F.when((F.col("samples") > one) & (F.col(f"x{one}") == index), 1).otherwise(0) for one in range(1, 3)),
            F.when(F.col("x0") == index, 1).otherwise(0),
        )

    histogram = F.when(
        F.col("accepted") & (F.col("samples") > 0), F.transform(F.sequence(F.lit(0), F.lit(BUCKETS - 1)), counts)
    )
    common = (
        F.when(F.col("accepted"), F.col("transport")).alias("transport"),
        name(F.lit("client"), stage.pseudonym_scope, "a").alias("src"),
        name(F.lit("client"), stage.pseudonym_scope, "b").alias("dst"),
        F.lit(True).alias("secure"),
    )
    opened = stage.events(
        filled.where(F.col("accepted") & ~_is_lost(stage)).withColumn("i", F.col("taken")),
        "transport_open",
        1,
        *common,
        F.col("open_ms").alias("accept_ms"),
        F.col("open_us").alias("accept_us"),
    )

    def counted(amount: Column, column: str) -> Column:
        return F.when(F.col("accepted"), amount).alias(column)

    drawn = F.floor(len(REASONS) * draw_uniform(seed, 30, *_KEY)).cast("int") + 1
    reason = F.when(stage.on_last_day(SLOW_READERS) & (F.col("i") % SLOW_READER_ONE_IN == 0), "queue_full").otherwise(
        F.element_at(F.array(*map(F.lit, REASONS)), drawn)
    )
    closed = stage.events(
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


def receipt_lines(stage: Scenario) -> DataFrame:
    """Return the lines of events ``receipt_checked`` with the receipts of both ends."""
    lie = F.when(F.col("server") == COLLUDER, LIE_FACTOR).otherwise(1.0)
    tens, ones = F.floor(F.col("taken") / 10), F.col("taken") % 10
    at = F.least(F.col("start") + F.col("lasted") + 5, stage.until - 1)
    rows = _transports(stage).where(F.col("accepted")).withColumn("at", at)
    ends = []
    for block, mine, other, initiator, sent, received, share in (
        (3, "a", "b", True, (F.col("out") * lie).cast("long"), (F.col("back") * lie).cast("long"), 9),
        (4, "b", "a", False, F.col("back"), F.col("out"), 8),
    ):
        ends.append(
            stage.events(
                rows.where(ones < share).withColumn("i", tens * share + ones),
                "receipt_checked",
                block,
                "transport",
                F.col("producer").alias("server"),
                name(F.lit("signer"), mine).alias("signer"),
                name(F.lit("signer"), other).alias("partner"),
                F.lit(initiator).alias("initiator"),
                sent.alias("delivered_out"),
                received.alias("delivered_in"),
            )
        )
    return ends[0].unionByName(ends[1])
