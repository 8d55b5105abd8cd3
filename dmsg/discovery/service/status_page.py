"""Status page of discovery."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TypedDict

from prometheus_client.registry import Collector
from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.units import human_count, human_size, human_time
from dmsg.base.version import program_version
from dmsg.discovery.service.api import DiscoveryAPI
from dmsg.discovery.store.measured import StoreUnavailable
from dmsg.errors import EntryNotFound, KeyFormatError
from dmsg.keys import PubKey
from dmsg.net.own_pauses import add_fair_timeout
from dmsg.pages.history import Quantiles, bucket_counts
from dmsg.pages.model import BAD, GOOD, Chart, Fact, Line, StatusSource, Table
from dmsg.pages.process import process_facts
from dmsg.telemetry.latencies import LATENCIES
from dmsg.telemetry.metrics import Metrics

SHOWN_SERVERS = 100
"""Maximum number of servers of each kind in the table of servers; the kinds are listed, quiet, and missing."""
STORE_TIMEOUT = 5.0
"""Seconds without an answer of the store after which the page says that the store does not answer."""
SHOWN_MISSED = 5
"""Maximum number of missing servers that the page lists as problems."""
MIN_KEY_PREFIX = 8
"""Minimum number of characters of a key's beginning by which the page's search finds a server."""
SHOWN_RELAYS = 20
"""Maximum number of servers in the table of clients per server."""


_log = Logger()


class _Server(TypedDict, total=False):
    """Server part of an entry. The number of free connections has two names, because programs spell it differently."""

    address: str
    available_connections: int
    availableConnections: int


class _Client(TypedDict, total=False):
    """Client part of an entry."""

    delegated_servers: list[str] | None


class _Entry(TypedDict, total=False):
    """JSON of an entry, as it is stored."""

    version: str
    sequence: int
    timestamp: int
    static: str
    server: _Server | None
    client: _Client | None


class DiscoveryStatus(StatusSource):
    """Content of discovery's status page."""

    kind = "dmsg discovery"
    search_key = "a public key"
    charts = (
        Chart("Requests", "/s", (Line("answered", "requests", rate=True),)),
        Chart("Entries posted", "/s", (Line("posted", "posts", rate=True),)),
        Chart("Refused", "/s", (Line("all reasons", "refused", rate=True),)),
        Chart("Response time", "ms", (Line("median", "p50"), Line("99th percentile", "p99"))),
    )

    def __init__(
        self,
        clock: IReactorTime,
        api: DiscoveryAPI,
        metrics: Metrics,
        started: float,
        store_clock: Callable[[], float] | None = None,
    ) -> None:
        """Set up the page.

        :param store_clock: clock of the store, in seconds since 1970; None for the system's clock.
        """
        self._clock = clock
        self._store_clock = store_clock or time.time
        self._api = api
        self._metrics = metrics
        self._started = started
        self._quantiles = Quantiles((*LATENCIES, float("inf")))
        self._status = ""
        self._kinds: dict[str, int] = {}
        self._size = 0
        self._servers: tuple[list[bytes], list[bytes], list[bytes]] = ([], [], [])
        self._asking: Deferred[None] | None = None
        self._asked_at = 0.0

    def refresh(self) -> None:
        """Query the store for new data, unless a query is under way. If the store does not answer, the page shows the
        last answer and says so.
        """
        now = time.monotonic()
        if self._asking is None:
            self._asked_at = now
            self._asking = Deferred.fromCoroutine(self._ask())
            self._asking.addBoth(self._on_answer)
        elif now - self._asked_at > STORE_TIMEOUT:
            self._status = f"the store has not answered for {now - self._asked_at:.0f} s"

    async def _ask(self) -> None:
        status = str((await self._api.reports.health_report())["status"])
        self._kinds, self._size = await self._api.reports.counts()
        self._servers = await self._api.reports.servers_of_each_kind(SHOWN_SERVERS)
        self._status = status

    def _on_answer(self, result: object) -> None:
        self._asking = None
        if isinstance(result, Failure):
            self._status = "the store does not answer"
            if not result.check(StoreUnavailable, CancelledError):
                _log.failure("unhandled error while the store was read for the status page", result)

    def facts(self) -> list[Fact]:
        status = self._status or "starting"
        kinds = self._kinds
        return [
            Fact("State", status, GOOD if status == "ok" else BAD if self._status else "", is_event=True),
            *process_facts(self._started),
            Fact("Entries", human_count(sum(kinds.values()))),
            Fact("Entries of clients", human_count(kinds.get("client", 0) + kinds.get("both", 0))),
            Fact("Servers listed for clients", _at_least(self._servers[0]), is_event=True),
            Fact("Entries of servers", human_count(kinds.get("server", 0) + kinds.get("both", 0))),
            Fact("Size of the store", human_size(self._size)),
            Fact("Clients that posted in the last hour", human_count(len(self._api.delegations))),
            Fact("Version", f"dmsg {program_version()}"),
        ]

    def problems(self) -> list[str]:
        found = []
        if self._status not in ("", "ok"):
            found.append(f"Discovery is impaired: {self._status}. Entries are served as far as the store can be read.")
        if self._status and not self._kinds.get("server", 0) + self._kinds.get("both", 0):
            found.append("No server has an entry here: clients find no server to connect to.")
        now = time.time()
        for one in map(json.loads, self._missing_servers()[:SHOWN_MISSED]):
            key, address, *_, posted = self._server(one, now)
            name = PubKey.from_hex(key).short
            found.append(f"Server {name}… at {address} last posted {posted}: check whether it runs.")
        return found

    def _missing_servers(self) -> list[bytes]:
        """Return the entries of servers that stopped posting without announcing that they shut down."""
        return [body for body in self._servers[2] if _takes_clients(json.loads(body))]

    def numbers(self) -> dict[str, float]:
        quantiles = zip(("p50", "p99"), self._quantiles.since(self._buckets(), 0.5, 0.99), strict=False)
        return {
            "requests": _total(self._metrics.requests),
            "posts": _total(self._metrics.posted),
            "refused": _total(self._metrics.refused),
            **{name: seconds * 1000 for name, seconds in quantiles},
        }

    def _buckets(self) -> list[float]:
        """Return the number of requests in each bucket of the latency histogram, summed over all paths."""
        sums: dict[str, float] = {}
        for metric in self._metrics.seconds.collect():
            for sample in metric.samples:
                if sample.name.endswith("_bucket"):
                    border = sample.labels["le"]
                    sums[border] = sums.get(border, 0.0) + sample.value
        ordered = list(sums.values()) or [0.0] * (len(LATENCIES) + 1)
        return bucket_counts(ordered)

    def reasons(self) -> dict[str, float]:
        return {
            **_totals_by_label(self._metrics.refused, "reason"),
            **{
                f"entries dropped: {name}": number
                for name, number in _totals_by_label(self._metrics.dropped, "reason").items()
            },
        }

    async def tables(self) -> list[Table]:
        now = time.time()
        self._api.delegations.forget_silent(self._store_clock())
        listed, quiet, _ = self._servers
        known = {str(json.loads(body).get("static")) for body in (*listed, *quiet)}
        states = ("listed", listed), ("checked, does not post", quiet), ("missing", self._missing_servers())
        rows = [(*self._server(json.loads(body), now), state) for state, bodies in states for body in bodies]
        rows.sort(key=lambda row: row[1])
        return [
            Table(
                "Servers",
                ("Server", "Address", "Free places", "Entry version", "Last post", "State"),
                rows,
                "no server has an entry: clients find none to connect to",
            ),
            Table(
                "Clients per server, from entries of the last hour",
                ("Server", "Clients", "Share", "Listed"),
                [
                    (
                        server,
                        human_count(number),
                        f"{100 * number / max(1, len(self._api.delegations)):.0f} %",
                        "yes" if server in known else "no",
                    )
                    for server, number in self._api.delegations.most_named(SHOWN_RELAYS)
                ],
                "no client has posted an entry since the start",
            ),
        ]

    def _full_key(self, text: str) -> str:
        """Return the full key of the only server on the page whose key begins with ``text``; return any other text
        unchanged.
        """
        if MIN_KEY_PREFIX <= len(text) < 66:
            beginning = text.rstrip("….").lower()
            statics = {str(json.loads(body).get("static")) for bodies in self._servers for body in bodies}
            keys = [key for key in map(PubKey.from_hex, statics) if _begins(key, beginning)]
            if len(keys) == 1:
                return keys[0].text
        return text

    def _server(self, entry: _Entry, now: float) -> tuple[str, str, str, str, str]:
        server = entry.get("server") or {}
        return (
            str(entry.get("static", "")),
            str(server.get("address", "")),
            str(_free(entry)),
            str(entry.get("version", "")),
            f"{human_time(max(0.0, now - int(entry.get('timestamp', 0)) / 1e9))} ago",
        )

    async def search(self, text: str) -> Table:
        columns = ("Field", "Value")
        try:
            key = PubKey.from_text(self._full_key(text))
            answer = Deferred.fromCoroutine(self._api.reports.entry_of(key.hex()))
            found = await add_fair_timeout(answer, STORE_TIMEOUT, self._clock)
            entry = json.loads(found)
        except (KeyFormatError, ValueError):
            forms = "53 characters, or 66 hexadecimal digits"
            words = f"not a public key ({forms}), nor the first {MIN_KEY_PREFIX} characters of a server's key"
            return Table("Search", columns, [], words)
        except EntryNotFound:
            return Table(f"Entry of {key.short}…", columns, [], "this key has no entry")
        except (StoreUnavailable, TimeoutError):
            return Table(f"Entry of {key.short}…", columns, [], "the store does not answer")
        return Table(f"Entry of {key.short}…", columns, list(_rows(entry)))


