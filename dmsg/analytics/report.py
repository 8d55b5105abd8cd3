"""Report page: renders the gold tables as one HTML file without network access or libraries.

The rows come from :mod:`dmsg.analytics.report_data`; this module only makes text.
"""

from __future__ import annotations

import importlib.resources
from collections import defaultdict
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from html import escape
from re import fullmatch

from dmsg.analytics import charts
from dmsg.analytics.attention import between, shorten_findings
from dmsg.analytics.charts import NOTHING, human
from dmsg.analytics.report_data import SHOWN_DAYS, Content
from dmsg.analytics.store import Row

SERIES = 5
"""Number of refusals with a colour of their own; the others share one."""
MAIN_ENDS = 3
"""Number of reasons for the end of transports that are named."""
_PALETTE = ("var(--blue)", "var(--amber)", "var(--teal)", "var(--violet)", "var(--red)", "var(--grey)")

# --- the page ----------------------------------------------------------------


def _short(key: object) -> str:
    """Return HTML for a key, shortened to 8 digits. Names that are no keys stay whole."""
    text = str(key)
    shown = text[:8] if fullmatch("[0-9a-f]{16,}", text) else text
    return f'<code title="{escape(text, quote=True)}">{escape(shown)}</code>'


def _cell(value: object, *, kind: str = "", shown: str | None = None) -> str:
    """Return a table cell that the page's script can sort by its raw value."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    text = shown if shown is not None else NOTHING if value is None else f"{value:,}" if number else escape(str(value))
    sort = "" if value is None else escape(str(value), quote=True)
    return f'<td class="{"n" if number or value is None else ""} {kind}" data-value="{sort}">{text}</td>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    if not rows:
        return '<p class="note">Nothing.</p>'
    head = "".join(
        f'<th class="{"n" if index in numbers else ""}"><button>{escape(text)}</button></th>'
        for index, text in enumerate(heads)
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="sort"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    return (
        '<div class="legend">'
        + "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in entries)
        + "</div>"
    )


def _percent(value: float | None, digits: int = 1) -> str:
    """Return a share as a percentage; a share below 1 is never rounded up to 100 %."""
    if value is None:
        return NOTHING
    shown = round(value * 100, digits)
    if value < 1 <= shown / 100:
        shown = 100 - 10**-digits
    return f"{shown:.{digits}f}\N{NO-BREAK SPACE}%"


def _hours(rows: Sequence[Row]) -> list[tuple[date, int]]:
    """Return every hour between the first and the last row, including hours without a row."""
    found = [(row["dt"], row["hour"]) for row in rows]
    if not found:
        return []
    first, last = min(found), max(found)
    hours = []
    at = datetime(first[0].year, first[0].month, first[0].day, first[1])
    end = datetime(last[0].year, last[0].month, last[0].day, last[1])
    while at <= end:
        hours.append((at.date(), at.hour))
        at += timedelta(hours=1)
    return hours


def _label(hour: tuple[date, int]) -> str:
    return f"{hour[0]:%d %b} {hour[1]:02d}h"


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _attention(content: Content) -> str:
    lines = []
    for found in shorten_findings(content.attention):
        kind = word = found.urgency.word
        about = f"{_short(found.about)} " if found.about else ""
        place = f"<a href='#{_anchor(found.place)}'>{found.place}</a>"
        lines.append(f"<li><b class='{kind}'>{word}</b><span>{about}{escape(found.text)}</span>{place}</li>")
    body = f"<ul>{''.join(lines)}</ul>" if lines else "<p class='note'>Nothing.</p>"
    return f"<section id='attention'><h2>What needs attention</h2>{body}</section>"


def _cards(content: Content) -> str:
    network = content["network_day"]
    newest = max(network, key=lambda row: row["dt"]) if network else {}
    uptime = [row["uptime"] for row in content["uptime"] if row["uptime"] is not None]
    period = f"in {len(network)} days" if len(network) != 1 else "in one day"
    complete = content["quality_day"]
    expected = sum(row["expected"] for row in complete)
    arrived = sum(row["distinct_events"] for row in complete)
    cards = [
        (human(newest.get("servers")), "servers on the last day"),
        (human(newest.get("clients")), "clients on the last day, counted at each server"),
        (human(sum(row["transports"] for row in network)), f"transports {period}"),
        (human(sum(row["bytes"] for row in network), "B"), f"carried {period}"),
        (_percent(sum(uptime) / len(uptime)) if uptime else NOTHING, f"mean uptime of servers, {SHOWN_DAYS} days"),
        (human(sum(row["refused"] for row in network)), f"refused {period}"),
        (
            _percent(arrived / expected, 2) if expected else NOTHING,
            f"of all events arrived, {SHOWN_DAYS} days",
        ),
    ]
    return (
        '<div class="cards">'
        + "".join(f"<div class='card'><b>{b}</b><span>{s}</span></div>" for b, s in cards)
        + "</div>"
    )


def _servers(content: Content) -> str:
    hours = _hours(content["server_hour"])
    shares: dict[str, dict[tuple[date, int], float | None]] = defaultdict(dict)
    for row in content["server_hour"]:
        # An hour that discovery saw but from which no heartbeat has arrived was not downtime: data is missing.
        unheard = not row["alive_minutes"] and (row["seen_minutes"] or 0) > 0
        shares[row["server"]][row["dt"], row["hour"]] = None if unheard else row["alive_minutes"] / 60
    drawn = set(shares)
    gone = {row["producer"]: row["last_at"] for row in content["gone"]}
    lines = []
    for row in content["uptime"]:
        server, uptime, seen = row["server"], row["uptime"], row["availability"]
        remarks = set(row["flags"])
        if server in gone:
            remarks.add(f"silent since {gone[server]:%d %b %H:%M}")
        if row["missing"]:
            remarks.add(f"{row['missing']:,} events missing")
        flags = ", ".join(sorted(remarks))
        strip = charts.strip([(_label(hour), shares[server].get(hour, 0.0)) for hour in hours])
        lines.append(
            [
                _cell(server, shown=_short(server)),
                f'<td class="wide">{strip if server in drawn else ""}</td>',
                _cell(uptime if uptime is None else round(uptime, 5), shown=_percent(uptime, 2)),
                _cell(seen if seen is None else round(seen, 5), shown=_percent(seen, 2)),
                _cell(row["crashes"]),
                _cell(flags, kind="text warn" if flags else "text"),
            ]
        )
    span = f"hours, {_label(hours[0])} to {_label(hours[-1])}" if hours else "hours"
    heads = ("server", span, "uptime", "availability", "crashes", "remarks")
    return _table(heads, lines, (2, 3, 4)) + _more(content.more.get("uptime", 0), "servers with fewer remarks")


def _more(count: int, what: str) -> str:
    return f"<p class='note'>And {count:,} more {what}.</p>" if count else ""


def _by_server(content: Content) -> str:
    rows = []
    for row in content["servers"]:
        ends = row.get("ends", [])
        total = sum(count for count, _ in ends)
        share = row.get("peak_share")
        why = ", ".join(f"{reason} {_percent(count / total)}" for count, reason in ends[:MAIN_ENDS])
        rows.append(
            [
                _cell(row["server"], shown=_short(row["server"])),
                _cell(row.get("bytes"), shown=human(row.get("bytes"), "B")),
                _cell(row.get("transports")),
                _cell(why, kind="text"),
                _cell(row.get("sessions")),
                _cell(row.get("clients")),
                _cell(row.get("lost")),
                _cell(_rounded(row.get("rtt_p50"))),
                _cell(_rounded(row.get("rtt_p99"))),
                _cell(row.get("refused")),
                _cell(None if share is None else round(share, 4), shown=_percent(share)),
                _cell(row.get("full"), kind="warn" if row.get("full") else ""),
            ]
        )
    heads = (
        "server",
        "carried",
        "transports",
        "reasons for their end",
        "sessions",
        "clients per day",
        "sessions lost",
        "p50, ms",
        "p99, ms",
        "refused",
        "peak load",
        "refused as full",
    )
    return _table(heads, rows, (1, 2, 4, 5, 6, 7, 8, 9, 10, 11))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _discovery(content: Content) -> str:
    rows = [
        [
            _cell(row["producer"], shown=_short(row["producer"])),
            _cell(str(row["dt"])),
            *(_cell(row[name]) for name in ("first", "next", "deleted", "refused", "absent", "servers")),
        ]
        for row in content["discovery"]
    ]
    heads = ("discovery", "day", "new entries", "changed", "deleted", "refused", "unknown keys", "servers")
    return _table(heads, rows, (2, 3, 4, 5, 6, 7))


def _traffic(content: Content) -> str:
    hours = _hours(content["traffic"])
    by_hour = {(row["dt"], row["hour"]): row for row in content["traffic"]}
    labels = [_label(hour) for hour in hours]
    carried = [float(by_hour[hour]["bytes"]) if hour in by_hour else 0.0 for hour in hours]
    closed = [float(by_hour[hour]["closed"]) if hour in by_hour else 0.0 for hour in hours]
    return (
        _legend([("bytes carried in the hour", "var(--blue)")])
        + charts.bars(labels, [("carried", "var(--blue)", carried)], "B", "Bytes carried by hour")
        + _legend([("transports that ended in the hour", "var(--teal)")])
        + charts.bars(labels, [("transports", "var(--teal)", closed)], "", "Transports by hour")
    )


def _latency(content: Content) -> str:
    hours = _hours(content["latency"])
    by_hour = {(row["dt"], row["hour"]): row for row in content["latency"]}
    series = [
        (f"p{share}", colour, [by_hour[hour][f"rtt_p{share}"] if hour in by_hour else None for hour in hours])
        for share, colour in ((50, "var(--teal)"), (90, "var(--amber)"), (99, "var(--red)"))
    ]
    legend = "".join(
        f'<span><svg class="key" viewBox="0 0 28 4"><path class="line" style="stroke:{colour};'
        f'stroke-dasharray:{charts.dashes(number)}" d="M0,2 L28,2"/></svg>{escape(name)}</span>'
        for number, (name, colour, _) in enumerate(series)
    )
    return f'<div class="legend">{legend}</div>' + charts.lines(
        [_label(hour) for hour in hours], series, "ms", "Latency by hour"
    )


def _refusal(row: Row) -> str:
    return row["what"] if row["reason"] is None else f"{row['what']}: {row['reason']}"


def _refusals(content: Content) -> str:
    hours = _hours(content["refused"])
    totals: dict[str, int] = defaultdict(int)
    amounts: dict[str, dict[tuple[date, int], float]] = defaultdict(lambda: defaultdict(float))
    for row in content["refused"]:
        totals[_refusal(row)] += row["n"]
    first = sorted(totals, key=lambda name: -totals[name])[:SERIES]
    for row in content["refused"]:
        name = _refusal(row)
        amounts[name if name in first else "other"][row["dt"], row["hour"]] += row["n"]
    names = [*first, *(["other"] if "other" in amounts else [])]
    series = [
        (name, colour, [amounts[name][hour] for hour in hours]) for name, colour in zip(names, _PALETTE, strict=False)
    ]
    chart = _legend([(name, colour) for name, colour, _ in series]) + charts.bars(
        [_label(hour) for hour in hours], series, "", "Refusals by hour"
    )
    rows = [
        [
            _cell(row["who"], shown=f"<code>{escape(str(row['who']))}</code>"),
            _cell(row["kind"]),
            _cell(row["score"], kind="warn" if row["score"] >= 100 else ""),
            _cell(row["servers"] if row["names"] else "not known", kind="" if row["names"] else "text"),
            _cell(row["most_at"], shown=_short(row["most_at"])),
            _cell(row["days"]),
            _cell(str(row["last_day"])),
            _cell(row["requests"]),
            _cell(row["refused"]),
            _cell(row["targets"]),
            _cell(row["posts"]),
        ]
        for row in content["actor"]
    ]
    return (
        (chart if hours else '<p class="note">Nothing was refused.</p>')
        + "<h3>Unusual activity</h3><p class='note'>A score of 100 is the limit for a day. Counted are accepted "
        "requests, "
        "refused requests, different clients asked for, and posted entries. The number of servers is known only for "
        "servers that share a secret (--telemetry-secret); other servers have different names for the same client.</p>"
        + _table(
            (
                "who",
                "kind",
                "score",
                "servers",
                "mostly at",
                "days",
                "last day",
                "requests",
                "refused",
                "targets",
                "posts",
            ),
            rows,
            (2, 3, 5, 7, 8, 9, 10),
        )
        + _more(content.more.get("actor", 0), "(table actor)")
    )


def _forecast(content: Content) -> str:
    def full(row: Row) -> float | None:
        return round((row["peak_sessions"] or 0) / row["capacity"], 4) if row["capacity"] else None

    rows = [
        [
            _cell(row["server"], shown=_short(row["server"])),
            _cell(row["peak_sessions"]),
            _cell(row["capacity"]),
            _cell(
                round((row["peak_sessions"] or 0) / row["capacity"], 4) if row["capacity"] else None,
                shown=_percent((row["peak_sessions"] or 0) / row["capacity"]) if row["capacity"] else None,
            ),
            _cell(row["growth_per_day"]),
            _cell(row["fit"]),
            _cell(row["days_left"]),
            _cell(None if row["full_on"] is None else str(row["full_on"])),
        ]
        for row in content["capacity_forecast"]
    ]
    heads = ("server", "peak sessions", "capacity", "peak load", "more sessions per day", "fit", "days left", "full on")
    return _table(heads, rows, (1, 2, 3, 4, 5, 6, 7))


def _lost(row: Row | None) -> str:
    """Return a cell with the bytes that both ends' receipts bound for the killed processes of a server's day."""
    if row is None:
        return _cell(None)
    if not row["witnessed"]:
        return _cell(0, shown="not known")
    return _cell(row["most"], shown=between(row["least"], row["most"]))


def _settlement(content: Content) -> str:
    lost = {(row["server"], row["dt"]): row for row in content["lost"]}
    rows = [
        [
            _cell(row["server"], shown=_short(row["server"])),
            _cell(str(row["dt"])),
            _cell(row["claimed_bytes"], shown=human(row["claimed_bytes"], "B")),
            _cell(row["credited_bytes"], shown=human(row["credited_bytes"], "B")),
            _cell(row["uncertain_bytes"] or 0, shown=human(row["uncertain_bytes"] or 0, "B")),
            _lost(lost.get((row["server"], row["dt"]))),
            _cell(row["matched"]),
            _cell(row["cut"] or 0),
            _cell(row["conflict"]),
            _cell(row["one_sided"]),
            _cell(row["relay_only"]),
            _cell(
                row["inflation"] if row["inflation"] is None else round(row["inflation"], 4),
                shown=_percent(row["inflation"]),
            ),
            _cell(row["verdict"], kind="text warn" if str(row["verdict"]).startswith("claims more") else "text"),
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
            _cell(row["transport"], shown=_short(row["transport"])),
            _cell(row["server"], shown=_short(row["server"])),
            _cell(str(row["dt"])),
            *(_cell(row[name]) for name in ("relay_ab", "a_out", "b_in", "relay_ba", "b_out", "a_in")),
            _cell(row["word"], kind="text"),
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
    parts = [_table(heads, rows, tuple(range(2, 12))), _more(content.more.get("settlement_day", 0), "that agree")]
    if not conflicts:
        return "".join(parts)
    return "".join(parts) + (
        "<h3>Transports with conflicting reports</h3>"
        "<p class='note'>In bytes, for the transports with the largest claims. The table settlement_conflict_day has "
        "all of "
        "them; <code>dmsg analytics explain</code> shows their events.</p>"
        + _table((*words, "who disagrees"), conflicts, tuple(range(3, 9)))
    )


def _public(content: Content) -> str:
    names = ("servers", "clients", "transports", "sessions", "gigabytes", "rtt_p50", "rtt_p90")
    rows = [
        [_cell(str(row["dt"])), *(_cell(row[name]) for name in names), _cell(row["withheld"] or "", kind="text")]
        for row in content["public_day"]
    ]
    heads = ("day", "servers", "clients", "transports", "sessions", "GB", "p50, ms", "p90, ms", "withheld")
    return _table(heads, rows, tuple(range(1, 8)))


def _placement(content: Content) -> str:
    rows = [
        [
            _cell(row["server"], shown=_short(row["server"])),
            _cell(row["weight"]),
            _cell(row["availability"], shown=_percent(row["availability"], 2)),
            _cell(row["headroom"], shown=_percent(row["headroom"])),
            _cell(row["latency_ms"]),
            _cell(row["reasons"], kind="text"),
        ]
        for row in content["placement"]
    ]
    return _table(("server", "weight", "availability", "free places", "median latency, ms", "why"), rows, (1, 2, 3, 4))


def _quality(content: Content) -> str:
    rows = [
        [
            _cell(row["producer"], shown=_short(row["producer"])),
            _cell(str(row["dt"])),
            _cell(row["distinct_events"]),
            _cell(row["duplicates"]),
            _cell(row["missing"], kind="warn" if row["completeness"] < 0.9 else ""),
            _cell(round(row["completeness"], 5), shown=_percent(row["completeness"], 2)),
            _cell(row["clock_steps_ms"]),
        ]
        for row in content["quality_day"]
    ]
    heads = ("producer", "day", "events", "duplicates", "missing", "complete", "clock steps, ms")
    parts = [_table(heads, rows, (2, 3, 4, 5, 6))]
    if content["quarantine"]:
        lines = [[_cell(row["problem"]), _cell(row["lines"])] for row in content["quarantine"]]
        parts.append("<h3>Lines in quarantine</h3>" + _table(("problem", "lines"), lines, (1,)))
    if content["files"]:
        lines = [
            [_cell(row["file"].rpartition("/")[2]), _cell(row["lines"]), _cell(row["problem"])]
            for row in content["files"]
        ]
        parts.append("<h3>Files with a problem</h3>" + _table(("file", "lines read", "problem"), lines, (1,)))
    return "".join(parts)


_SECTIONS = (
    (
        "Servers",
        "Each cell is one hour. A full green bar means that the server reported every minute, a lower bar that it "
        "reported fewer, an empty frame that it reported none. Grey means that discovery saw the server, but no events "
        "of it have arrived. Uptime is what the server reports; for availability, discovery saw it as well. Servers "
        "with most remarks come first.",
        _servers,
    ),
    ("By server", f"Sums over the last {SHOWN_DAYS} days, for the servers that carried most.", _by_server),
    ("Traffic", "User data that servers carried.", _traffic),
    ("Latency", "Time from data passing a server until its acknowledgement comes back, over all servers.", _latency),
    ("Refusals", "Connections and requests that servers and discovery refused.", _refusals),
    ("Capacity", "When each server reaches its limit if its daily peaks keep growing as before.", _forecast),
    (
        "Settlement",
        "Bytes that servers claim to have carried. A server is credited only with bytes for which both ends signed. "
        "Uncertain: in transit when a transport ended. Lost in kills: carried by processes that were killed or are "
        "silent, as both ends bound it. Nobody is credited with either.",
        _settlement,
    ),
    (
        "Discovery",
        "Entries that discovery accepted and requests that it refused. Unknown keys: look-ups of keys without an "
        "entry.",
        _discovery,
    ),
    (
        "Placement",
        "How often discovery should offer each server to clients: it draws servers at random by weight.",
        _placement,
    ),
    (
        "Public",
        "Figures that may be published: sums of whole days, without values that concern only few clients.",
        _public,
    ),
    ("Data", "Share of the written events that has arrived.", _quality),
)


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Content security policy of the page: it may load nothing."""


def render(content: Content) -> str:
    """Return the HTML of the report page."""
    static = importlib.resources.files("dmsg.analytics").joinpath("static")
    style, script = (static.joinpath(name).read_text() for name in ("report.css", "report.js"))
    days = sorted(row["dt"] for row in content["network_day"])
    period = f"{days[0]} to {days[-1]}" if days else "no days"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<title>dmsg network, {period}</title><style>{style}</style></head><body><header><div><h1>dmsg network</h1>",
        f"<p class='meta'>{period}, UTC. Run {content.run}, computed {content.generated:%Y-%m-%d %H:%M} UTC. "
        f"Hourly charts cover the last {SHOWN_DAYS} days.</p></div><button class='theme'>Light / "
        "dark</button></header>",
        _attention(content),
        _cards(content),
    ]
    for title, note, section in _SECTIONS:
        head = f"<section id='{_anchor(title)}'><h2>{title}</h2><p class='note'>{note}</p>"
        parts.append(f"{head}{section(content)}</section>")
    if content.cut:
        parts.append(
            f"<p class='note'>These tables have more rows than are shown: {escape(', '.join(content.cut))}.</p>"
        )
    parts.append(f"<script>{script}</script></body></html>\n")
    return "".join(parts)
