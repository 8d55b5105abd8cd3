"""HTTP interface of discovery: routes and error responses.

There are two groups of paths. The paths of the seed documents (``/discovery/...``) answer with the status codes that
these documents define. The paths for clients of 2019 (``/messaging-discovery/...``, ``/dmsg-discovery/...``) answer
exactly as the service of 2019 did.
"""

from __future__ import annotations

import importlib.resources
import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.iweb import IRequest
from twisted.web.resource import IResource
from werkzeug.exceptions import HTTPException

from dmsg.discovery.entries.dialects import Dialect
from dmsg.discovery.entries.entry import (
    MAX_ENTRY_SIZE,
    MAX_VERSION,
    REFRESH,
    REFRESHING,
    Entry,
    EntryInvalid,
    EntrySignatureError,
)
from dmsg.discovery.entries.gojson import NULL_KEY, EntryDecodeError, is_key_text
from dmsg.discovery.entries.recognition import VERSION_1_POSTED, is_version_1
from dmsg.discovery.entries.rules import Terms, decode_deletion
from dmsg.discovery.service.delegations import Delegations
from dmsg.discovery.service.nameplates import Nameplates, NameplatesInUse
from dmsg.discovery.service.reports import Reports
from dmsg.discovery.service.responses import entry_response, json_response, list_response
from dmsg.discovery.service.server_quota import ServerQuota, TooManyServers
from dmsg.discovery.service.settings import (
    CLIENT_TTL,
    DEFAULTS,
    INVALID_ENTRY_COST,
    MAX_SERVER_SIZE,
    RANKED_POOL,
    REFRESHING_TTL,
    DiscoverySettings,
)
from dmsg.discovery.service.telemetry import DiscoveryTelemetry
from dmsg.discovery.store.base import IEntryStore, StoreContended
from dmsg.discovery.store.measured import MeasuredStore, StoreUnavailable
from dmsg.errors import EntryNotFound, KeyFormatError
from dmsg.keys import PubKey
from dmsg.net.addresses import block_of, is_public
from dmsg.net.pending import detached
from dmsg.net.web.routes import QuickKlein
from dmsg.net.web.site import Requesters, answer, answer_http_error
from dmsg.pages.access import LOCAL_ONLY, NOT_PUBLIC
from dmsg.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from dmsg.telemetry.service import Telemetry

_log = Logger()

NOT_FOUND = "entry of public key is not found"
BAD_INPUT = "error bad input"
UNEXPECTED = "something unexpected happened"
BAD_SIGNATURE = "invalid signature"
WROTE_FIRST = "wrote a new entry"
WROTE_NEXT = "wrote new entry iteration"


_Route = TypeVar("_Route", bound=Callable[..., bytes | Deferred[bytes]])


def _path_key(text: str) -> str:
    """Return the key in a URL path, in lower case. A key that is no point of the curve is accepted; it has no entry.

    :raises KeyFormatError: the text does not look like a key.
    """
    return text.lower() if is_key_text(text) else PubKey.from_hex(text).hex()


def _check_size(entry: Entry) -> None:
    """Check the size of an entry in the form in which it is served. Escapes in that JSON can make a posted character
    six times as long.

    :raises EntryInvalid: the entry is too long.
    """
    if len(entry.version) > MAX_VERSION:
        raise EntryInvalid(f"version has more than {MAX_VERSION} characters")
    size = len(entry.to_json())
    if size > MAX_ENTRY_SIZE or (entry.server is not None and size > MAX_SERVER_SIZE):
        raise EntryInvalid("entry is too long")


_app = QuickKlein()
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
"""HTTP methods with which a path of 2019 may be requested; the service of 2019 did not distinguish them."""
_SEED_ENTRY = [path + "/<static>" for path in Dialect.SEED.entries]


def _on_all(
    paths: Iterable[str], methods: Sequence[str] | None = None, *, branch: bool = False
) -> Callable[[_Route], _Route]:
    """Return a decorator that registers a handler for several paths."""

    def routed(method: _Route) -> _Route:
        for path in paths:
            _app.route(path, methods=methods, branch=branch)(method)
        return method

    return routed


