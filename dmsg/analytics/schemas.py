"""Schemas of the tables: columns, types, and the meaning of a row.

Bronze contains the events as they were written, silver the checked events, and gold the answers to questions. All
tables except those in :data:`OVERALL` are partitioned by ``dt``, the day in UTC.
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
"""Name of the column with the text of a line that is not JSON, or that has a field of a wrong type."""
RAW = StructType([*EVENT.fields, StructField(CORRUPT, StringType())])
"""Columns that Spark's JSON reader returns for a line of a spool."""
BRONZE = StructType(
    [
        *EVENT.fields,
        StructField("file", StringType()),
        StructField("problem", StringType()),
        StructField("line", StringType()),
        StructField("origin", StringType()),
        StructField("batch", LongType()),
        StructField("file_bytes", LongType()),
        StructField("file_sha256", StringType()),
        StructField("family", StringType()),
        StructField("dt", StringType()),
    ]
)
"""Columns of bronze. A row is an event with its origin, or in the family ``quarantine`` a line with its problem,
or in the family of :data:`REGISTER` a file with its size and hash."""

FAMILIES = {
    "transport": ("transport_open", "transport_progress", "transport_close"),
    "session": ("session_open", "session_close"),
    "beat": ("heartbeat",),
    "refusal": ("handshake_fail", "transport_refuse", "entry_refuse", "lookup_fail", "drop"),
    "entry": ("entry",),
    "receipt": ("receipt_checked",),
    "life": ("start", "stop", "segment_end"),
}
"""Types of events in each family. The events of a family and day are in one partition of bronze."""
OF_TRANSPORTS = ("transport", "receipt")
"""Families of events with the three counts of transports. The events of one transport can be on both sides of
midnight."""
QUARANTINE = "quarantine"
"""Name of the family for lines that are no events."""
REGISTER = "file"
"""Name of the family of rows that record which files Arrow has read. These rows are written in the same transaction as
the events of the files."""
LIES = "claims more than both ends"
"""Verdict on one server and one day: the server claims more bytes than both ends report. The verdict lowers the weight
by which clients should use the server."""
AGREES = "agrees"


def write_options(schema: StructType) -> dict[str, str]:
    """Return options of Spark's Parquet writer that turn off dictionaries for columns of numbers and times.

    Nearly all values of such a column differ, and the attempt to build a dictionary takes a quarter of the writing
    time.
    """
    plain = (LongType, TimestampType)
    return {
        f"parquet.enable.dictionary#{one.name}": "false" for one in schema.fields if isinstance(one.dataType, plain)
    }


