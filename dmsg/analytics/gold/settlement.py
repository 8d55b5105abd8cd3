"""Settlement: computes how many bytes each server delivered, from three counts for each transport.

For each direction of a transport there are three counts of bytes, called *words*: the server's own count, and those
that the two clients signed in their receipts (docs/pipeline/receipts.md). The server is credited with the smaller of
the two clients' counts. The server cannot raise this number alone, nor together with one of the two clients. If a
client's count is missing, nothing is credited. Counts cannot reveal that one person controls both clients.

If a transport ends while data is in flight, the counts differ although nobody lies. The receiver may have bytes whose
acknowledgement did not reach the sender. The server may have forwarded bytes that did not reach the receiver, because
the receiver had just closed, or was so slow that the server ended the transport. Therefore a difference up to the
sender's window is no conflict. Such a transport is called *cut*. A server that inflates all its counts is nevertheless
detected. If the sender of a direction ended the transport, everything that the server forwarded in this direction
arrived. The server's count must then agree with the receiver's.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame

from dmsg.analytics import functions as F
from dmsg.analytics.broadcasts import Hint
from dmsg.analytics.gold.totals import bounded_sum, bounded_sums
from dmsg.analytics.schemas import AGREES, DAILY, LIES, SILVER

MIN_TOLERANCE = 4096
"""Bytes by which two counts may differ and still agree."""
TOLERANCE = 0.01
"""Share of the larger count by which two counts may differ and still agree, if the share is more than
:data:`MIN_TOLERANCE`."""
INFLATION_LIMIT = 0.02
"""Share by which a server's claim may exceed the counts of the ends. A claim that exceeds them by more is inflated."""
ACCUSER_SHARE = 0.5
"""Maximum share of a server's clients whose counts may show an inflated claim. Above it, the verdict says so. Each
client counts once, so a few clients that lie together cannot accuse a server."""
SIDED_LIMIT = 0.01
"""Maximum share of a server's transports in which the server may agree with one end against the other. Above it, the
verdict on the day says so."""
FIRST_WINDOW = 256 * 1024
MAX_WINDOW = 32 * 1024 * 1024
"""Largest window of a sender at any time, in bytes: a sender has at most a window of bytes in flight. At the start of a
stream, the window is ``FIRST_WINDOW``.
"""
WINDOW_GROWTH = 4
"""Maximum number of bytes by which a sender's window grows for each acknowledged byte."""
WITNESS_LIMIT = 0.5
"""Minimum share of a server's transports with receipts of both ends. Below it, the verdict is that there are too few
receipts."""


_NAMES = ("a_signer", "a_partner", "b_signer", "b_partner")
ORDERLY = "unspecified"
"""Reason that the event of an orderly close states. In an orderly close, the closing end has first waited until all its
data was acknowledged."""
_BY = {"src": 1, "dst": 2}
UNCERTAIN = "uncertain: too much data was in transit"
STRANGERS = "the two ends do not name each other"


def receipts_of_real_ends(former: DataFrame, transports: DataFrame, hint: Hint = F.broadcast) -> DataFrame:
    """Return those receipts of ``former`` that come from the ends of their transports.

    After a restart, the server does not know the ends, so it cannot check the signers itself. Its events from before
    the restart name the ends.

    :param former: receipts that a restarted server received for transports from before the restart.
    :param hint: function that marks rows for a broadcast join if there are few of them.
    """
    asked = F.col("initiator")
    ends = transports.where((F.col("what") == "close") & F.col("transport").isNotNull()).select(
        "server", "transport", "src", "dst"
    )
    known = (asked & (F.col("peer") == F.col("src"))) | (~asked & (F.col("peer") == F.col("dst")))
    return ends.join(hint(former), ["server", "transport"]).where(known).select(*former.columns)


