"""Client of one discovery; entries are verified before they are used.

A :class:`Lookup` is the client of one discovery. A :class:`~dmsg.discovery.lookup.lookups.Lookups` is the client of
several: it reads from all of them and returns the newest entry, and it writes to all of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.error import (
    ConnectionDone,
    ConnectionLost,
    ConnectionRefusedError,
    DNSLookupError,
    NoRouteError,
    TimeoutError as TwistedTimeoutError,
)
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.printable import MAX_PEER_TEXT, shorten, without_userinfo
from dmsg.base.units import human_time
from dmsg.discovery.entries.dialects import Dialect
from dmsg.discovery.entries.entry import VERSION, ClientMeta, Entry, ServerMeta, Successor, with_feature
from dmsg.discovery.entries.gojson import INT64
from dmsg.discovery.entries.recognition import COMMON_PATH, describe_foreign, is_foreign, recognise
from dmsg.discovery.entries.rules import WRONG_TIME, Deletion, decode_deletion, next_sequence
from dmsg.discovery.lookup.server_list import ServerList, parse_server_list
from dmsg.errors import DiscoveryError, DmsgError, EntryError, EntryNotFound, WrongDiscovery
from dmsg.keys import PubKey, SecKey
from dmsg.net.pending import cancellable
from dmsg.net.tls_errors import tls_error_text
from dmsg.net.web.plain_client import PlainClient, is_plain
from dmsg.net.web.response import AnswerTooLong, parse_json

if TYPE_CHECKING:
    from dmsg.net.web.fetch import TreqRequests

T = TypeVar("T")

TIMEOUT = 10.0
"""Default timeout of a request, in seconds."""
MAX_ANSWER = 1024 * 1024
"""Maximum size of an answer in bytes; a longer answer is an error."""
UPDATE_ATTEMPTS = 4
"""Maximum number of attempts at a change of an entry. An attempt fails if another program posts an entry of the same
key in the meantime.
"""
_REFUSED = (400, 401)
"""HTTP status codes of a discovery that does not accept the form in which an entry was signed."""

_log = Logger()


def _parse_entry(body: bytes, key: PubKey | None = None) -> Entry:
    """Parse and verify an entry from discovery. Return the entry in the form in which it was signed."""
    entry = Dialect.SEED.decode_signed(body)
    if key is not None and entry.static != key.hex():
        raise EntryError("the entry belongs to another key")
    return entry


class _Deleted(DiscoveryError):
    """Error: the posted entry is dated before the deletion of an earlier entry of its key.

    :ivar timestamp: date of the deletion, in nanoseconds since 1970. The key's owner has signed the deletion, so nobody
        else can have forged the date.
    """

    def __init__(self, text: str, timestamp: int) -> None:
        super().__init__(text, 422)
        self.timestamp = timestamp


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
        self.shown_url = without_userinfo(self.url)
        """URL without credentials, for messages and logs."""
        self._reactor: IReactorTime = reactor
        self._timeout = timeout
        self._date = date or time.time_ns
        self._http = _http_client(reactor, self.url, timeout, http)
        self._recognised_for: set[bool] = set()
        """Values of ``path_is_unknown`` with which :meth:`_recognise` has already been called, and has found no
        discovery of another kind at the URL. A further call with such a value makes no request.
        """
        self._under_way: dict[Deferred[Any], None] = {}
        self._closed = False
        self._port_signed = True
        """Whether this client signs servers' entries with the field ``port``. The value changes if discovery accepts
        only the other form.
        """
        self._posted_entries: dict[PubKey, Entry] = {}
        """Last entry that :meth:`update` posted, by key."""
        self._sent_entries: dict[PubKey, Entry] = {}
        """Last entry that :meth:`update` sent, by key. Discovery may have stored it although no answer arrived."""

    def entry(self, key: PubKey) -> Deferred[Entry]:
        """Fetch and verify the entry of ``key``.

        Fails with :class:`~dmsg.errors.EntryNotFound` or
        :class:`~dmsg.errors.DiscoveryError`.
        """
        return self._ask(self._entry(key))

    def available_servers(self) -> Deferred[ServerList]:
        """Fetch the entries of the servers that discovery lists, in random order. Entries that fail verification are
        left out, and the list says why.
        """
        return self._ask(self._available_servers())

    def post(self, entry: Entry) -> Deferred[None]:
        """Post a signed entry.  Fails with :class:`~dmsg.errors.DiscoveryError`."""
        return self._ask(self._post(entry))

    def update(self, key: SecKey, make: Callable[[Entry], Entry]) -> Deferred[Entry]:
        """Replace the entry of ``key`` by its next entry, and fire with that entry.

        :param make: function that returns the next entry, unsigned. Its argument is the present entry with the next
            sequence and a later timestamp; for a key without an entry, an entry without content.
        """
        return self._ask(self._update(key, make))

    def delete(self, key: SecKey) -> Deferred[None]:
        """Delete the entry of ``key``, even if another program has posted it. Fails with EntryNotFound if there is
        none."""
        return self._ask(self._delete(key))

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
        return self._ask(self._withdraw(key, half, frozenset(features)))

    def ask(self, method: str, path: str, body: bytes | None = None) -> Deferred[object]:
        """Send a request for which this class has no method of its own, and return the decoded JSON of the answer.

        Fails with :class:`~dmsg.errors.DiscoveryError`, whose ``status`` is that of an answer other than 200.
        """
        return self._ask(self._json(method, path, body))

    @property
    def reactor(self) -> IReactorTime:
        """Reactor that provides the clock for timeouts."""
        return self._reactor

    def is_posted_here(self, entry: Entry) -> bool:
        """Whether ``entry`` is the last entry of its key that :meth:`update` posted here, or the last one that it sent,
        even if no answer arrived.
        """
        return any(ours.signature == entry.signature for ours in self._own_entries(entry.key))

    def _own_entries(self, key: PubKey) -> list[Entry]:
        """Return the last entry of a key that :meth:`update` posted, and the last one that it sent."""
        return [table[key] for table in (self._posted_entries, self._sent_entries) if key in table]

    def _forget_own(self, key: PubKey) -> None:
        """Forget the entries of a key that :meth:`update` posted or sent, because discovery has none of them."""
        self._posted_entries.pop(key, None)
        self._sent_entries.pop(key, None)

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
        self._closed = True
        for asked in list(self._under_way):
            asked.cancel()
        return self._http.close()

    # --- coroutines of the public methods ---

    async def _request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        headers = {"accept": "application/json"}
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            status, answer = await self._http.request(method, path, headers, body)
        except AnswerTooLong:
            raise DiscoveryError(f"discovery {self.shown_url}: answer is longer than {MAX_ANSWER} bytes") from None
        except DiscoveryError:
            raise
        except DmsgError as error:  # A proxy refused the request, or the headers of the answer were too long.
            raise DiscoveryError(f"discovery {self.shown_url}: {error}") from None
        except Exception as error:
            why = "this program has closed its connection to it" if self._closed else _short(error, self._timeout)
            raise DiscoveryError(f"discovery {self.shown_url}: {why}") from None
        if path != COMMON_PATH and is_foreign(status, answer):
            # A discovery of this network answers 404 to a GET of an entry that it does not have. To any other request,
            # only a program of another kind answers 404.
            await self._recognise(path_is_unknown=method != "GET" or path == "/discovery/available_servers")
        return status, answer

    async def _recognise(self, *, path_is_unknown: bool) -> None:
        """Find out which program answers at this URL, with one more request.

        :param path_is_unknown: whether the program has answered 404 for a path that every discovery of this network
            has.
        :raises WrongDiscovery: the program is a discovery of another kind.
        """
        if path_is_unknown in self._recognised_for:
            return
        what = recognise(*await self._request("GET", COMMON_PATH), path_is_unknown=path_is_unknown)
        if what:
            raise WrongDiscovery(f"discovery {self.shown_url}: {what}", 404)
        self._recognised_for.add(path_is_unknown)

    async def _json(self, method: str, path: str, body: bytes | None) -> object:
        status, answer = await self._request(method, path, body)
        if status != 200:
            raise self._error(status, answer)
        try:
            return parse_json(answer)
        except ValueError:
            raise DiscoveryError(f"discovery {self.shown_url}: its answer is not JSON") from None

    def _error(self, status: int, body: bytes) -> DiscoveryError:
        try:
            message = shorten(str(parse_json(body)["message"]), MAX_PEER_TEXT)
        except (ValueError, KeyError, TypeError):
            message = describe_foreign(status)
        return DiscoveryError(f"discovery {self.shown_url}: {message} ({status})", status)

    async def _entry(self, key: PubKey) -> Entry:
        status, body = await self._request("GET", f"/discovery/entries/{key}")
        if status == 404:
            # Only the status is examined, because other implementations have another text in the answer.
            advice = "is its program running, and does it use this discovery?"
            raise EntryNotFound(f"discovery {self.shown_url} has no entry of {key.short}: {advice}", key.hex())
        if status != 200:
            raise self._error(status, body)
        try:
            return _parse_entry(body, key)
        except EntryError as error:
            raise DiscoveryError(f"discovery {self.shown_url}: entry of {key.short} is refused: {error}") from None

    async def _available_servers(self) -> ServerList:
        status, body = await self._request("GET", "/discovery/available_servers")
        if status == 404 and not is_foreign(status, body):
            # A discovery without servers answers 404 with JSON. A web server that is no discovery would answer with an
            # HTML page.
            return ServerList()
        if status != 200:
            raise self._error(status, body)
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

    async def _post(self, entry: Entry) -> None:
        status, body = await self._request("POST", "/discovery/entries", entry.to_json())
        if status == 200:
            return
        error = self._error(status, body)
        deletion = _deletion_in(body, entry) if status == 422 else None
        raise error if deletion is None else _Deleted(str(error), deletion.timestamp)

    async def _update(self, key: SecKey, make: Callable[[Entry], Entry]) -> Entry:
        attempts = 0
        refused: DiscoveryError | None = None
        deleted = 0
        """Date of the deletion of an earlier entry of the key, in nanoseconds since 1970; 0 if unknown."""
        # The first attempt is based on the last entry that this client posted, which saves a request for the present
        # entry. If another program has posted since then, the POST fails, and the next attempt fetches the entry.
        trusts = key.public in self._posted_entries
        while True:
            client: ClientMeta | None = None
            server: ServerMeta | None = None
            version = VERSION
            successor: Successor | None = None
            sequence, timestamp = 0, deleted and deleted + 1
            try:
                present = self._posted_entries[key.public] if trusts else await self._entry(key.public)
            except EntryNotFound:
                pass
            else:
                version, client, server = present.version, present.client, present.server
                successor = present.successor
                sequence, timestamp = next_sequence(present.sequence), present.timestamp + 1
            blank = Entry(
                version, sequence, max(self._date(), timestamp), key.public.hex(), client, server, successor=successor
            )
            entry = self._in_form(make(blank)).sign(key)
            self._sent_entries[key.public] = entry
            try:
                await self._post(entry)
            except DiscoveryError as error:
                if trusts and error.status in (*_REFUSED, 422):
                    trusts = False
                    continue
                if refused is not None and error.status in _REFUSED:
                    self._port_signed = not self._port_signed
                    raise refused from None
                if error.status in _REFUSED and entry.server is not None and refused is None:
                    # A discovery that follows the seed document verifies a server's signature without ``port``. So the
                    # entry is posted once more in the other form.
                    self._port_signed = not self._port_signed
                    refused = error
                    continue
                # Status 422 means that another program has meanwhile posted or deleted an entry of this key, so the
                # loop tries again.
                attempts += 1
                if error.status != 422 or attempts == UPDATE_ATTEMPTS:
                    raise self._with_clock(error, entry) from None
                if isinstance(error, _Deleted) and entry.timestamp <= error.timestamp < INT64 - 1:
                    self._tell_of_clock(entry, error.timestamp)
                    deleted = error.timestamp
            else:
                if refused is not None:
                    form = "with" if self._port_signed else "without"
                    _log.info(
                        "{url} accepts servers' entries {with_or_without} the field 'port'",
                        url=self.shown_url,
                        with_or_without=form,
                    )
                self._posted_entries[key.public] = entry
                return entry

    def _tell_of_clock(self, entry: Entry, deleted: int) -> None:
        _log.warn(
            "{url}: an entry of {key} was deleted by a machine whose clock was {much} ahead of this machine's, and the "
            "new entry is dated after the deletion; is the clock of this machine right?",
            url=self.shown_url,
            key=entry.key.short,
            much=human_time(round((deleted - entry.timestamp) / 1e9)),
        )

    @staticmethod
    def _with_clock(error: DiscoveryError, entry: Entry) -> DiscoveryError:
        """Return ``error`` with advice about clocks, if an earlier version of discovery refused a key's first entry
        because of its date. Such a version requires that the entry is newer than the deletion of the key's previous
        entry, but does not report the date of the deletion.
        """
        if entry.sequence or isinstance(error, _Deleted) or WRONG_TIME not in str(error):
            return error
        why = "an entry of this key was deleted by a clock that was ahead; is the clock of this machine right?"
        return DiscoveryError(f"{error}: {why} Discovery forgets the deletion after a day", error.status)

    def _in_form(self, entry: Entry) -> Entry:
        """Return ``entry`` in the form that this discovery accepts: a server's entry with or without ``port``."""
        if self._port_signed or entry.server is None:
            return entry
        return replace(entry, server=replace(entry.server, port=None))

    async def _delete(self, key: SecKey) -> None:
        present = await self._entry(key.public)
        deletion = Deletion(present.static, present.sequence, max(self._date(), present.timestamp + 1)).sign(key)
        status, body = await self._request("DELETE", f"/discovery/entries/{key.public}", deletion.to_json())
        if status == 404:
            raise EntryNotFound(f"discovery {self.shown_url} has no entry of {key.public.short}", key.public.hex())
        if status != 200:
            raise self._error(status, body)
        self._forget_own(key.public)

    async def _withdraw(self, key: SecKey, half: str, features: frozenset[str]) -> bool:
        for attempt in range(1, UPDATE_ATTEMPTS + 1):
            present = await self._entry(key.public)
            if not self._is_ours(present, half):
                return False
            other = present.client if half == "server" else present.server
            try:
                if other is None:
                    await self._delete_or_empty(key, present)
                else:
                    await self._post(self._without_half(present, half, features).sign(key))
            except DiscoveryError as error:
                # Status 422 means that a program has posted meanwhile, so the loop checks again whose entry it is.
                if error.status != 422 or attempt == UPDATE_ATTEMPTS:
                    raise
            else:
                self._forget_own(key.public)
                return True
        raise AssertionError("unreachable")

    def _is_ours(self, present: Entry, half: str) -> bool:
        return any(self._has_half(present, ours, half) for ours in self._own_entries(present.key))

    @staticmethod
    def _has_half(present: Entry, posted: Entry, half: str) -> bool:
        """Whether the entry in discovery has the half of an entry that this program has posted."""
        if posted.signature == present.signature:
            return True
        # Another program has posted this entry, but it may contain the half that this program has posted. A client and
        # a server with the same key each copy the other's half when they post.
        if half == "client":
            return present.server is not None and present.client == posted.client
        shared = present.client is not None and present.server is not None and posted.server is not None
        return shared and present.server.address == posted.server.address  # type: ignore[union-attr]

    def _without_half(self, present: Entry, half: str, features: frozenset[str]) -> Entry:
        version = present.version
        for feature in features:
            version = with_feature(version, feature, present=False)
        left = replace(
            present,
            version=version,
            sequence=next_sequence(present.sequence),
            timestamp=max(self._date(), present.timestamp + 1),
            client=None if half == "client" else present.client,
            server=None if half == "server" else present.server,
        )
        return self._in_form(left)

    async def _delete_or_empty(self, key: SecKey, present: Entry) -> None:
        """Delete an entry. If this discovery does not support deletion, post an entry without servers and without free
        connections in its place.
        """
        try:
            await self._delete(key)
        except DiscoveryError as error:
            if error.status not in (405, 501):
                raise
            empty = replace(
                present,
                sequence=next_sequence(present.sequence),
                timestamp=max(self._date(), present.timestamp + 1),
                client=None if present.client is None else ClientMeta(()),
                server=None if present.server is None else replace(present.server, available_connections=0),
            )
            await self._post(self._in_form(empty).sign(key))


