"""Schema of the events that the entities write and the pipeline reads.

This module contains only data. :mod:`dmsg.analytics` imports it, and from the rest of :mod:`dmsg.telemetry` only the
listing of spools. An event is one JSON object on one line: the fields of ``ENVELOPE``, then those of its type. An
absent field means that the value was not measured, which differs from 0.

Rules for changes: ``SCHEMA_VERSION`` does not change for a new field or a new type. A field whose meaning changes gets
a new name. A reader puts events of an unknown version into quarantine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SCHEMA_VERSION = 1

SEGMENT_SUFFIX = ".jsonl.gz"
"""Suffix of the names of sealed files."""
EVENTS_PREFIX, RECEIPTS_PREFIX = "events-", "receipts-"
"""Prefixes of the names of sealed files. Receipts are in separate files, because they are verified before they are
counted."""

MAX_LINE = 16 * 1024
"""Maximum length of a line in bytes. A longer line is not an event."""
MAX_NUMBER = 2**50
"""Largest number of bytes, frames or other units that an event or a receipt may state (1 PiB as bytes)."""


class Type(StrEnum):
    """Type of a field, as represented in JSON."""

    STRING = "string"
    LONG = "long"
    BOOLEAN = "boolean"
    HISTOGRAM = "histogram"
    """Array of :data:`BUCKETS` counts."""


@dataclass(frozen=True, slots=True)
class Field:
    """Field of an event."""

    name: str
    type: Type
    text: str


# --- histograms --------------------------------------------------------------

BUCKETS = 34
"""Number of buckets of a latency histogram."""
FIRST_BOUND = 0.0001
"""Upper bound of the first bucket, in seconds. Each next bound is larger by the factor sqrt(2). The last bucket has no
upper bound."""
BOUNDS = tuple(FIRST_BOUND * 2 ** (index / 2) for index in range(BUCKETS - 1))
"""Upper bounds in seconds of all buckets but the last: 100 us to 6.55 s."""

# --- the envelope ------------------------------------------------------------

ENVELOPE = (
    Field("v", Type.LONG, "schema version, 1"),
    Field("type", Type.STRING, "type of the event"),
    Field("producer", Type.STRING, "writer of the event: a server's public key (66 hex digits), or a discovery's name"),
    Field("role", Type.STRING, "server or discovery"),
    Field("boot", Type.STRING, "random id of the process, 32 hex digits"),
    Field(
        "seq",
        Type.LONG,
        "number of the event in its process: 0, 1, 2 ... without gaps; producer, boot and seq together identify an "
        "event",
    ),
    Field("ts", Type.LONG, "time of the event in ms since 1970, UTC, by the machine's clock"),
    Field("mono", Type.LONG, "ms since the process started, by a monotonic clock"),
)

# --- fields that several events have -----------------------------------------

_PEER = Field(
    "peer", Type.STRING, "the client: a pseudonym of 16 hex digits, or its key if the operator chose clear keys"
)
_SRC = Field("src", Type.STRING, "the client that requested the transport, named as peer")
_DST = Field("dst", Type.STRING, "the client that was requested, named as peer")
_FORMER = Field(
    "former",
    Type.BOOLEAN,
    "true if the transport is from before the server's start and unknown to the server; otherwise absent",
)
_REASON = Field("reason", Type.STRING, "close or drop reason in lower case (docs/protocol)")
_SOURCE = Field("source", Type.STRING, "pseudonym of the source network (/24, /48), which changes every day")
_COUNT = Field("n", Type.LONG, "number of occurrences that the event stands for")
_SESSION = Field("session", Type.LONG, "number of the connection in the process")
_TRANSPORT = Field(
    "transport",
    Type.STRING,
    "id of the transport, 32 hex digits: the first half of SHA-256 over 'dmsg transport 1' and the payloads of "
    "REQUEST and ACCEPT; both clients know it, too; absent before ACCEPT",
)
_SECURE = Field("secure", Type.BOOLEAN, "true if the transport is encrypted end to end")
_DURATION = Field("duration_ms", Type.LONG, "duration in ms")
_ACCEPT = Field("accept_ms", Type.LONG, "time from REQUEST to ACCEPT in ms; absent if the transport was never accepted")
_ACCEPT_US = Field("accept_us", Type.LONG, "the same time in microseconds, because milliseconds are too coarse")
_COUNTERS = (
    Field("data_ab", Type.LONG, "bytes of user data received from src for dst since the transport's last event"),
    Field("data_ba", Type.LONG, "the same in the other direction"),
    Field("frames_ab", Type.LONG, "FWD frames from src to dst since the last event"),
    Field("frames_ba", Type.LONG, "the same in the other direction"),
    Field("acks_ab", Type.LONG, "ACK frames from dst for data of src since the last event"),
    Field("acks_ba", Type.LONG, "the same in the other direction"),
    Field(
        "rtt",
        Type.HISTOGRAM,
        "times from a FWD to its ACK at the relay since the last event; absent without samples. A sample is taken "
        "after a direction was silent for a second or more, because only then is it certain which FWD an ACK "
        "acknowledges",
    ),
)

# --- events ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EventType:
    """Type of an event.

    :ivar required: names of the fields that a line must have to be an event of this type. The pipeline groups rows by
        these fields.
    """

    name: str
    writers: str
    text: str
    fields: tuple[Field, ...]
    required: tuple[str, ...] = ()


EVENTS = (
    EventType(
        "start",
        "all",
        "The process starts to write events.",
        (
            Field("version", Type.STRING, "version of dmsg"),
            Field("capacity", Type.LONG, "maximum number of clients of a server"),
            Field("keys", Type.STRING, "how clients are named: hashed (pseudonyms) or clear (keys)"),
            Field(
                "names",
                Type.STRING,
                "id of the secret for pseudonyms, 8 hex digits: writers with the same value use the same pseudonyms; "
                "clear if clients are named by keys",
            ),
        ),
    ),
    EventType("stop", "all", "The process ends in an orderly way. A process without this event was killed.", ()),
    EventType(
        "heartbeat",
        "all",
        "Written once a minute. Counts are those since the last heartbeat, and not since the start.",
        (
            Field("interval_ms", Type.LONG, "ms since the last heartbeat, or since the start"),
            Field("sessions", Type.LONG, "connected clients"),
            Field("transports", Type.LONG, "open transports"),
            Field("capacity", Type.LONG, "maximum number of clients of a server"),
            Field("handshakes", Type.LONG, "handshakes in progress"),
            Field("frames", Type.LONG, "frames received"),
            Field("bytes", Type.LONG, "bytes of frames received"),
            Field("entries", Type.LONG, "entries that a discovery stores"),
            Field("requests", Type.LONG, "requests that a discovery answered"),
            Field("lag_ms", Type.LONG, "longest delay of a timer of the process, in ms"),
            Field("cpu_ms", Type.LONG, "processor time used, in ms"),
            Field("rss_kb", Type.LONG, "resident memory in KiB"),
            Field("registered", Type.BOOLEAN, "true if discovery accepted the server's last entry"),
            Field("lost", Type.LONG, "events that could not be written"),
        ),
    ),
    EventType(
        "session_open",
        "server",
        "A client has connected.",
        (_PEER, _SESSION, Field("handshake_ms", Type.LONG, "duration of the client's handshake in ms")),
        ("peer",),
    ),
    EventType(
        "session_close",
        "server",
        "A client has disconnected.",
        (
            _PEER,
            _SESSION,
            _REASON,
            _DURATION,
            Field("frames", Type.LONG, "frames received from the client"),
            Field("bytes", Type.LONG, "bytes of frames received from the client"),
        ),
        ("peer",),
    ),
    EventType(
        "handshake_fail",
        "server",
        "A connection ended before its client was authenticated. Repetitions within a minute are one event.",
        (_REASON, _SOURCE, _COUNT),
    ),
    EventType(
        "transport_open",
        "server",
        "A transport was accepted.",
        (_TRANSPORT, _SRC, _DST, _SECURE, _ACCEPT, _ACCEPT_US),
        ("src", "dst"),
    ),
    EventType(
        "transport_refuse",
        "server",
        "The server refused a REQUEST. Repetitions within a minute are one event.",
        (
            _SRC,
            _DST,
            _REASON,
            _COUNT,
            Field("targets", Type.LONG, "number of different clients requested, counted up to 1024"),
        ),
    ),
    EventType(
        "transport_progress",
        "server",
        "State of an open transport, every 5 minutes if any data passed.",
        (_TRANSPORT, _SRC, _DST, _SECURE, *_COUNTERS),
        ("src", "dst"),
    ),
    EventType(
        "transport_close",
        "server",
        "A transport, or a REQUEST for one, has ended.",
        (
            _TRANSPORT,
            _SRC,
            _DST,
            _SECURE,
            _REASON,
            Field("by", Type.STRING, "party that ended it: src, dst or server"),
            _DURATION,
            _ACCEPT,
            _ACCEPT_US,
            *_COUNTERS,
            Field("total_ab", Type.LONG, "bytes of user data received from src for dst since the transport was opened"),
            Field("total_ba", Type.LONG, "the same in the other direction"),
            Field(
                "dropped_ab",
                Type.LONG,
                "bytes of total_ab that were not forwarded: dropped for lack of room, or a share of the data in dst's "
                "queue when dst's connection ended; absent if there are none",
            ),
            Field("dropped_ba", Type.LONG, "the same in the other direction"),
        ),
        ("src", "dst"),
    ),
    EventType(
        "drop",
        "server",
        "Number of refusals and forced ends since the last heartbeat, one event per reason.",
        (_REASON, _COUNT),
    ),
    EventType(
        "receipt",
        "server",
        "A client's signed statement about the bytes delivered to and from it (docs/pipeline/receipts.md). Receipts "
        "are in separate files.",
        (
            Field("receipt", Type.STRING, "the signed bytes in hex"),
            _PEER,
            _FORMER,
        ),
    ),
    EventType(
        "receipt_checked",
        "verifier",
        "A receipt with its signature checked, written by `dmsg analytics verify`. Its producer, boot, seq and times "
        "are those of the event `receipt`.",
        (
            Field("reason", Type.STRING, "why the receipt is rejected; absent if it is accepted"),
            _TRANSPORT,
            Field("server", Type.STRING, "key of the server that carried the transport, in hex"),
            Field("signer", Type.STRING, "the client that signed: a pseudonym of the pipeline, or the key"),
            Field("partner", Type.STRING, "the other end, named as signer"),
            Field("initiator", Type.BOOLEAN, "true if the signer requested the transport"),
            Field("delivered_out", Type.LONG, "bytes that the other end acknowledged to the signer"),
            Field("delivered_in", Type.LONG, "bytes that the signer received"),
            _PEER,
            _FORMER,
        ),
    ),
    EventType(
        "entry",
        "discovery",
        "An entry was posted or deleted.",
        (
            Field("subject", Type.STRING, "owner of the entry: a server's key, or a client's pseudonym"),
            Field("is_server", Type.BOOLEAN, "true if the entry is a server's"),
            Field("result", Type.STRING, "result of the post: first, next or deleted"),
            Field("sequence", Type.LONG, "sequence number of the entry"),
            Field("available", Type.LONG, "free places of the server"),
            Field("clock_ms", Type.LONG, "for a server's entry: its time minus the time of this machine, in ms"),
            Field("delegated", Type.LONG, "number of servers that a client's entry names"),
        ),
        ("subject",),
    ),
    EventType(
        "entry_refuse",
        "discovery",
        "A request was refused. Repetitions within a minute are one event.",
        (_REASON, _SOURCE, _COUNT),
    ),
    EventType(
        "lookup_fail",
        "discovery",
        "A requested entry does not exist. Repetitions within a minute are one event.",
        (
            _SOURCE,
            _COUNT,
            Field("targets", Type.LONG, "number of different clients requested, counted up to 1024"),
        ),
    ),
    EventType(
        "segment_end",
        "all",
        "The last line of a file.",
        (
            Field("lines", Type.LONG, "number of lines before this one"),
            Field("sha256", Type.STRING, "SHA-256 of the bytes of those lines, in hex"),
            Field(
                "recovered",
                Type.BOOLEAN,
                "true if the process that wrote those lines was killed, and the next process wrote this line",
            ),
        ),
    ),
)

EVENT = {event.name: event for event in EVENTS}


def columns() -> tuple[Field, ...]:
    """Return all fields, each of them once, those of the envelope first. They are the columns of a table that can
    contain any event.

    :raises TypeError: a field has different types in two events.
    """
    known: dict[str, Field] = {}
    for field in (*ENVELOPE, *(field for event in EVENTS for field in event.fields)):
        before = known.setdefault(field.name, field)
        if before.type is not field.type:
            raise TypeError(f"the field {field.name} has two types: {before.type} and {field.type}")
    return tuple(known.values())


def markdown() -> str:
    """Return the tables of docs/pipeline/events.md."""
    parts = ["## Envelope\n", _table(ENVELOPE)]
    for event in EVENTS:
        parts += [f"## `{event.name}`\n", f"Written by: {event.writers}. {event.text}\n"]
        if event.required:
            names = " and ".join(f"`{name}`" for name in event.required)
            parts.append(f"A line without {names} is no event; it goes to quarantine.\n")
        if event.fields:
            parts.append(_table(event.fields))
    return "\n".join(parts)


def _table(fields: tuple[Field, ...]) -> str:
    rows = [f"| `{field.name}` | {field.type} | {field.text} |" for field in fields]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows]) + "\n"