def three_words(transports: DataFrame, receipts: DataFrame) -> DataFrame:
    """Return a row with the three counts for each transport that a server or a client reports."""
    claims = transports.where((F.col("what") == "close") & F.col("transport").isNotNull()).select(
        "server",
        "transport",
        F.col("dt").alias("claimed_on"),
        F.lit(None).cast("date").alias("signed_on"),
        *[
            F.when(total.isNotNull(), F.greatest(F.lit(0), total - F.coalesce(dropped, F.lit(0)))).alias(f"relay_{way}")
            for way, total, dropped in ((way, F.col(f"total_{way}"), F.col(f"dropped_{way}")) for way in ("ab", "ba"))
        ],
        (F.col("reason") == ORDERLY).cast("int").alias("orderly"),
        F.when(F.col("by") == "src", _BY["src"]).when(F.col("by") == "dst", _BY["dst"]).otherwise(0).alias("closer"),
        *[F.lit(None).cast("long").alias(name) for name in ("a_out", "a_in", "b_out", "b_in")],
        *[F.lit(None).cast("long").alias(name) for name in _NAMES],
    )
    asked = F.col("initiator")
    words = receipts.select(
        "server",
        "transport",
        F.lit(None).cast("date").alias("claimed_on"),
        F.col("dt").alias("signed_on"),
        *[F.lit(None).cast("long").alias(name) for name in ("relay_ab", "relay_ba")],
        *[F.lit(None).cast("int").alias(name) for name in ("orderly", "closer")],
        F.when(asked, F.col("delivered_out")).alias("a_out"),
        F.when(asked, F.col("delivered_in")).alias("a_in"),
        F.when(~asked, F.col("delivered_out")).alias("b_out"),
        F.when(~asked, F.col("delivered_in")).alias("b_in"),
        *[
            F.when(end, F.xxhash64(name)).alias(f"{side}_{name}")
            for side, end in (("a", asked), ("b", ~asked))
            for name in ("signer", "partner")
        ],
    )
    # One aggregation is cheaper than two outer joins. If an end sent two receipts, min() selects the smaller count.
    # Signers are hashed to numbers, because Spark would have to sort the rows to aggregate texts.
    return (
        claims.unionByName(words)
        .groupBy("server", "transport")
        .agg(
            F.coalesce(F.max("claimed_on"), F.min("signed_on")).alias("dt"),
            *[
                F.min(name).alias(name)
                for name in ("relay_ab", "relay_ba", "orderly", "closer", "a_out", "a_in", "b_out", "b_in", *_NAMES)
            ],
        )
    )


def _agree(one: Column, other: Column) -> Column:
    return F.abs(one - other) <= F.greatest(F.lit(MIN_TOLERANCE), TOLERANCE * F.greatest(one, other))


def _window(sent: Column) -> Column:
    return F.least(F.lit(MAX_WINDOW), FIRST_WINDOW + WINDOW_GROWTH * sent)


def are_counts_compatible(sent: str, received: str) -> Column:
    """Return a boolean column: whether the counts of the two ends can both be true.

    Both can be true if the receiver's count is at least the number of bytes that the sender knows to be delivered, and
    exceeds this number by at most a window, because a window of bytes can have been in flight.

    :param sent: column with the bytes that the sender knows to be delivered.
    :param received: column with the receiver's count.
    """
    told, got = F.col(sent), F.col(received)
    return (told <= got) & (got - told <= _window(told))


@dataclass(frozen=True)
class _Direction:
    """Comparison of the counts for one direction of a transport; each field is a column.

    :ivar is_consistent: whether the three counts can all be true.
    :ivar ends_agree: whether the counts of the two ends can both be true, by :func:`are_counts_compatible`.
    :ivar is_complete: whether every byte that the server forwarded has certainly reached the receiver. Bytes may be
        missing if the receiver or the server ended the transport.
    :ivar received: the receiver's count. If ``is_complete``, the server's count must not exceed it.
    """

    is_consistent: Column
    ends_agree: Column
    is_complete: Column
    received: Column


def _direction(claim: str, sent: str, received: str, sender: int, receiver: int) -> _Direction:
    """Compare the three counts of one direction.

    :param claim: column with the server's count.
    :param sent: column with the bytes that the sender knows to be delivered.
    :param received: column with the receiver's count.
    :param sender: value of the column ``closer`` if the sender ended the transport.
    :param receiver: value of the column ``closer`` if the receiver ended the transport.
    """
    said, got, told = F.col(claim), F.col(received), F.col(sent)
    waited = (F.col("closer") == sender) & (F.col("orderly") == 1)
    # Some bytes that the server forwarded may not have reached the receiver. This is possible if the receiver ended the
    # transport, or if the server ended it (``closer`` 0) because the receiver was slow.
    left = F.col("closer").isin(receiver, 0)
    behind = ~waited & are_counts_compatible(sent, received)
    return _Direction(
        ends_agree=are_counts_compatible(sent, received),
        is_consistent=(_agree(told, got) | behind)
        & (_agree(said, got) | (left & (said > got) & (said - got <= _window(told)))),
        is_complete=~left,
        received=got,
    )


