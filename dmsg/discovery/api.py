"""The HTTP face of discovery: routes and the error map, nothing else.

Two families of paths: those of the seed documents (``/discovery/...``) with
clear status codes, and those of the 2019 client (``/messaging-discovery/...``)
with that service's codes and bodies, to the letter.
"""

from __future__ import annotations

import importlib.resources
import json
import math
import sqlite3
from collections.abc import Callable
from typing import Any

from klein import Klein
from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.iweb import IRequest
from twisted.web.resource import IResource
from twisted.web.server import Site
from werkzeug.exceptions import HTTPException

from dmsg.base.buckets import RateLimit
from dmsg.discovery.entry import (
    MAX_ENTRY_SIZE,
    REFRESH,
    REFRESHING,
    Entry,
    EntryInvalid,
    EntrySignatureError,
    decode_verified,
    features,
)
from dmsg.discovery.gojson import NULL_KEY, EntryDecodeError, Form, is_key_text
from dmsg.discovery.quota import ServerQuota
from dmsg.discovery.ranking import RankingFile
from dmsg.discovery.rules import decode_deletion
from dmsg.discovery.store import KINDS, Terms
from dmsg.discovery.telemetry import DiscoveryTelemetry
from dmsg.errors import EntryNotFound, KeyFormatError
from dmsg.keys import PubKey
from dmsg.net.addresses import block_of, is_public
from dmsg.net.web.site import answer, answer_http_error, gated_site
from dmsg.telemetry.metrics import Metrics
from dmsg.telemetry.service import Telemetry

_log = Logger()

MAX_SERVERS = 10
"""Servers in one answer of available_servers, by default."""
SERVER_TTL = 120.0
"""Seconds without a refresh after which a server is not listed, by default."""
OF_PLACE = 64 * 1024 * 1024
"""Bytes of entries that one public address, or block, may have posted; then its oldest are dropped."""
CLIENT_TTL = 2 * 3600.0
"""Seconds after its last POST when the entry of a client is dropped that posts it every half hour."""
REFRESHING_TTL = 86400.0
"""Seconds after its last POST when the entry of a server is dropped that posts it every half minute."""
ENTRY_TTL = 90 * 86400.0
"""Seconds after its last POST when any other entry is dropped, by default; a server's: after it was last seen."""
MAX_VERSION = 256
"""Characters of an entry's version."""
MAX_SERVER_SIZE = 16 * 1024
"""Bytes of an entry with a server: a list of them is to be no longer than clients take."""
RANKED_POOL = 512
"""Live servers of which a ranking chooses."""
RATE = 200.0
"""Requests a second and address, by default."""
BURST = 1000.0
"""Requests of an address at once, by default: some hundred clients behind one address that all start now."""
POST_RATE = 50.0
"""Entries a second that an address may post, by default; those that cannot be read or verified count as requests."""
POST_BURST = 1000.0
"""Entries that an address may post at once, by default."""
WORTHLESS = 5
"""Requests that an entry counts for which cannot be read, or is not signed by its key: verifying is what costs."""
GO_PATIENCE = 5.0
"""Seconds that a request on the paths of 2019 is delayed rather than refused: those clients know no 429, and a server
of then gives up after 10."""

NOT_FOUND = "entry of public key is not found"
BAD_INPUT = "error bad input"
UNEXPECTED = "something unexpected happened"
BAD_SIGNATURE = "invalid signature"
WROTE_FIRST = "wrote a new entry"
WROTE_NEXT = "wrote new entry iteration"


class TooManyServers(Exception):
    """Somebody has as many servers listed as he may."""


class StoreUnavailable(Exception):
    """The store failed; the client may try again."""


def _json(request: IRequest, body: bytes, status: int = 200) -> bytes:
    request.setResponseCode(status)
    request.setHeader(b"content-type", b"application/json")
    return body


def _path_key(text: str) -> str:
    """The key in a path, lower case.  One that is no point of the curve has no entry.

    :raises KeyFormatError: it does not look like a key.
    """
    try:
        return PubKey.from_hex(text).hex()
    except KeyFormatError:
        if is_key_text(text):
            return text.lower()
        raise


