"""One program of a twin on the bus: who it is, what it sends sealed, what it takes only opened.

Clients and peers differ in where messages come from and go to; what lies between that and the relays is here.
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
from dmsg.rmb.session.seal import Received, Rejected, Seal
from dmsg.rmb.session.setup import find_twin, patiently, publish
from dmsg.rmb.session.uplink import Uplink, dealt_with
from dmsg.rmb.twins import token
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.twin import Twin

REGISTRY_RETRY = 1.0
"""Seconds before the registry is asked again about who sent a message."""
SETTLE_WAIT = 2.0
"""Seconds that stopping waits for confirmations."""
LOOK_EVERY = 0.02
"""Seconds between looks whether they have come."""

_log = Logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Who a program is, and what the registry is to say of it.

    :ivar encryption: None: messages are signed, and not encrypted.
    :ivar relays: URLs, ``ws://`` or ``wss://``; at most 4.
    :ivar sid: a name, so that several programs of a twin can be connected; None is the twin itself.
    :ivar update: let the registry say which relays and which key this twin has.
    :ivar strict: let it also say that every program of this twin signs with borders; None leaves that as it is.
    """

    identity: Identity
    encryption: Encryption | None
    relays: Sequence[str]
    sid: str | None = None
    update: bool = True
    strict: bool | None = None


class Participant:
    """A program of a twin.

    :param taken: told of each message that came and is what it says; a relay's ping behind it is answered when this
        has ended.
    :param rejected: told of each that is not.  Both are coroutines.
    :ivar twin: of the registry; it, ``seal`` and ``uplink`` are there once ``is_open``.
    :param drops: how often each reason occurred.
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
        taken: Callable[[Received], Coroutine[Deferred[object], object, None]],
        rejected: Callable[[Rejected], Coroutine[Deferred[object], object, None]],
    ) -> None:
        self._reactor = reactor
        self._profile = profile
        self.registry = registry
        self.now = wall_clock
        self._random = random
        self._taken = taken
        self._rejected = rejected
        self._running: set[Deferred[None]] = set()
        self.drops = drops
        self.twin: Twin
        self.seal: Seal
        self.uplink: Uplink
        self.is_open = False

    # --- life ---

    async def open(self) -> None:
        """Learn who this twin is, say in the registry where it is reached, and connect to its relays.

        :raises RmbError: it has no twin, or the registry does not take what it says.
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
        # it always signs with borders too: twins that the registry calls strict are not believed without
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
        """Wait until all is confirmed that was sent or brought, ``SETTLE_WAIT`` seconds at most.

        What is not would be sent, or brought, again; and others than this package's do not know what they have had.

        :param also: what is to be true besides.
        """
        until = self._reactor.seconds() + SETTLE_WAIT
        while self.is_open and not (self.uplink.is_settled and also()) and self._reactor.seconds() < until:
            await deferLater(self._reactor, LOOK_EVERY)

    def disconnect(self) -> None:
        """End the connections to relays, if :meth:`open` was done."""
        if self.is_open:
            self.uplink.stop()

    def cancel(self) -> None:
        """Give up what is under way: for the next process of this twin, or for who sent it."""
        for running in list(self._running):
            running.addErrback(lambda _: None)
            running.cancel()

    def run(self, coroutine: Coroutine[Deferred[object], object, None]) -> Deferred[None]:
        """Something that goes on beside all else, and ends with this participant."""
        running: Deferred[None] = Deferred.fromCoroutine(coroutine)
        self._running.add(running)

        def done(result: Failure | None) -> None:
            self._running.discard(running)
            if isinstance(result, Failure) and not result.check(CancelledError):
                _log.failure("a message was not dealt with", result)

        return running.addBoth(done)

    def ask(
        self, question: Callable[[], Awaitable[Twin]], until: float | None = None
    ) -> Coroutine[Deferred[object], object, Twin]:
        """Ask the registry, again and again while it is away.

        :param until: seconds since 1970, after which its being away is an error.
        :raises RegistryUnavailable: it is that time.
        """
        return patiently(self._reactor, self._random, question, until=until, now=self.now)

    # --- out ---

    def send(
        self, envelope: Envelope, payload: bytes | None, receiver: Twin, to: Session, until: float | None = None
    ) -> Deferred[None]:
        """Seal a message and send it; fires when a relay has confirmed it.

        :param receiver: the twin of ``to``.
        :param until: seconds since 1970, when nobody waits for it any more; None: when its life is over.
        :raises MessageTooLarge, CipherError: it cannot be sealed.
        """
        data = self.seal.close(envelope, payload, receiver, to, int(self.now()))
        return self.uplink.send(data, envelope.timestamp + envelope.expiration if until is None else until)

    # --- in ---

    def received(self, data: bytes, done: Callable[[bool], None]) -> None:
        """A message came from a relay.

        :param done: told whether it is taken over; else it comes again.
        """
        self.run(dealt_with(self.take(data), done, self.drops))

    async def take(self, data: bytes) -> None:
        """Open one message; while the registry is away it waits, for as long as it lives, and the relay with it."""
        while True:
            try:
                received = await self.seal.open(data, int(self.now()))
            except Rejected as rejected:
                if rejected.drop is not Drop.REGISTRY_DOWN:
                    self.drops[rejected.drop] += 1
                    await self._rejected(rejected)
                    return
            else:
                await self._taken(received)
                return
            await deferLater(self._reactor, REGISTRY_RETRY)


def encryption_of(secret: str) -> Encryption | None:
    """The encryption key of a secret; None where it has junctions, which have no part in it."""
    try:
        return Encryption(secret)
    except IdentityError:
        return None