def _begins(key: PubKey, beginning: str) -> bool:
    """Whether a key begins with a text, in the form for people or in hexadecimal."""
    return key.text.startswith(beginning) or key.hex().startswith(beginning)


def _at_least(bodies: list[bytes]) -> str:
    return f"{len(bodies)}{' or more' if len(bodies) >= SHOWN_SERVERS else ''}"


def _takes_clients(entry: _Entry) -> bool:
    """Whether a server accepted clients when it last posted. A server that shuts down posts that it has no free
    connections.
    """
    return bool(_free(entry))


def _free(entry: _Entry) -> int | str:
    """Return how many more clients a server accepts according to its entry; an empty text if the entry does not say."""
    server = entry.get("server") or {}
    return server.get("available_connections", server.get("availableConnections", ""))


def _rows(entry: _Entry) -> Iterable[tuple[str, str]]:
    posted = datetime.fromtimestamp(int(entry.get("timestamp", 0)) / 1e9, UTC)
    yield "Posted", f"{posted:%Y-%m-%d %H:%M:%S} UTC"
    yield "Sequence", str(entry.get("sequence", ""))
    yield "Version", str(entry.get("version", ""))
    for name, value in (entry.get("server") or {}).items():
        yield f"Server: {name}", str(value)
    for server in (entry.get("client") or {}).get("delegated_servers") or ():
        yield "Reached through server", str(server)


def _totals_by_label(counter: Collector, label: str) -> dict[str, float]:
    return {
        sample.labels[label]: sample.value
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


def _total(counter: Collector) -> float:
    return math.fsum(
        sample.value for metric in counter.collect() for sample in metric.samples if sample.name.endswith("_total")
    )
