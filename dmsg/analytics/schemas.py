"""Schemas of the tables: columns, types, and the meaning of a row.

Bronze holds the events as they were written, silver cleaned events, gold answers to questions. Every
table but those of :data:`OVERALL` is partitioned by ``dt``, the day in UTC.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from dmsg.telemetry.schema import Type, columns

_TYPES: dict[Type, DataType] = {
    Type.STRING: StringType(),
    Type.LONG: LongType(),
    Type.BOOLEAN: BooleanType(),
    Type.HISTOGRAM: ArrayType(IntegerType()),
}

_COLUMN_TYPES: dict[str, DataType] = {
    "string": StringType(),
    "int": IntegerType(),
    "long": LongType(),
    "double": DoubleType(),
    "boolean": BooleanType(),
    "date": DateType(),
    "timestamp": TimestampType(),
    "array<int>": ArrayType(IntegerType()),
    "array<long>": ArrayType(LongType()),
}

EVENT = StructType([StructField(field.name, _TYPES[field.type]) for field in columns()])
"""Columns of any event: the union of the fields of all types."""
DAY_MS = 86_400_000
CORRUPT = "_corrupt"
"""Column for the text of a line that is no JSON or has a field of a wrong type."""
RAW = StructType([*EVENT.fields, StructField(CORRUPT, StringType())])
"""Columns of a line of a spool, as Spark's JSON reader returns it."""
BRONZE = StructType(
    [
        *EVENT.fields,
        StructField("file", StringType()),
        StructField("problem", StringType()),
        StructField("line", StringType()),
        StructField("origin", StringType()),
        StructField("batch", LongType()),
        StructField("family", StringType()),
        StructField("dt", StringType()),
    ]
)
"""Columns of bronze: an event with its origin; in the family ``quarantine`` a line with its problem."""

FAMILIES = {
    "transport": ("transport_open", "transport_progress", "transport_close"),
    "session": ("session_open", "session_close"),
    "beat": ("heartbeat",),
    "refusal": ("handshake_fail", "transport_refuse", "entry_refuse", "lookup_fail", "drop"),
    "entry": ("entry",),
    "receipt": ("receipt_checked",),
    "life": ("start", "stop", "segment_end"),
}
"""Types of events that share a partition of bronze, by family."""
QUARANTINE = "quarantine"
LIES = "claims more than both ends"
"""Verdict on a server's day that lowers its weight in the placement of clients."""
AGREES = "agrees"


def write_options(schema: StructType) -> dict[str, str]:
    """Return options of the Parquet writer that turn off dictionaries for numbers and times.

    Their values differ from row to row; looking for a dictionary takes a quarter of the writing time.
    """
    plain = (LongType, TimestampType)
    return {
        f"parquet.enable.dictionary#{one.name}": "false" for one in schema.fields if isinstance(one.dataType, plain)
    }


@dataclass(frozen=True)
class Table:
    """Definition of a silver or gold table.

    :ivar text: what the table holds, or the question that it answers.
    :ivar columns: names and types as in SQL, including ``dt`` if the table has days.
    """

    name: str
    text: str
    columns: str

    @property
    def schema(self) -> StructType:
        """Columns as a Spark schema. Spark's own parser would need a session."""
        fields = (column.split() for column in self.columns.split(","))
        return StructType([StructField(name, _COLUMN_TYPES[kind]) for name, kind in fields])


_LATENCY = (
    "rtt_samples long, rtt_p50 double, rtt_p90 double, rtt_p99 double, accept_samples long, accept_p50 double,"
    " accept_p90 double, accept_p99 double, rtt array<long>, accept array<long>"
)
_SIDES = "data_ab long, data_ba long, frames_ab long, frames_ba long, acks_ab long, acks_ba long"

