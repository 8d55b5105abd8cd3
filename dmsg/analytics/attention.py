"""Findings that need an operator's attention, from the gold tables; the most urgent first.

The functions compute findings from rows only, however the rows are read. Every limit is a named constant, and every
finding states the numbers that it is based on, so that an operator can dispute it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import IntEnum
from statistics import median

from dmsg.analytics.charts import human
from dmsg.analytics.gold.uptime import CLOCK_LIMIT_MS
from dmsg.analytics.runs import State
from dmsg.analytics.schemas import LIES
from dmsg.analytics.store import Row, Store
from dmsg.telemetry.spool_listing import Left, left_lines

TABLES = (
    "boot",
    "session_day",
    "latency_day",
    "capacity_day",
    "close_day",
    "settlement_day",
    "actor",
    "clock_day",
    "quality_day",
    "network_day",
    "uptime_day",
)
"""Gold tables whose rows the findings need."""
DAYS_BACK = 9
"""Number of days before the newest day whose rows are read, too. The newest day may be incomplete, and the newest
complete day is compared with the week before it.
"""
RECENT_DAYS = 2
"""Number of days, including the newest, for which crashes and most other problems are reported."""
LYING_DAYS = 7
"""Number of days for which inflated claims of traffic are reported. It exceeds :data:`RECENT_DAYS`, because receipts
arrive late."""
FORGOTTEN_DAYS = 28
"""Days after which a silent process is no longer reported."""
UNHEARD_MINUTES = 15
"""Minutes in which discovery must have seen a server of which no heartbeat has arrived; with fewer, the server is not
reported. A server's file of events arrives minutes later than the file in which discovery saw the server, so at the
beginning of a day, servers without a fault have no heartbeat yet."""
SLOW_TIMES = 2.0
"""A server is reported as slow if its p99 of a day exceeds the median p99 of the week before by this factor and by
:data:`SLOW_MIN_MS`."""
SLOW_MIN_MS = 5.0
"""Minimum difference in ms between the p99 of a slow server and its median p99 of the week before."""
SLOW_SAMPLES = 100
"""Minimum number of round-trip samples that a day needs to be compared with other days."""
SLOW_DAYS = 3
"""Minimum number of days of the week before that have at least :data:`SLOW_SAMPLES` samples each. With fewer such days,
a server is never reported as slow.
"""
SLOW_READERS = 0.01
"""Minimum share of a server's transports that ended because of slow receivers; below it, the server is not reported."""
SLOW_READERS_LEAST = 10
"""Minimum number of transports that ended because of slow receivers; with fewer, the server is not reported."""
MIN_UNCERTAIN_SHARE = 0.02
"""Minimum share of uncertain bytes in all bytes that a server claims. Uncertain bytes were in flight when their
transports ended, so they are not credited. Below it, the server is not reported.
"""
UNCERTAIN_LEAST = 1024 * 1024
"""Minimum number of uncertain bytes on one day. Below it, the server is not reported."""
MIN_ATTACK_SCORE = 100.0
"""Minimum score at which an actor (a client or network) is reported for abuse."""
MIN_COMPLETE_SHARE = 0.99
"""Share of a producer's events of a day that must have arrived. Below it, the missing events are reported."""
OLD_SECONDS = 2 * 3600
"""Age in seconds of the newest event above which the data is reported as old. Entities finish a file of events every
five minutes.
"""
CHANGE_TIMES = 1.5
"""Factor by which a total of the network must rise or fall from one day to the next to be reported."""
MIN_BUSY_LOAD = 0.8
"""Minimum load, as a share of a server's capacity, at which a server that refuses connections needs attention at
once."""
MAX_LINES = 8
"""Maximum number of lines shown to a person for findings of one kind. If there are more findings, the last line says
how many are left out."""
UNNAMED = "unnamed"
"""Text shown for an actor or a producer without a name in the tables."""
MAX_ABUSE_LINES = 3
"""Maximum number of lines shown for one kind of abuse. With more, findings of other kinds would be overlooked."""


class Urgency(IntEnum):
    """How soon an operator should handle a finding."""

    NOW = 0
    SOON = 1
    NOTE = 2

    @property
    def word(self) -> str:
        """Word for the urgency, for people and programs."""
        return ("now", "look", "changed")[self]


@dataclass(frozen=True)
class Finding:
    """Problem or change that an operator should know of.

    :ivar kind: silent, crashed, full, slow receivers, uncertain, slow, claims, clock, unheard, missing, not read,
        unusable, old, changed, new, or a kind of abuse such as ``scan``.
    :ivar about: key of a server, or name of a process or an actor; empty for the whole network.
    :ivar place: section of the report that shows the rows from which the finding was computed.
    """

    urgency: Urgency
    kind: str
    about: str
    text: str
    place: str