class DiscoveryAPI:
    """HTTP interface to an entry store.

    :ivar requests: number of requests that reached a route.
    :ivar reports: reports about the store.
    :ivar delegations: number of clients that name each server in their entries, according to recent POSTs.
    """

    _app = _app

    def __init__(
        self,
        reactor: IReactorTime,
        store: IEntryStore,
        clock: Callable[[], float],
        metrics: Metrics,
        settings: DiscoverySettings = DEFAULTS,
        *,
        wall_clock: Callable[[], float] | None = None,
        telemetry: Telemetry | None = None,
        checks: Callable[[], object] | None = None,
    ) -> None:
        """Set up the interface.

        :param clock: clock of the store, in seconds since 1970. The reactor's clock is not suitable, because stores
            outlive the process.
        :param wall_clock: clock for comparison with dates that other machines wrote; ``clock`` by default.
        :param checks: called when a server was posted, to check it soon; None if servers are listed without checks.
        """
        self._reactor = reactor
        self._entries = store
        self._store = MeasuredStore(reactor, store, metrics)
        self.reports = Reports(store, self._store, clock, metrics, settings)
        self._nameplates = Nameplates(reactor, store.nameplates, metrics, clock)
        self._now = clock
        self._wall_clock = wall_clock or clock
        self._metrics = metrics
        self._settings = settings
        self._telemetry = DiscoveryTelemetry(telemetry, self._wall_clock)
        self._checks = checks
        self._quota = ServerQuota()
        self.delegations = Delegations()
        self._posted = cache(metrics.posted.labels)
        self.requesters = Requesters(reactor, settings.rate, settings.burst, proxied=settings.proxied)
        self.charge = self.requesters.charge
        self.client_of = self.requesters.client_of
        self.requests = 0
        self._openapi = importlib.resources.files("dmsg.discovery.service").joinpath("openapi.json").read_bytes()

    def resource(self) -> IResource:
        """Return the root resource of the HTTP interface."""
        return self._app.resource()

    def _post(self, request: IRequest, dialect: Dialect) -> Deferred[bytes]:
        self.requests += 1
        entry = dialect.decode_verified(request.content.read())
        _check_size(entry)
        poster = self.client_of(request)
        place = None if entry.server is None else self._quota.reserve(entry.static, poster, self._now())
        terms = self._terms(entry, dialect, poster)

        def posted(first: bool) -> bytes:
            result = "first" if first else "next"
            self._posted(result).inc()
            self._telemetry.posted(entry, result)
            if entry.client is not None:
                self.delegations.posted(entry.static, entry.client.delegated_servers, self._now())
            if place is not None:
                self._quota.accept(place, self._now())
                if self._checks is not None:
                    self._checks()
            return answer(request, 200, WROTE_FIRST if first else WROTE_NEXT)

        def refused(failure: Failure) -> Failure:
            if place is not None:
                self._quota.release(place)
            return failure

        asked = self._store.ask(self._entries.post, entry, self._now(), terms)
        return detached(asked.addCallbacks(posted, refused))

    def _terms(self, entry: Entry, dialect: Dialect, poster: str) -> Terms:
        """Return the conditions under which the store keeps an entry. They depend on the entry's features and on its
        poster.
        """
        marks = dialect.features(entry)
        refreshes = bool(marks & REFRESHING)
        lasts = 0.0
        if entry.server is not None:
            # If servers are checked, the lifetime can be short, because each successful check extends it.
            lasts = REFRESHING_TTL if refreshes or self._checks is not None else self._settings.entry_ttl
        if entry.client is not None or entry.server is None:
            lasts = max(lasts, CLIENT_TTL if REFRESH in marks else self._settings.entry_ttl)
        # An address that is not public has no limit, because it may be a reverse proxy that forwards everybody's
        # requests.
        most = self._settings.bytes_per_address if is_public(poster) else math.inf
        return Terms(refreshes, self._checks is None, block_of(poster), most, lasts)

    def _available(self) -> Deferred[list[bytes]]:
        """Find the servers to return: those that post regularly first, then quiet servers that a recent check has
        found.
        """
        self.requests += 1
        return Deferred.fromCoroutine(self._find_available())

    async def _find_available(self) -> list[bytes]:
        since = self._now() - self._settings.server_ttl if self._settings.server_ttl else -math.inf
        ranking, most = self._settings.ranking, self._settings.max_servers
        if ranking is None or ranking.current(self._wall_clock()) is None:
            servers = await self._store.ask(self._entries.available, most, since)
        else:
            # Ranked servers are fetched by their keys. In a random sample of all servers they could be missing, because
            # strangers can post any number of unranked servers.
            servers = await self._store.ask(self._entries.listed, ranking.draw(RANKED_POOL, self._wall_clock()), since)
            known = set(servers)
            others = await self._store.ask(self._entries.available, RANKED_POOL, since)
            servers += [body for body in others if body not in known]
            servers = ranking.choose(servers, most, self._wall_clock())
        if len(servers) < most:
            quiet = await self._store.ask(self._entries.quiet, most - len(servers), since)
            servers += quiet
        return servers

    # --- paths of the seed documents ---

    @_on_all(Dialect.SEED.entries, methods=["POST"])
    def post_entry(self, request: IRequest) -> Deferred[bytes]:
        """Store a posted entry."""
        return self._post(request, Dialect.SEED)

    @_on_all(_SEED_ENTRY, methods=["GET"])
    def get_entry(self, request: IRequest, static: str) -> Deferred[bytes]:
        """Return the entry of a key."""
        self.requests += 1
        return self._get(request, _path_key(static))

    def _get(self, request: IRequest, key: str) -> Deferred[bytes]:
        def absent(failure: Failure) -> Failure:
            if failure.check(EntryNotFound):
                self._telemetry.record_absent(request.getClientAddress(), key)
            return failure

        return self._store.ask(self._entries.get, key).addCallbacks(lambda body: entry_response(request, body), absent)

    @_on_all(_SEED_ENTRY, methods=["DELETE"])
    def delete_entry(self, request: IRequest, static: str) -> Deferred[bytes]:
        """Delete an entry. The body of the request is a deletion signed by the entry's key."""
        key = _path_key(static)
        deletion = decode_deletion(request.content.read())
        if deletion.static != key:
            raise EntryInvalid("the key in static differs from the one in the URL")

        def deleted(_: None) -> bytes:
            self._posted("deleted").inc()
            self._telemetry.deleted(key, deletion)
            return answer(request, 200, "deleted the entry")

        return detached(self._store.ask(self._entries.delete, deletion, self._now()).addCallback(deleted))

    @_on_all(Dialect.SEED.available, methods=["GET"])
    def get_available_servers(self, request: IRequest) -> Deferred[bytes]:
        """Return the entries of available servers."""

        def found(servers: list[bytes]) -> bytes:
            if not servers:
                return answer(request, 404, "no server is available")
            return list_response(request, servers)

        return self._available().addCallback(found)

    @_app.route("/discovery/nameplates", methods=["POST"])
    def claim_nameplate(self, request: IRequest) -> Deferred[bytes]:
        """Assign a nameplate to a key for some minutes."""
        self.requests += 1
        return self._nameplates.claim(request, self.client_of(request))

    @_app.route("/discovery/nameplates/<number>", methods=["GET"])
    def get_nameplate(self, request: IRequest, number: str) -> Deferred[bytes]:
        """Return the public key to which the nameplate ``number`` belongs."""
        self.requests += 1
        return self._nameplates.find(request, self.client_of(request), number, self.charge)

    @_app.route("/discovery/nameplates/<number>", methods=["DELETE"])
    def release_nameplate(self, request: IRequest, number: str) -> Deferred[bytes]:
        """Release a nameplate. The body of the request is a release signed by the nameplate's key."""
        self.requests += 1
        return self._nameplates.release(request, number)

    # --- paths for clients of 2019 ---

    @_on_all(Dialect.GO2019.entries, methods=_METHODS)
    def go_redirect(self, request: IRequest) -> bytes:
        """Redirect a path without the final slash to the path with it, as Go's HTTP request multiplexer does."""
        request.setResponseCode(301)
        request.setHeader(b"location", request.path + b"/")
        return b""

    @_on_all([path + "/" for path in Dialect.GO2019.entries], branch=True)
    def go_entry(self, request: IRequest) -> bytes | Deferred[bytes]:
        """Store the entry of a POST, whatever follows in the path. For any other method, return the entry of the key
        that is the last segment of the path.
        """
        if request.method == b"POST":
            return self._go(request, lambda: self._post(request, Dialect.GO2019))
        text = request.path.rsplit(b"/", 1)[1].decode("latin-1")

        def get() -> Deferred[bytes]:
            # As in the service of 2019, an empty segment, or one of zeros only, is the null key, which has no entry.
            key = PubKey.from_hex(text).hex() if text.strip("0") else NULL_KEY
            return self._get(request, key)

        return self._go(request, get)

    @_on_all(Dialect.GO2019.available, methods=_METHODS)
    def go_available_servers(self, request: IRequest) -> bytes | Deferred[bytes]:
        """Return the available servers. If there are none, the answer is ``[]``, while the path of the seed documents
        answers 404.
        """
        return self._go(
            request,
            lambda: self._available().addCallback(lambda servers: list_response(request, servers)),
        )

    def _go(self, request: IRequest, act: Callable[[], Deferred[bytes]]) -> bytes | Deferred[bytes]:
        """Answer a request to a path of 2019. As the service of 2019 did, answer 500 to JSON that cannot be decoded."""
        try:
            return act()
        except EntryDecodeError as error:
            self._refused(request, "undecodable", error)
            self.charge(request, INVALID_ENTRY_COST)
            return answer(request, 500, UNEXPECTED)
        except KeyFormatError:
            return answer(request, 400, BAD_INPUT)

    # --- about the service ---

    @_app.route("/openapi.json", methods=["GET"])
    def openapi(self, request: IRequest) -> bytes:
        """Return the OpenAPI description of the paths of the seed documents."""
        return json_response(request, self._openapi)

    @_app.route("/health", methods=["GET"])
    def health(self, request: IRequest) -> Deferred[bytes]:
        """Report whether the store answers and accepts writes. Requests from this machine also get the number of
        entries.
        """

        def told(health: dict[str, object]) -> bytes:
            status = health["status"]
            shown = health if LOCAL_ONLY.refuses(request) is None else {"status": status}
            return json_response(request, json.dumps(shown).encode(), 200 if status == "ok" else 503)

        return Deferred.fromCoroutine(self.reports.health_report()).addCallback(told)

    @_app.route("/metrics", methods=["GET"])
    def metrics(self, request: IRequest) -> Deferred[bytes]:
        """Return metrics for Prometheus, to requests from this machine only. Other machines use the port of
        ``--metrics``.
        """
        if LOCAL_ONLY.refuses(request) is not None:
            request.setResponseCode(403)
            request.setHeader(b"content-type", b"text/plain; charset=utf-8")
            return succeed(NOT_PUBLIC.encode())

        def rendered(text: bytes) -> bytes:
            request.setHeader(b"content-type", self._metrics.content_type)
            return text

        return Deferred.fromCoroutine(self.reports.rendered_metrics()).addCallback(rendered)

    # --- errors ---

    def _refused(self, request: IRequest, kind: str, error: BaseException | None) -> None:
        self._metrics.refused.labels(kind).inc()
        self._telemetry.refused(request.getClientAddress(), kind)
        _log.debug("a request was refused: {error}", error=str(error))

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
        self.charge(request, INVALID_ENTRY_COST)
        return answer(request, 400, f"{BAD_INPUT}: {failure.value}")

    @_app.handle_errors(EntrySignatureError)
    def _bad_signature(self, request: IRequest, failure: Failure) -> bytes:
        self.charge(request, INVALID_ENTRY_COST)
        self._refused(request, "signature", failure.value)
        request.content.seek(0)
        is_foreign = is_version_1(request.content.read())
        return answer(request, 401, f"{BAD_SIGNATURE}: {VERSION_1_POSTED}" if is_foreign else BAD_SIGNATURE)

    @_app.handle_errors(EntryInvalid)
    def _invalid(self, request: IRequest, failure: Failure) -> bytes:
        self._refused(request, "invalid", failure.value)
        deletion = getattr(failure.value, "deletion", None)
        return answer(request, 422, str(failure.value), b"" if deletion is None else b',"deletion":%s' % deletion)

    @_app.handle_errors(TooManyServers)
    def _too_many(self, request: IRequest, failure: Failure) -> bytes:
        self._refused(request, "too_many_servers", failure.value)
        request.setHeader(b"retry-after", b"600")
        return answer(request, 429, str(failure.value))

    @_app.handle_errors(NameplatesInUse)
    def _no_nameplate(self, request: IRequest, failure: Failure) -> bytes:
        self._refused(request, "nameplates", failure.value)
        request.setHeader(b"retry-after", b"60")
        return answer(request, getattr(failure.value, "status", 503), str(failure.value))

    @_app.handle_errors(HTTPException)
    def _http(self, request: IRequest, failure: Failure) -> bytes:
        return answer_http_error(request, failure)

    @_app.handle_errors(StoreContended)
    def _answer_contended(self, request: IRequest, failure: Failure) -> bytes:
        self._refused(request, "contended", failure.value)
        request.setHeader(b"retry-after", b"1")
        return answer(request, 503, str(failure.value))

    @_app.handle_errors(StoreUnavailable)
    def _unavailable(self, request: IRequest, failure: Failure) -> bytes:
        request.setHeader(b"retry-after", b"1")
        return answer(request, 503, "the store does not answer")