def verdicts(words: DataFrame) -> DataFrame:
    """Return the verdict on each transport: the bytes credited to its server, and which of the three counts
    disagree."""
    both = F.col("a_out").isNotNull() & F.col("b_out").isNotNull()
    one = F.col("a_out").isNotNull() | F.col("b_out").isNotNull()
    relay = F.col("relay_ab").isNotNull()
    a_word, b_word = F.col("a_out") + F.col("a_in"), F.col("b_in") + F.col("b_out")
    claimed = F.coalesce(F.col("relay_ab") + F.col("relay_ba"), F.lit(0))
    # Both ends must name each other as partner. Otherwise one client may have signed for both ends.
    strangers = both & ((F.col("a_signer") != F.col("b_partner")) | (F.col("b_signer") != F.col("a_partner")))
    credited = F.when(both & ~strangers, F.least("a_out", "b_in") + F.least("b_out", "a_in")).otherwise(0)
    src, dst = _BY["src"], _BY["dst"]
    ways = {
        "relay_ab": _direction("relay_ab", "a_out", "b_in", src, dst),
        "relay_ba": _direction("relay_ba", "b_out", "a_in", dst, src),
    }
    nothing = F.lit(0).cast("long")
    counted: dict[bool, tuple[Column, Column]] = {}
    for is_complete in (True, False):
        said = word = nothing
        for name, way in ways.items():
            counts = (way.is_complete if is_complete else ~way.is_complete) & way.ends_agree & ~strangers
            said = said + F.when(counts, F.col(name)).otherwise(nothing)
            word = word + F.when(counts, way.received).otherwise(nothing)
        counted[is_complete] = said, word
    rows = words.withColumns(
        {
            "claimed": claimed,
            "credited": credited,
            "a_word": a_word,
            "b_word": b_word,
            "sure_claimed": F.when(both & relay, counted[True][0]),
            "sure_word": F.when(both & relay, counted[True][1]),
            "left_claimed": F.when(both & relay, counted[False][0]),
            "left_word": F.when(both & relay, counted[False][1]),
            "initiator": F.when(both & relay, F.col("a_signer")),
        }
    ).withColumn(
        "state",
        F.when(~relay, "unclaimed")
        .when(~one, "relay_only")
        .when(~both, "one_sided")
        .when(strangers, "conflict")
        .when(_agree(F.col("a_word"), F.col("b_word")) & _agree(F.col("claimed"), F.col("credited")), "matched")
        .when(ways["relay_ab"].is_consistent & ways["relay_ba"].is_consistent, "cut")
        .otherwise("conflict"),
    )
    agree = _agree(F.col("a_word"), F.col("b_word"))
    larger = F.greatest("a_word", "b_word")
    word = (
        F.when(strangers, STRANGERS)
        .when(agree & (F.col("claimed") > F.col("credited")), "relay claims more than both ends")
        .when(agree, "relay claims less than both ends")
        .when(
            _agree(F.col("claimed"), larger) & (F.col("a_word") > F.col("b_word")),
            "relay and initiator against responder",
        )
        .when(_agree(F.col("claimed"), larger), "relay and responder against initiator")
        .otherwise("no two agree")
    )
    conflict = F.col("state") == "conflict"
    # Some columns are needed only for conflicts and for transports that ended in a crash. In other rows they are NULL,
    # which takes no space.
    shown = ("transport", *_NAMES, "relay_ab", "relay_ba", "a_out", "a_in", "b_out", "b_in")
    return (
        rows.withColumn("word", F.when(conflict, word))
        .withColumns({name: F.when(conflict | ~relay, F.col(name)) for name in shown})
        .select(*SILVER["verdicts"].schema.fieldNames())
    )


def _more(claimed: str, word: str) -> Column:
    return F.col(claimed) > (1 + INFLATION_LIMIT) * F.col(word)


_COUNTED = ("matched", "cut", "conflict", "one_sided", "relay_only", "unclaimed")