def needs_attention(store: Store, state: State, *, now: datetime) -> list[Finding]:
    """Read the tables of a store and return the findings for an operator, the most urgent first.

    :raises LakeError: the tables cannot be read.
    """
    tables: dict[str, list[Row]] = {name: [] for name in TABLES}
    if state.days:
        since = str(date.fromisoformat(max(state.days)) - timedelta(DAYS_BACK))
        tables = {name: store.gold(name, state, since) for name in TABLES}
    return attention(tables, now=now, left=state.left, unusable=state.unusable)


def attention(
    tables: Mapping[str, Sequence[Row]],
    *,
    now: datetime,
    left: Left | None = None,
    unusable: Mapping[str, tuple[int, int]] | None = None,
) -> list[Finding]:
    """Return the findings for an operator, the most urgent first, from rows of the tables.

    :param tables: rows of :data:`TABLES`.
    :param now: current time, with a time zone.
    :param left: files that the run could not read, by reason.
    :param unusable: number of lines that are no events, and of damaged files, by the day on which they were read.
    """
    network = tables["network_day"]
    boots = [{**row, "first_at": _utc(row["first_at"]), "last_at": _utc(row["last_at"])} for row in tables["boot"]]
    not_read = [Finding(Urgency.SOON, "not read", "", line, "Data") for line in left_lines(left or {})]
    not_read += _unusable(unusable or {}, now.date())
    if not network or not boots:
        return not_read
    newest = max(row["dt"] for row in network)
    kinds: list[Iterator[Finding]] = [
        _old_servers(boots, now),
        _down_servers(boots, now),
        _full_servers(tables["capacity_day"], newest),
        _liars(tables["settlement_day"], newest),
        _crashed_servers(boots, tables["session_day"], newest),
        _slow_servers(tables["latency_day"]),
        _slow_readers(tables["close_day"], newest),
        _uncertain_servers(tables["settlement_day"], tables["close_day"], newest),
        _wrong_clocks(tables["clock_day"], newest),
        _unheard_servers(tables["uptime_day"], newest),
        _missing_events(tables["quality_day"]),
        iter(not_read),
        *(_attacks([row for row in tables["actor"] if row["kind"] == kind], newest) for kind in _DEEDS),
        _changed_totals(network, tables["uptime_day"], now),
    ]
    return sorted((line for kind in kinds for line in kind), key=lambda line: line.urgency)


def shorten_findings(lines: Sequence[Finding]) -> list[Finding]:
    """Shorten the findings of each kind and urgency to :data:`MAX_LINES` lines, and those of each kind of abuse to
    :data:`MAX_ABUSE_LINES`. Where findings are left out, the last line says how many."""
    groups: dict[tuple[Urgency, str], list[Finding]] = defaultdict(list)
    for line in lines:
        groups[line.urgency, line.kind].append(line)
    shown = []
    for (urgency, kind), group in groups.items():
        most = MAX_ABUSE_LINES if kind in _DEEDS else MAX_LINES
        if len(group) <= most:
            shown += group
            continue
        first = group[: most - 1]
        text = f"{kind}: and {len(group) - len(first)} more (attention --json has all)"
        shown += [*first, Finding(urgency, kind, "", text, first[0].place)]
    return shown


def _utc(time: datetime) -> datetime:
    """Return a time with the time zone UTC, because Spark's ``collect()`` returns times in UTC without a time zone."""
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _time_text(time: datetime) -> str:
    return f"{time:%-d %b %H:%M}"


def _day(day: date) -> str:
    return f"{day:%-d %b}"


def _duration(seconds: float) -> str:
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def _since(rows: Iterable[Row], newest: date, days: int) -> list[Row]:
    return [row for row in rows if row["dt"] > newest - timedelta(days)]


def _down_servers(boots: Sequence[Row], now: datetime) -> Iterator[Finding]:
    newest = max(row["last_at"] for row in boots)
    gone = [row for row in boots if row["ended"] == "silent" and row["next_at"] is None]
    for row in sorted(gone, key=lambda row: row["last_at"], reverse=True):
        if newest - row["last_at"] <= timedelta(FORGOTTEN_DAYS):
            text = f"{row['role']} is silent since {_time_text(row['last_at'])}, for "
            if _seconds(now, newest) > OLD_SECONDS:
                # The silence is measured up to the newest event of all, because nothing is known of the time after that
                # event.
                text += f"{_duration(_seconds(newest, row['last_at']))} until the newest event"
            else:
                text += _duration(_seconds(now, row["last_at"]))
            yield Finding(Urgency.NOW, "silent", row["producer"], text + lost_with([row]), "Servers")


