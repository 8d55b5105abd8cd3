"""Explanation of a server's day: the evidence for each verdict about the server on that day, down to single events.

The rows are read from the tables without Spark. Each line of the explanation states a number and the limit with which
it is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from statistics import median

from dmsg.analytics.attention import SLOW_DAYS, SLOW_MIN_MS, SLOW_SAMPLES, SLOW_TIMES, bytes_between, lost_with
from dmsg.analytics.event_rules import SILENCE_SECONDS
from dmsg.analytics.gold.settlement import ACCUSER_SHARE, INFLATION_LIMIT, SIDED_LIMIT, WITNESS_LIMIT
from dmsg.analytics.gold.uptime import CLOCK_LIMIT_MS, MAX_UNSEEN_SHARE
from dmsg.analytics.runs import State
from dmsg.analytics.self_dealing import TooManyPairs, find_dealings, lines_of
from dmsg.analytics.store import Row, Store

WEEK = 7
NEARBY_DAYS = 7
"""Number of days before and after the explained day. The text also mentions crashes of the server on these days."""
MAX_CONFLICTS = 5
"""Maximum number of transports whose byte counts are shown. Those with the largest difference between the claimed and
the credited bytes are shown."""
MAX_PAIRS = 100_000
"""Maximum number of pairs of clients for which self-dealing is examined. With more pairs, this would take seconds."""
MAX_GAPS = 5
"""Maximum number of processes with missing events that are shown."""

Reader = Callable[..., list[Row]]


@dataclass
class Section:
    """Section of an explanation, which answers one question about the day.

    :ivar verdict: the answer in a few words.
    :ivar lines: the evidence.
    """

    title: str
    verdict: str
    lines: list[str] = field(default_factory=list)


def explain(store: Store, state: State, server: str, day: date) -> list[Section]:
    """Explain a server's day from the tables; each section answers one question.

    :param server: key of the server (66 hex digits), or the name of another producer.
    :raises LakeError: the tables cannot be read.
    """

    def read(table: str, column: str = "server", *, layer: str = "gold", of: date = day, **more: str) -> list[Row]:
        return store.rows(layer, table, state, str(of), {column: server, **more})

    return [
        section
        for section in (
            _uptime(read, day),
            _settlement(read),
            _self_dealing(store, state, server, day),
            _latency(read, day),
            _room(read),
            _ends(read),
            _data(read),
        )
        if section is not None
    ]


def other_crash_days(store: Store, state: State, server: str, day: date) -> set[date]:
    """Return the other days on which the server crashed, up to ``NEARBY_DAYS`` days before or after ``day``."""
    boots = store.gold("boot", state)
    ends = {boot["last_at"].date() for boot in boots if boot["producer"] == server and boot["ended"] == "crashed"}
    return {one for one in ends if one != day and abs((one - day).days) <= NEARBY_DAYS}


def find_server(names: Sequence[str], beginning: str) -> list[str]:
    """Return the names of servers that begin with ``beginning``."""
    return sorted({name for name in names if name.startswith(beginning.lower())})


def _time(at: datetime, day: date) -> str:
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return f"{at:%H:%M:%S}" if at.date() == day else f"{at:%-d %b %H:%M:%S}"


def _percent(share: float | None) -> str:
    return "not known" if share is None else f"{share * 100:.2f} %"


# --- uptime ---


def _uptime(read: Reader, day: date) -> Section | None:
    row = next(iter(read("uptime_day")), None)
    boots = [one for one in read("boot", "producer") if one["first_at"].date() <= day <= _covered_until(one).date()]
    if row is None and not boots:
        return None
    found = Section("Uptime", "" if row is None else row["state"])
    for boot in boots:
        if boot["ended"] == "silent" and boot["next_at"] is None:
            found.verdict = f"silent since {_time(boot['last_at'], day)}"
    if row is not None:
        if row["flags"]:
            found.verdict += f": {row['flags']}"
        found.lines += _minutes(row)
    for boot in sorted(boots, key=lambda one: one["first_at"]):
        found.lines.append(_life(boot, day))
    for clock in read("clock_day"):
        way = f"{clock['skew_ms']:,} ms" if clock["skew_ms"] is not None else "not known"
        found.lines.append(
            f"clock: {way} from discovery's, measured by {clock['posts']:,} entries (limit {CLOCK_LIMIT_MS:,} ms "
            "either way)"
        )
    hours = sorted(read("server_hour"), key=lambda one: one["hour"])
    for one in hours:
        alive, seen = one["alive_minutes"] or 0, one["seen_minutes"]
        if alive < 60 or (seen is not None and seen < 60):
            by = "no discovery watched" if seen is None else f"discovery saw it in {seen} minutes"
            found.lines.append(f"{one['hour']:02d}h: {alive} minutes with heartbeats, {by}")
    there = {one["hour"] for one in hours}
    if gaps := _spans([hour for hour in range(24) if hour not in there]) if there else "":
        found.lines.append(f"no data for {gaps}")
    return found


def _spans(hours: Sequence[int]) -> str:
    """Format hours as ranges, as in ``03h, 05h to 09h``."""
    spans: list[list[int]] = []
    for hour in hours:
        if spans and spans[-1][-1] == hour - 1:
            spans[-1].append(hour)
        else:
            spans.append([hour])
    return ", ".join(f"{one[0]:02d}h" if len(one) == 1 else f"{one[0]:02d}h to {one[-1]:02d}h" for one in spans)


def _covered_until(boot: Row) -> datetime:
    """Return the end of the time that a process covers: the start of the next process of the same name, or the
    process's last event if there is no next process."""
    last: datetime = boot["last_at"]
    return boot["next_at"] or last


