"""Implementation of ``dmsg top``: queries entities repeatedly, and shows a table of their metrics."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.internet.error import ConnectingCancelledError, ConnectionRefusedError, TimeoutError
from twisted.internet.task import deferLater
from twisted.web.client import ResponseNeverReceived

from dmsg.base.printable import printable
from dmsg.base.units import human_count, human_size, milliseconds
from dmsg.cli.fleet.entity_metrics import Row, Snapshot, read, row
from dmsg.cli.output import describe, say, state
from dmsg.cli.screen import screen
from dmsg.errors import DmsgError
from dmsg.net.pending import cancellable
from dmsg.net.reactor import Reactor
from dmsg.net.web.body import read_body
from dmsg.net.web.fetch import WebClient, make_pool

MAX_METRICS = 4 * 1024 * 1024
"""Maximum bytes of an entity's metrics."""
MAX_HEALTH = 256 * 1024
HEAD_LINES = 6
"""Number of lines that the table needs on the screen in addition to its rows."""
ORDERS: dict[str, Callable[[Row], Any]] = {
    "problem": lambda one: (-one.worse, -(one.byte_rate or 0), one.name),
    "name": lambda one: one.name,
    "clients": lambda one: -(one.clients or 0),
    "rate": lambda one: -(one.in_rate or 0),
    "bytes": lambda one: -(one.byte_rate or 0),
    "refused": lambda one: -(one.refused_rate or 0),
    "slowest": lambda one: -(one.slowest or 0),
    "memory": lambda one: -(one.memory or 0),
}


class Fleet:
    """Set of entities to query.

    :param urls: URLs of the entities, without ``/metrics``.
    :param timeout: seconds to wait for an answer.
    """

    def __init__(self, reactor: Reactor, urls: list[str], timeout: float) -> None:
        self._reactor = reactor
        self._urls = urls
        self._timeout = timeout
        self._client = WebClient(reactor, make_pool(reactor), timeout)
        self._before: dict[str, Snapshot] = {}

    async def poll(self) -> list[Row]:
        """Query all entities concurrently, and return their rows."""
        asking = gatherResults([Deferred.fromCoroutine(self._ask(url)) for url in self._urls])
        looks: list[Snapshot] = await cancellable(asking)
        rows = []
        for url, seen in zip(self._urls, looks, strict=True):
            rows.append(row(_name(url), seen, self._before.get(url)))
            self._before[url] = seen
        return rows

    async def _ask(self, url: str) -> Snapshot:
        at = self._reactor.seconds()
        try:
            metrics = await self._get(f"{url}/metrics", MAX_METRICS)
            health = await self._get(f"{url}/health", MAX_HEALTH)
        except Exception as error:
            # All exceptions are caught, because Twisted's connection errors have no common base class.
            return Snapshot(at, error=_error_text(error))
        try:
            return read(at, metrics, health)
        except ValueError as error:
            return Snapshot(at, error=f"answers, but not as an entity of dmsg: {error}")

    async def _get(self, url: str, limit: int) -> str:
        response = await self._client.request("GET", url, timeout=self._timeout, reactor=self._reactor)
        body = await read_body(response, limit)
        # An unhealthy entity answers /health with status 503 and the reason.
        if response.code not in (200, 503):
            raise DmsgError(f"answers with HTTP status {response.code}")
        return body.decode("utf-8", "replace")


def _name(url: str) -> str:
    """Return the host and port of a URL."""
    return url.partition("://")[2].rpartition("@")[2]


def _error_text(error: Exception) -> str:
    reasons = getattr(error, "reasons", None)
    cause = reasons[0].value if reasons else error
    if isinstance(cause, ConnectionRefusedError):
        return "nothing listens there"
    # If a request takes too long, the HTTP client raises one of the errors in this condition.
    if isinstance(cause, TimeoutError | ResponseNeverReceived | ConnectingCancelledError | CancelledError):
        return "no answer"
    return printable(describe(cause).rstrip("."))[:80]