def _seconds(later: datetime, earlier: datetime) -> float:
    return max(0.0, (later - earlier).total_seconds())


def lost_with(boots: Sequence[Row]) -> str:
    """Return the last part of a sentence: how many transports were lost with killed processes, and their bytes. The
    part is empty if no transport was lost.

    :param boots: rows of ``boot``.
    """
    transports, witnessed = (sum(row[name] or 0 for row in boots) for name in ("lost_transports", "lost_witnessed"))
    if not transports:
        return ""
    text = f", {transports:,} transports ended with it"
    if witnessed:
        least, most = (sum(row[f"lost_{name}_bytes"] or 0 for row in boots) for name in ("least", "most"))
        of = "they" if witnessed == transports else f"{witnessed:,} of them"
        text += f"; {of} had carried {bytes_between(least, most)}, both ends say"
    return text


def bytes_between(least: int, most: int) -> str:
    """Format a range of bytes for people, such as ``1 MB to 1.2 MB``."""
    low, high = human(least, "B"), human(most, "B")
    return low if low == high else f"{low} to {high}"


def _crashed_servers(boots: Sequence[Row], sessions: Sequence[Row], newest: date) -> Iterator[Finding]:
    lost: dict[str, int] = defaultdict(int)
    for row in _since(sessions, newest, RECENT_DAYS):
        lost[row["server"]] += row["lost"] or 0
    ends: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in boots:
        if row["ended"] == "crashed" and row["last_at"].date() > newest - timedelta(RECENT_DAYS):
            ends[row["producer"], row["role"]].append(row)
    for (producer, role), rows in sorted(ends.items(), key=lambda item: -len(item[1])):
        down = sum(row["down_seconds"] or 0 for row in rows)
        times = "" if len(rows) == 1 else f" {len(rows)} times, the last"
        last_time = _time_text(max(row["last_at"] for row in rows))
        text = f"{role} crashed{times} at {last_time}; was down for {_duration(down)}"
        if lost[producer]:
            text += f", {lost[producer]} sessions were lost"
        text += lost_with(rows)
        yield Finding(Urgency.SOON, "crashed", producer, text, "Servers")


def _full_servers(days: Sequence[Row], newest: date) -> Iterator[Finding]:
    by_server: dict[str, list[Row]] = defaultdict(list)
    for row in _since(days, newest, RECENT_DAYS):
        if row["refused_full"] or row["busy_hours"]:
            by_server[row["server"]].append(row)
    for server, rows in by_server.items():
        last = max(rows, key=lambda row: row["dt"])
        worst = max(rows, key=lambda row: row["peak_share"] or 0)
        peak = f"{worst['peak_sessions']:,} of {worst['capacity']:,} sessions at its peak"
        refused, busy = (sum(row[name] or 0 for row in rows) for name in ("refused_full", "busy_hours"))
        words = f"refused {refused:,} connections because it was full" if refused else f"nearly full in {busy} hours"
        # A refusal alone does not prove that the server is full, because the limit of connections per address also
        # causes refusals. So the load is compared, too.
        urgency = Urgency.NOW if refused and (worst["peak_share"] or 0) >= MIN_BUSY_LOAD else Urgency.SOON
        yield Finding(urgency, "full", server, f"{words}, until {_day(last['dt'])}; {peak}", "Capacity")


def _slow_readers(ends: Sequence[Row], newest: date) -> Iterator[Finding]:
    total: dict[tuple[str, date], int] = defaultdict(int)
    full: dict[tuple[str, date], int] = defaultdict(int)
    for row in _since(ends, newest, RECENT_DAYS):
        key = row["server"], row["dt"]
        total[key] += row["transports"]
        full[key] += row["transports"] if row["reason"] == "queue_full" else 0
    for (server, day), ended in sorted(full.items(), key=lambda item: -item[1]):
        if ended >= SLOW_READERS_LEAST and ended >= SLOW_READERS * total[server, day]:
            text = f"{ended:,} of {total[server, day]:,} transports of {_day(day)} ended because a receiver was slow"
            yield Finding(Urgency.SOON, "slow receivers", server, f"{text} (queue_full)", "Traffic")