def _minutes(row: Row) -> Iterator[str]:
    observed = row["observed_minutes"]
    if row["alive_minutes"] is not None:
        yield (
            f"{row['alive_minutes']:,} minutes with heartbeats, of {observed or 0:,} minutes with any report: "
            f"uptime {_percent(row['uptime'])}"
        )
    if row["seen_minutes"] is None:
        yield "no discovery watched: availability is not known"
        return
    agreed = row["agreed_minutes"]
    yield (
        f"{row['seen_minutes']:,} minutes in which a discovery had its fresh entry, {agreed or 0:,} of them with a "
        f"heartbeat: availability {_percent(row['availability'])}"
    )
    if row["alive_minutes"]:
        share = (row["alive_minutes"] - (agreed or 0)) / row["alive_minutes"]
        yield f"discovery did not see {_percent(share)} of its minutes (limit {MAX_UNSEEN_SHARE * 100:g} %)"


def _life(boot: Row, day: date) -> str:
    text = f"process {boot['boot'][:8]}: from {_time(boot['first_at'], day)} to {_time(boot['last_at'], day)}, "
    if boot["ended"] == "crashed":
        return (
            f"{text}crashed: no stop event, and the next began at {_time(boot['next_at'], day)}, "
            f"{boot['down_seconds']:.0f} s later{lost_with([boot])}"
        )
    if boot["ended"] == "silent":
        return (
            f"{text}silent: no stop event, and no event for at least {SILENCE_SECONDS // 60} minutes{lost_with([boot])}"
        )
    ended = str(boot["ended"])
    return text + {"stopped": "stopped cleanly", "running": "still running"}.get(ended, ended)


# --- settlement ---


def _settlement(read: Reader) -> Section | None:
    row = next(iter(read("settlement_day")), None)
    lost = read("lost_transport")
    if row is None and not lost:
        return None
    found = Section("Settlement", "nothing to settle" if row is None else row["verdict"])
    if row is not None:
        found.lines += _settlement_lines(row, read)
    if lost:
        known = [one for one in lost if one["least_bytes"] is not None]
        columns = ("least_bytes", "most_bytes", "counted_bytes")
        least, most, counted = (sum(one[name] or 0 for one in known) for name in columns)
        found.lines.append(
            f"{len(lost):,} transports ended with a killed or silent process; {len(known):,} have receipts of both ends"
        )
        found.lines.append(
            f"the receipts bound the bytes carried: {least:,} to {most:,}; the process had reported {counted:,}; "
            "nobody is credited with them"
        )
        bound = (
            f"both ends' receipts bound {bytes_between(least, most)}" if known else "no two receipts bound the bytes"
        )
        found.verdict += f"; {bound} of a killed or silent process"
    return found