@dataclass(frozen=True)
class Table:
    """Definition of a silver or gold table.

    :ivar text: what the table contains, or the question that it answers.
    :ivar columns: names and types of the columns, separated by commas, including ``dt`` if the table has days.
    """

    name: str
    text: str
    columns: str

    @property
    def schema(self) -> StructType:
        """Columns as a Spark schema. This method parses the types itself, because Spark's parser would need a
        session."""
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
            "Transport events: opened, progress, closed.",
            "server string, boot string, at timestamp, hour int, what string, transport string, src string, dst string,"
            f" secure boolean, reason string, by string, duration_ms long, accept_ms long, {_SIDES}, rtt array<int>,"
            " total_ab long, total_ba long, dropped_ab long, dropped_ba long, accept_us long, dt date",
        ),
        Table(
            "sessions",
            "Connections of clients, joined from their open and close events.",
            "server string, boot string, session long, peer string, opened_at timestamp, closed_at timestamp,"
            " duration_ms long, reason string, handshake_ms long, frames long, bytes long, dt date",
        ),
        Table(
            "heartbeats",
            "Heartbeats of processes, one per minute. covers_from: start of the time that the heartbeat covers; gaps "
            "of up to 10 minutes are closed.",
            "producer string, role string, boot string, at timestamp, covers_from timestamp, sessions long,"
            " transports long, capacity long, handshakes long, frames long, bytes long, entries long, requests long,"
            " lag_ms long, cpu_ms long, rss_kb long, registered boolean, lost long, dt date",
        ),
        Table(
            "refusals",
            "Refused or dropped requests, and their senders.",
            "producer string, at timestamp, hour int, what string, who string, reason string, n long, targets long,"
            " dt date",
        ),
        Table(
            "entries",
            "Entries that discovery accepted.",
            "producer string, at timestamp, hour int, subject string, is_server boolean, result string,"
            " sequence long, available long, delegated long, clock_ms long, dt date",
        ),
        Table(
            "receipts",
            "Signed receipts, one for each end of a transport; of several receipts, the smallest counts. former: "
            "received after the server restarted. The server knew then which client sent it (peer), but not whether "
            "this client was an end.",
            "server string, transport string, signer string, partner string, initiator boolean, delivered_out long,"
            " delivered_in long, words long, former boolean, peer string, at timestamp, dt date",
        ),
        Table(
            "verdicts",
            "Comparison of the three counts of a transport: the server's and its ends'. sure: claimed and expected "
            "bytes in directions in which nothing can have been in transit. left: the other directions. initiator: "
            "hash of the signer that requested the transport. The counts themselves are stored only where they "
            "conflict, or where the server reports nothing. Signers and partners are hashes.",
            "server string, claimed long, credited long, sure_claimed long, sure_word long, left_claimed long,"
            " left_word long, initiator long, state string, word string,"
            " transport string, relay_ab long,"
            " relay_ba long, a_out long, a_in long, b_out long, b_in long, a_signer long, a_partner long,"
            " b_signer long, b_partner long, dt date",
        ),
        Table(
            "unfinished",
            "Events and receipts of transports that were not both opened and closed on one day. told_ab, told_ba: "
            "bytes that the server reported since the opening. Rows without a process: receipts of a transport that "
            "the server did not report on that day; peer is the client that sent them.",
            "server string, boot string, transport string, src string, dst string, opened_at timestamp, closed boolean,"
            " told_ab long, told_ba long, peer string, a_out long, a_in long, b_out long, b_in long, a_signer long,"
            " a_partner long, b_signer long, b_partner long, dt date",
        ),
        Table(
            "boots",
            "Processes on a day: first and last event, and whether the process started and stopped on this day.",
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
            "How fast do clients answer over a server (rtt), and how long does opening take (accept)? In ms. The "
            "arrays are counts per bucket, which may be added.",
            f"server string, dt date, hour int, {_LATENCY}",
        ),
        Table(
            "latency_day",
            "How fast do clients answer over a server (rtt), and how long does opening take (accept), by day? In ms.",
            f"server string, dt date, {_LATENCY}",
        ),
        Table(
            "server_hour",
            "Was the server up, by its own report and by discovery's, and how loaded was it?",
            "server string, dt date, hour int, alive_minutes int, seen_minutes int, agreed_minutes int,"
            " peak_sessions long, peak_transports long, capacity long, frames long, bytes long, max_lag_ms long,"
            " cpu_ms long, max_rss_kb long, lost_events long",
        ),
        Table(
            "minute_day",
            "In how many minutes of a day was the server up, by its own report and by discovery's? Only days with "
            "such minutes.",
            "server string, dt date, alive_minutes long, seen_minutes long, agreed_minutes long, observed_minutes long",
        ),
        Table(
            "clock_day",
            "Whose clock is wrong? skew: time of a server's entries minus the clock of the discovery that accepted "
            "them, measured by the entry with the shortest delay.",
            "server string, dt date, posts long, skew_ms long, least_ms long, witnesses long",
        ),
        Table(
            "session_day",
            "How long do clients stay?",
            "server string, dt date, sessions long, clients long, lost long, mean_seconds double, bytes long",
        ),
        Table(
            "settlement_day",
            "What did a server deliver by the receipts of both ends, and what does it claim?",
            "server string, dt date, transports long, claimed_bytes long, credited_bytes long, matched long,"
            " cut long, uncertain_bytes long, conflict long, one_sided long, relay_only long, unclaimed long,"
            " inflated_bytes long, inflation double, witnesses long, accusers long, sided_with_one long,"
            " verdict string",
        ),
        Table(
            "settlement_conflict_day",
            "Transports whose three counts disagree, with the counts.",
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
            "Who floods, scans, churns? Score 100 is the daily limit; evidence gives the reason.",
            "producer string, dt date, who string, kind string, requests long, refused long, targets long, posts long,"
            " score double, evidence string",
        ),
        Table(
            "refusal_day",
            "What was refused in all, and by how many senders? who: summed over reporting entities, so one sender "
            "may count twice.",
            "dt date, what string, reason string, n long, who long, producers long",
        ),
        Table(
            "discovery_hour",
            "What does discovery accept and refuse? absent: look-ups of entries that do not exist.",
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
            "What are the totals of the whole network?",
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
            "When did each process write, and how did it end? down: seconds until the next process started. lost: "
            "transports that ended with the process, bytes as in lost_transport. witnessed: those with receipts of "
            "both ends.",
            "producer string, role string, boot string, first_at timestamp, last_at timestamp, ended string,"
            " next_at timestamp, down_seconds double, lost_transports long, lost_witnessed long,"
            " lost_counted_bytes long, lost_least_bytes long, lost_most_bytes long",
        ),
        Table(
            "uptime_day",
            "What share of the day was the server up? Includes days without any events. agreed: minutes that both "
            "its heartbeats and a discovery have.",
            "server string, dt date, state string, alive_minutes long, seen_minutes long, agreed_minutes long,"
            " observed_minutes long, uptime double, availability double, starts long, clean_stops long, crashes long,"
            " flags string",
        ),
        Table(
            "quality_day",
            "How much of what was written has arrived? Numbers of a process continue over days, from 0.",
            "producer string, dt date, events long, distinct_events long, duplicates long, expected long,"
            " missing long, completeness double, clock_steps_ms long",
        ),
        Table(
            "lost_transport",
            "Which transports ended with a server process that was killed? counted: the server's last reported "
            "bytes. least, most: bounds by the receipts that both ends send later. words: number of receipts.",
            "server string, dt date, boot string, transport string, src string, dst string, opened_at timestamp,"
            " lost_at timestamp, counted_bytes long, least_bytes long, most_bytes long, words long",
        ),
        Table(
            "actor",
            "Who floods, scans, churns, over all days and servers? Scores are added over servers with the same value "
            "of names, which use the same pseudonyms. If names is NULL, a client has another pseudonym at each "
            "server. The score is that of the worst day; most_at is the server where it was highest.",
            "who string, kind string, names string, servers long, most_at string, days long, first_day date,"
            " last_day date, requests long, refused long, targets long, posts long, score double",
        ),
        Table(
            "capacity_forecast",
            "When does a server reach its limit, if the trend of the last four weeks continues?",
            "server string, days long, peak_sessions long, capacity long, growth_per_day double, fit double,"
            " days_left double, full_on date",
        ),
        Table(
            "placement",
            "Where should clients be sent? Discovery draws servers in proportion to weight.",
            "server string, weight double, availability double, headroom double, latency_ms double,"
            " latency_factor double, honesty double, days long, reasons string",
        ),
        Table(
            "public_day",
            "Which sums of the network may be published? No number covers only a few clients.",
            "dt date, servers long, clients long, transports long, sessions long, gigabytes double,"
            " rtt_p50 double, rtt_p90 double, withheld string",
        ),
    )
}

GOLD = {**DAILY, **OVERALL}
