"""The client of discovery: what is fetched is verified before it is used.

:class:`Lookup` talks to one discovery, :class:`Lookups` to several: reads ask
one after the other until one answers, writes go to all of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import treq
from treq.client import HTTPClient
from twisted.internet.defer import Deferred, DeferredList, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.web.client import Agent, HTTPConnectionPool, _HTTP11ClientFactory

from dmsg.discovery.entry import (
    VERSION,
    ClientMeta,
    Deletion,
    Entry,
    Form,
    ServerMeta,
    Successor,
    decode,
    next_sequence,
    verified,
)
from dmsg.errors import DiscoveryError, DmsgError, EntryError, EntryNotFound
from dmsg.keys import PubKey, SecKey

T = TypeVar("T")

TIMEOUT = 10.0
"""Seconds for one request, by default."""
MAX_ANSWER = 1024 * 1024
"""Bytes of an answer; a longer one is an error."""
UPDATE_ATTEMPTS = 4
"""How often an update is tried when another writer of the same key was faster."""

_log = Logger()


def check_url(url: str) -> str:
    """A URL of a discovery.

    :raises ValueError: it cannot be one; the text says so in one line.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"{url[:80]!r} is not a URL, as http://127.0.0.1:9090 is")
    return url


class QuietFactory(_HTTP11ClientFactory):
    """Two lines of log for each connection are no news."""

    noisy = False


def _parse_entry(body: bytes, key: PubKey | None = None) -> Entry:
    """An entry from discovery, verified in whichever form it was signed."""
    entry, port_given = decode(body, Form.SEED)
    entry.validate()
    entry = verified(entry, Form.SEED, port_given=port_given)
    if key is not None and entry.static != key.hex():
        raise EntryError("entry is of another key")
    return entry


class Lookup:
    """One discovery service.

    :param url: as in ``http://127.0.0.1:9090``.
    :param http: a treq client, for tests and for TLS settings of one's own.
    """

    def __init__(self, reactor: Any, url: str, *, http: Any = None, timeout: float = TIMEOUT) -> None:
        self.url = url.rstrip("/")
        self._reactor: IReactorTime = reactor
        self._timeout = timeout
        self._pool: HTTPConnectionPool | None = None
        if http is None:
            self._pool = HTTPConnectionPool(reactor)
            self._pool._factory = QuietFactory
            http = HTTPClient(Agent(reactor, connectTimeout=timeout, pool=self._pool))
        self._http = http
        self._under_way: set[Deferred[Any]] = set()

    def entry(self, key: PubKey) -> Deferred[Entry]:
        """The entry of ``key``, verified.

        Fails with :class:`~dmsg.errors.EntryNotFound` or
        :class:`~dmsg.errors.DiscoveryError`.
        """
        return self._ask(self._entry(key))

    def available_servers(self) -> Deferred[list[Entry]]:
        """Servers that discovery offers, in random order; those that do not verify are left out."""
        return self._ask(self._available_servers())

    def post(self, entry: Entry) -> Deferred[None]:
        """Store a signed entry.  Fails with :class:`~dmsg.errors.DiscoveryError`."""
        return self._ask(self._post(entry))

    def update(self, key: SecKey, make: Callable[[Entry], Entry]) -> Deferred[Entry]:
        """Put a new iteration in place of the present entry of ``key``.

        :param make: gets an entry with version, sequence, timestamp and key,
            and what the present one has; returns it with the content wanted.
        """
        return self._ask(self._update(key, make))

    def delete(self, key: SecKey) -> Deferred[None]:
        """Withdraw the entry of ``key``.  Fails with EntryNotFound when there is none."""
        return self._ask(self._delete(key))

    def _ask(self, asking: Coroutine[Deferred[Any], Any, T]) -> Deferred[T]:
        asked = Deferred.fromCoroutine(asking)
        self._under_way.add(asked)

        def done(result: Any) -> Any:
            self._under_way.discard(asked)
            return result

        return asked.addBoth(done)

    def close(self) -> Deferred[None]:
        """End what is asked and not answered, and close kept connections.

        A connection whose answer comes later would be kept for good.
        """
        for asked in list(self._under_way):
            asked.cancel()
        if self._pool is None:
            return Deferred.fromCoroutine(_nothing())
        closed: Deferred[None] = self._pool.closeCachedConnections()
        return closed

    # --- one coroutine each ---

    async def _request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        headers = {"accept": "application/json"}
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            response = await self._http.request(
                method, f"{self.url}{path}", data=body, headers=headers, reactor=self._reactor, timeout=self._timeout
            )
            parts: list[bytes] = []
            size = 0

            def collect(part: bytes) -> None:
                nonlocal size
                size += len(part)
                if size <= MAX_ANSWER:
                    parts.append(part)
                else:
                    parts.clear()
                    response.original._transport.loseConnection()

            await treq.collect(response, collect).addTimeout(self._timeout, self._reactor)
        except DmsgError:
            raise
        except TimeoutError:
            raise DiscoveryError(f"{self.url}: no answer within {self._timeout:g} s") from None
        except Exception as error:
            raise DiscoveryError(f"{self.url}: {_short(error)}") from None
        if size > MAX_ANSWER:
            raise DiscoveryError(f"{self.url}: answer is longer than {MAX_ANSWER} bytes")
        return response.code, b"".join(parts)

    def _error(self, status: int, body: bytes) -> DiscoveryError:
        try:
            message = str(json.loads(body)["message"])[:200]
        except (ValueError, KeyError, TypeError):
            message = "answer is not of a discovery"
        return DiscoveryError(f"{self.url}: {message} ({status})", status)

    async def _entry(self, key: PubKey) -> Entry:
        status, body = await self._request("GET", f"/discovery/entries/{key}")
        if status == 404 and b"entry of public key is not found" in body:
            raise EntryNotFound
        if status != 200:
            raise self._error(status, body)
        try:
            return _parse_entry(body, key)
        except EntryError as error:
            raise DiscoveryError(f"{self.url}: entry of {key.short} is refused: {error}") from None

    async def _available_servers(self) -> list[Entry]:
        status, body = await self._request("GET", "/discovery/available_servers")
        if status == 404:
            return []
        if status != 200:
            raise self._error(status, body)
        try:
            listed = json.loads(body)
            if not isinstance(listed, list):
                raise ValueError
        except (ValueError, RecursionError):
            raise DiscoveryError(f"{self.url}: list of servers is malformed") from None
        entries = []
        for one in listed:
            try:
                entry = _parse_entry(json.dumps(one).encode())
            except EntryError as error:
                _log.info("{url}: a server entry is refused: {error}", url=self.url, error=str(error))
                continue
            if entry.server is not None:
                entries.append(entry)
        return entries

    async def _post(self, entry: Entry) -> None:
        status, body = await self._request("POST", "/discovery/entries", entry.to_json())
        if status != 200:
            raise self._error(status, body)

    async def _update(self, key: SecKey, make: Callable[[Entry], Entry]) -> Entry:
        for attempt in range(1, UPDATE_ATTEMPTS + 1):
            client: ClientMeta | None = None
            server: ServerMeta | None = None
            version = VERSION
            successor: Successor | None = None
            sequence = timestamp = 0
            try:
                present = await self._entry(key.public)
            except EntryNotFound:
                pass
            else:
                version, client, server = present.version, present.client, present.server
                successor = present.successor
                sequence, timestamp = next_sequence(present.sequence), present.timestamp + 1
            blank = Entry(
                version, sequence, max(time.time_ns(), timestamp), key.public.hex(), client, server, successor=successor
            )
            entry = make(blank).sign(key)
            try:
                await self._post(entry)
            except DiscoveryError as error:
                # 422: another writer of this key came between, or a deletion did
                if error.status != 422 or attempt == UPDATE_ATTEMPTS:
                    raise
            else:
                return entry
        raise AssertionError("not reached")

    async def _delete(self, key: SecKey) -> None:
        present = await self._entry(key.public)
        deletion = Deletion(present.static, present.sequence, max(time.time_ns(), present.timestamp + 1)).sign(key)
        status, body = await self._request("DELETE", f"/discovery/entries/{key.public}", deletion.to_json())
        if status == 404:
            raise EntryNotFound
        if status != 200:
            raise self._error(status, body)