def _settlement_lines(row: Row, read: Reader) -> Iterator[str]:
    verdicts = read("verdicts", layer="silver")
    states = ", ".join(
        f"{row[name]:,} {name.replace('_', ' ')}"
        for name in ("matched", "cut", "conflict", "one_sided", "relay_only", "unclaimed")
        if row[name]
    )
    yield (f"{row['transports']:,} transports: {states}")
    yield (
        f"claimed {row['claimed_bytes']:,} bytes; both ends signed for {row['credited_bytes']:,}, which are credited"
    )
    seen = row["matched"] + row["cut"] + row["conflict"]
    if seen:
        claimed, word = (sum(one[name] or 0 for one in verdicts) for name in ("sure_claimed", "sure_word"))
        yield (
            f"transports that ended with nothing in transit: claimed {claimed:,} bytes, signed {word:,} bytes: "
            f"inflation {_percent(row['inflation'])} (limit {INFLATION_LIMIT * 100:g} %)"
        )
        yield (
            f"{row['accusers'] or 0:,} of {row['witnesses'] or 0:,} clients that opened transports report less than "
            f"the server claims (more than {ACCUSER_SHARE * 100:g} % are needed)"
        )
        claimed, word = (sum(one[name] or 0 for one in verdicts) for name in ("left_claimed", "left_word"))
        yield (f"other transports: claimed {claimed:,} bytes, signed {word:,} bytes")
        yield (
            f"{row['sided_with_one']:,} of {seen:,} transports with both receipts: the server agrees with one end "
            f"against the other (limit {SIDED_LIMIT * 100:g} %)"
        )
    yield (
        f"both receipts of {seen:,} of {row['transports']:,} transports (at least {WITNESS_LIMIT * 100:g} % are needed)"
    )
    conflicts = sorted(read("settlement_conflict_day"), key=lambda one: (one["credited"] or 0) - (one["claimed"] or 0))
    for one in conflicts[:MAX_CONFLICTS]:
        yield from _conflict(one, read)
    if len(conflicts) > MAX_CONFLICTS:
        yield (f"and {len(conflicts) - MAX_CONFLICTS:,} more conflicts (table settlement_conflict_day)")


def _conflict(row: Row, read: Reader) -> Iterator[str]:
    def number(name: str) -> str:
        return "-" if row[name] is None else f"{row[name]:,}"

    yield (
        f"transport {row['transport']}: {row['word']}; bytes forward: server {number('relay_ab')}, "
        f"sender {number('a_out')}, receiver {number('b_in')}; back: server {number('relay_ba')}, "
        f"sender {number('b_out')}, receiver {number('a_in')}"
    )
    for event in sorted(
        read("transports", layer="silver", transport=row["transport"]), key=lambda one: (one["at"], one["what"])
    ):
        text = f"  {_time(event['at'], row['dt'])} {event['what']}, process {event['boot'][:8]}"
        if event["what"] == "close":
            sums = {name: event[name] for name in ("total_ab", "total_ba", "dropped_ab", "dropped_ba")}
            ways = (f"{name} {count:,}" for name, count in sums.items() if count)
            text += f", {event['reason']} by {event['by']}: {', '.join(ways)}"
        yield text
    for receipt in read("receipts", layer="silver", transport=row["transport"]):
        end = "initiator" if receipt["initiator"] else "responder"
        yield (
            f"  receipt of the {end} {str(receipt['signer'])[:8]}: sent {receipt['delivered_out']:,}, "
            f"received {receipt['delivered_in']:,}"
        )


# --- self-dealing ---


def _self_dealing(store: Store, state: State, server: str, day: date) -> Section | None:
    try:
        found = next((one for one in find_dealings(store, state, day, MAX_PAIRS) if one.server == server), None)
    except TooManyPairs as error:
        return Section("Self-dealing", "not judged", [f"{error} here; dmsg analytics self-dealing judges more"])
    if found is None:
        return None
    return Section("Self-dealing", ", ".join(found.flags) or "no sign of it", lines_of(found))


# --- latency, capacity, ends of transports ---


