"""Participant: one program of a twin on the bus, which seals outgoing messages and opens incoming ones.

Clients and peers differ in where their messages come from and go to. Everything between these places and the relays is
here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from random import Random

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.rmb.envelope.cipher import Encryption
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.errors import Drop, IdentityError
from dmsg.rmb.registry.cache import CachedRegistry
from dmsg.rmb.session.seal import MessageRejected, ReceivedMessage, Seal
from dmsg.rmb.session.setup import find_twin, publish, retry_registry
from dmsg.rmb.session.uplink import Uplink, report_outcome
from dmsg.rmb.twins import token
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.twin import Twin

REGISTRY_RETRY = 1.0
"""Seconds before the registry is asked again about the sender of a message."""
SETTLE_WAIT = 2.0
"""Seconds for which stopping waits for confirmations."""
CHECK_INTERVAL = 0.02
"""Seconds between checks whether all messages are confirmed, while the participant stops."""

_log = Logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Identity of a program, and what it registers about itself.

    :ivar encryption: the encryption key; with None messages are signed, but not encrypted.
    :ivar relays: URLs, ``ws://`` or ``wss://``; at most 4.
    :ivar sid: name of the session, so that several programs of a twin can be connected; None is the unnamed session.
    :ivar update: whether to register the relays and the encryption key of this twin.
    :ivar strict: whether to register that every program of this twin signs with borders; None leaves the entry as it
        is.
    """

    identity: Identity
    encryption: Encryption | None
    relays: Sequence[str]
    sid: str | None = None
    update: bool = True
    strict: bool | None = None


class Participant:
    """Program of a twin: seals and sends messages, receives and opens them.

    :param on_message: coroutine function called with each valid message. A relay's ping behind the message is answered
        once the coroutine has ended.
    :param on_rejected: coroutine function called with each invalid message.
    :param drops: counter of drops by reason.
    :ivar twin: the registry entry; ``twin``, ``seal`` and ``uplink`` exist once ``is_open`` is true.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        profile: Profile,
        registry: CachedRegistry,
        wall_clock: Callable[[], float],
        random: Random,
        *,
        drops: Counter[Drop],
        on_message: Callable[[ReceivedMessage], Coroutine[Deferred[object], object, None]],
        on_rejected: Callable[[MessageRejected], Coroutine[Deferred[object], object, None]],
    ) -> None:
        self._reactor = reactor
        self._profile = profile
        self.registry = registry
        self.now = wall_clock
        self._random = random
        self._on_message = on_message
        self._on_rejected = on_rejected
        self._running: set[Deferred[None]] = set()
        self.drops = drops
        self.twin: Twin
        self.seal: Seal
        self.uplink: Uplink
        self.is_open = False

    # --- life ---

    async def open(self) -> None:
        """Find this twin in the registry, register its relays there, and connect to them.

        :raises RmbError: no twin has this key, or the registry refuses the entry.
        """
        profile, registry = self._profile, self.registry
        twin = await self.ask(lambda: find_twin(registry, profile.identity))
        if profile.update:
            twin = await self.ask(
                lambda: publish(
                    registry,
                    profile.identity,
                    twin,
                    profile.relays,
                    profile.encryption,
                    strict=profile.strict,
                    keep=profile.sid is not None,
                )
            )
        session = Session(twin.id, profile.sid)
        self.twin = twin
        # The participant always signs with borders as well, because strict twins are not believed without.
        self.seal = Seal(profile.identity, session, registry, profile.encryption)
        self.uplink = Uplink(
            self._reactor,
            profile.relays,
            lambda: token.make(profile.identity, session, int(self.now())),
            self.received,
            self.now,
            self._random,
        )
        self.uplink.start()
        self.is_open = True

    async def settle(self, also: Callable[[], bool] = lambda: True) -> None:
        """Wait until all sent and received messages are confirmed, at most ``SETTLE_WAIT`` seconds.

        Unconfirmed messages would be sent again, and programs of the reference do not recognise repeated messages.

        :param also: a further condition to wait for.
        """
        until = self._reactor.seconds() + SETTLE_WAIT
        while self.is_open and not (self.uplink.is_settled and also()) and self._reactor.seconds() < until:
            await deferLater(self._reactor, CHECK_INTERVAL)

    def disconnect(self) -> None:
        """Close the connections to relays, if they were opened."""
        if self.is_open:
            self.uplink.stop()

    def cancel(self) -> None:
        """Cancel what is under way, and leave it to the sender or to the next process of this twin."""
        for running in list(self._running):
            running.addErrback(lambda _: None)
            running.cancel()

    def run(self, coroutine: Coroutine[Deferred[object], object, None]) -> Deferred[None]:
        """Start a coroutine that is cancelled when the participant stops."""
        running: Deferred[None] = Deferred.fromCoroutine(coroutine)
        self._running.add(running)

        def done(result: Failure | None) -> None:
            self._running.discard(running)
            if isinstance(result, Failure) and not result.check(CancelledError):
                _log.failure("unhandled error while a message was processed", result)

        return running.addBoth(done)

    def ask(
        self, question: Callable[[], Awaitable[Twin]], until: float | None = None
    ) -> Coroutine[Deferred[object], object, Twin]:
        """Ask the registry; retry with backoff while it is unavailable.

        :param until: seconds since 1970, after which its unavailability is an error.
        :raises RegistryUnavailable: the registry is unavailable and the time is over.
        """
        return retry_registry(self._reactor, self._random, question, until=until, now=self.now)

    # --- outbound ---

    def send(
        self, envelope: Envelope, payload: bytes | None, receiver: Twin, to: Session, until: float | None = None
    ) -> Deferred[None]:
        """Seal a message and send it; fires when a relay has confirmed it.

        :param receiver: the twin of ``to``.
        :param until: when to give up, in seconds since 1970; None waits for the end of the message's life.
        :raises MessageTooLarge, CipherError: the message cannot be sealed.
        """
        data = self.seal.close(envelope, payload, receiver, to, int(self.now()))
        return self.uplink.send(data, envelope.timestamp + envelope.expiration if until is None else until)

    # --- inbound ---

    def received(self, data: bytes, done: Callable[[bool], None]) -> None:
        """Process a message that came from a relay.

        :param done: called with True when the message is handled, or with False when the relay has to bring it
            again.
        """
        self.run(report_outcome(self.take(data), done, self.drops))

    async def take(self, data: bytes) -> None:
        """Open one message and pass it on; while the registry is unavailable, retry until the message expires."""
        while True:
            try:
                received = await self.seal.open(data, int(self.now()))
            except MessageRejected as rejected:
                if rejected.drop is not Drop.REGISTRY_DOWN:
                    self.drops[rejected.drop] += 1
                    await self._on_rejected(rejected)
                    return
            else:
                await self._on_message(received)
                return
            await deferLater(self._reactor, REGISTRY_RETRY)


def encryption_of(secret: str) -> Encryption | None:
    """Return the encryption key of a secret; None for a secret with junctions, which yields no encryption key."""
    try:
        return Encryption(secret)
    except IdentityError:
        return None
