"""HTTP API of a registry: its routes and the mapping of errors to status codes.

| request | answer |
|---|---|
| ``GET /twins/ID`` | the twin, or 404 |
| ``GET /twins?account=ACCOUNT`` | the twin with that account (an address or hexadecimal), or 404 |
| ``GET /twins?after=ID&most=N`` | ``{"twins": [...]}``, in order of ids |
| ``POST /twins`` with a signed statement | the changed twin; 409: counter not higher; 401: not signed by the owner |
| ``GET /changes?since=N&wait=SECONDS`` | ``{"twins": [...], "next": N}``, waits until there is a change |
"""

from __future__ import annotations

import json

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.iweb import IRequest
from twisted.web.resource import IResource
from twisted.web.server import Request
from werkzeug.exceptions import HTTPException

from dmsg.net.reactor import cancel_call
from dmsg.net.web.routes import QuickKlein
from dmsg.net.web.site import answer, answer_http_error
from dmsg.pages.access import LOCAL_ONLY
from dmsg.rmb.errors import IdentityError, NotTheOwner, RegistryConflict, RegistryRefused, TwinNotFound
from dmsg.rmb.registry.interface import PAGE
from dmsg.rmb.registry.table import TableRegistry
from dmsg.rmb.twins.address import MAX_TWIN
from dmsg.rmb.twins.identity import parse_account
from dmsg.rmb.twins.twin import Twin
from dmsg.telemetry.metrics import CONTENT_TYPE

MAX_BODY = 8192
"""Maximum size in bytes of a posted statement."""
MAX_WAIT = 25.0
"""Maximum seconds for which a long poll for changes stays open."""
MAX_WAITING = 10_000
"""Maximum number of open long polls for changes. For each further one, the registry ends the oldest with an empty
answer."""

_log = Logger()


