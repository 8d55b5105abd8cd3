"""Report page: renders the gold tables as one HTML file that needs neither network access nor libraries.

The rows come from :mod:`dmsg.analytics.report_data`; this module only formats them.
"""

from __future__ import annotations

import importlib.resources
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from html import escape

from dmsg.analytics import charts, report_tables
from dmsg.analytics.attention import shorten_findings
from dmsg.analytics.charts import human
from dmsg.analytics.html_parts import cell, legend_line, more_line, percent, short_name, sortable_table
from dmsg.analytics.report_data import SHOWN_DAYS, Content
from dmsg.analytics.store import Row

MAX_SERIES = 5
"""Number of kinds of refusals with separate colours in the chart. All other kinds have one common colour."""
_PALETTE = ("var(--blue)", "var(--amber)", "var(--teal)", "var(--violet)", "var(--red)", "var(--grey)")


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


def _observed_minutes(days: Sequence[Row], hour: tuple[date, int]) -> int:
    """Return the number of minutes of an hour that are between the first and the last event of the day, of any
    producer.

    :param days: rows with ``dt``, and with the times of the ``first`` and ``last`` event in minutes since 1970.
    """
    first = int(datetime(hour[0].year, hour[0].month, hour[0].day, hour[1], tzinfo=UTC).timestamp()) // 60
    return sum(
        max(0, min(day["last"], first + 59) - max(day["first"], first) + 1) for day in days if day["dt"] == hour[0]
    )


def _cell_of(cells: Mapping[tuple[date, int], charts.Cell], hour: tuple[date, int], observed: int) -> charts.Cell:
    """Return the cell of an hour. If the tables have no row for the hour, the cell says that the server was not up, or
    that the hour is unknown."""
    if hour in cells:
        return cells[hour]
    return (0.0, f"0 of {observed} minutes") if observed else (None, "no events of anybody have arrived")


def _label(hour: tuple[date, int]) -> str:
    return f"{hour[0]:%d %b} {hour[1]:02d}h"


def _anchor_of(title: str) -> str:
    return title.lower().replace(" ", "-")


def _attention(content: Content) -> str:
    lines = []
    for found in shorten_findings(content.attention):
        kind = word = found.urgency.word
        about = f"{short_name(found.about)} " if found.about else ""
        place = f"<a href='#{_anchor_of(found.place)}'>{found.place}</a>"
        lines.append(f"<li><b class='{kind}'>{word}</b><span>{about}{escape(found.text)}</span>{place}</li>")
    body = f"<ul>{''.join(lines)}</ul>" if lines else "<p class='note'>Nothing.</p>"
    return f"<section id='attention'><h2>What needs attention</h2>{body}</section>"


def _cards(content: Content) -> str:
    """Return the boxes with totals at the top of the page. Each total is computed for the same days as the table or
    chart further down."""
    totals = content.totals
    period = f"{SHOWN_DAYS} days"
    known, clients, most = (totals[name] for name in ("uptime_servers", "clients", "clients_of_one"))
    cards = [
        (totals["servers"], None, f"servers in {period}, {totals['up']:,} of them up on the last day"),
        (
            clients,
            human(clients) if most == clients else f"{human(most)} to {human(clients)}",
            "clients on the last day: the most of one server, and the sum of all",
        ),
        (totals["transports"], None, f"transports in {period}"),
        (totals["bytes"], human(totals["bytes"], "B"), f"carried in {period}"),
        (totals["uptime"], percent(totals["uptime"]), f"mean uptime of the {known:,} servers that reported, {period}"),
        (totals["refused"], None, f"refused in {period}, {human(totals['lookups'])} of them look-ups of unknown keys"),
        (totals["complete"], percent(totals["complete"], 2), f"of all events arrived, {period}"),
    ]
    return (
        '<div class="cards">'
        + "".join(
            f"<div class='card' data-value='{'' if value is None else value}'>"
            f"<b>{human(value) if shown is None else shown}</b><span>{text}</span></div>"
            for value, shown, text in cards
        )
        + "</div>"
    )


def _servers(content: Content) -> str:
    hours = _hours(content["server_hour"])
    observed = {hour: _observed_minutes(content["observed"], hour) for hour in hours}
    cells: dict[str, dict[tuple[date, int], charts.Cell]] = defaultdict(dict)
    for row in content["server_hour"]:
        hour, alive = (row["dt"], row["hour"]), row["alive_minutes"] or 0
        # If discovery saw the server in the hour, but no heartbeat has arrived, events are missing, and the server was
        # not down.
        if not alive and row["seen_minutes"]:
            cells[row["server"]][hour] = None, "discovery saw it, none of its events have arrived"
        else:
            # A heartbeat also counts for the minutes before it, which may be before the day's first event. So a server
            # may have been alive in more minutes than were observed.
            of = max(alive, observed[hour])
            cells[row["server"]][hour] = (alive / of if of else None), f"{alive} of {of} minutes"
    drawn = set(cells)
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
        strip = charts.strip([(_label(hour), *_cell_of(cells[server], hour, observed[hour])) for hour in hours])
        lines.append(
            [
                cell(server, shown=short_name(server)),
                f'<td class="wide">{strip if server in drawn else ""}</td>',
                cell(uptime if uptime is None else round(uptime, 5), shown=percent(uptime, 2)),
                cell(seen if seen is None else round(seen, 5), shown=percent(seen, 2)),
                cell(row["crashes"]),
                cell(flags, kind="text warn" if flags else "text"),
            ]
        )
    span = f"hours, {_label(hours[0])} to {_label(hours[-1])}" if hours else "hours"
    heads = ("server", span, "uptime", "availability", "crashes", "remarks")
    return sortable_table(heads, lines, (2, 3, 4)) + more_line(
        content.more.get("uptime", 0), "servers with fewer remarks"
    )


