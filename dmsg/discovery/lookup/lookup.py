"""Client of one discovery; entries are verified before they are used.

A :class:`Lookup` is the client of one discovery. A :class:`~dmsg.discovery.lookup.lookups.Lookups` is the client of
several: it reads from all of them and returns the newest entry, and it writes to all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.entries.recognition import is_foreign
from dmsg.discovery.lookup.own_entries import OwnEntries
from dmsg.discovery.lookup.requests import DiscoveryRequests
from dmsg.discovery.lookup.server_list import ServerList, parse_server_list
from dmsg.errors import DiscoveryError
from dmsg.keys import PubKey, SecKey
from dmsg.net.pending import cancellable
from dmsg.net.web.response import parse_json

T = TypeVar("T")

TIMEOUT = 10.0
"""Default timeout of a request, in seconds."""
_log = Logger()


class Lookup:
    """Client of one discovery service.

    :param url: base URL, as ``http://127.0.0.1:9090``.
    :param http: treq client to use in place of the usual HTTP client, for tests and for custom TLS settings.
    :param timeout: seconds that one request may take.
    :param date: function that returns the date for new entries and deletions, in nanoseconds since 1970; None for the
        system's clock.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        url: str,
        *,
        http: Any = None,
        timeout: float = TIMEOUT,
        date: Callable[[], int] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._reactor: IReactorTime = reactor
        self._requests = DiscoveryRequests(reactor, self.url, timeout, http)
        self.shown_url = self._requests.shown_url
        """URL without credentials, for messages and logs."""
        self._own = OwnEntries(self._requests, date or time.time_ns)
        self._under_way: dict[Deferred[Any], None] = {}

    def entry(self, key: PubKey) -> Deferred[Entry]:
        """Fetch and verify the entry of ``key``.

        Fails with :class:`~dmsg.errors.EntryNotFound` or
        :class:`~dmsg.errors.DiscoveryError`.
        """
        return self._ask(self._requests.entry(key))

    def available_servers(self) -> Deferred[ServerList]:
        """Fetch the entries of the servers that discovery lists, in random order. Entries that fail verification are
        left out, and the list says why.
        """
        return self._ask(self._available_servers())

    def post(self, entry: Entry) -> Deferred[None]:
        """Post a signed entry.  Fails with :class:`~dmsg.errors.DiscoveryError`."""
        return self._ask(self._own.post(entry))

    def update(self, key: SecKey, make: Callable[[Entry], Entry]) -> Deferred[Entry]:
        """Replace the entry of ``key`` by its next entry, and fire with that entry.

        :param make: function that returns the next entry, unsigned. Its argument is the present entry with the next
            sequence and a later timestamp; for a key without an entry, an entry without content.
        """
        return self._ask(self._own.update(key, make))

    def delete(self, key: SecKey) -> Deferred[None]:
        """Delete the entry of ``key``, even if another program has posted it. Fails with EntryNotFound if there is
        none."""
        return self._ask(self._own.delete(key))

    def withdraw(self, key: SecKey, half: str, features: Iterable[str] = ()) -> Deferred[bool]:
        """Withdraw one half of the entry that :meth:`update` posted, ``client`` or ``server``, if discovery still has
        it.

        Another program may use the same key. An entry that the other program has posted since then stays unchanged. So
        does the other half of an entry that both programs share.

        :param half: ``client`` or ``server``: the half to withdraw.
        :param features: features in the version that belong to this half.
        :returns: Deferred that fires with True if discovery still had this half as this program had posted it,
            otherwise with False. It fails with EntryNotFound if the key has no entry.
        """
        return self._ask(self._own.withdraw(key, half, frozenset(features)))

    def ask(self, method: str, path: str, body: bytes | None = None) -> Deferred[object]:
        """Send a request for which this class has no method of its own, and return the decoded JSON of the answer.

        Fails with :class:`~dmsg.errors.DiscoveryError`, whose ``status`` is that of an answer other than 200.
        """
        return self._ask(self._requests.json(method, path, body))

    @property
    def reactor(self) -> IReactorTime:
        """Reactor that provides the clock for timeouts."""
        return self._reactor

    def is_posted_here(self, entry: Entry) -> bool:
        """Whether ``entry`` is the last entry of its key that :meth:`update` posted here, or the last one that it sent,
        even if no answer arrived.
        """
        return self._own.includes(entry)

    def _ask(self, asking: Coroutine[Deferred[Any], Any, T]) -> Deferred[T]:
        asked = Deferred.fromCoroutine(asking)
        self._under_way[asked] = None

        def done(result: T | Failure) -> T | Failure:
            self._under_way.pop(asked, None)
            return result

        return cancellable(asked.addBoth(done))

    def close(self) -> Deferred[None]:
        """Cancel all requests, and close the pooled connections.

        Requests have to be cancelled before the pool is closed. Otherwise the connection of a later answer would return
        to the pool and stay open.
        """
        self._requests.is_closing = True
        for asked in list(self._under_way):
            asked.cancel()
        return self._requests.close()

    # --- coroutines of the public methods ---

    async def _available_servers(self) -> ServerList:
        status, body = await self._requests.request("GET", "/discovery/available_servers")
        if status == 404 and not is_foreign(status, body):
            # A discovery without servers answers 404 with JSON. A web server that is no discovery would answer with an
            # HTML page.
            return ServerList()
        if status != 200:
            raise self._requests.error(status, body)
        try:
            listed = parse_json(body)
            if not isinstance(listed, list):
                raise ValueError
        except ValueError:
            raise DiscoveryError(f"discovery {self.shown_url}: list of servers is malformed") from None
        servers = parse_server_list(listed, f"discovery {self.shown_url}")
        if servers.refusal:
            _log.info("{refusal}", refusal=servers.refusal)
        return servers