def settlement_day(rows: DataFrame) -> DataFrame:
    """Compute for each server and day the bytes that the server claims, the bytes credited to it, and the verdict on
    its honesty."""
    conflict = F.col("state") == "conflict"
    beyond = F.greatest(F.lit(0), F.col("claimed") - F.col("credited"))
    nothing = F.lit(0).cast("long")
    by_initiator = rows.groupBy("server", "dt", "initiator").agg(
        F.count(F.lit(1)).alias("transports"),
        bounded_sum("claimed").alias("claimed_bytes"),
        bounded_sum(F.when(F.col("state") != "unclaimed", F.col("credited")).otherwise(0)).alias("credited_bytes"),
        *[F.count_if(F.col("state") == state).alias(state) for state in _COUNTED],
        F.coalesce(bounded_sum(F.when(F.col("state") == "cut", beyond)), nothing).alias("uncertain_bytes"),
        F.coalesce(bounded_sum(F.when(conflict, beyond)), nothing).alias("inflated_bytes"),
        *bounded_sums("sure_claimed", "sure_word", "left_claimed", "left_word"),
        # Only conflicts are counted in which the server agrees with one end against the other. Conflicts between ends
        # that do not name each other are left out, because they are no evidence against the server.
        F.count_if(F.col("word").contains("against")).alias("sided_with_one"),
    )
    told, on_the_way = F.col("sure_claimed") > 0, F.col("left_claimed") > 0
    summed = (
        *("transports", "claimed_bytes", "credited_bytes", *_COUNTED, "uncertain_bytes", "inflated_bytes"),
        *("sure_claimed", "sure_word", "left_claimed", "left_word", "sided_with_one"),
    )
    sums = by_initiator.groupBy("server", "dt").agg(
        *bounded_sums(*summed),
        F.count_if(told).alias("witnesses"),
        F.count_if(told & _more("sure_claimed", "sure_word")).alias("accusers"),
        F.count_if(on_the_way).alias("left_witnesses"),
        F.count_if(on_the_way & _more("left_claimed", "left_word")).alias("left_accusers"),
    )
    seen = F.col("matched") + F.col("cut") + F.col("conflict")
    inflation = F.col("sure_claimed") / F.nullif(F.col("sure_word"), F.lit(0)) - 1
    inflated = _more("sure_claimed", "sure_word")
    verdict = (
        F.when(seen == 0, "no receipts of both ends")
        .when(inflated & (F.col("accusers") > ACCUSER_SHARE * F.col("witnesses")), LIES)
        .when(F.col("sided_with_one") > SIDED_LIMIT * seen, "claims more, supported by one end")
        .when(inflated, "claims more, as few of its clients say")
        # Transports that only clients report are left out, because anybody can invent them.
        .when(seen < WITNESS_LIMIT * (F.col("transports") - F.col("unclaimed")), "too few receipts")
        # Only the server's events say which end closed a transport, and why. A server that lies about this could hide
        # an inflated claim as data in flight, and must not be called honest.
        .when(
            _more("left_claimed", "left_word") & (F.col("left_accusers") > ACCUSER_SHARE * F.col("left_witnesses")),
            UNCERTAIN,
        )
        .otherwise(AGREES)
    )
    return (
        sums.withColumn("inflation", inflation)
        .withColumn("verdict", verdict)
        .select(*DAILY["settlement_day"].schema.fieldNames())
    )


def settlement_conflict_day(verdicts: DataFrame, receipts: DataFrame, hint: Hint = F.broadcast) -> DataFrame:
    """Return the transports whose three counts contradict each other, with the counts and the signers.

    :param receipts: accepted receipts, possibly several of one end of a transport.
    :param hint: function that marks rows for a broadcast join if there are few of them.
    """
    rows = verdicts.where(F.col("state") == "conflict")
    keys = rows.select("server", "transport")
    signed = receipts.join(hint(keys), ["server", "transport"], "left_semi")
    for side, end in (("a", F.col("initiator")), ("b", ~F.col("initiator"))):
        name = F.col("signer").alias(f"signer_{side}")
        signers = signed.where(end).select("server", "transport", name, F.xxhash64("signer").alias(f"{side}_signer"))
        rows = rows.join(signers.distinct(), ["server", "transport", f"{side}_signer"], "left")
    return rows.select(*DAILY["settlement_conflict_day"].schema.fieldNames())