def _uncertain_servers(settled: Sequence[Row], ends: Sequence[Row], newest: date) -> Iterator[Finding]:
    full: dict[tuple[str, date], int] = defaultdict(int)
    for row in ends:
        if row["reason"] == "queue_full":
            full[row["server"], row["dt"]] += row["transports"]
    for row in _since(settled, newest, RECENT_DAYS):
        uncertain, claimed = row["uncertain_bytes"] or 0, row["claimed_bytes"] or 0
        if uncertain >= UNCERTAIN_LEAST and uncertain >= MIN_UNCERTAIN_SHARE * claimed:
            share = _percent(uncertain / claimed)
            text = f"{human(uncertain, 'B')} of {_day(row['dt'])}, {share} of its claim, are credited to nobody: "
            text += f"{row['cut']:,} transports ended with data in transit"
            if slow := full[row["server"], row["dt"]]:
                text += f"; {slow:,} ended because a receiver was slow (queue_full)"
            yield Finding(Urgency.SOON, "uncertain", row["server"], text, "Settlement")


def _percent(share: float) -> str:
    return f"{share * 100:.2g} %" if share < 0.995 else f"{share * 100:.0f} %"


def _slow_servers(days: Sequence[Row]) -> Iterator[Finding]:
    by_server: dict[str, list[Row]] = defaultdict(list)
    for row in days:
        if row["rtt_p99"] is not None and row["rtt_samples"] >= SLOW_SAMPLES:
            by_server[row["server"]].append(row)
    if not by_server:
        return
    newest = max(row["dt"] for rows in by_server.values() for row in rows)
    for server, rows in by_server.items():
        last = max(rows, key=lambda row: row["dt"])
        before = [row["rtt_p99"] for row in rows if last["dt"] - timedelta(7) <= row["dt"] < last["dt"]]
        if last["dt"] < newest or len(before) < SLOW_DAYS:
            continue
        usual, now = median(before), last["rtt_p99"]
        if now >= SLOW_TIMES * usual and now >= usual + SLOW_MIN_MS:
            text = f"slow on {_day(last['dt'])}: p99 of answers {now:.0f} ms, {usual:.0f} ms in the week before"
            yield Finding(Urgency.SOON, "slow", server, text, "Latency")


def _liars(days: Sequence[Row], newest: date) -> Iterator[Finding]:
    verdicts: dict[str, list[Row]] = defaultdict(list)
    for row in _since(days, newest, LYING_DAYS):
        if str(row["verdict"]).startswith("claims more"):
            verdicts[row["server"]].append(row)
    for server, rows in verdicts.items():
        last = max(rows, key=lambda row: row["dt"])
        text = f"{last['verdict']} on {_day(last['dt'])}"
        if last["inflation"] is not None and last["inflation"] > 0:
            text += f", by {last['inflation'] * 100:.1f} %"
        if last["accusers"]:
            text += f"; {last['accusers']:,} of {last['witnesses']:,} clients say so"
        if len(rows) > 1:
            text += f"; on {len(rows)} days of the week"
        # If only few clients dispute what the server claims, these clients may be lying, so the finding is less urgent.
        proven = any(row["verdict"] == LIES for row in rows)
        yield Finding(Urgency.NOW if proven else Urgency.SOON, "claims", server, text, "Settlement")


OF_DISCOVERY = ("entries", "lookups", "churn")
"""Kinds of abuse that are observed by discoveries. The other kinds are observed by servers."""
_DEEDS = {
    "scan": "asked for {targets:,} clients that are not connected",
    "flood": "{refused:,} requests refused, most over its rate",
    "handshakes": "{refused:,} failed handshakes from its network",
    "entries": "{refused:,} requests that discovery refused",
    "lookups": "asked discovery for {targets:,} clients without an entry",
    "churn": "posted {posts:,} entries",
    "unanswered": "{refused:,} of its {requests:,} requests were accepted by nobody",
}


def _attacks(actors: Sequence[Row], newest: date) -> Iterator[Finding]:
    for row in sorted(actors, key=lambda row: -row["score"]):
        if row["score"] >= MIN_ATTACK_SCORE and row["last_day"] > newest - timedelta(RECENT_DAYS):
            numbers = {name: row[name] or 0 for name in ("targets", "refused", "posts", "requests")}
            deed = _DEEDS[row["kind"]].format(**numbers)
            where = _places_text(row)
            text = f"{row['kind']}: {deed}, {where}, until {_day(row['last_day'])}; score {row['score']:,.0f}"
            # If the abuse did not continue on the newest day, it has ended, and is less urgent.
            urgency = Urgency.NOW if row["last_day"] == newest else Urgency.SOON
            yield Finding(urgency, row["kind"], row["who"] or UNNAMED, text, "Refusals")


