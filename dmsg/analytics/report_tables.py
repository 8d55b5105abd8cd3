"""Tables of the report page, as HTML."""

from __future__ import annotations

from dmsg.analytics.attention import bytes_between
from dmsg.analytics.charts import human
from dmsg.analytics.html_parts import cell, more_line, percent, short_name, sortable_table
from dmsg.analytics.report_data import Content
from dmsg.analytics.store import Row

MAIN_ENDS = 3
"""Number of reasons for the end of transports that the page names for a server: the most frequent ones."""


def by_server(content: Content) -> str:
    """Return the table with the sums of each server."""
    rows = []
    for row in content["servers"]:
        ends = row.get("ends", [])
        total = sum(count for count, _ in ends)
        share = row.get("peak_share")
        why = ", ".join(f"{reason} {percent(count / total)}" for count, reason in ends[:MAIN_ENDS])
        rows.append(
            [
                cell(row["server"], shown=short_name(row["server"])),
                cell(row.get("bytes"), shown=human(row.get("bytes"), "B")),
                cell(row.get("transports")),
                cell(why, kind="text"),
                cell(row.get("sessions")),
                cell(row.get("clients")),
                cell(row.get("lost")),
                cell(_round(row.get("rtt_p50"))),
                cell(_round(row.get("rtt_p99"))),
                cell(row.get("refused")),
                cell(None if share is None else round(share, 4), shown=percent(share)),
                cell(row.get("full"), kind="warn" if row.get("full") else ""),
            ]
        )
    heads = (
        "server",
        "carried",
        "transports",
        "reasons for their end",
        "sessions",
        "clients, last day",
        "sessions lost",
        "p50, ms",
        "p99, ms",
        "refused",
        "peak load",
        "refused as full",
    )
    return sortable_table(heads, rows, (1, 2, 4, 5, 6, 7, 8, 9, 10, 11))


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def discovery(content: Content) -> str:
    """Return the table with the sums of each discovery and day."""
    rows = [
        [
            cell(row["producer"], shown=short_name(row["producer"])),
            cell(str(row["dt"])),
            *(cell(row[name]) for name in ("first", "next", "deleted", "refused", "absent", "servers")),
        ]
        for row in content["discovery"]
    ]
    heads = ("discovery", "day", "new entries", "changed", "deleted", "refused", "unknown keys", "servers")
    return sortable_table(heads, rows, (2, 3, 4, 5, 6, 7))


def forecast(content: Content) -> str:
    """Return the table that says when each server reaches its capacity."""

    def full(row: Row) -> float | None:
        return round((row["peak_sessions"] or 0) / row["capacity"], 4) if row["capacity"] else None

    rows = [
        [
            cell(row["server"], shown=short_name(row["server"])),
            cell(row["peak_sessions"]),
            cell(row["capacity"]),
            cell(
                round((row["peak_sessions"] or 0) / row["capacity"], 4) if row["capacity"] else None,
                shown=percent((row["peak_sessions"] or 0) / row["capacity"]) if row["capacity"] else None,
            ),
            cell(row["growth_per_day"]),
            cell(row["fit"]),
            cell(row["days_left"]),
            cell(None if row["full_on"] is None else str(row["full_on"]), kind="n"),
        ]
        for row in content["capacity_forecast"]
    ]
    heads = ("server", "peak sessions", "capacity", "peak load", "more sessions per day", "fit", "days left", "full on")
    return sortable_table(heads, rows, (1, 2, 3, 4, 5, 6, 7))


def _lost_cell(row: Row | None) -> str:
    """Return a cell with the number of bytes that a server carried on a day in transports that ended because its
    process was killed. The receipts of both ends determine a lower and an upper bound."""
    if row is None:
        return cell(None)
    if not row["witnessed"]:
        return cell(0, shown="not known")
    return cell(row["most"], shown=bytes_between(row["least"], row["most"]))