async def watch(
    reactor: Reactor, urls: list[str], *, every: float, once: bool, sort: str, name_filter: str, timeout: float
) -> None:
    """Print the table until the command is cancelled, or once.

    :param every: seconds between two queries.
    :param once: whether to print only one table, after two queries.
    :param sort: column to sort by.
    :param name_filter: text that a row must contain to be shown.
    :param timeout: seconds to wait for an answer.
    """
    fleet = Fleet(reactor, urls, timeout)
    console = screen(140)
    rows = await fleet.poll()
    if once:
        await deferLater(reactor, min(every, 2.0))
        rows = _filter_rows(await fleet.poll(), sort, name_filter)
        _say(console, rows)
        if name_filter and not rows:
            raise DmsgError(f"no row contains {name_filter!r}: --only looks at name, kind, status and problem")
        if any(one.worse for one in rows):
            raise SystemExit(1)
        return
    if state.json or not console.is_terminal:
        while True:
            _say(console, _filter_rows(rows, sort, name_filter))
            await deferLater(reactor, every)
            rows = await fleet.poll()
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(draw_table(_filter_rows(rows, sort, name_filter), console.width, console.height), refresh=True)
            await deferLater(reactor, every)
            rows = await fleet.poll()


def _filter_rows(rows: list[Row], sort: str, name_filter: str) -> list[Row]:
    found = [one for one in rows if name_filter.lower() in f"{one.name} {one.kind} {one.status} {one.why}".lower()]
    return sorted(found, key=ORDERS[sort])


def _say(console: Console, rows: list[Row]) -> None:
    if state.json:
        for one in rows:
            say(json.dumps(dataclasses.asdict(one)))
    else:
        console.print(draw_table(rows, console.width))


COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    ("kind", 70, lambda one: one.kind),
    ("clients", 50, lambda one: _number(one.clients, human_count)),
    ("free", 100, lambda one: _number(one.free, human_count)),
    ("in/s", 60, lambda one: _number(one.in_rate, human_count)),
    ("bytes/s", 0, lambda one: _number(one.byte_rate, human_size)),
    ("refused/s", 80, lambda one: _number(one.refused_rate, human_count)),
    ("99 of 100", 90, lambda one: _number(one.slowest, milliseconds)),
    ("memory", 110, lambda one: _number(one.memory, lambda share: f"{share:.0%}")),
)
"""Columns of the table: title, minimum width of a terminal on which the column is shown, and function that returns the
cell of a row.
"""

MIN_NAME_WIDTH = 15
"""Minimum number of characters of an entity's name in one line, such as ``127.0.0.1:39905``."""
OTHER_COLUMNS = 95
"""Number of characters that all columns other than the name need at most."""


def draw_table(rows: list[Row], width: int, height: int | None = None) -> Table:
    """Return the table for a terminal of this width.

    :param height: maximum number of lines; None for no limit.
    """
    wrong = sum(1 for one in rows if one.worse)
    title = Text(f"{time.strftime('%H:%M:%S')}  {len(rows)} watched, ")
    title.append(f"{wrong} to be looked at" if wrong else "nothing wrong", style="bold red" if wrong else "green")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, expand=width < 140, padding=(0, 1))
    most = len(rows) if height is None else max(1, height - HEAD_LINES)
    if most < len(rows):
        title.append(f"; {len(rows) - most} more below: --only, --sort", style="bold")
    shown = [(name, said) for name, least, said in COLUMNS if width >= least]
    name_width = max(MIN_NAME_WIDTH, width - OTHER_COLUMNS)
    table.add_column("entity", overflow="fold", max_width=name_width)
    table.add_column("state", overflow="fold", ratio=1)
    for name, _ in shown:
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    for one in rows[:most]:
        style = "red" if one.worse >= 70 else "yellow" if one.worse else ""
        table.add_row(
            _break_name(one.name, name_width), one.why or one.status, *(said(one) for _, said in shown), style=style
        )
    return table


def _break_name(name: str, width: int) -> str:
    """Return the name with a line break before its port if it is longer than ``width``."""
    host, colon, port = name.rpartition(":")
    return f"{host}\n:{port}" if colon and len(name) > width else name


def _number(value: float | None, format_value: Callable[[float], str]) -> str:
    return "-" if value is None else format_value(value)
