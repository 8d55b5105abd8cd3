"""HTTP requests to one discovery, and the errors that refusals, failures and foreign programs become."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

from dmsg.base.printable import MAX_PEER_TEXT, shorten, without_userinfo
from dmsg.discovery.entries.dialects import Dialect
from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.entries.recognition import COMMON_PATH, describe_foreign, is_foreign, recognise
from dmsg.errors import DiscoveryError, DmsgError, EntryError, EntryNotFound, WrongDiscovery
from dmsg.keys import PubKey
from dmsg.net.tls_errors import tls_error_text
from dmsg.net.web.plain_client import PlainClient, is_plain
from dmsg.net.web.response import AnswerTooLong, parse_json

if TYPE_CHECKING:
    from dmsg.net.web.fetch import TreqRequests

MAX_ANSWER = 1024 * 1024
"""Maximum size of an answer in bytes; a longer answer is an error."""


class DiscoveryRequests:
    """Requests to one discovery.

    :param url: base URL, without a slash at its end.
    :param timeout: seconds that one request may take.
    :param http: treq client to use in place of the usual HTTP client; None for the usual one.
    :ivar shown_url: URL without credentials, for messages and logs.
    :ivar is_closing: whether requests that fail are to say that this program has closed its connections.
    """

    def __init__(self, reactor: IReactorTime, url: str, timeout: float, http: Any) -> None:
        self.shown_url = without_userinfo(url)
        self._timeout = timeout
        self._http = _http_client(reactor, url, timeout, http)
        self._recognised_for: set[bool] = set()
        """Values of ``path_is_unknown`` with which :meth:`_recognise` has already been called, and has found no
        discovery of another kind at the URL. A further call with such a value makes no request.
        """
        self.is_closing = False

    def close(self) -> Deferred[None]:
        """Close the pooled connections."""
        return self._http.close()

    async def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Send a request, and return the status and the body of the answer.

        :raises DiscoveryError: no answer arrived, or a program that is no discovery has answered.
        """
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
            why = "this program has closed its connection to it" if self.is_closing else _short(error, self._timeout)
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
        what = recognise(*await self.request("GET", COMMON_PATH), path_is_unknown=path_is_unknown)
        if what:
            raise WrongDiscovery(f"discovery {self.shown_url}: {what}", 404)
        self._recognised_for.add(path_is_unknown)

    async def json(self, method: str, path: str, body: bytes | None) -> object:
        """Send a request, and return the decoded JSON of the answer.

        :raises DiscoveryError: no answer with status 200 and JSON arrived.
        """
        status, answer = await self.request(method, path, body)
        if status != 200:
            raise self.error(status, answer)
        try:
            return parse_json(answer)
        except ValueError:
            raise DiscoveryError(f"discovery {self.shown_url}: its answer is not JSON") from None

    def error(self, status: int, body: bytes) -> DiscoveryError:
        """Return the error for an answer that refuses a request."""
        try:
            message = shorten(str(parse_json(body)["message"]), MAX_PEER_TEXT)
        except (ValueError, KeyError, TypeError):
            message = describe_foreign(status)
        return DiscoveryError(f"discovery {self.shown_url}: {message} ({status})", status)

    async def entry(self, key: PubKey) -> Entry:
        """Fetch and verify the entry of ``key``; see ``Lookup.entry``."""
        status, body = await self.request("GET", f"/discovery/entries/{key}")
        if status == 404:
            # Only the status is examined, because other implementations have another text in the answer.
            advice = "is its program running, and does it use this discovery?"
            raise EntryNotFound(f"discovery {self.shown_url} has no entry of {key.short}: {advice}", key.hex())
        if status != 200:
            raise self.error(status, body)
        try:
            return _parse_entry(body, key)
        except EntryError as error:
            raise DiscoveryError(f"discovery {self.shown_url}: entry of {key.short} is refused: {error}") from None


def _parse_entry(body: bytes, key: PubKey) -> Entry:
    """Parse and verify the entry of ``key`` from discovery. Return the entry in the form in which it was signed."""
    entry = Dialect.SEED.decode_signed(body)
    if entry.static != key.hex():
        raise EntryError("the entry belongs to another key")
    return entry


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
