"""Calling services, and being one, straight through a relay: for Twisted programs, without Redis.

::

    client = RmbClient(reactor, words, "http://127.0.0.1:9091", ["ws://127.0.0.1:8081"])
    client.startService()
    reply = await client.call(7, "calculator.add", b"[1, 2]")
    client.serve("calculator.add", lambda request: json.dumps(sum(json.loads(request.payload))).encode())
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypedDict, Unpack
from uuid import uuid4

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.net.reactor import Reactor
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.envelope.texts import EXPIRED, OFFLINE
from dmsg.rmb.envelope.wire import FAIL_FAST, JSON, SENT_EXPIRATION, set_address
from dmsg.rmb.errors import CallTimeout, Drop, RemoteError, RmbError, TwinOffline
from dmsg.rmb.registry.cache import CachedRegistry
from dmsg.rmb.registry.interface import TwinRegistry
from dmsg.rmb.registry.service import open_registry
from dmsg.rmb.session.handlers import Handler, Handlers
from dmsg.rmb.session.participant import Participant, Profile, encryption_of
from dmsg.rmb.session.seal import Received, Rejected
from dmsg.rmb.session.uplink import Uplink
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.twin import Twin

DEFAULT_TIMEOUT = 30.0
"""Seconds for a call."""
MAX_CALLS = 10_000
"""Calls that wait for an answer."""

_log = Logger()


@dataclass(frozen=True)
class Reply:
    """An answer.

    :ivar source: who answers; signed, and the one who was asked.
    """

    source: Session
    payload: bytes
    schema: str | None


class CallOptions(TypedDict, total=False):
    """Keyword arguments of :meth:`RmbClient.call`."""

    timeout: float
    schema: str | None
    session: str | None
    keep: bool
    tags: str


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
    """

    name = "rmb-client"

    def __init__(
        self,
        reactor: Reactor,
        secret: str,
        registry: str | TwinRegistry,
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
        profile = Profile(
            identity=Identity(secret, key_type),
            encryption=encryption_of(secret) if encryption else None,
            relays=tuple(relays),
            sid=session,
            update=update,
            strict=strict,
        )
        self._profile = profile
        self._own_registry = isinstance(registry, str)
        source = open_registry(registry, reactor) if isinstance(registry, str) else registry
        self.registry = source if isinstance(source, CachedRegistry) else CachedRegistry(source, reactor)
        self._now = wall_clock
        self.drops: Counter[Drop] = Counter()
        self._bus = Participant(
            reactor,
            profile,
            self.registry,
            wall_clock,
            random or Random(),
            drops=self.drops,
            taken=self._taken,
            rejected=self._rejected,
        )
        self._handlers = Handlers(self._bus)
        self._calls: dict[str, tuple[int, Deferred[Reply]]] = {}
        self._starting: Deferred[None] | None = None
        self._could_not: Failure | None = None
        self.ready: Deferred[None] = Deferred()

    @property
    def account(self) -> bytes:
        """32 bytes."""
        return self._profile.identity.account

    @property
    def relays(self) -> Sequence[str]:
        """URLs."""
        return self._profile.relays

    @property
    def twin(self) -> Twin | None:
        """Of the registry, once it is ready."""
        return self._bus.twin if self._bus.is_open else None

    @property
    def uplink(self) -> Uplink | None:
        """The connections to relays, once it is ready."""
        return self._bus.uplink if self._bus.is_open else None

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
        await self._bus.open()
        self.ready.callback(None)

    async def when_online(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Wait for a relay.

        :raises DmsgTimeout: there is none.
        :raises RmbError: the twin is unknown, or the registry refuses it.
        """
        if not self.ready.called:
            waiting: Deferred[None] = Deferred()

            def pass_on(result: Failure | None) -> Failure | None:
                if not waiting.called:
                    waiting.callback(result)
                return result

            self.ready.addBoth(pass_on)
            waiting.addTimeout(timeout, self._reactor, _too_late("the registry did not answer"))
            await waiting
        elif self._could_not is not None:
            self._could_not.raiseException()
        await self._bus.uplink.when_online(timeout)

    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self.ready.addErrback(lambda _: None)
        if self._starting is not None:
            self._starting.cancel()
        await self._bus.settle()
        self._bus.disconnect()
        self._bus.cancel()
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
        if not self._bus.is_open:
            await self.when_online(timeout)
        if len(self._calls) >= MAX_CALLS:
            raise RmbError(f"{MAX_CALLS} calls wait for an answer")
        receiver = await self.registry.get(twin)
        now = self._now()
        # the message is stamped with whole seconds: of the present one a part is over
        life = max(1, min(math.ceil(now % 1 + timeout), SENT_EXPIRATION))
        envelope = Envelope(uid=str(uuid4()), expiration=life)
        envelope.request.command = command
        if schema is not None:
            envelope.schema = schema
        words = [word for word in (tags, "" if keep else FAIL_FAST) if word]
        if words:
            envelope.tags = ",".join(words)
        uid = envelope.uid
        waiting: Deferred[Reply] = Deferred()
        sent = self._bus.send(envelope, payload, receiver, Session(twin, session), now + life)
        self._calls[uid] = (twin, waiting)

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
        self, twins: Iterable[int], command: str, payload: bytes = b"", **options: Unpack[CallOptions]
    ) -> dict[int, Reply | Exception]:
        """Ask several twins at once: twin -> its answer, or the error of that one."""
        numbers = list(dict.fromkeys(twins))

        async def call(number: int) -> Reply | Exception:
            try:
                return await self.call(number, command, payload, **options)
            except Exception as error:
                return error

        answers = await gatherResults([Deferred.fromCoroutine(call(number)) for number in numbers])
        return dict(zip(numbers, answers, strict=True))

    async def ping(self, timeout: float = 10.0) -> float:
        """Seconds to the relay and back, as an envelope."""
        await self.when_online(timeout)
        envelope = Envelope(uid=str(uuid4()), timestamp=int(self._now()), expiration=int(timeout) + 1)
        envelope.ping.SetInParent()
        set_address(envelope.source, self._bus.seal.session)
        envelope.destination.twin = 0
        waiting: Deferred[Reply] = Deferred()
        self._calls[envelope.uid] = (0, waiting)
        began = self._reactor.seconds()
        self._bus.uplink.send(envelope.SerializeToString(), self._now() + timeout).addErrback(lambda _: None)
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
        self._handlers.add(command, handler)

    # --- what came ---

    async def _rejected(self, rejected: Rejected) -> None:
        _log.debug("dropped: {why}", why=str(rejected))
        if rejected.wants_answer is not None:
            code, request = rejected.wants_answer
            await self._handlers.answer_error(request, code, str(rejected))

    async def _taken(self, received: Received) -> None:
        """It is with its handler, or its call, when this ends: what that does with it is another matter."""
        if received.kind == "request":
            self._handlers.requested(received)
        elif received.kind in ("response", "error", "pong"):
            self._answered(received)
        else:
            self.drops[Drop.BAD_PAYLOAD] += 1

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
            if received.by_relay and text == EXPIRED:
                # the call itself ends when its time is over: a relay that says so earlier has another clock
                why = "its clock or this one's is wrong: compare them"
                waiting.errback(CallTimeout(f"twin {called[0]} did not answer: the {text}, a relay says; {why}"))
                return
            offline = received.by_relay and text.endswith(OFFLINE)
            kind = TwinOffline if offline else RemoteError
            waiting.errback(kind(code, text, by_relay=received.by_relay))
        elif received.kind == "pong" and called[0]:
            self.drops[Drop.UNKNOWN_REPLY] += 1
        else:
            schema = envelope.schema if envelope.HasField("schema") else None
            waiting.callback(Reply(received.source, received.payload, schema))


def _too_late(text: str) -> Callable[[object, float], None]:
    def raise_it(_: object, seconds: float) -> None:
        raise CallTimeout(f"{text} within {seconds:g} s")

    return raise_it