SILVER = {
    table.name: table
    for table in (
        Table(
            "transports",
            "what happened to transports: opened, progress, closed",
            "server string, boot string, at timestamp, hour int, what string, transport string, src string, dst string,"
            f" secure boolean, reason string, by string, duration_ms long, accept_ms long, {_SIDES}, rtt array<int>,"
            " total_ab long, total_ba long, dropped_ab long, dropped_ba long, accept_us long, dt date",
        ),
        Table(
            "sessions",
            "a client's connection, put together from its opening and its end",
            "server string, boot string, session long, peer string, opened_at timestamp, closed_at timestamp,"
            " duration_ms long, reason string, handshake_ms long, frames long, bytes long, dt date",
        ),
        Table(
            "heartbeats",
            "a minute of a process; covers_from is the heartbeat before, if none that is missing lies more than "
            "10 minutes back",
            "producer string, role string, boot string, at timestamp, covers_from timestamp, sessions long,"
            " transports long, capacity long, handshakes long, frames long, bytes long, entries long, requests long,"
            " lag_ms long, cpu_ms long, rss_kb long, registered boolean, lost long, dt date",
        ),
        Table(
            "refusals",
            "what was refused or dropped, to whom",
            "producer string, at timestamp, hour int, what string, who string, reason string, n long, targets long,"
            " dt date",
        ),
        Table(
            "entries",
            "an entry that discovery took",
            "producer string, at timestamp, hour int, subject string, is_server boolean, result string,"
            " sequence long, available long, delegated long, clock_ms long, dt date",
        ),
        Table(
            "receipts",
            "what a client signed, once for each end of a transport; of several words the smallest; former: handed in"
            " after the server had started again, which knows the signer as peer and not whether it was an end",
            "server string, transport string, signer string, partner string, initiator boolean, delivered_out long,"
            " delivered_in long, words long, former boolean, peer string, at timestamp, dt date",
        ),
        Table(
            "verdicts",
            "what three words say of a transport: the server's and its ends'; sure: what is claimed, and what it should"
            " be, the ways on which nothing can have been on its way; left: the other ways; initiator: who has signed,"
            " as a number; the words themselves only where they conflict or"
            " the server says nothing, signers and partners as numbers",
            "server string, claimed long, credited long, sure_claimed long, sure_word long, left_claimed long,"
            " left_word long, initiator long, state string, word string,"
            " transport string, relay_ab long,"
            " relay_ba long, a_out long, a_in long, b_out long, b_in long, a_signer long, a_partner long,"
            " b_signer long, b_partner long, dt date",
        ),
        Table(
            "unfinished",
            "what of a day belongs to transports that were not opened and closed on it: what the server told, told_ab"
            " and told_ba since their opening; or, without a process, receipts of one of which it told nothing then, by"
            " whom the server knows as peer",
            "server string, boot string, transport string, src string, dst string, opened_at timestamp, closed boolean,"
            " told_ab long, told_ba long, peer string, a_out long, a_in long, b_out long, b_in long, a_signer long,"
            " a_partner long, b_signer long, b_partner long, dt date",
        ),
        Table(
            "boots",
            "a process on a day: its first and last event, and whether it began and ended there in order",
            "producer string, role string, boot string, first_at timestamp, last_at timestamp, starts long, stops long,"
            " names string, dt date",
        ),
    )
}

DAILY = {
    table.name: table
    for table in (
        Table(
            "traffic_hour",
            "What did each server carry?",
            "server string, dt date, hour int, opened long, accepted long, closed long, refused_by_peer long,"
            " bytes long, dropped_bytes long, frames long, acks long",
        ),
        Table(
            "close_day",
            "Why did transports end?",
            "server string, dt date, reason string, by string, transports long",
        ),
        Table(
            "pair_day",
            "Who sent how much to whom, over which server?",
            "server string, dt date, src string, dst string, transports long, bytes_ab long, bytes_ba long",
        ),
        Table(
            "latency_hour",
            "How fast do clients answer over a server (rtt), how long does opening take (accept)? In ms; the arrays are"
            " counts by bucket, which may be added.",
            f"server string, dt date, hour int, {_LATENCY}",
        ),
        Table(
            "latency_day",
            "The same of a day.",
            f"server string, dt date, {_LATENCY}",
        ),
        Table(
            "server_hour",
            "Was it up, by its own word and by discovery's, and how loaded?",
            "server string, dt date, hour int, alive_minutes int, seen_minutes int, agreed_minutes int,"
            " peak_sessions long, peak_transports long, capacity long, frames long, bytes long, max_lag_ms long,"
            " cpu_ms long, max_rss_kb long, lost_events long",
        ),
        Table(
            "minute_day",
            "In how many minutes of a day was it there, by its own word and by discovery's? Days that have any.",
            "server string, dt date, alive_minutes long, seen_minutes long, agreed_minutes long, observed_minutes long",
        ),
        Table(
            "clock_day",
            "Whose clock is wrong? skew: the time that a server's entries name, less that of the discovery that took"
            " them, where the way there was shortest.",
            "server string, dt date, posts long, skew_ms long, least_ms long, witnesses long",
        ),
        Table(
            "session_day",
            "How long do clients stay?",
            "server string, dt date, sessions long, clients long, lost long, mean_seconds double, bytes long",
        ),
        Table(
            "settlement_day",
            "What did a server deliver by the word of both ends, and what does it claim?",
            "server string, dt date, transports long, claimed_bytes long, credited_bytes long, matched long,"
            " cut long, uncertain_bytes long, conflict long, one_sided long, relay_only long, unclaimed long,"
            " inflated_bytes long, inflation double, witnesses long, accusers long, sided_with_one long,"
            " verdict string",
        ),
        Table(
            "settlement_conflict_day",
            "The transports about which three words disagree, with the words.",
            "server string, dt date, transport string, state string, signer_a string, signer_b string,"
            " relay_ab long, a_out long, b_in long, relay_ba long, b_out long, a_in long, credited long, claimed long,"
            " word string",
        ),
        Table(
            "refusal_hour",
            "What was refused, why, how often?",
            "producer string, dt date, hour int, what string, reason string, n long, who long",
        ),
        Table(
            "abuse_day",
            "Who floods, scans, churns? Score 100 is the limit of what is usual; the evidence says why.",
            "producer string, dt date, who string, kind string, requests long, refused long, targets long, posts long,"
            " score double, evidence string",
        ),
        Table(
            "refusal_day",
            "What was refused in all, and how many did it? who: by each that tells of it, so that one may count twice.",
            "dt date, what string, reason string, n long, who long, producers long",
        ),
        Table(
            "discovery_hour",
            "What does discovery take and refuse? absent: look-ups of entries that are not there.",
            "producer string, dt date, hour int, first long, next long, deleted long, refused long, servers long,"
            " absent long",
        ),
        Table(
            "capacity_day",
            "How near is a server to its limit?",
            "server string, dt date, peak_sessions long, capacity long, peak_share double, busy_hours long,"
            " refused_full long, bytes long",
        ),
        Table(
            "network_day",
            "The network at a glance.",
            "dt date, servers long, transports long, sessions long, clients long, bytes long, frames long,"
            f" refused long, receipts long, {_LATENCY}",
        ),
    )
}

