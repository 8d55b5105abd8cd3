"""Client of the message bus for Twisted programs: calls services and serves commands through a relay, without Redis.

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
from typing import NoReturn, TypedDict, Unpack
from uuid import uuid4

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.log_throttle import LogThrottle
from dmsg.net.own_pauses import add_fair_timeout
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
from dmsg.rmb.session.seal import MessageRejected, ReceivedMessage
from dmsg.rmb.session.uplink import Uplink
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.twin import Twin

DEFAULT_TIMEOUT = 30.0
"""Default seconds that a call waits for its answer."""
MAX_CALLS = 10_000
"""Maximum number of a client's calls that are waiting for an answer. A further call fails at once."""

_log = Logger()


@dataclass(frozen=True)
class Reply:
    """Answer to a call.

    :ivar source: session that answered. The signature of the answer was verified, and the twin of this session is the
        one that was called.
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
    """Client of the message bus: one session of a twin.

    :param secret: words, or ``0x`` and 64 digits. If the secret has ``//junctions``, messages are signed but not
        encrypted.
    :param registry: description of a registry, as the option ``--registry`` takes it, or a TwinRegistry.
    :param relays: URLs of relays, ``ws://`` or ``wss://``; at most 4.
    :param session: name of the session. With different names, several programs of a twin can be connected at once. None
        is the twin's unnamed session, which receives the calls of other twins.
    :param update: whether to register the relays and the encryption key of this twin.
    :param strict: whether to register that every program of this twin also makes the strict signature, which covers
        each field separately. None leaves what the registry says about this unchanged.
    :param on_warning: called with a line of text when received messages are dropped because of their times; by default
        the line is logged.
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
        wall_clock: Callable[[], float] | None = None,
        random: Random | None = None,
        on_warning: Callable[[str], None] = lambda text: _log.warn("{text}", text=text),
    ) -> None:
        """:raises IdentityError: ``secret`` is neither words nor a seed, or ``key_type`` is unknown."""
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
        self._now = wall_clock or time.time
        self.drops: Counter[Drop] = Counter()
        self._bus = Participant(
            reactor,
            profile,
            self.registry,
            self._now,
            random or Random(),
            drops=self.drops,
            on_message=self._deliver,
            on_rejected=self._on_rejected,
        )
        self._handlers = Handlers(self._bus)
        self._on_warning = on_warning
        self._log_throttle = LogThrottle(reactor.seconds)
        self._calls: dict[str, tuple[int, Deferred[Reply]]] = {}
        self._starting: Deferred[None] | None = None
        self._start_failure: Failure | None = None
        self._is_stopped = False
        self.ready: Deferred[None] = Deferred()

    @property
    def account(self) -> bytes:
        """Public key of this twin, 32 bytes."""
        return self._profile.identity.account

    @property
    def relays(self) -> Sequence[str]:
        """URLs of the relays of this client."""
        return self._profile.relays

    @property
    def twin(self) -> Twin | None:
        """Registry entry of this client's twin; None until the client is ready."""
        return self._bus.twin if self._bus.is_open else None

    @property
    def uplink(self) -> Uplink | None:
        """Connections to the relays; None until the client is ready."""
        return self._bus.uplink if self._bus.is_open else None

    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self._is_stopped = False
        if self.ready.called:
            self.ready, self._start_failure = Deferred(), None
        self._starting = Deferred.fromCoroutine(self._start())
        self._starting.addErrback(self._start_failed)

    def _start_failed(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            self._fail_ready(failure)

    def _fail_ready(self, failure: Failure) -> None:
        if not self.ready.called:
            self._start_failure = failure
            self.ready.errback(failure)
            self.ready.addErrback(lambda _: None)  # when_online() reports the error of a failed start.

    async def _start(self) -> None:
        await self._bus.open()
        self.ready.callback(None)

    async def when_online(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Wait until at least one relay is connected.

        :raises DmsgTimeout: no relay was connected in time.
        :raises RmbError: the twin is unknown, the registry refuses the entry, or the client is stopped.
        """
        self._check_not_stopped()
        if not self.ready.called:
            waiting: Deferred[None] = Deferred()

            def pass_on(result: Failure | None) -> Failure | None:
                if not waiting.called:
                    waiting.callback(result)
                return result

            self.ready.addBoth(pass_on)
            add_fair_timeout(waiting, timeout, self._reactor, _too_late("the registry"))
            await waiting
        elif self._start_failure is not None:
            self._start_failure.raiseException()
        self._check_not_stopped()
        await self._bus.uplink.when_online(timeout)

    def _check_not_stopped(self) -> None:
        if self._is_stopped:
            raise RmbError("the client is stopped")

    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self._is_stopped = True
        if self._starting is not None:
            self._starting.cancel()
        self._fail_ready(Failure(RmbError("the client is stopped")))
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
        """Call a command of a twin and return the answer.

        :param timeout: seconds to wait for the answer. The message expires after this time, or after 1800 seconds if
            that is sooner.
        :param keep: whether the relay stores the message if the twin is not connected. If False, the call fails at once
            in this case.
        :raises TwinOffline: the twin is not connected.
        :raises RemoteError: the twin or a relay answered with an error.
        :raises CallTimeout: no answer arrived in time.
        :raises RmbError: the twin is unknown, too many calls are waiting for an answer, or the client is stopped.
        """
        if not 0 < timeout < 1e9:
            raise RmbError(f"timeout is {timeout}: it must be above 0 and below 1e9 seconds")
        self._check_not_stopped()
        if not self._bus.is_open:
            await self.when_online(timeout)
        if len(self._calls) >= MAX_CALLS:
            raise RmbError(f"{MAX_CALLS} calls are already waiting for an answer, which is the limit")
        receiver = await self.registry.get(twin)
        self._check_not_stopped()
        now = self._now()
        # The timestamp is rounded down to whole seconds. So the elapsed fraction of the current second is added to the
        # lifetime.
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
        add_fair_timeout(waiting, timeout, self._reactor, _too_late(f"twin {twin}", f" {command!r}"))
        try:
            return await waiting
        finally:
            self._calls.pop(uid, None)

    async def call_all(
        self, twins: Iterable[int], command: str, payload: bytes = b"", **options: Unpack[CallOptions]
    ) -> dict[int, Reply | Exception]:
        """Call several twins at once. Return, for each twin, its answer or the exception of its call."""
        numbers = list(dict.fromkeys(twins))

        async def call(number: int) -> Reply | Exception:
            try:
                return await self.call(number, command, payload, **options)
            except Exception as error:
                return error

        answers = await gatherResults([Deferred.fromCoroutine(call(number)) for number in numbers])
        return dict(zip(numbers, answers, strict=True))

    async def ping(self, timeout: float = 10.0) -> float:
        """Send a ping envelope to the relay, and return the seconds until its answer arrives."""
        await self.when_online(timeout)
        envelope = Envelope(uid=str(uuid4()), timestamp=int(self._now()), expiration=int(timeout) + 1)
        envelope.ping.SetInParent()
        set_address(envelope.source, self._bus.seal.session)
        envelope.destination.twin = 0
        waiting: Deferred[Reply] = Deferred()
        self._calls[envelope.uid] = (0, waiting)
        began = self._reactor.seconds()
        self._bus.uplink.send(envelope.SerializeToString(), self._now() + timeout).addErrback(lambda _: None)
        add_fair_timeout(waiting, timeout, self._reactor, _too_late("the relay"))
        try:
            await waiting
        finally:
            self._calls.pop(envelope.uid, None)
        elapsed: float = self._reactor.seconds() - began
        return elapsed

    # --- incoming requests ---

    def serve(self, command: str, handler: Handler) -> None:
        """Answer requests of a command with the value that ``handler`` returns, directly or by a Deferred or coroutine.

        If the handler raises an exception, the answer is an error with code 255, or with the code of a
        :class:`~dmsg.rmb.HandlerError`. The command ``calculator.*`` stands for every command that begins with
        ``calculator.``.
        """
        self._handlers.add(command, handler)

    # --- received messages ---

    async def _on_rejected(self, rejection: MessageRejected) -> None:
        _log.debug("a received message was dropped: {why}", why=str(rejection))
        if rejection.drop is Drop.BAD_TIMES and self._log_throttle.count_left_out() is not None:
            # The answer that follows has the time of this machine. If that is wrong, the sender drops the answer, too.
            self._on_warning(
                f"a received message was dropped: {rejection}; is the clock of this machine or of the sender wrong?"
            )
        if rejection.wants_answer is not None:
            code, request = rejection.wants_answer
            await self._handlers.answer_error(request, code, str(rejection))

    async def _deliver(self, received: ReceivedMessage) -> None:
        """Pass a received message to its handler or pending call, without waiting until the message is processed."""
        if received.kind == "request":
            self._handlers.requested(received)
        elif received.kind in ("response", "error", "pong"):
            self._on_answer(received)
        else:
            self.drops[Drop.BAD_PAYLOAD] += 1

    def _on_answer(self, received: ReceivedMessage) -> None:
        envelope = received.envelope
        called = self._calls.get(envelope.uid)
        # Any twin can sign a message with this uid. So an answer counts only if it comes from the twin that was called.
        if called is None or called[1].called or (not received.by_relay and received.source.twin != called[0]):
            self.drops[Drop.UNKNOWN_REPLY] += 1
            return
        waiting = called[1]
        if received.kind == "error":
            text, code = envelope.error.message, envelope.error.code
            if received.by_relay and text == EXPIRED:
                # With correct clocks, a call times out here before its message expires at the relay. So one of the two
                # clocks is wrong.
                why = "the relay's clock or this machine's clock is wrong: compare them"
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


def _too_late(asked: str, command: str = "") -> Callable[[object, float], NoReturn]:
    def raise_it(_: object, seconds: float) -> NoReturn:
        raise CallTimeout(f"{asked} did not answer{command} within {seconds:g} s")

    return raise_it
