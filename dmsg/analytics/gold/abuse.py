"""Tables of refused requests, and of actors (clients and networks) that cause unusually many of them.

A score of 100 means that an actor reached the limit for its kind of abuse. The limits are fixed, because a limit
relative to other clients would rise with the abuse. Every row contains its evidence, so that an operator can check it.
The tables do not restrict anybody: an operator decides what to do.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame

from dmsg.analytics import functions as F
from dmsg.analytics.gold.reasons import bound_reasons
from dmsg.analytics.gold.totals import bounded_sum, bounded_sums
from dmsg.analytics.schemas import DAILY, OVERALL

SCAN_LIMIT = 100
"""Limit per day: number of different clients to which one client requested transports although they were not
connected."""
FLOOD_LIMIT = 1000
"""Limit per day: number of requests of one client that were refused because of a rate limit."""
HANDSHAKE_LIMIT = 200
"""Limit per day: number of failed handshakes from one network."""
ENTRY_LIMIT = 500
"""Limit per day: number of requests from one network that discovery refused."""
LOOKUP_LIMIT = 1000
"""Limit per day: number of clients for which one network queried discovery although they have no entry. The same client
counts once per minute."""
CHURN_LIMIT = 5000
"""Limit per day: number of entries that one client posted; an ordinary client posts every few minutes."""
UNANSWERED_LIMIT = 0.9
"""Maximum share of a client's requests for transports that nobody accepts. Above it, the client is reported, if it made
at least ``UNANSWERED_LEAST`` requests."""
UNANSWERED_LEAST = 50
CHURN = "churn"
"""Kind of abuse: posting entries too often. It is found in the table ``entries``."""
UNANSWERED = "unanswered"
"""Kind of abuse: requests for transports that nobody accepts. They are found in the table ``transports``. The kinds
other than this one and :data:`CHURN` are found in the table ``refusals``.
"""
SHOWN_FROM = 1.0
"""Minimum score of a day at one producer that is stored in ``abuse_day``. The minimum is low, so that small scores at
many servers can add up in ``actor``."""
ACTOR_FROM = 10.0
"""Minimum score, summed over all servers, that is stored in the table ``actor``."""


def refusal_hour(refusals: DataFrame) -> DataFrame:
    """Count refusals by hour, kind and reason."""
    return (
        bound_reasons(refusals)
        .groupBy("producer", "dt", "hour", "what", "reason")
        .agg(bounded_sum("n").alias("n"), F.count_distinct("who").alias("who"))
    )


def refusal_day(refusals: DataFrame) -> DataFrame:
    """Count refusals by day, kind and reason, for all producers together."""
    return (
        bound_reasons(refusals)
        .groupBy("dt", "what", "reason")
        .agg(
            bounded_sum("n").alias("n"),
            F.count_distinct("producer", "who").alias("who"),
            F.count_distinct("producer").alias("producers"),
        )
    )


def actor(days: DataFrame, boots: DataFrame) -> DataFrame:
    """Sum the abuse of each actor over all servers that use the same pseudonyms for clients.

    :param days: rows of :func:`abuse_day` of all days.
    :param boots: processes by day. Their column ``names`` identifies the secret from which a process computes
        pseudonyms.
    """
    spaces = (
        boots.where(F.col("names").isNotNull()).groupBy("producer").agg(F.max_by("names", "last_at").alias("names"))
    )
    alone = F.coalesce("names", F.col("producer"))
    per_day = (
        days.join(F.broadcast(spaces), "producer", "left")
        .groupBy("who", "kind", alone.alias("space"), "dt")
        .agg(
            F.max("names").alias("names"),
            F.collect_set("producer").alias("producers"),
            F.max_by("producer", "score").alias("most_at"),
            *bounded_sums("requests", "refused", "targets", "posts"),
            F.sum("score").alias("score"),
        )
    )
    return (
        per_day.groupBy("who", "kind", "space")
        .agg(
            F.max("names").alias("names"),
            F.size(F.array_distinct(F.flatten(F.collect_list("producers")))).cast("long").alias("servers"),
            F.count(F.lit(1)).alias("days"),
            F.min("dt").alias("first_day"),
            F.max("dt").alias("last_day"),
            F.max_by("most_at", "score").alias("most_at"),
            *bounded_sums("requests", "refused", "targets", "posts"),
            F.round(F.max("score"), 1).alias("score"),
        )
        .where(F.col("score") >= ACTOR_FROM)
        .select(*OVERALL["actor"].schema.fieldNames())
    )


def _score(amount: Column, limit: float) -> Column:
    return F.round(100.0 * amount / limit, 1)


def abuse_day(refusals: DataFrame, transports: DataFrame, entries: DataFrame) -> DataFrame:
    """Score each client and network by day and kind of abuse."""
    names = DAILY["abuse_day"].schema.fieldNames()
    nothing = F.lit(0).cast("long")
    too_many = F.col("reason").isin("rate_limited", "flood")
    in_vain = (F.col("reason") == "no_such_peer") | (F.col("what") == "lookup")
    by_who = (
        refusals.where(F.col("who").isNotNull())
        .groupBy("producer", "dt", "who", "what")
        .agg(
            bounded_sum("n").alias("refused"),
            F.coalesce(bounded_sum(F.when(in_vain, F.col("targets"))), nothing).alias("targets"),
            F.coalesce(bounded_sum(F.when(too_many, F.col("n"))), nothing).alias("over"),
        )
    )

    # All kinds of abuse that are found in refusals are computed in one pass over the refusals.
    refused = by_who.select(
        "*",
        F.explode(
            F.array(
                *[
                    F.struct(
                        F.lit(name).alias("kind"),
                        F.when(F.col("what") == what, _score(F.col(amount), limit)).alias("score"),
                        F.format_string(words, amount).alias("evidence"),
                    )
                    for name, what, amount, limit, words in (
                        ("scan", "request", "targets", SCAN_LIMIT, "asked for %d clients that are not connected"),
                        ("flood", "request", "over", FLOOD_LIMIT, "%d requests over its rate"),
                        (
                            "handshakes",
                            "handshake",
                            "refused",
                            HANDSHAKE_LIMIT,
                            "%d failed handshakes from its network",
                        ),
                        ("entries", "entry", "refused", ENTRY_LIMIT, "%d requests that discovery refused"),
                        (
                            "lookups",
                            "lookup",
                            "targets",
                            LOOKUP_LIMIT,
                            "asked discovery for %d clients without an entry",
                        ),
                    )
                ]
            )
        ).alias("found"),
    ).select("producer", "dt", "who", "refused", "targets", "found.*")
    posts = (
        entries.where(~F.col("is_server"))
        .groupBy("producer", "dt", F.col("subject").alias("who"))
        .agg(F.count(F.lit(1)).alias("posts"))
        .withColumns(
            {
                "kind": F.lit(CHURN),
                "score": _score(F.col("posts"), CHURN_LIMIT),
                "evidence": F.format_string("%d entries in a day", "posts"),
            }
        )
    )
    requests = (
        transports.where(F.col("what") == "close")
        .groupBy(F.col("server").alias("producer"), "dt", F.col("src").alias("who"))
        .agg(
            F.count(F.lit(1)).alias("requests"),
            F.count_if(F.col("accept_ms").isNull()).alias("refused"),
        )
        .where((F.col("requests") >= UNANSWERED_LEAST) & (F.col("refused") > UNANSWERED_LIMIT * F.col("requests")))
        .withColumns(
            {
                "kind": F.lit(UNANSWERED),
                "score": _score(F.col("refused"), SCAN_LIMIT),
                "evidence": F.format_string("nobody accepted %d of %d requests", "refused", "requests"),
            }
        )
    )
    rows = refused
    for part in (posts, requests):
        rows = rows.unionByName(part, allowMissingColumns=True)
    rows = rows.where(F.col("score") >= SHOWN_FROM).fillna(0, ["requests", "refused", "targets", "posts"])
    return rows.select(*names)


def discovery_hour(entries: DataFrame, refusals: DataFrame) -> DataFrame:
    """Count the entries that each discovery accepted and refused, by hour."""
    keys = ["producer", "dt", "hour"]
    taken = entries.groupBy(*keys).agg(
        *[F.count_if(F.col("result") == result).alias(result) for result in ("first", "next", "deleted")],
        F.count_distinct(F.when(F.col("is_server"), F.col("subject"))).alias("servers"),
    )
    refused = (
        refusals.where(F.col("what").isin("entry", "lookup"))
        .groupBy(*keys)
        .agg(
            bounded_sum(F.when(F.col("what") == "entry", F.col("n"))).alias("refused"),
            bounded_sum(F.when(F.col("what") == "lookup", F.col("n"))).alias("absent"),
        )
    )
    return (
        taken.join(refused, keys, "full_outer")
        .fillna(0, ["first", "next", "deleted", "refused", "servers", "absent"])
        .select(*DAILY["discovery_hour"].schema.fieldNames())
    )