def settlement(content: Content) -> str:
    """Return two tables: the settlement of each server and day, and the transports whose counts contradict each
    other."""
    lost = {(row["server"], row["dt"]): row for row in content["lost"]}
    rows = [
        [
            cell(row["server"], shown=short_name(row["server"])),
            cell(str(row["dt"])),
            cell(row["claimed_bytes"], shown=human(row["claimed_bytes"], "B")),
            cell(row["credited_bytes"], shown=human(row["credited_bytes"], "B")),
            cell(row["uncertain_bytes"] or 0, shown=human(row["uncertain_bytes"] or 0, "B")),
            _lost_cell(lost.get((row["server"], row["dt"]))),
            cell(row["matched"]),
            cell(row["cut"] or 0),
            cell(row["conflict"]),
            cell(row["one_sided"]),
            cell(row["relay_only"]),
            cell(
                row["inflation"] if row["inflation"] is None else round(row["inflation"], 4),
                shown=percent(row["inflation"]),
            ),
            cell(row["verdict"], kind="text warn" if str(row["verdict"]).startswith("claims more") else "text"),
        ]
        for row in content["settlement_day"]
    ]
    heads = (
        "server",
        "day",
        "claimed",
        "credited",
        "uncertain",
        "lost in kills",
        "matched",
        "cut",
        "conflict",
        "one end",
        "no receipt",
        "claimed too much",
        "verdict",
    )
    conflicts = [
        [
            cell(row["transport"], shown=short_name(row["transport"])),
            cell(row["server"], shown=short_name(row["server"])),
            cell(str(row["dt"])),
            *(cell(row[name]) for name in ("relay_ab", "a_out", "b_in", "relay_ba", "b_out", "a_in")),
            cell(row["word"], kind="text"),
        ]
        for row in content["settlement_conflict_day"]
    ]
    words = (
        "transport",
        "server",
        "day",
        "forward: server",
        "sender",
        "receiver",
        "back: server",
        "sender",
        "receiver",
    )
    parts = [
        sortable_table(heads, rows, tuple(range(2, 12))),
        more_line(content.more.get("settlement_day", 0), "that agree"),
    ]
    if not conflicts:
        return "".join(parts)
    return "".join(parts) + (
        "<h3>Transports with conflicting reports</h3>"
        "<p class='note'>In bytes, for the transports with the largest claims. The table settlement_conflict_day has "
        "all of "
        "them; <code>dmsg analytics explain</code> shows their events.</p>"
        + sortable_table((*words, "who disagrees"), conflicts, tuple(range(3, 9)))
    )


def public(content: Content) -> str:
    """Return the table with the totals that may be published."""
    names = ("servers", "clients", "transports", "sessions", "gigabytes", "rtt_p50", "rtt_p90")
    rows = [
        [cell(str(row["dt"])), *(cell(row[name]) for name in names), cell(row["withheld"] or "", kind="text")]
        for row in content["public_day"]
    ]
    heads = ("day", "servers", "clients", "transports", "sessions", "GB", "p50, ms", "p90, ms", "withheld")
    return sortable_table(heads, rows, tuple(range(1, 8)))


def placement(content: Content) -> str:
    """Return the table with the weights by which clients should be distributed over servers."""
    rows = [
        [
            cell(row["server"], shown=short_name(row["server"])),
            cell(row["weight"]),
            cell(row["availability"], shown=percent(row["availability"], 2)),
            cell(row["headroom"], shown=percent(row["headroom"])),
            cell(row["latency_ms"]),
            cell(row["reasons"], kind="text"),
        ]
        for row in content["placement"]
    ]
    return sortable_table(
        ("server", "weight", "availability", "free places", "median latency, ms", "why"), rows, (1, 2, 3, 4)
    )


def quality(content: Content) -> str:
    """Return tables of the completeness of each producer's events, of the lines in quarantine, and of damaged files."""
    rows = [
        [
            cell(row["producer"], shown=short_name(row["producer"])),
            cell(str(row["dt"])),
            cell(row["distinct_events"]),
            cell(row["duplicates"]),
            cell(row["missing"], kind="warn" if row["completeness"] < 0.9 else ""),
            cell(round(row["completeness"], 5), shown=percent(row["completeness"], 2)),
            cell(row["clock_steps_ms"]),
        ]
        for row in content["quality_day"]
    ]
    heads = ("producer", "day", "events", "duplicates", "missing", "complete", "clock steps, ms")
    parts = [sortable_table(heads, rows, (2, 3, 4, 5, 6))]
    if content["quarantine"]:
        lines = [[cell(row["problem"]), cell(row["lines"])] for row in content["quarantine"]]
        parts.append("<h3>Lines in quarantine</h3>" + sortable_table(("problem", "lines"), lines, (1,)))
    if content["files"]:
        lines = [
            [cell(row["file"].rpartition("/")[2]), cell(row["lines"]), cell(row["problem"])] for row in content["files"]
        ]
        parts.append("<h3>Files with a problem</h3>" + sortable_table(("file", "lines read", "problem"), lines, (1,)))
    return "".join(parts)