def _traffic(content: Content) -> str:
    hours = _hours(content["traffic"])
    by_hour = {(row["dt"], row["hour"]): row for row in content["traffic"]}
    labels = [_label(hour) for hour in hours]
    carried = [float(by_hour[hour]["bytes"]) if hour in by_hour else 0.0 for hour in hours]
    closed = [float(by_hour[hour]["closed"]) if hour in by_hour else 0.0 for hour in hours]
    return (
        legend_line([("bytes carried in the hour", "var(--blue)")])
        + charts.bars(labels, [("carried", "var(--blue)", carried)], "B", "Bytes carried by hour")
        + legend_line([("transports that ended in the hour", "var(--teal)")])
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
    first = sorted(totals, key=lambda name: -totals[name])[:MAX_SERIES]
    for row in content["refused"]:
        name = _refusal(row)
        amounts[name if name in first else "other"][row["dt"], row["hour"]] += row["n"]
    names = [*first, *(["other"] if "other" in amounts else [])]
    series = [
        (name, colour, [amounts[name][hour] for hour in hours]) for name, colour in zip(names, _PALETTE, strict=False)
    ]
    chart = legend_line([(name, colour) for name, colour, _ in series]) + charts.bars(
        [_label(hour) for hour in hours], series, "", "Refusals by hour"
    )
    rows = [
        [
            cell(row["who"], shown=f"<code>{escape(str(row['who']))}</code>"),
            cell(row["kind"]),
            cell(row["score"], kind="warn" if row["score"] >= 100 else ""),
            cell(row["servers"] if row["names"] else "not known", kind="" if row["names"] else "n"),
            cell(row["most_at"], shown=short_name(row["most_at"])),
            cell(row["days"]),
            cell(str(row["last_day"])),
            cell(row["requests"]),
            cell(row["refused"]),
            cell(row["targets"]),
            cell(row["posts"]),
        ]
        for row in content["actor"]
    ]
    return (
        (chart if hours else '<p class="note">Nothing was refused.</p>')
        + "<h3>Unusual activity</h3><p class='note'>A score of 100 is the limit for a day. Counted are accepted "
        "requests, "
        "refused requests, different clients asked for, and posted entries. The number of servers is known only for "
        "servers that share a secret (--telemetry-secret); other servers have different names for the same client.</p>"
        + sortable_table(
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
        + more_line(content.more.get("actor", 0), "(table actor)")
    )


_SECTIONS = (
    (
        "Servers",
        "Each cell is one hour. A full green bar means that the server reported every minute in which anybody's events "
        "arrived, a lower bar that it reported fewer, an empty frame that it reported none. Grey means that its events "
        "are missing: discovery saw the server, or no events of anybody have arrived. Uptime is what the server "
        "reports; for availability, discovery saw it as well. Servers with most remarks come first.",
        _servers,
    ),
    ("By server", f"Sums over the last {SHOWN_DAYS} days, for the servers that carried most.", report_tables.by_server),
    ("Traffic", "User data that servers carried.", _traffic),
    ("Latency", "Time from data passing a server until its acknowledgement comes back, over all servers.", _latency),
    ("Refusals", "Connections and requests that servers and discovery refused.", _refusals),
    (
        "Capacity",
        "When each server reaches its limit if its daily peaks keep growing as before.",
        report_tables.forecast,
    ),
    (
        "Settlement",
        "Bytes that servers claim to have carried. A server is credited only with bytes for which both ends signed. "
        "Uncertain: in transit when a transport ended. Lost in kills: carried by processes that were killed or are "
        "silent, as both ends bound it. Nobody is credited with either.",
        report_tables.settlement,
    ),
    (
        "Discovery",
        "Entries that discovery accepted and requests that it refused. Unknown keys: look-ups of keys without an "
        "entry.",
        report_tables.discovery,
    ),
    (
        "Placement",
        "How often discovery should offer each server to clients: it draws servers at random by weight.",
        report_tables.placement,
    ),
    (
        "Public",
        "Figures that may be published: sums of whole days, without values that concern only few clients.",
        report_tables.public,
    ),
    ("Data", "Share of the written events that has arrived.", report_tables.quality),
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
        head = f"<section id='{_anchor_of(title)}'><h2>{title}</h2><p class='note'>{note}</p>"
        parts.append(f"{head}{section(content)}</section>")
    if content.cut:
        parts.append(
            f"<p class='note'>These tables have more rows than are shown: {escape(', '.join(content.cut))}.</p>"
        )
    parts.append(f"<script>{script}</script></body></html>\n")
    return "".join(parts)
