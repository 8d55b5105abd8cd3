"""Participant: one program of a twin on the bus. It signs and encrypts outgoing messages, and verifies and decrypts
incoming ones.

Clients and peers share this module.  The messages of a client are calls of a program; those of a peer come from Redis.
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

from dmsg.net.deadlines import wait_until
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
"""Seconds between two queries to the registry for the sender of a message, while the registry is unavailable."""
SETTLE_WAIT = 2.0
"""Maximum seconds to wait for confirmations when the participant stops."""
CHECK_INTERVAL = 0.02
"""Seconds between two checks whether all messages are confirmed, when the participant stops."""

_log = Logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Identity of a program, and the settings that it registers for its twin.

    :ivar encryption: encryption key; with None, messages are signed but not encrypted.
    :ivar relays: URLs of relays, ``ws://`` or ``wss://``; at most 4.
    :ivar sid: name of the session, by which several programs of a twin can be connected at once; None is the unnamed
        session.
    :ivar update: whether to register the relays and the encryption key of this twin.
    :ivar strict: whether to register that every program of this twin also makes the strict signature, which covers each
        field separately. None leaves what the registry says about this unchanged.
    """

    identity: Identity
    encryption: Encryption | None
    relays: Sequence[str]
    sid: str | None = None
    update: bool = True
    strict: bool | None = None


class Participant:
    """Program of a twin: signs, encrypts and sends messages; receives, verifies and decrypts them.

    :param on_message: coroutine function that is called with each valid message. When a relay sends a ping after a
        message, the ping is answered after this coroutine has ended.
    :param on_rejected: coroutine function that is called with each invalid message.
    :param drops: counter of dropped messages by reason.
    :ivar twin: registry entry of the twin. ``twin``, ``seal`` and ``uplink`` exist only when ``is_open`` is true.
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
        self._running: dict[Deferred[None], None] = {}
        self.drops = drops
        self.twin: Twin
        self.seal: Seal
        self.uplink: Uplink
        self.is_open = False

    # --- start and stop ---

    async def open(self) -> None:
        """Find this twin in the registry, register its relays, and connect to them.

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
        # The participant always makes the strict signature, too, because receivers reject messages of strict twins
        # without it.
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
        """Wait until all sent and received messages are confirmed, but at most ``SETTLE_WAIT`` seconds.

        Unconfirmed messages would be sent again later, and programs of the reference implementation would process them
        twice.

        :param also: function that returns whether a further condition is met; the wait lasts until it is.
        """
        await wait_until(
            self._reactor,
            lambda: not self.is_open or (self.uplink.is_settled and also()),
            SETTLE_WAIT,
            CHECK_INTERVAL,
        )

    def disconnect(self) -> None:
        """Close the connections to relays, if they were opened."""
        if self.is_open:
            self.uplink.stop()

    def cancel(self) -> None:
        """Cancel all running coroutines.  Messages that are not processed are sent again later: received ones
        by their sender, and those of this twin by its next process."""
        for running in list(self._running):
            running.addErrback(lambda _: None)
            running.cancel()

    def run(self, coroutine: Coroutine[Deferred[object], object, None]) -> Deferred[None]:
        """Start a coroutine. It is cancelled when the participant stops."""
        running: Deferred[None] = Deferred.fromCoroutine(coroutine)
        self._running[running] = None

        def done(result: Failure | None) -> None:
            self._running.pop(running, None)
            if isinstance(result, Failure) and not result.check(CancelledError):
                _log.failure("unhandled error while a message was processed", result)

        return running.addBoth(done)

    def ask(
        self, question: Callable[[], Awaitable[Twin]], until: float | None = None
    ) -> Coroutine[Deferred[object], object, Twin]:
        """Query the registry. While it is unavailable, retry with backoff.

        :param until: time in seconds since 1970 at which retrying ends; None retries without end.
        :raises RegistryUnavailable: the registry was still unavailable at that time.
        """
        return retry_registry(self._reactor, self._random, question, until=until, now=self.now)

    # --- outbound ---

    def send(
        self, envelope: Envelope, payload: bytes | None, receiver: Twin, to: Session, until: float | None = None
    ) -> Deferred[None]:
        """Sign, encrypt and send a message. The Deferred fires when a relay has confirmed it.

        :param receiver: registry entry of the twin of ``to``.
        :param until: time in seconds since 1970 at which to stop trying; None stands for the time at which the message
            expires.
        :raises MessageTooLarge, CipherError: the message cannot be sent.
        """
        data = self.seal.seal_message(envelope, payload, receiver, to, int(self.now()))
        return self.uplink.send(data, envelope.timestamp + envelope.expiration if until is None else until)

    # --- inbound ---

    def received(self, data: bytes, done: Callable[[bool], None]) -> None:
        """Process a message from a relay.

        :param done: callback. Its argument is True if the message was processed, or False if the relay must send it
            again.
        """
        self.run(report_outcome(self.take(data), done, self.drops))

    async def take(self, data: bytes) -> None:
        """Verify and decrypt one message, and call ``on_message`` with it. While the registry is unavailable, retry
        until the message expires."""
        while True:
            try:
                received = await self.seal.open_message(data, int(self.now()))
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
    """Return the encryption key that belongs to a secret. A secret with junctions has none, so the result is None."""
    try:
        return Encryption(secret)
    except IdentityError:
        return None
