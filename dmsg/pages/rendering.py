"""HTML of the status page: the complete page, and its parts. A browser with scripts replaces single parts when they
change."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping

from twisted.internet.defer import Deferred
from twisted.web.template import Tag, flattenString, tags

from dmsg.base.printable import printable
from dmsg.keys import PUBKEY_SIZE, PubKey
from dmsg.pages.drawing import draw, sparkline, with_unit
from dmsg.pages.history import History, reason_number
from dmsg.pages.model import Fact, Line, StatusSource, Table
from dmsg.pages.recent_events import RecentEvents, worst_first

REFRESH = 5
"""Seconds after which a browser without scripts reloads the page."""

_NUMBER = re.compile(r"[0-9.]+( [kMGT]?B?)?(/s)?( %)?")
_ADDRESS = re.compile(r"(\S+)(:\d+)")

Parts = dict[str, Tag]


def parts(
    source: StatusSource,
    samples: History,
    recent_events: RecentEvents,
    tables: Iterable[Table],
    wall: float,
) -> Parts:
    """Return the parts of the page by name, in the order in which the page shows them.

    :param wall: present time, in seconds since 1970.
    """
    return {
        "problems": _problems(source.problems()),
        "facts": facts_list(worst_first(source.facts())),
        "charts": tags.div(*(draw(chart, samples) for chart in source.charts), class_="charts"),
        "reasons": _reasons(source.reasons(), samples),
        "tables": tags.div(*map(table, tables), class_="tables"),
        "events": _events(recent_events, wall),
    }


def whole_page(source: StatusSource, parts: Parts, searched: str = "", answer: Table | None = None) -> Tag:
    """Return the complete page.

    :param searched: text of the search.
    :param answer: result of the search; None without a search.
    """
    key = _key_of(source.key)
    title = f"{source.kind} {key.short if key is not None else source.key[:8]}…" if source.key else source.kind
    head = tags.head(
        tags.meta(charset="utf-8"),
        tags.meta(name="viewport", content="width=device-width, initial-scale=1"),
        tags.meta(name="color-scheme", content="light dark"),
        tags.title(title),
        tags.link(rel="stylesheet", href="page.css"),
        tags.noscript(Tag("meta")(**{"http-equiv": "refresh", "content": str(REFRESH)})),
        tags.script(src="page.js", defer="defer"),
    )
    header = tags.header(
        tags.h1(source.kind),
        tags.code(source.key if key is None else key.text) if source.key else "",
        [" ", tags.small("in logs and JSON: ", tags.code(source.key))] if key is not None else "",
        tags.p("No connection: this page shows the last known state.", id="lost", hidden="hidden"),
    )
    body = tags.body(header, Tag("main")(*(tags.section(part, id=name) for name, part in parts.items())))
    if source.search_key:
        header(_search(source.search_key, searched))
        if answer is not None:
            header(tags.section(table(answer), id="answer"))
    return tags.html(head, body, lang="en")


def flatten(tag: Tag) -> str:
    """Return a tag as text. The tag must not contain Deferreds."""
    found: list[bytes] = []
    flattened: Deferred[bytes] = flattenString(None, tag)
    flattened.addCallback(found.append)
    flattened.addErrback(lambda failure: failure.raiseException())
    return found[0].decode()


def table(content: Table) -> Tag:
    """Return a table with its title."""
    # A column is aligned right if all of its cells are numbers, otherwise left.
    kinds = [
        "number" if content.rows and all(_is_number(row[column]) for row in content.rows) else "text"
        for column in range(len(content.columns))
    ]
    rows = [tags.tr(*(_cell(cell, kind) for cell, kind in zip(row, kinds, strict=True))) for row in content.rows]
    if not rows:
        rows = [tags.tr(tags.td(content.empty, colspan=str(len(content.columns)), class_="empty"))]
    head = tags.thead(tags.tr(*(tags.th(name, class_=kind) for name, kind in zip(content.columns, kinds, strict=True))))
    return tags.div(tags.h2(content.title), tags.div(tags.table(head, tags.tbody(*rows)), class_="wide"))


def _cell(text: str, kind: str) -> Tag:
    key = _key_of(text)
    if key is not None:
        return tags.td(tags.code(f"{key.short}…", title=f"{key.text}, in logs and JSON: {key}"))
    return tags.td(printable(text), class_=kind)


def _key_of(text: str) -> PubKey | None:
    """Parse a public key in hexadecimal; return None for any other text."""
    if len(text) != 2 * PUBKEY_SIZE:
        return None
    try:
        return PubKey.shared(bytes.fromhex(text))
    except ValueError:
        return None


def _is_number(text: str) -> bool:
    """Whether a cell is a number, perhaps with a unit."""
    return _NUMBER.fullmatch(text) is not None


def _search(search_key: str, searched: str) -> Tag:
    field = tags.input(
        type="search", name="key", value=searched, maxlength="200", placeholder=search_key, **{"aria-label": search_key}
    )
    return tags.form(field, tags.button("Search"), method="get", action=".", role="search")


def _problems(problems: list[str]) -> Tag:
    if not problems:
        return tags.p("Nothing needs attention.", class_="good")
    return tags.ul(*(tags.li(printable(one)) for one in problems), class_="bad")


def facts_list(facts: list[Fact]) -> Tag:
    """Return facts as a list of cards."""
    return tags.dl(
        *(tags.div(tags.dt(fact.label), tags.dd(_value(fact.value), class_=fact.level or "plain")) for fact in facts)
    )


def _value(text: str) -> list[str | Tag]:
    """Return the HTML of a value. In a narrow card, the line of an address breaks before the port, not within a
    number."""
    address = _ADDRESS.fullmatch(printable(text))
    return [printable(text)] if address is None else [address[1], tags.span(address[2], class_="port")]


def _reasons(reasons: Mapping[str, float], samples: History) -> Tag:
    """Return a table of reasons, with their number since the start, their present rate, and a sparkline of the last
    minutes."""
    rows = []
    for number, name in sorted(((number, name) for name, number in reasons.items() if number), reverse=True):
        line = Line(name, reason_number(name), rate=True)
        now = samples.now(line)
        rows.append(
            tags.tr(
                tags.td(name.replace("_", " ")),
                tags.td(with_unit(number, ""), class_="number"),
                tags.td("-" if now is None else with_unit(now, "/s"), class_="number"),
                tags.td(sparkline(line, samples), class_="bar"),
            )
        )
    heads = ("Reason", "text"), ("Since the start", "number"), ("Rate now", "number"), ("Last minutes", "text")
    if not rows:
        rows = [tags.tr(tags.td("none since the start", colspan=str(len(heads)), class_="empty"))]
    head = tags.thead(tags.tr(*(tags.th(name, class_=kind) for name, kind in heads)))
    return tags.div(tags.h2("Refused, dropped or ended"), tags.table(head, tags.tbody(*rows)))


def _events(recent_events: RecentEvents, wall: float) -> Tag:
    rows = []
    for at, text in reversed(recent_events.events):
        clock = time.strftime("%H:%M:%S" if wall - at < 86400 else "%Y-%m-%d %H:%M", time.localtime(at))
        rows.append(tags.tr(tags.td(clock, class_="when"), tags.td(printable(text))))
    if not rows:
        rows = [tags.tr(tags.td("none since the start", class_="empty"))]
    return tags.div(tags.h2("Recent events"), tags.table(tags.tbody(*rows)))