OVERALL = {
    table.name: table
    for table in (
        Table(
            "boot",
            "Every process that wrote: from when, until when, and how it ended. down: until the next one began. lost:"
            " transports that ended with it, bytes as in lost_transport; witnessed: those with the words of both ends.",
            "producer string, role string, boot string, first_at timestamp, last_at timestamp, ended string,"
            " next_at timestamp, down_seconds double, lost_transports long, lost_witnessed long,"
            " lost_counted_bytes long, lost_least_bytes long, lost_most_bytes long",
        ),
        Table(
            "uptime_day",
            "What share of the day was it up? Also of days of which nothing came. agreed: minutes that its heartbeats"
            " and a discovery both have.",
            "server string, dt date, state string, alive_minutes long, seen_minutes long, agreed_minutes long,"
            " observed_minutes long, uptime double, availability double, starts long, clean_stops long, crashes long,"
            " flags string",
        ),
        Table(
            "quality_day",
            "How much of what was written has arrived? Numbers of a process go on over days, from 0.",
            "producer string, dt date, events long, distinct_events long, duplicates long, expected long,"
            " missing long, completeness double, clock_steps_ms long",
        ),
        Table(
            "lost_transport",
            "Which transports ended with their server's process, that was killed? counted: by the server, until it last"
            " said so; least, most: by the words of both ends, which they hand in later; of so many words.",
            "server string, dt date, boot string, transport string, src string, dst string, opened_at timestamp,"
            " lost_at timestamp, counted_bytes long, least_bytes long, most_bytes long, words long",
        ),
        Table(
            "actor",
            "Who floods, scans, churns, over all days and servers? Only servers that name clients alike can be put"
            " together: names says which; without it a client is another one at each. The score is of the worst day,"
            " most_at where it was highest.",
            "who string, kind string, names string, servers long, most_at string, days long, first_day date,"
            " last_day date, requests long, refused long, targets long, posts long, score double",
        ),
        Table(
            "capacity_forecast",
            "When does a server reach its limit, if it goes on as in the last four weeks?",
            "server string, days long, peak_sessions long, capacity long, growth_per_day double, fit double,"
            " days_left double, full_on date",
        ),
        Table(
            "placement",
            "Where should clients be sent? weight is what discovery draws by.",
            "server string, weight double, availability double, headroom double, latency_ms double,"
            " latency_factor double, honesty double, days long, reasons string",
        ),
        Table(
            "public_day",
            "What may be published: sums of the network, no cell of few clients.",
            "dt date, servers long, clients long, transports long, sessions long, gigabytes double,"
            " rtt_p50 double, rtt_p90 double, withheld string",
        ),
    )
}

GOLD = {**DAILY, **OVERALL}