class Lookups:
    """Several discoveries that know the same network."""

    def __init__(self, lookups: Sequence[Lookup]) -> None:
        if not lookups:
            raise ValueError("at least one discovery is needed")
        self.lookups = tuple(lookups)

    def entry(self, key: PubKey) -> Deferred[Entry]:
        """As :meth:`Lookup.entry`, from the first discovery that has it."""
        return Deferred.fromCoroutine(self._first(lambda lookup: lookup.entry(key)))

    def available_servers(self) -> Deferred[list[Entry]]:
        """As :meth:`Lookup.available_servers`, of all discoveries that answer, each key once."""
        return Deferred.fromCoroutine(self._available_servers())

    def update(self, key: SecKey, make: Callable[[Entry], Entry]) -> Deferred[None]:
        """As :meth:`Lookup.update`, at every discovery; fails when none took it."""
        return Deferred.fromCoroutine(self._all(lambda lookup: lookup.update(key, make)))

    def delete(self, key: SecKey) -> Deferred[None]:
        """As :meth:`Lookup.delete`, at every discovery; fails when none did it."""
        return Deferred.fromCoroutine(self._all(lambda lookup: lookup.delete(key)))

    def close(self) -> Deferred[None]:
        """Close kept connections."""
        return DeferredList([lookup.close() for lookup in self.lookups]).addCallback(lambda _: None)

    async def _first(self, ask: Callable[[Lookup], Deferred[Any]]) -> Any:
        problem: DiscoveryError | None = None
        for lookup in self.lookups:
            try:
                return await ask(lookup)
            except DiscoveryError as error:
                # "not found" is the weakest answer: another may have it, or be broken
                if problem is None or isinstance(problem, EntryNotFound):
                    problem = error
        assert problem is not None
        raise problem

    async def _all(self, ask: Callable[[Lookup], Deferred[Any]]) -> None:
        results = await DeferredList([ask(lookup) for lookup in self.lookups], consumeErrors=True)
        if not any(success for success, _ in results):
            raise _error_of(results[0][1])

    async def _available_servers(self) -> list[Entry]:
        results = await DeferredList([lookup.available_servers() for lookup in self.lookups], consumeErrors=True)
        found: dict[str, Entry] = {}
        for success, result in results:
            if success:
                for entry in result:
                    found.setdefault(entry.static, entry)
        if not found and not any(success for success, _ in results):
            raise _error_of(results[0][1])
        return list(found.values())


def _error_of(result: Any) -> BaseException:
    """The error in a failed result of a DeferredList."""
    error: BaseException = result.value
    return error


async def _nothing() -> None:
    return None


def _short(error: Exception) -> str:
    """One line for what treq and Twisted raise."""
    reasons = getattr(error, "reasons", None)
    if reasons:
        error = reasons[0].value
    return " ".join(str(error).split())[:200] or type(error).__name__