class RegistryAPI:
    """HTTP interface to a table of twins.

    :ivar refused: number of refused requests, by reason.
    """

    _app = QuickKlein()

    def __init__(self, reactor: IReactorTime, table: TableRegistry) -> None:
        self._reactor = reactor
        self._table = table
        self._waiting: dict[Deferred[None], None] = {}
        self.refused: dict[str, int] = {}
        self.requests = 0
        self._closed = False
        table.watch(self._changed)

    def resource(self) -> IResource:
        """Return the root resource of the HTTP API."""
        return self._app.resource()

    def count_refusal(self, reason: str) -> None:
        """Count a refused request under its reason."""
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def _changed(self, twin: Twin) -> None:
        waiting, self._waiting = self._waiting, {}
        for one in waiting:
            one.callback(None)

    def close(self) -> None:
        """Answer all open long polls, because the table is about to be closed."""
        self._closed = True
        waiting, self._waiting = self._waiting, {}
        for one in waiting:
            one.callback(None)

    def _json(self, request: IRequest, content: object) -> bytes:
        request.setHeader(b"content-type", b"application/json")
        return json.dumps(content, separators=(",", ":")).encode()

    def _number(self, request: IRequest, name: str, default: int, limit: int) -> int:
        text = request.args.get(name.encode(), [str(default).encode()])[0]
        if not text.isdigit() or len(text) > 19:
            raise ValueError(f"{name} is not a number")
        return min(int(text), limit)

    @_app.route("/twins/<int:twin>", methods=["GET"])
    def one(self, request: IRequest, twin: int) -> Deferred[bytes]:
        """Answer with the twin that has this id."""
        self.requests += 1
        return self._table.get(min(twin, MAX_TWIN + 1)).addCallback(lambda found: self._json(request, found.as_dict()))

    @_app.route("/twins", methods=["GET"])
    def list_twins(self, request: IRequest) -> Deferred[bytes]:
        """Answer with the twin that has the given account, or with a page of all twins."""
        self.requests += 1
        account = request.args.get(b"account")
        if account:
            found = self._table.id_by_account(parse_account(account[0].decode("latin-1")))
            return found.addCallback(self._table.get).addCallback(lambda twin: self._json(request, twin.as_dict()))
        after, most = self._number(request, "after", 0, MAX_TWIN), self._number(request, "most", PAGE, PAGE)
        return self._table.twins(after, most).addCallback(
            lambda twins: self._json(request, {"twins": [twin.as_dict() for twin in twins]})
        )

    @_app.route("/twins", methods=["POST"])
    def put(self, request: IRequest) -> Deferred[bytes]:
        """Store a signed statement and answer with the twin."""
        self.requests += 1
        try:
            content = json.loads(request.content.read())
        except (ValueError, RecursionError):
            raise ValueError("the request is not JSON") from None
        return self._table.put(Twin.from_dict(content)).addCallback(lambda twin: self._json(request, twin.as_dict()))

    @_app.route("/changes", methods=["GET"])
    async def changes(self, request: Request) -> bytes:
        """Answer with the changes that have higher numbers than ``since``. If there are none, wait for one."""
        self.requests += 1
        if b"since" not in request.args:
            return self._json(request, {"twins": [], "next": self._table.last_change()})
        since = self._number(request, "since", 0, 2**62)
        wait = self._number(request, "wait", 0, int(MAX_WAIT))
        twins, following = self._table.changes(since)
        if not twins and wait and following == since:
            await self._wait(request, wait)
            if self._closed:
                return self._json(request, {"twins": [], "next": since})
            twins, following = self._table.changes(since)
        return self._json(request, {"twins": [twin.as_dict() for twin in twins], "next": following})

    def _wait(self, request: Request, seconds: float) -> Deferred[None]:
        if len(self._waiting) >= MAX_WAITING:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.callback(None)
        waiting: Deferred[None] = Deferred()
        self._waiting[waiting] = None

        def over(result: object = None) -> None:
            cancel_call(call)
            if self._waiting.pop(waiting, self) is None and not waiting.called:
                waiting.callback(None)

        call = self._reactor.callLater(seconds, over)
        request.notifyFinish().addBoth(over)
        waiting.addBoth(over)
        return waiting

    @_app.route("/health", methods=["GET"])
    def health(self, request: IRequest) -> bytes:
        """Answer a health check. Programs on this machine also get the number of twins."""
        twins = {"twins": self._table.count()} if LOCAL_ONLY.refuses(request) is None else {}
        return self._json(request, {"status": "ok", **twins})

    @_app.route("/metrics", methods=["GET"])
    def metrics(self, request: IRequest) -> bytes:
        """Answer with the metrics for Prometheus. Only programs on this machine get them."""
        if LOCAL_ONLY.refuses(request) is not None:
            return answer(request, 403, "the metrics of a registry are for programs of its own machine")
        request.setHeader(b"content-type", CONTENT_TYPE)
        lines = [
            "# TYPE rmb_registry_twins gauge",
            f"rmb_registry_twins {self._table.count()}",
            "# TYPE rmb_registry_requests_total counter",
            f"rmb_registry_requests_total {self.requests}",
            "# TYPE rmb_registry_refused_total counter",
            *(f'rmb_registry_refused_total{{reason="{reason}"}} {n}' for reason, n in sorted(self.refused.items())),
        ]
        return "\n".join([*lines, ""]).encode()

    # --- mapping of errors to status codes ---

    @_app.handle_errors(TwinNotFound)
    def _not_found(self, request: IRequest, failure: Failure) -> bytes:
        return answer(request, 404, str(failure.value))

    @_app.handle_errors(RegistryRefused)
    def _refused(self, request: IRequest, failure: Failure) -> bytes:
        text = str(failure.value)
        self.count_refusal("refused")
        status = 401 if failure.check(NotTheOwner) else 409 if failure.check(RegistryConflict) else 400
        return answer(request, status, text)

    @_app.handle_errors(IdentityError, ValueError)
    def _bad(self, request: IRequest, failure: Failure) -> bytes:
        self.count_refusal("bad_request")
        return answer(request, 400, str(failure.value))

    @_app.handle_errors(HTTPException)
    def _http(self, request: IRequest, failure: Failure) -> bytes:
        return answer_http_error(request, failure)

    @_app.handle_errors(Exception)
    def _failed(self, request: IRequest, failure: Failure) -> bytes:
        _log.failure("unhandled error in an HTTP request", failure)
        self.count_refusal("failed")
        request.setHeader(b"retry-after", b"1")
        return answer(request, 503, "the registry cannot process requests now")
