"""HTTP site of a relay on one port: accepts websockets of sessions and messages of other relays, and serves the
metrics."""

from __future__ import annotations

import json
from collections.abc import Callable

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request

from dmsg.base.buckets import RateLimit
from dmsg.errors import DmsgError
from dmsg.net.addresses import forwarded_client
from dmsg.net.blocks import blocks_of
from dmsg.net.turn_end import at_turn_end
from dmsg.net.web.channel import BoundedSite
from dmsg.net.web.guard import Guard, GuardReason
from dmsg.net.web.routes import finish_with
from dmsg.net.web.site import bounded_arguments, close_after, without_body
from dmsg.net.websocket.upgrade import Upgrade
from dmsg.pages.access import LOCAL_ONLY, NOT_PUBLIC
from dmsg.rmb.envelope.wire import MAX_MESSAGE
from dmsg.rmb.errors import Drop, EnvelopeError, TokenError, TwinNotFound
from dmsg.rmb.relay.federation import batch
from dmsg.rmb.relay.federation.post import ONLY_CONNECTED
from dmsg.rmb.relay.inbound.verify import TAKEN, InboundVerifier, Verdict
from dmsg.rmb.relay.sessions import RelaySession
from dmsg.rmb.relay.settings import RelaySettings
from dmsg.rmb.relay.switch import Switch
from dmsg.rmb.socket.plain_upgrade import PlainUpgradeFactory, SocketTransport
from dmsg.rmb.socket.upgrade import UpgradeResource
from dmsg.rmb.twins import token
from dmsg.rmb.twins.address import Session

IDLE_TIMEOUT = 60
"""Seconds without data after which a connection that is not a websocket is closed."""
CONNECT_BURST = 2000
"""Number of websocket upgrades that one address may make in a burst. If the configured rate per second is higher, the
rate is also the burst."""
OTHER_RATE, OTHER_BURST = 50.0, 500.0
"""Number of other requests that one address may make per second, and in a burst: for metrics, health and unknown
paths."""
TOKEN_REUSE_TIME = 2
"""Seconds after a token was issued during which the token may open several connections.

Clients of the reference implementation put only the current second into their tokens, and ed25519 signatures over the
same claims are equal. So if such a client connects twice in one second, both connections have the same token.
"""
MAX_SESSIONS_OF_TWIN = 1024
"""Maximum number of simultaneous sessions of one twin."""
MAX_USED_TOKENS = 100_000
"""Maximum number of used tokens that are remembered. Each is remembered until it expires."""

_log = Logger()


