"""Calling services, and being one, straight through a relay: for Twisted programs, without Redis.

::

    client = RmbClient(reactor, words, "http://127.0.0.1:9091", ["ws://127.0.0.1:8081"])
    client.startService()
    reply = await client.call(7, "calculator.add", b"[1, 2]")
    client.serve("calculator.add", lambda request: json.dumps(sum(json.loads(request.payload))).encode())
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import iscoroutine
from random import Random
from typing import Any
from uuid import uuid4

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, DeferredList, maybeDeferred
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.rmb.envelope.cipher import Encryption
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.envelope.texts import OFFLINE
from dmsg.rmb.envelope.wire import FAIL_FAST, SENT_EXPIRATION
from dmsg.rmb.errors import CallTimeout, Drop, IdentityError, RemoteError, RmbError, TwinOffline
from dmsg.rmb.registry.cache import CachedRegistry
from dmsg.rmb.registry.service import open_registry
from dmsg.rmb.session.seal import Received, Rejected, Seal, Seen
from dmsg.rmb.session.setup import find_twin, patiently, publish
from dmsg.rmb.session.uplink import MessageTooLarge, Uplink, dealt_with
from dmsg.rmb.twins import token
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.twin import Twin

HANDLER_ERROR = 255
"""The code of errors of a handler, as the Go router has it."""
DEFAULT_TIMEOUT = 30.0
"""Seconds for a call."""
REGISTRY_RETRY = 1.0
"""Seconds before the registry is asked again about who sent a message."""
MAX_CALLS = 10_000
"""Calls that wait for an answer."""
MAX_HANDLING = 1000
"""Requests in handlers at once."""
JSON = "application/json"

_log = Logger()


@dataclass(frozen=True)
class Request:
    """What a handler gets.

    :ivar source: who asks; signed.
    :ivar left: seconds until the caller does not wait any more.
    """

    source: Session
    command: str
    payload: bytes
    schema: str | None
    tags: str
    uid: str
    left: float


@dataclass(frozen=True)
class Reply:
    """An answer.

    :ivar source: who answers; signed, and the one who was asked.
    """

    source: Session
    payload: bytes
    schema: str | None


class HandlerError(RmbError):
    """A handler raises it to answer with an error of its own.

    :ivar code: for the caller; 255 when none is said.
    """

    def __init__(self, text: str, code: int = HANDLER_ERROR) -> None:
        super().__init__(text)
        self.code = code


Handler = Callable[[Request], "bytes | Awaitable[bytes | None] | Deferred[bytes | None] | None"]


class RmbClient(Service):
    """A session of a twin.

    :param secret: words, or ``0x`` and 64 digits; with ``//junctions``
        messages are signed, but not encrypted.
    :param registry: what ``--registry`` says, or a TwinRegistry.
    :param relays: URLs, ``ws://`` or ``wss://``; at most 4.
    :param session: a name, so that several programs of a twin can be
        connected; None is the twin itself, whom others call.
    :param update: let the registry say which relays and which key this twin has.
    :param strict: let it also say that every program of this twin signs with borders; None leaves that as it is.
    :ivar twin: of the registry, once it is ready.
    """

    name = "rmb-client"

    def __init__(
        self,
        reactor: Any,
        secret: str,
        registry: Any,
        relays: Sequence[str],
        *,
        key_type: str = "sr25519",
        session: str | None = None,
        encryption: bool = True,
        update: bool = True,
        strict: bool | None = None,
        wall_clock: Callable[[], float] = time.time,
        random: Random | None = None,
    ) -> None:
        """:raises IdentityError: the secret cannot be one."""
        self._reactor = reactor
        self._identity = Identity(secret, key_type)
        self._encryption = encryption_of(secret) if encryption else None
        self._own_registry = isinstance(registry, str)
        source = open_registry(registry, reactor) if isinstance(registry, str) else registry
        self.registry = source if isinstance(source, CachedRegistry) else CachedRegistry(source, reactor)
        self.relays = tuple(relays)
        self._sid = session
        self._update = update
        self._strict = strict
        self._now = wall_clock
        self._random = random or Random()
        self.twin: Twin | None = None
        self._seal: Seal | None = None
        self.uplink: Uplink | None = None
        self._calls: dict[str, tuple[int, Deferred[Reply]]] = {}
        self._seen = Seen()
        self._handlers: dict[str, Handler] = {}
        self._handling = 0
        self.drops: Counter[Drop] = Counter()
        self._starting: Deferred[None] | None = None
        self._could_not: Failure | None = None
        self.ready: Deferred[None] = Deferred()

    @property
    def account(self) -> bytes:
        """32 bytes."""
        return self._identity.account

    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self._starting = Deferred.fromCoroutine(self._start())
        self._starting.addErrback(self._not_started)

    def _not_started(self, failure: Failure) -> None:
        if not failure.check(CancelledError) and not self.ready.called:
            self._could_not = failure
            self.ready.errback(failure)
            self.ready.addErrback(lambda _: None)  # when_online says so

    async def _start(self) -> None:
        identity, registry = self._identity, self.registry
        twin = await patiently(self._reactor, self._random, lambda: find_twin(registry, identity))
        if self._update:
            twin = await patiently(
                self._reactor,
                self._random,
                lambda: publish(
                    registry,
                    identity,
                    twin,
                    self.relays,
                    self._encryption,
                    strict=self._strict,
                    keep=self._sid is not None,
                ),
            )
        self.twin = twin
        session = Session(twin.id, self._sid)
        # with borders whenever the registry says so, for else nobody believes it
        self._seal = Seal(self._identity, session, self.registry, self._encryption)
        self.uplink = Uplink(
            self._reactor,
            self.relays,
            lambda: token.make(self._identity, session, int(self._now())),
            self._received,
            self._now,
            self._random,
        )
        self.uplink.start()
        self.ready.callback(None)

    async def when_online(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Wait for a relay.

        :raises DmsgTimeout: there is none.
        :raises RmbError: the twin is unknown, or the registry refuses it.
        """
        if not self.ready.called:
            waiting: Deferred[None] = Deferred()

            def pass_on(result: Any) -> Any:
                if not waiting.called:
                    waiting.callback(result)
                return result

            self.ready.addBoth(pass_on)
            waiting.addTimeout(timeout, self._reactor, _too_late("the registry did not answer"))
            await waiting
        elif self._could_not is not None:
            self._could_not.raiseException()
        assert self.uplink is not None
        await self.uplink.when_online(timeout)

    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self.ready.addErrback(lambda _: None)
        if self._starting is not None:
            self._starting.cancel()
        if self.uplink is not None:
            self.uplink.stop()
        calls, self._calls = self._calls, {}
        for _, waiting in calls.values():
            if not waiting.called:
                waiting.errback(CallTimeout("the client was stopped"))
        if self._own_registry:
            await self.registry.close()

    # --- calling ---

    async def call(
        self,
        twin: int,
        command: str,
        payload: bytes = b"",
        *,
        timeout: float = DEFAULT_TIMEOUT,
        schema: str | None = JSON,
        session: str | None = None,
        keep: bool = False,
        tags: str = "",
    ) -> Reply:
        """Ask a twin.

        :param timeout: seconds; the message lives no longer, at most 1800.
        :param keep: let the relay keep it while the twin is not connected;
            else that is said at once.
        :raises TwinOffline: the twin is not connected.
        :raises RemoteError: the answer is an error, of the twin or of a relay.
        :raises CallTimeout: there was none.
        :raises RmbError: the twin is unknown, or too many calls wait.
        """
        if not 0 < timeout < 1e9:
            raise RmbError(f"a timeout of {timeout} seconds")
        if self._seal is None or self.uplink is None:
            await self.when_online(timeout)
        assert self._seal is not None and self.uplink is not None
        if len(self._calls) >= MAX_CALLS:
            raise RmbError(f"{MAX_CALLS} calls wait for an answer")
        receiver = await self.registry.get(twin)
        now = self._now()
        life = max(1, min(int(timeout + 0.999), SENT_EXPIRATION))
        envelope = Envelope(uid=str(uuid4()), expiration=life)
        envelope.request.command = command
        if schema is not None:
            envelope.schema = schema
        words = [word for word in (tags, "" if keep else FAIL_FAST) if word]
        if words:
            envelope.tags = ",".join(words)
        data = self._seal.close(envelope, payload, receiver, Session(twin, session), int(now))
        uid = envelope.uid
        waiting: Deferred[Reply] = Deferred()
        self._calls[uid] = (twin, waiting)
        sent = self.uplink.send(data, now + life)

        def not_sent(failure: Failure) -> None:
            if not waiting.called:
                waiting.errback(failure)

        sent.addErrback(not_sent)
        waiting.addTimeout(timeout, self._reactor, _too_late(f"twin {twin} did not answer {command!r}"))
        try:
            return await waiting
        finally:
            self._calls.pop(uid, None)

    async def call_all(
        self, twins: Iterable[int], command: str, payload: bytes = b"", **options: Any
    ) -> dict[int, Reply | Exception]:
        """Ask several twins at once: twin -> its answer, or the error of that one."""
        numbers = list(dict.fromkeys(twins))
        calls = [Deferred.fromCoroutine(self.call(number, command, payload, **options)) for number in numbers]
        results: list[tuple[bool, Any]] = await DeferredList(calls, consumeErrors=True)
        return {
            number: result if good else result.value for number, (good, result) in zip(numbers, results, strict=True)
        }

    async def ping(self, timeout: float = 10.0) -> float:
        """Seconds to the relay and back, as an envelope."""
        await self.when_online(timeout)
        assert self._seal is not None and self.uplink is not None
        envelope = Envelope(uid=str(uuid4()), timestamp=int(self._now()), expiration=int(timeout) + 1)
        envelope.ping.SetInParent()
        envelope.source.twin = self._seal.session.twin
        if self._sid is not None:
            envelope.source.connection = self._sid
        envelope.destination.twin = 0
        waiting: Deferred[Reply] = Deferred()
        self._calls[envelope.uid] = (0, waiting)
        began = self._reactor.seconds()
        self.uplink.send(envelope.SerializeToString(), self._now() + timeout).addErrback(lambda _: None)
        waiting.addTimeout(timeout, self._reactor, _too_late("the relay did not answer"))
        try:
            await waiting
        finally:
            self._calls.pop(envelope.uid, None)
        elapsed: float = self._reactor.seconds() - began
        return elapsed

    # --- being called ---

    def serve(self, command: str, handler: Handler) -> None:
        """Answer a command with what ``handler`` returns, at once or later.

        What it raises is answered as an error, code 255; :class:`HandlerError`
        says its own code.  ``module.*`` takes every command of a module.
        """
        self._handlers[command] = handler

    def _handler(self, command: str) -> Handler | None:
        found = self._handlers.get(command)
        while found is None and "." in command:
            command = command.rpartition(".")[0]
            found = self._handlers.get(f"{command}.*")
        return found

    # --- inbound ---

    def _received(self, data: bytes, done: Callable[[bool], None]) -> None:
        # taken over when it is with its handler: what that does with it is another matter
        handling = Deferred.fromCoroutine(dealt_with(self._take(data), done, self.drops))
        handling.addErrback(self._failed)

    def _failed(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            _log.failure("a message could not be dealt with", failure)

    async def _take(self, data: bytes) -> None:
        now = int(self._now())
        try:
            received = await self._opened(data)
        except Rejected as rejected:
            self.drops[rejected.drop] += 1
            _log.debug("dropped: {why}", why=str(rejected))
            envelope = rejected.envelope
            if rejected.code is not None and envelope is not None and envelope.WhichOneof("message") == "request":
                await self._answer_error(envelope, rejected.code, str(rejected), now)
            return
        envelope = received.envelope
        if received.kind == "request":
            until = envelope.timestamp + envelope.expiration
            new = self._seen.add(received.source.twin, envelope.uid, "request", until, now)
            if new:
                self._begin(received, now)
            elif new is None:
                self.drops[Drop.BUSY] += 1
                self._reply(envelope, HandlerError("too many requests of this twin are within their life"))
            else:
                self.drops[Drop.REPLAYED] += 1
        elif received.kind in ("response", "error", "pong"):
            self._answered(received)
        else:
            self.drops[Drop.BAD_PAYLOAD] += 1

    async def _opened(self, data: bytes) -> Received:
        """What came; while the registry is away it waits, for as long as it lives, and the relay with it."""
        assert self._seal is not None
        while True:
            try:
                return await self._seal.open(data, int(self._now()))
            except Rejected as rejected:
                if rejected.drop is not Drop.REGISTRY_DOWN or not self.running:
                    raise
            await deferLater(self._reactor, REGISTRY_RETRY)

    def _answered(self, received: Received) -> None:
        envelope = received.envelope
        called = self._calls.get(envelope.uid)
        # an answer of somebody else is none, whoever signed it
        if called is None or called[1].called or (not received.by_relay and received.source.twin != called[0]):
            self.drops[Drop.UNKNOWN_REPLY] += 1
            return
        waiting = called[1]
        if received.kind == "error":
            text, code = envelope.error.message, envelope.error.code
            offline = received.by_relay and text.endswith(OFFLINE)
            kind = TwinOffline if offline else RemoteError
            waiting.errback(kind(code, text, by_relay=received.by_relay))
        elif received.kind == "pong" and called[0]:
            self.drops[Drop.UNKNOWN_REPLY] += 1
        else:
            schema = envelope.schema if envelope.HasField("schema") else None
            waiting.callback(Reply(received.source, received.payload, schema))

    def _begin(self, received: Received, now: int) -> None:
        envelope = received.envelope
        handler = self._handler(envelope.request.command)
        if self._handling >= MAX_HANDLING:
            self.drops[Drop.BUSY] += 1
            self._reply(envelope, HandlerError("too many requests at once"))
            return
        if handler is None:
            self._reply(envelope, HandlerError(f"function not found: {envelope.request.command}"))
            return
        request = Request(
            received.source,
            envelope.request.command,
            received.payload,
            envelope.schema if envelope.HasField("schema") else None,
            envelope.tags,
            envelope.uid,
            envelope.timestamp + envelope.expiration - now,
        )
        self._handling += 1

        def ended(result: Any) -> None:
            self._handling -= 1
            if isinstance(result, Failure):
                if not result.check(RmbError):
                    _log.failure("handler of {command!r} failed", result, command=request.command)
                value = result.value
                result = value if isinstance(value, HandlerError) else HandlerError(str(value) or type(value).__name__)
            self._reply(envelope, result)

        maybeDeferred(_run, handler, request).addBoth(ended)

    def _reply(self, request: Envelope, result: bytes | HandlerError | None) -> None:
        answer = Envelope(uid=request.uid, expiration=SENT_EXPIRATION)
        payload: bytes | None = None
        if isinstance(result, HandlerError):
            answer.error.code = result.code
            answer.error.message = str(result)
            answer.error.SetInParent()
        else:
            answer.response.SetInParent()
            answer.schema = JSON
            payload = result or b""
        Deferred.fromCoroutine(self._send_answer(request, answer, payload)).addErrback(self._failed)

    async def _answer_error(self, request: Envelope, code: int, text: str, now: int) -> None:
        answer = Envelope(uid=request.uid, expiration=min(request.expiration, SENT_EXPIRATION))
        answer.error.code = code
        answer.error.message = text
        await self._send_answer(request, answer, None)

    async def _send_answer(self, request: Envelope, answer: Envelope, payload: bytes | None) -> None:
        assert self._seal is not None and self.uplink is not None
        source = request.source
        to = Session(source.twin, source.connection if source.HasField("connection") else None)
        try:
            receiver = await self.registry.get(to.twin)
            data = self._seal.close(answer, payload, receiver, to, int(self._now()))
            await self.uplink.send(data, answer.timestamp + answer.expiration)
        except MessageTooLarge as error:
            await self._answer_error(request, HANDLER_ERROR, str(error), int(self._now()))
        except RmbError as error:
            self.drops[Drop.UNKNOWN_REPLY] += 1
            _log.info("an answer to twin {twin} was not sent: {error}", twin=to.twin, error=str(error))


def _run(handler: Handler, request: Request) -> Any:
    result: Any = handler(request)
    return Deferred.fromCoroutine(result) if iscoroutine(result) else result


def _too_late(text: str) -> Callable[[object, float], None]:
    def raise_it(_: object, seconds: float) -> None:
        raise CallTimeout(f"{text} within {seconds:g} s")

    return raise_it


def encryption_of(secret: str) -> Encryption | None:
    """The encryption key of a secret; None where it has junctions, which have no part in it."""
    try:
        return Encryption(secret)
    except IdentityError:
        return None