def _places_text(row: Row) -> str:
    """Return a phrase that says at which servers or discoveries an actor was observed."""
    there = "discoveries" if row["kind"] in OF_DISCOVERY else "servers"
    most_at = row["most_at"] or UNNAMED
    if row["servers"] > 1:
        return f"at {row['servers']} {there}, most at {most_at[:8]}"
    return f"at {most_at[:8] if there == 'servers' else most_at}"


def _wrong_clocks(days: Sequence[Row], newest: date) -> Iterator[Finding]:
    worst: dict[str, Row] = {}
    for row in _since(days, newest, RECENT_DAYS):
        if row["skew_ms"] is not None and abs(row["skew_ms"]) > CLOCK_LIMIT_MS:
            worst[row["server"]] = max(worst.get(row["server"], row), row, key=lambda one: one["dt"])
    for server, row in worst.items():
        way = "ahead of" if row["skew_ms"] > 0 else "behind"
        text = f"its clock was {_duration(abs(row['skew_ms']) / 1000)} {way} discovery's on {_day(row['dt'])}"
        yield Finding(Urgency.SOON, "clock", server, text, "Servers")


def _unheard_servers(days: Sequence[Row], newest: date) -> Iterator[Finding]:
    for row in days:
        if row["dt"] == newest and row["state"] == "unheard" and row["seen_minutes"] > UNHEARD_MINUTES:
            text = f"discovery saw it on {_day(newest)}, but no events of it have arrived"
            yield Finding(Urgency.SOON, "unheard", row["server"], text, "Data")


def _missing_events(days: Sequence[Row]) -> Iterator[Finding]:
    missing: dict[str, list[Row]] = defaultdict(list)
    for row in days:
        if row["completeness"] is not None and row["completeness"] < MIN_COMPLETE_SHARE:
            missing[row["producer"]].append(row)
    for producer, rows in missing.items():
        events = sum(row["missing"] for row in rows)
        first, last = (edge(row["dt"] for row in rows) for edge in (min, max))
        period = _day(first) if first == last else f"{_day(first)} to {_day(last)}"
        text = f"{events:,} events of {period} have not arrived: a file is lost or not yet collected"
        yield Finding(Urgency.SOON, "missing", producer, text, "Data")


def _unusable(days: Mapping[str, tuple[int, int]], today: date) -> Iterator[Finding]:
    for day, counts in days.items():
        read = date.fromisoformat(day)
        if (today - read).days < RECENT_DAYS:
            amounts = [
                f"{count:,} {word}{'' if count == 1 else 's'} {what}"
                for count, word, what in zip(counts, ("line", "file"), ("in quarantine", "with a problem"), strict=True)
                if count
            ]
            yield Finding(Urgency.SOON, "unusable", "", f"{' and '.join(amounts)}, read on {_day(read)}", "Data")


def _old_servers(boots: Sequence[Row], now: datetime) -> Iterator[Finding]:
    newest = max(row["last_at"] for row in boots)
    if _seconds(now, newest) > OLD_SECONDS:
        text = (
            f"the newest event is of {_time_text(newest)}: check that events are collected and that runs are scheduled"
        )
        yield Finding(Urgency.NOW, "old", "", text, "Data")


def _changed_totals(network: Sequence[Row], uptime: Sequence[Row], now: datetime) -> Iterator[Finding]:
    """Report the totals that differ strongly between the newest complete day and the day before, and new servers."""
    days = {row["dt"]: row for row in network}
    over = [day for day in days if day < now.date() and day - timedelta(1) in days]
    if not over:
        return
    day = max(over)
    new, old = days[day], days[day - timedelta(1)]
    for name, words, unit in (
        ("bytes", "carried", "B"),
        ("transports", "transports", ""),
        ("clients", "clients", ""),
        ("refused", "refusals", ""),
    ):
        now_is, was = new[name] or 0, old[name] or 0
        if max(now_is, was) >= CHANGE_TIMES * max(1, min(now_is, was)) and max(now_is, was) >= 10:
            text = f"{words}: {human(now_is, unit)} on {_day(day)}, {human(was, unit)} the day before"
            yield Finding(Urgency.NOTE, "changed", "", text, "Refusals" if name == "refused" else "Traffic")
    there = {when: {row["server"] for row in uptime if row["dt"] == when} for when in (day, day - timedelta(1))}
    if fresh := there[day] - there[day - timedelta(1)]:
        names = ", ".join(sorted(one[:8] for one in fresh)[:5]) + (", ..." if len(fresh) > 5 else "")
        text = f"{len(fresh)} new servers on {_day(day)}: {names}" if len(fresh) > 1 else f"new on {_day(day)}: {names}"
        yield Finding(Urgency.NOTE, "new", "", text, "Servers")