class RelaySite(Resource):
    """Root resource of a relay, which answers requests for every path.

    :param admits: function that returns the reason why the relay accepts no further session, or None.
    """

    isLeaf = True

    def __init__(
        self,
        switch: Switch,
        upgrade: UpgradeResource,
        reactor: IReactorTime,
        settings: RelaySettings,
        *,
        metrics: Callable[[], bytes],
        health: Callable[[], dict[str, object]],
        admits: Callable[[], Drop | None],
        make_place: Callable[[int], bool],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._switch = switch
        self._verifier = InboundVerifier(switch)
        self._upgrade = upgrade
        self._reactor = reactor
        self._metrics = metrics
        self._health = health
        self._admits = admits
        self._make_place = make_place
        self._settings = settings
        self._connects = RateLimit(settings.connect_rate, max(CONNECT_BURST, settings.connect_rate), blocks_of)
        self._other_requests = RateLimit(OTHER_RATE, OTHER_BURST, blocks_of)
        self._used = None if settings.token_reuse else token.UsedTokens(MAX_USED_TOKENS)

    def make_site(self) -> PlainUpgradeFactory:
        """Return the factory with which the relay listens."""

        def refused(reason: str) -> None:
            self._switch.rules.drops[Drop.INTAKE_RATE if reason == "busy" else Drop.INTAKE_TOO_LARGE] += 1

        def unguarded(reason: GuardReason) -> None:
            self._switch.rules.drops[Drop(reason)] += 1

        site = BoundedSite(self, **bounded_arguments(self._reactor, MAX_MESSAGE, refused, IDLE_TIMEOUT))
        site.displayTracebacks = False
        # Requests are not logged, because the URL contains the token.
        site.log = lambda request: None  # type: ignore[method-assign]
        guard = Guard(self._reactor, by_place=not self._settings.proxied, on_refused=unguarded)
        return PlainUpgradeFactory(site, self._reactor, self._take, IDLE_TIMEOUT, guard)

    # --- routes ---

    # This method exceeds Ruff's limit of return statements, because each route has its own.
    def render(self, request: Request) -> bytes | int:  # noqa: PLR0911
        upgrade = (request.getHeader(b"upgrade") or b"").lower()
        if upgrade == b"websocket" and b"upgrade" in (request.getHeader(b"connection") or b"").lower():
            # An upgrade is accepted at any path.
            if getattr(request, "received", 0):
                close_after(request)
                return self._refuse(request, Drop.BAD_UPGRADE, 400, "an upgrade has no body")
            return self._authenticate(request)
        if request.path == b"/" and request.method == b"POST":
            return self._intake(request)
        if request.path == b"/" + batch.PATH.encode() and request.method == b"POST":
            return self._intake_batch(request)
        if not self._other_requests.allow(self._address_of(request), self._reactor.seconds()):
            close_after(request)
            return self._refuse_for_now(request, Drop.RATE_LIMITED, "too many requests")
        if request.method in (b"GET", b"HEAD") and request.path == b"/metrics":
            request.setHeader(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
            # Clients on other machines get the status 200, too, though no metrics, because the probes in the charts of
            # rmb-rs request this path from other machines.
            shown = self._metrics() if LOCAL_ONLY.refuses(request) is None else b"# " + NOT_PUBLIC.encode()
            return without_body(request, shown)
        if request.method in (b"GET", b"HEAD") and request.path == b"/health":
            request.setHeader(b"content-type", b"application/json")
            health = self._health()
            if health["status"] != "ok":
                request.setResponseCode(503)
            if LOCAL_ONLY.refuses(request) is not None:
                health = {"status": health["status"]}
            return without_body(request, json.dumps(health).encode())
        return self._text(request, 404, "page not found")

    def _text(self, request: Request, status: int, text: str) -> bytes:
        request.setResponseCode(status)
        request.setHeader(b"content-type", b"text/plain; charset=utf-8")
        return without_body(request, text.encode("utf-8", "replace"))

    def _refuse(self, request: Request, drop: Drop, status: int, text: str) -> bytes:
        self._switch.rules.drops[drop] += 1
        return self._text(request, status, text)

    def _refuse_for_now(self, request: Request, drop: Drop, text: str, seconds: int = 1) -> bytes:
        """Refuse a request for a temporary reason, with status 503. Relays of the reference implementation treat a 4xx
        as final."""
        request.setHeader(b"retry-after", b"%d" % seconds)
        return self._refuse(request, drop, 503, text)

    def _address(self, forwarded: bytes | None, peer: IAddress) -> str:
        """Return the name of the address block to which the limits charge a connection."""
        client = forwarded_client(forwarded) if self._settings.proxied else ""
        return blocks_of(client or str(getattr(peer, "host", "")))[0].name

    def _address_of(self, request: Request) -> str:
        return self._address(request.getHeader(b"x-forwarded-for"), request.getClientAddress())

    def _finish(self, answer: Deferred[bytes | int], request: Request) -> int:
        """Answer the request when the answer is known, unless the client has disconnected."""
        gone: list[bool] = []

        def left(_: Failure) -> None:
            gone.append(True)
            answer.cancel()

        request.notifyFinish().addErrback(left)

        def known(body: bytes | int) -> None:
            if not gone and isinstance(body, bytes):
                finish_with(body, request)

        def failed(failure: Failure) -> None:
            if gone or failure.check(CancelledError):
                return
            _log.failure("unhandled error in an HTTP request", failure)
            known(self._text(request, 500, "internal error"))

        answer.addCallback(known).addErrback(failed)
        return NOT_DONE_YET

    # --- sessions ---

    def _authenticate(self, request: Request) -> bytes | int:
        _, question, query = request.uri.partition(b"?")
        if not question or not query:
            close_after(request)
            return self._refuse(request, Drop.NO_TOKEN, 400, "missing jwt")
        if not self._connects.allow(self._address_of(request), self._reactor.seconds()):
            close_after(request)
            request.setHeader(b"retry-after", b"1")
            return self._refuse(request, Drop.RATE_LIMITED, 429, "too many connections from this address")
        refusal = self._admits()
        if refusal is not None:
            request.setHeader(b"retry-after", b"10")
            return self._refuse(request, refusal, 503, refusal.value.replace("_", " "))
        try:
            parsed = token.parse(query)
            parsed.check_times(int(self._switch.now()), self._settings.max_token_ttl)
        except TokenError as error:
            return self._refuse(request, Drop.BAD_TOKEN, 401, f"invalid jwt: {error}")
        return self._finish(Deferred.fromCoroutine(self._upgrade_session(request, parsed)), request)

    def _take(self, upgrade: Upgrade, transport: SocketTransport) -> bool:
        """Accept an upgrade if this is possible without waiting. Otherwise return False; :meth:`_authenticate` then
        accepts or refuses it."""
        address = self._address(upgrade.headers.get(b"x-forwarded-for"), transport.getPeer())
        now = self._reactor.seconds()
        if self._admits() is not None or not self._connects.allow(address, now):
            return False
        try:
            parsed = token.parse(upgrade.target.partition(b"?")[2])
            parsed.check_times(int(self._switch.now()), self._settings.max_token_ttl)
            twin = self._switch.registry.get_cached(parsed.session.twin)
            if twin is not None:
                parsed.check_signature(twin.account)
        except TokenError:
            twin = None
        if twin is None or not self._may_have_more(parsed.session) or not self._first_use(parsed):
            # The charge is refunded, because _authenticate charges this connection again.
            self._connects.charge(address, -1.0, now)
            return False
        if not self._make_place_if_full(parsed.session):
            # The charge is refunded, because _authenticate charges this connection again.
            self._connects.charge(address, -1.0, now)
            return False
        self._upgrade.take(transport, upgrade.key, RelaySession(self._switch, parsed.session, resends=parsed.resends))
        return True

    # This method exceeds Ruff's limit of return statements, because each refusal has its own.
    async def _upgrade_session(self, request: Request, parsed: token.Token) -> bytes | int:  # noqa: PLR0911
        session = parsed.session
        try:
            twin = await self._switch.registry.get(session.twin)
            parsed.check_signature(twin.account)
        except TwinNotFound:
            return self._refuse(request, Drop.UNKNOWN_TWIN, 401, f"twin not found {session.twin}")
        except TokenError as error:
            return self._refuse(request, Drop.BAD_TOKEN, 401, f"invalid jwt: {error}")
        except DmsgError as error:
            return self._refuse(request, Drop.REGISTRY_DOWN, 500, f"failed to get twin: {error}")
        # Other sessions may have connected while the registry was queried.
        refusal = self._admits()
        if refusal is not None:
            return self._refuse(request, refusal, 503, refusal.value.replace("_", " "))
        if not self._may_have_more(session):
            request.setHeader(b"retry-after", b"10")
            return self._refuse(request, Drop.TOO_MANY_SESSIONS, 503, "too many sessions of this twin")
        if not self._first_use(parsed):
            return self._refuse(request, Drop.BAD_TOKEN, 401, "invalid jwt: jwt: was used before")
        if not self._make_place_if_full(session):
            request.setHeader(b"retry-after", b"10")
            return self._refuse(request, Drop.TOO_MANY_SESSIONS, 503, "too many sessions")
        return self._upgrade.upgrade(request, RelaySession(self._switch, session, resends=parsed.resends))

    def _may_have_more(self, session: Session) -> bool:
        """Whether the session replaces an older connection, or its twin has fewer sessions than it may have."""
        there = self._switch
        return session in there.sessions or there.presence.of_twin[session.twin] < MAX_SESSIONS_OF_TWIN

    def _make_place_if_full(self, session: Session) -> bool:
        """Return whether the session may connect.  This may end a session of another twin, so it may be called only
        after authentication."""
        return session in self._switch.sessions or self._make_place(session.twin)

    def _first_use(self, parsed: token.Token) -> bool:
        """Whether the token was not used before, or was issued within ``TOKEN_REUSE_TIME`` seconds of now.

        Proxies log URLs, so a token from a log must not open a session.
        """
        if self._used is None:
            return True
        now = int(self._switch.now())
        return self._used.first_use(parsed, now) or abs(now - parsed.issued) <= TOKEN_REUSE_TIME

    # --- other relays ---

    def _intake(self, request: Request) -> bytes | int:
        """Accept one message in one POST, as programs of the reference implementation send it."""
        request.setHeader(batch.OFFER, b"1")
        address, body = self._address_of(request), self._body_from_relay(request)
        if body is None:
            return self._refuse(request, Drop.DRAINING, 503, "shutting down")
        full = self._verifier.too_many(address, self._reactor.seconds())
        if full is not None:
            # The connection is closed. Otherwise an address that ignores the refusal could send message after message
            # over the same connection.
            close_after(request)
            return self._answer_judged(request, full)
        only_connected = request.getHeader(ONLY_CONNECTED) is not None

        def taken(judged: tuple[Verdict, bool]) -> bytes:
            verdict, worthless = judged
            if worthless:
                self._verifier.charge(address, self._reactor.seconds())
            return self._answer_judged(request, verdict)

        taking = Deferred.fromCoroutine(self._verifier.take(body, only_connected=only_connected))
        return self._finish(taking.addCallback(taken), request)

    def _body_from_relay(self, request: Request) -> bytes | None:
        """Return the body of another relay's request; None while this process shuts down."""
        if self._admits() is Drop.DRAINING:
            # The connection is closed. So the other relay opens a new connection for its next message, to the process
            # that replaces this one.
            close_after(request)
            return None
        assert request.content is not None
        data: bytes = request.content.read()
        request.content.close()  # The body is read only once. Closing it frees the memory.
        return data

    def _answer_judged(self, request: Request, verdict: Verdict) -> bytes:
        if verdict.status == TAKEN.status:
            request.setResponseCode(verdict.status)
            return b""
        if verdict.retry_after is not None:
            request.setHeader(b"retry-after", b"%d" % verdict.retry_after)
        return self._text(request, verdict.status, verdict.text)

    def _intake_batch(self, request: Request) -> bytes | int:
        """Accept a batch of messages. See :mod:`dmsg.rmb.relay.federation.batch`."""
        request.setHeader(batch.OFFER, b"1")
        address, body = self._address_of(request), self._body_from_relay(request)
        if body is None:
            return self._refuse(request, Drop.DRAINING, 503, "shutting down")
        try:
            messages = batch.decode(body)
        except EnvelopeError as error:
            self._verifier.charge(address, self._reactor.seconds())
            return self._refuse(request, Drop.BAD_INTAKE, 400, f"bad request: {error}")
        request.setHeader(b"content-type", b"text/plain; charset=utf-8")
        BatchAnswer(self._verifier, request, address, self._reactor).take_all(messages)
        return NOT_DONE_YET


class BatchAnswer:
    """Answer to one request with several messages. The status of each message is written in the reactor turn in which
    it becomes known."""

    def __init__(self, verifier: InboundVerifier, request: Request, address: str, reactor: IReactorTime) -> None:
        self._verifier = verifier
        self._request = request
        self._address = address
        self._reactor = reactor
        self._taking: dict[int, Deferred[tuple[Verdict, bool]]] = {}
        self._lines: list[bytes] = []
        self._is_disconnected = self._is_flush_planned = False
        self._left = 0
        request.notifyFinish().addErrback(self._cancel)

    def take_all(self, messages: list[tuple[bytes, bool]]) -> None:
        """Process all messages independently, so that none waits for another."""
        self._left = len(messages)
        for number, (data, only_connected) in enumerate(messages):
            full = self._verifier.too_many(self._address, self._reactor.seconds())
            if full is not None:
                self._known(number, full.status)
                continue
            taking = Deferred.fromCoroutine(self._verifier.take(data, only_connected=only_connected))
            self._taking[number] = taking
            taking.addCallbacks(self._answer_verdict, self._failed, callbackArgs=(number,), errbackArgs=(number,))

    def _answer_verdict(self, judged: tuple[Verdict, bool], number: int) -> None:
        verdict, worthless = judged
        if worthless:
            self._verifier.charge(self._address, self._reactor.seconds())
        self._known(number, verdict.status)

    def _failed(self, failure: Failure, number: int) -> None:
        if not failure.check(CancelledError):
            _log.failure("unhandled error in an HTTP request", failure)
            self._known(number, 500)

    def _known(self, number: int, status: int) -> None:
        self._taking.pop(number, None)
        self._left -= 1
        self._lines.append(batch.encode_answer(number, status))
        if not self._is_flush_planned:
            # The statuses that become known in one reactor turn are written together, to save system calls.
            self._is_flush_planned = True
            at_turn_end(self._reactor)(self._write)

    def _write(self) -> None:
        self._is_flush_planned = False
        if self._is_disconnected:
            return
        lines, self._lines = self._lines, []
        self._request.write(b"".join(lines))
        if not self._left:
            self._request.finish()

    def _cancel(self, _: Failure) -> None:
        """Cancel the unfinished work, because the other relay has disconnected."""
        self._is_disconnected = True
        for taking in list(self._taking.values()):
            taking.cancel()