def _check_size(entry: Entry) -> None:
    """As it is served: characters that JSON escapes are six times as long there.

    :raises EntryInvalid: it is too long.
    """
    if len(entry.version) > MAX_VERSION:
        raise EntryInvalid(f"version has more than {MAX_VERSION} characters")
    size = len(entry.to_json())
    if size > MAX_ENTRY_SIZE or (entry.server is not None and size > MAX_SERVER_SIZE):
        raise EntryInvalid("entry is too long")


class DiscoveryAPI:
    """Maps HTTP onto an entry store.

    :param store: provides :class:`~dmsg.discovery.store.IEntryStore`.
    """

    _app = Klein()

    def __init__(
        self,
        reactor: IReactorTime,
        store: Any,
        wall_clock: Any,
        metrics: Metrics,
        *,
        max_servers: int = MAX_SERVERS,
        server_ttl: float = SERVER_TTL,
        ranking: RankingFile | None = None,
        telemetry: Telemetry | None = None,
        looks: Callable[[], object] | None = None,
        entry_ttl: float = ENTRY_TTL,
        of_place: float = OF_PLACE,
    ) -> None:
        """:param wall_clock: returns seconds since 1970; kept apart from the
            reactor's clock because stores outlive the process.
        :param looks: servers are looked at before they are listed; told that one has come.
        """
        self._reactor = reactor
        self._store = store
        self._now = wall_clock
        self._metrics = metrics
        self._max_servers = max_servers
        self._server_ttl = server_ttl
        self._ranking = ranking
        self._telemetry = DiscoveryTelemetry(telemetry, wall_clock)
        self._looks = looks
        self._entry_ttl, self._of_place = entry_ttl, of_place
        self._quota = ServerQuota()
        self._failing: set[str] = set()
        self._full = False
        self.charge: Callable[[IRequest, float], None] = lambda request, requests: None
        """Told of requests that were worth nothing."""
        self.client_of: Callable[[IRequest], str] = lambda request: str(getattr(request.getClientAddress(), "host", ""))
        """Where the client of a request is."""
        self.requests = 0
        """Requests that came to a route."""
        self._openapi = importlib.resources.files("dmsg.discovery").joinpath("openapi.json").read_bytes()

    def resource(self) -> IResource:
        """The root resource."""
        root: IResource = self._app.resource()
        return root

    # --- the store, with its failures named ---

    def _ask(self, operation: str, *arguments: Any) -> Deferred[Any]:
        """A question to the store, by the name of its method."""
        seconds = self._metrics.store_seconds.labels(operation)
        began = self._reactor.seconds()
        result: Deferred[Any] = maybeDeferred(getattr(self._store, operation), *arguments)

        def measured(value: Any) -> Any:
            seconds.observe(self._reactor.seconds() - began)
            return value

        result.addBoth(measured)

        def answered(value: Any) -> Any:
            if operation in self._failing:
                self._failing.discard(operation)
                if operation == "post":
                    self._full = False
                _log.info("the store answers again ({operation})", operation=operation)
            return value

        def failed(failure: Failure) -> Failure:
            # cancelled: who asked is gone
            if failure.check(EntryNotFound, EntryInvalid, CancelledError):
                return failure
            # one line for all requests of a time in which it is away
            if operation not in self._failing:
                self._failing.add(operation)
                if operation == "post":
                    # a database that is read and not written: its disk is full, or not its own
                    self._full = failure.check(sqlite3.Error) is not None
                if failure.type is not None and failure.type.__module__ in ("txredisapi", "sqlite3"):
                    error = f"{failure.type.__name__}: {failure.value}"
                    _log.error("the store fails ({operation}): {error}", operation=operation, error=error)
                else:
                    _log.failure("the store fails", failure)
            raise StoreUnavailable from None

        return result.addCallbacks(answered, failed)

    def _post(self, request: IRequest, form: Form) -> Deferred[bytes]:
        self.requests += 1
        entry = decode_verified(request.content.read(), form)
        _check_size(entry)
        poster = self.client_of(request)
        if entry.server is not None:
            refusal = self._quota.refusal(entry.static, poster, self._now())
            if refusal is not None:
                raise TooManyServers(refusal)
        terms = self._terms(entry, form, poster)

        def posted(first: bool) -> bytes:
            result = "first" if first else "next"
            self._metrics.posted.labels(result).inc()
            self._telemetry.posted(entry, result)
            if entry.server is not None:
                self._quota.count(entry.static, poster, self._now())
                if self._looks is not None:
                    self._looks()
            return answer(request, 200, WROTE_FIRST if first else WROTE_NEXT)

        return self._ask("post", entry, self._now(), terms).addCallback(posted)

    def _terms(self, entry: Entry, form: Form, poster: str) -> Terms:
        """How an entry is kept: by what its owner says, and where it comes from."""
        # a mark that another program left does not make a program of 2019 refresh
        marks = features(entry.version) if form is Form.SEED else frozenset()
        refreshes = bool(marks & REFRESHING)
        lasts = 0.0
        if entry.server is not None:
            # one that is looked at lasts longer when it was seen
            lasts = REFRESHING_TTL if refreshes or self._looks is not None else self._entry_ttl
        if entry.client is not None or entry.server is None:
            lasts = max(lasts, CLIENT_TTL if REFRESH in marks else self._entry_ttl)
        # who is beside discovery may be a proxy, or everybody
        most = self._of_place if is_public(poster) else math.inf
        return Terms(refreshes, self._looks is None, block_of(poster), most, lasts)

    def _available(self) -> Deferred[list[bytes]]:
        """Live servers; behind them those that say nothing and were there at the last look."""
        self.requests += 1
        return Deferred.fromCoroutine(self._find_available())

    async def _find_available(self) -> list[bytes]:
        since = self._now() - self._server_ttl if self._server_ttl else -math.inf
        ranking, most = self._ranking, self._max_servers
        if ranking is None or ranking.current(self._now()) is None:
            servers: list[bytes] = await self._ask("available", most, since)
        else:
            # all that are ranked are in the draw, however many strangers are listed beside them
            servers = await self._ask("listed", ranking.some(RANKED_POOL, self._now()), since)
            known = set(servers)
            servers += [body for body in await self._ask("available", RANKED_POOL, since) if body not in known]
            servers = ranking.choose(servers, most, self._now())
        if len(servers) < most:
            servers += await self._ask("quiet", most - len(servers), since)
        # an earlier version took longer ones
        return [body for body in servers if len(body) <= MAX_SERVER_SIZE]

    # --- paths of the seed documents ---

    @_app.route("/discovery/entries", methods=["POST"])
    def post_entry(self, request: IRequest) -> Deferred[bytes]:
        """POST Entry."""
        return self._post(request, Form.SEED)

    @_app.route("/discovery/entries/<static>", methods=["GET"])
    def get_entry(self, request: IRequest, static: str) -> Deferred[bytes]:
        """GET Entry."""
        self.requests += 1
        return self._get(request, _path_key(static))

    def _get(self, request: IRequest, key: str) -> Deferred[bytes]:
        def absent(failure: Failure) -> Failure:
            if failure.check(EntryNotFound):
                self._telemetry.absent(request.getClientAddress(), key)
            return failure

        return self._ask("get", key).addCallbacks(lambda body: _json(request, body), absent)

    @_app.route("/discovery/entries/<static>", methods=["DELETE"])
    def delete_entry(self, request: IRequest, static: str) -> Deferred[bytes]:
        """Delete an entry by a statement that its key signed."""
        key = _path_key(static)
        deletion = decode_deletion(request.content.read())
        if deletion.static != key:
            raise EntryInvalid("static is not the key of the path")

        def deleted(_: None) -> bytes:
            self._metrics.posted.labels("deleted").inc()
            self._telemetry.deleted(key, deletion)
            return answer(request, 200, "deleted the entry")

        return self._ask("delete", deletion, self._now()).addCallback(deleted)

    @_app.route("/discovery/available_servers", methods=["GET"])
    def get_available_servers(self, request: IRequest) -> Deferred[bytes]:
        """GET Available Servers."""

        def found(servers: list[bytes]) -> bytes:
            if not servers:
                return answer(request, 404, "no server is available")
            return _json(request, b"[" + b",".join(servers) + b"]")

        return self._available().addCallback(found)

    # --- paths of the 2019 client ---

    @_app.route("/messaging-discovery/entry", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    @_app.route("/dmsg-discovery/entry", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    def go_redirect(self, request: IRequest) -> bytes:
        """Go's mux sends those without the slash to the one with it."""
        request.setResponseCode(301)
        request.setHeader(b"location", request.path + b"/")
        return b""

    @_app.route("/messaging-discovery/entry/", branch=True)
    @_app.route("/dmsg-discovery/entry/", branch=True)
    def go_entry(self, request: IRequest) -> Any:
        """POST is a POST whatever the rest of the path; all else gets the last segment's entry."""
        if request.method == b"POST":
            return self._go(request, lambda: self._post(request, Form.GO2019))
        text = request.path.rsplit(b"/", 1)[1].decode("latin-1")

        def get() -> Deferred[bytes]:
            # zeros of any length, also none, are the null key, which has no entry
            key = PubKey.from_hex(text).hex() if text.strip("0") else NULL_KEY
            return self._get(request, key)

        return self._go(request, get)

    @_app.route("/messaging-discovery/available_servers", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    @_app.route("/dmsg-discovery/available_servers", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    def go_available_servers(self, request: IRequest) -> Any:
        """``[]`` where the seed documents say 404."""
        return self._go(
            request,
            lambda: self._available().addCallback(lambda servers: _json(request, b"[" + b",".join(servers) + b"]")),
        )

    def _go(self, request: IRequest, act: Any) -> Any:
        """The 2019 service answers 500 to JSON that it cannot decode."""
        try:
            return act()
        except EntryDecodeError as error:
            self._refused(request, "undecodable", error)
            self.charge(request, WORTHLESS)
            return answer(request, 500, UNEXPECTED)
        except KeyFormatError:
            return answer(request, 400, BAD_INPUT)

    # --- about the service ---

    @_app.route("/openapi.json", methods=["GET"])
    def openapi(self, request: IRequest) -> bytes:
        """The description of the paths of the seed documents."""
        return _json(request, self._openapi)

    @_app.route("/health", methods=["GET"])
    def health(self, request: IRequest) -> Deferred[bytes]:
        """200 when the store answers, and took what it was given last."""

        def counted(count: int) -> bytes:
            status = "the store takes nothing" if self._full else "ok"
            body = json.dumps({"status": status, "entries": count}).encode()
            return _json(request, body, 200 if status == "ok" else 503)

        return self._ask("count").addCallback(counted)

    @_app.route("/metrics", methods=["GET"])
    def metrics(self, request: IRequest) -> Deferred[bytes]:
        """Prometheus text."""

        def counted(counts: dict[str, int]) -> Deferred[bytes]:
            self._metrics.entries.set(sum(counts.values()))
            for kind in KINDS:
                self._metrics.kinds.labels(kind).set(counts.get(kind, 0))
            return self._ask("size").addCallback(measured)

        def measured(size: int) -> bytes:
            self._metrics.entries_bytes.set(size)
            request.setHeader(b"content-type", self._metrics.content_type)
            return self._metrics.render()

        def unknown(failure: Failure) -> bytes:
            """What is counted here is true while the store is away, too."""
            failure.trap(StoreUnavailable)
            request.setHeader(b"content-type", self._metrics.content_type)
            return self._metrics.render()

        return self._ask("counts").addCallback(counted).addErrback(unknown)

    # --- errors ---

    def _refused(self, request: IRequest, kind: str, error: BaseException | None) -> None:
        self._metrics.refused.labels(kind).inc()
        self._telemetry.refused(request.getClientAddress(), kind)
        _log.debug("refused: {error}", error=str(error))

    @_app.handle_errors(EntryNotFound)
    def _not_found(self, request: IRequest, failure: Failure) -> bytes:
        return answer(request, 404, NOT_FOUND)

    @_app.handle_errors(KeyFormatError)
    def _bad_key(self, request: IRequest, failure: Failure) -> bytes:
        self._refused(request, "bad_key", failure.value)
        return answer(request, 400, f"{BAD_INPUT}: {failure.value}")

    @_app.handle_errors(EntryDecodeError)
    def _undecodable(self, request: IRequest, failure: Failure) -> bytes:
        self._refused(request, "undecodable", failure.value)
        self.charge(request, WORTHLESS)
        return answer(request, 400, f"{BAD_INPUT}: {failure.value}")

    @_app.handle_errors(EntrySignatureError)
    def _bad_signature(self, request: IRequest, failure: Failure) -> bytes:
        self.charge(request, WORTHLESS)
        self._refused(request, "signature", failure.value)
        return answer(request, 401, BAD_SIGNATURE)

    @_app.handle_errors(EntryInvalid)
    def _invalid(self, request: IRequest, failure: Failure) -> bytes:
        self._refused(request, "invalid", failure.value)
        return answer(request, 422, str(failure.value))

    @_app.handle_errors(TooManyServers)
    def _too_many(self, request: IRequest, failure: Failure) -> bytes:
        self._refused(request, "too_many_servers", failure.value)
        request.setHeader(b"retry-after", b"600")
        return answer(request, 429, str(failure.value))

    @_app.handle_errors(HTTPException)
    def _http(self, request: IRequest, failure: Failure) -> bytes:
        return answer_http_error(request, failure)

    @_app.handle_errors(StoreUnavailable)
    def _unavailable(self, request: IRequest, failure: Failure) -> bytes:
        request.setHeader(b"retry-after", b"1")
        return answer(request, 503, "the store does not answer")


def make_site(
    api: DiscoveryAPI,
    reactor: Any,
    metrics: Metrics,
    *,
    rate: float = RATE,
    burst: float = BURST,
    post_rate: float = POST_RATE,
    post_burst: float = POST_BURST,
    proxied: bool = False,
) -> Site:
    """The factory to listen with, see :func:`dmsg.net.web.site.gated_site`."""

    def refused(reason: str) -> None:
        metrics.refused.labels(reason).inc()

    def finished(request: Any, status: int, seconds: float) -> None:
        path = _path_label(request.path)
        metrics.requests.labels(path, str(status)).inc()
        metrics.seconds.labels(path).observe(seconds)
        metrics.delayed.set(gate.delayed)

    site = gated_site(
        api.resource(),
        reactor,
        refused,
        rate=rate,
        burst=burst,
        proxied=proxied,
        max_body=MAX_ENTRY_SIZE,
        patience=lambda request: GO_PATIENCE if request.path.startswith(_GO_PATHS) else 0.0,
        posts=RateLimit(post_rate if rate else 0.0, post_burst),
        is_post=lambda request: request.method == b"POST" and request.path.startswith(_POST_PATHS),
        finished=finished,
    )
    gate: Any = site.resource
    api.charge = gate.charge
    api.client_of = gate.client_of
    return site


_GO_PATHS = (b"/messaging-discovery/", b"/dmsg-discovery/")
_POST_PATHS = (b"/discovery/entries", b"/messaging-discovery/entry/", b"/dmsg-discovery/entry/")
_PATHS = frozenset(
    {
        "/discovery/entries",
        "/discovery/available_servers",
        "/messaging-discovery/available_servers",
        "/dmsg-discovery/available_servers",
        "/health",
        "/metrics",
        "/openapi.json",
    }
)


def _path_label(path: bytes) -> str:
    """A path as metrics name it: strangers make no series of their own."""
    text = path.decode("latin-1")
    if text in _PATHS:
        return text
    for prefix in ("/discovery/entries/", "/messaging-discovery/entry/", "/dmsg-discovery/entry/"):
        if text.startswith(prefix):
            return prefix + "{key}"
    return "other"
