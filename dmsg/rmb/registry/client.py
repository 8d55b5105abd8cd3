"""Client of a registry service: verifies the entries that it gets, and follows the feed of changes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from urllib.parse import urlencode

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http_headers import Headers
from zope.interface import implementer

from dmsg.base.printable import without_userinfo
from dmsg.base.urls import check_url
from dmsg.errors import DmsgError
from dmsg.net.isolate import call_isolated
from dmsg.net.own_pauses import add_fair_timeout
from dmsg.net.pending import cancellable
from dmsg.net.retry import retry_delay
from dmsg.net.web.body import read_body
from dmsg.net.web.fetch import WebClient, make_pool
from dmsg.net.web.response import parse_json
from dmsg.rmb.errors import RegistryConflict, RegistryRefused, RegistryUnavailable, TwinNotFound
from dmsg.rmb.registry.interface import PAGE, TwinRegistry
from dmsg.rmb.twins.twin import Twin

TIMEOUT = 5.0
"""Timeout of one request in seconds."""
LONG_POLL_TIME = 25
"""Seconds for which the service is asked to keep a long poll for changes open."""
MAX_ANSWER = 4 * 1024 * 1024
"""Maximum size in bytes of an answer with many twins."""
MAX_TWIN_ANSWER = 64 * 1024
"""Maximum size in bytes of an answer with one twin."""
VERIFIED_AT_ONCE = 32
"""Maximum number of signatures that are verified in one reactor turn."""
POLL_PAUSE = 0.2
"""Seconds between an answer with changes and the next long poll. Changes made in between arrive together in one
answer."""
MAX_IDLE_CONNECTIONS = 16
"""Maximum number of idle connections to the service that are kept open."""

_log = Logger()


@implementer(TwinRegistry)
class HTTPRegistry:
    """Client of ``twistd rmb-registry``.

    The client verifies the signature of each entry with the key of the account in the entry.  So the service can
    withhold twins or return outdated entries, but it cannot forge an entry.

    :param url: URL of the service, such as ``http://127.0.0.1:9091``.
    """

    def __init__(self, reactor: IReactorTime, url: str, *, random: Random | None = None) -> None:
        """:raises ValueError: ``url`` is not a URL."""
        self.url = check_url(url).rstrip("/")
        self.shown_url = without_userinfo(self.url)
        self._reactor = reactor
        self._random = random or Random()
        self._pool = make_pool(reactor, limit=MAX_IDLE_CONNECTIONS)
        self._http = WebClient(reactor, self._pool, TIMEOUT)
        self._watchers: list[Callable[[Twin], None]] = []
        self._following: Deferred[None] | None = None
        self._closed = False

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, timeout: float = TIMEOUT, limit: int = MAX_TWIN_ANSWER
    ) -> dict[str, object]:
        headers = Headers({"content-type": ["application/json"]} if body is not None else {})
        try:
            request = self._http.request(method, f"{self.url}{path}", data=body, headers=headers)
            response = await cancellable(add_fair_timeout(request, timeout, self._reactor))
            answer = await cancellable(add_fair_timeout(read_body(response, limit), timeout, self._reactor))
            content = parse_json(answer)
        except CancelledError:
            raise
        except TimeoutError:
            raise RegistryUnavailable(f"{self.shown_url}: the registry did not answer within {timeout:g} s") from None
        except ValueError:
            raise RegistryUnavailable(f"{self.shown_url}: the answer is not JSON") from None
        except RegistryUnavailable:
            raise
        # When a connection is lost, Twisted raises exceptions of many types. So all types are caught.
        except Exception as error:
            reasons = getattr(error, "reasons", None)
            why = reasons[-1].value if reasons else error
            raise RegistryUnavailable(f"{self.shown_url}: {why or type(why).__name__}") from None
        message = content.get("message") if isinstance(content, dict) else None
        if response.code == 404:
            raise TwinNotFound(str(message or "twin not found"))
        if response.code == 409:
            raise RegistryConflict(str(message))
        if response.code in (400, 401, 413):
            raise RegistryRefused(str(message or response.code))
        if response.code != 200 or not isinstance(content, dict):
            raise RegistryUnavailable(f"{self.shown_url}: the registry answered with HTTP status {response.code}")
        return content

    def _parse_twin(self, content: object) -> Twin:
        try:
            twin = Twin.from_dict(content)
            twin.check()
        except (RegistryRefused, ValueError) as error:
            # from_dict raises ValueError, for example, for a text with an unpaired surrogate.
            raise RegistryUnavailable(
                f"{self.shown_url}: the registry answered with a twin whose signature is wrong: {error}"
            ) from None
        return twin

    async def _get(self, twin: int) -> Twin:
        found = self._parse_twin(await self._ask("GET", f"/twins/{twin}"))
        if found.id != twin:
            raise RegistryUnavailable(f"{self.shown_url}: the registry answered with a twin that was not requested")
        return found

    def get(self, twin: int) -> Deferred[Twin]:
        return Deferred.fromCoroutine(self._get(twin))

    async def _by_account(self, account: bytes) -> int:
        found = self._parse_twin(await self._ask("GET", f"/twins?account={account.hex()}"))
        if found.account != account:
            raise RegistryUnavailable(f"{self.shown_url}: the registry answered with a twin that was not requested")
        return found.id

    def id_by_account(self, account: bytes) -> Deferred[int]:
        return Deferred.fromCoroutine(self._by_account(account))

    async def _put(self, statement: Twin) -> Twin:
        return self._parse_twin(await self._ask("POST", "/twins", statement.to_json()))

    def put(self, statement: Twin) -> Deferred[Twin]:
        return Deferred.fromCoroutine(self._put(statement))

    async def _page(self, after: int, limit: int) -> list[Twin]:
        query = urlencode({"after": after, "most": min(limit, PAGE)})
        content = await self._ask("GET", f"/twins?{query}", limit=MAX_ANSWER)
        return [self._parse_twin(one) for one in _list(content)]

    def twins(self, after: int, limit: int) -> Deferred[list[Twin]]:
        return Deferred.fromCoroutine(self._page(after, limit))

    # --- the change feed ---

    def watch(self, on_change: Callable[[Twin], None]) -> None:
        self._watchers.append(on_change)
        if self._following is None:
            self._following = Deferred.fromCoroutine(self._follow())
            self._following.addErrback(self._not_following)

    def _not_following(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            _log.failure("unhandled error: changes of twins are not followed any more", failure)

    async def _follow(self) -> None:
        since: int | None = None
        failures = 0
        while not self._closed:
            try:
                query = "" if since is None else f"?{urlencode({'since': since, 'wait': LONG_POLL_TIME})}"
                content = await self._ask("GET", f"/changes{query}", timeout=LONG_POLL_TIME + TIMEOUT, limit=MAX_ANSWER)
                following = content.get("next")
                if isinstance(following, bool) or not isinstance(following, int):
                    raise RegistryUnavailable(f"{self.shown_url}: its list of changes has no valid number 'next'")
                for number, one in enumerate(_list(content)):
                    if number and number % VERIFIED_AT_ONCE == 0:
                        # Each entry costs the verification of a signature, so one reactor turn processes only some of
                        # them.
                        await deferLater(self._reactor, 0)
                    twin = self._parse_twin(one)
                    for changed in self._watchers:
                        call_isolated(changed, twin)
                # A service that has lost its database counts from 0 again. So its number is used even if it is lower
                # than before.
                since = following
                failures = 0
                if len(_list(content)) < PAGE:
                    await deferLater(self._reactor, POLL_PAUSE)
            except CancelledError:
                raise
            # All exceptions are caught: the next long poll must follow even if an answer could not be processed.
            except Exception as error:
                if self._closed:
                    return
                if not isinstance(error, DmsgError):
                    _log.failure("unhandled error in an answer of the registry", Failure())
                failures += 1
                if failures == 1:
                    _log.warn("the registry's list of changed twins cannot be read now: {error}", error=str(error))
                await deferLater(self._reactor, retry_delay(failures, self._random))

    async def _close(self) -> None:
        self._closed = True
        if self._following is not None:
            self._following.cancel()
        await self._pool.closeCachedConnections()

    def close(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._close())


def _list(content: dict[str, object]) -> list[object]:
    twins = content.get("twins")
    return twins[:PAGE] if isinstance(twins, list) else []