def _latency(read: Reader, day: date) -> Section | None:
    rows = {one["dt"]: one for back in range(WEEK + 1) for one in read("latency_day", of=day - timedelta(back))}
    row = rows.pop(day, None)
    if row is None or row["rtt_p99"] is None:
        return None
    measured = [one for one in rows.values() if one["rtt_p99"] is not None]
    before = [one["rtt_p99"] for one in measured if one["rtt_samples"] >= SLOW_SAMPLES]
    found = Section("Latency", "as usual")
    found.lines.append(
        f"answers of clients: p50 {row['rtt_p50']:.1f} ms, p99 {row['rtt_p99']:.1f} ms, {row['rtt_samples']:,} samples"
    )
    if row["accept_p99"] is not None:
        found.lines.append(
            f"opening: p50 {row['accept_p50']:.1f} ms, p99 {row['accept_p99']:.1f} ms, "
            f"{row['accept_samples']:,} samples"
        )
    if row["rtt_samples"] < SLOW_SAMPLES or len(before) < SLOW_DAYS:
        found.verdict = "not compared"
        found.lines.append(
            f"{len(before)} days of the week before have {SLOW_SAMPLES} samples; {SLOW_DAYS} are needed, and the day "
            "itself"
        )
        return found
    usual = median(before)
    limit = max(SLOW_TIMES * usual, usual + SLOW_MIN_MS)
    if row["rtt_p99"] >= limit:
        found.verdict = "slow"
    found.lines.append(
        f"the week before: p99 {usual:.1f} ms, the median of {len(before)} days; slow from {limit:.1f} ms on"
    )
    return found


def _room(read: Reader) -> Section | None:
    row = next(iter(read("capacity_day")), None)
    if row is None:
        return None
    found = Section("Capacity", "full" if row["refused_full"] else "busy" if row["busy_hours"] else "has room")
    capacity = "not known" if row["capacity"] is None else f"{row['capacity']:,}"
    found.lines.append(
        f"{row['peak_sessions'] or 0:,} sessions at its peak, capacity {capacity}: {_percent(row['peak_share'])}"
    )
    found.lines.append(
        f"{row['busy_hours'] or 0} hours nearly full, {row['refused_full'] or 0:,} connections refused because it "
        "was full"
    )
    refused: dict[tuple[str, str], list[int]] = {}
    for one in read("refusal_hour", "producer"):
        sums = refused.setdefault((one["what"], one["reason"]), [0, 0])
        sums[0] += one["n"] or 0
        sums[1] = max(sums[1], one["who"] or 0)
    for (what, reason), (count, who) in sorted(refused.items(), key=lambda item: -item[1][0]):
        by = f", from up to {who:,} sources in an hour" if who else ""
        found.lines.append(f"{count:,} x {what}: {reason}{by}")
    return found


def _ends(read: Reader) -> Section | None:
    rows = sorted(read("close_day"), key=lambda one: -one["transports"])
    if not rows:
        return None
    total = sum(one["transports"] for one in rows)
    found = Section("Ends of transports", f"{total:,}")
    found.lines += [f"{one['transports']:,} {one['reason']}, by {one['by'] or 'nobody'}" for one in rows]
    return found


# --- completeness of the data ---


def _data(read: Reader) -> Section | None:
    row = next(iter(read("quality_day", "producer")), None)
    if row is None:
        return None
    found = Section("Data", "complete" if not row["missing"] else f"{row['missing']:,} events are missing")
    found.lines.append(
        f"{row['distinct_events']:,} of {row['expected']:,} event numbers have arrived "
        f"({_percent(row['completeness'])}), "
        f"{row['duplicates']:,} arrived twice"
    )
    per_boot: dict[str, list[int]] = {}
    for one in read("numbers", "producer", layer="silver"):
        sums = per_boot.setdefault(one["boot"], [one["first"], one["last"], 0])
        sums[0], sums[1] = min(sums[0], one["first"]), max(sums[1], one["last"])
        sums[2] += one["distinct_events"]
    gaps = sorted(
        ((last - first + 1 - count, boot, first, last) for boot, (first, last, count) in per_boot.items()), reverse=True
    )
    for missing, boot, first, last in gaps[:MAX_GAPS]:
        if missing:
            found.lines.append(
                f"process {boot[:8]}: {missing:,} of the event numbers {first:,} to {last:,} have not arrived"
            )
    return found