def _deletion_in(body: bytes, entry: Entry) -> Deletion | None:
    """Return the deletion that an answer contains, if the key of ``entry`` has signed it."""
    try:
        deletion = decode_deletion(json.dumps(parse_json(body)["deletion"]).encode())
    except (ValueError, KeyError, TypeError, EntryError):
        return None
    return deletion if deletion.static == entry.static else None


def _http_client(reactor: IReactorTime, url: str, timeout: float, http: Any) -> PlainClient | TreqRequests:
    """Return the HTTP client for a discovery."""
    if http is None and is_plain(url):
        return PlainClient(reactor, url, timeout=timeout, limit=MAX_ANSWER)

    from dmsg.net.web.fetch import TreqRequests

    return TreqRequests(reactor, url, timeout=timeout, limit=MAX_ANSWER, http=http)


def _short(error: BaseException, timeout: float) -> str:
    """Return the message of an error of treq or Twisted in one line."""
    reasons = getattr(error, "reasons", None)
    if reasons:
        error = reasons[0].value
    if isinstance(error, CancelledError | TimeoutError | TwistedTimeoutError):
        return f"no answer within {timeout:g} s"
    for kind, words in _CAUSES.items():
        if isinstance(error, kind):
            return words
    return tls_error_text(error) or shorten(str(error)) or type(error).__name__


_CAUSES: dict[type[Exception], str] = {
    ConnectionRefusedError: "connection refused",
    DNSLookupError: "there is no such host",
    NoRouteError: "there is no route to it",
    ConnectionLost: "the connection was lost",
    ConnectionDone: "the connection was closed before the answer",
}
