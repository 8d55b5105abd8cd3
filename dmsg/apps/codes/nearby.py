"""Codes on the local network, without discovery: the order in which a receiver tries the peers that claim to have made
a code, and the classes that a search of the network implements.

Any machine on the network can claim to offer a code, so the receiver may have to try several peers.  It tries the next
peer when the last one has failed or is slow.  A peer that accepts the connection and then sends nothing therefore
delays the true sender, but cannot block it.  The attempts do not start at the same time, because two simultaneous
attempts with the true sender could both succeed.  A code for several receivers would then count one receiver twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IProtocol, IProtocolFactory, IReactorTime
from twisted.python.failure import Failure

from dmsg.apps.codes.pake import CodeProtocolError
from dmsg.apps.codes.receiver_proof import prove_code
from dmsg.apps.codes.stream import PORT, CodeAgreement, CodeUsedUp
from dmsg.apps.codes.words import Code
from dmsg.base.printable import shorten
from dmsg.errors import NobodyThere
from dmsg.keys import PubKey
from dmsg.net.reactor import cancel_call

STAGGER = 2.0
"""Seconds after which the next key agreement starts, even if the last one is still running."""
GRACE = 3.0
"""Seconds for which the search continues after a peer has rejected the code as wrong, because the true sender may still
answer.
"""
MAX_TEXTS = 2
"""Maximum number of errors in one message: one of the local network, and one of the path through a server."""
MAX_WAITING = 16
"""Maximum number of peers found whose key agreement has not started yet; further peers are ignored."""


class NobodyNearby(NobodyThere):
    """Error: no peer on the network offers the code, or no peer that offers it can be reached."""


class Stoppable(Protocol):
    """Interface that offers and searches have in common."""

    def stop(self) -> Deferred[None]:
        """End the offer or search; the Deferred fires when its ports are closed."""


class NearbyOffer(Stoppable, Protocol):
    """Interface of an object that offers a short code on the local network."""

    @property
    def interfaces(self) -> Sequence[object]:
        """Addresses of this machine on which the code is offered."""


class NearbySearch(Stoppable, Protocol):
    """Interface of an object that searches the local network for a short code."""

    @property
    def interfaces(self) -> Sequence[object]:
        """Addresses of this machine from which the search asks the local networks for the code."""

    @property
    def announcers(self) -> int:
        """Number of different keys whose owners have claimed to offer the code."""

    @property
    def drops(self) -> Mapping[str, int]:
        """Number of received packets that were ignored, by reason."""


class NearbyPeer(Protocol):
    """Interface of a peer on the local network that claims to offer the code."""

    key: PubKey

    def connect(self, factory: IProtocolFactory, port: int, *, timeout: float) -> Deferred[IProtocol]:
        """Open a stream to the peer."""


class Nearby(Protocol):
    """Interface of the object that offers and searches codes on this machine's local networks."""

    def offer(self, nameplate: int, factory: IProtocolFactory, port: int) -> NearbyOffer:
        """Answer peers that search for ``nameplate``, and accept their streams with ``factory``."""

    def search(self, nameplate: int, found: Callable[[NearbyPeer], object]) -> NearbySearch:
        """Search the local networks for peers that offer ``nameplate``, until the search is stopped.

        :param found: callback invoked with each peer.
        """


Begin = Callable[[], "Deferred[CodeAgreement] | None"]
"""Function that starts the key agreement with one candidate, or returns None if it is no longer needed."""


class AgreementRace:
    """Race of key agreements with all peers that may have made the code.  The first agreement that succeeds ends the
    others.

    :param sources: number of objects that add candidates; each calls :meth:`source_ended` once.
    :ivar first: Deferred that fires with the first :class:`CodeAgreement`.  It fails with the most informative error
        when all sources have ended and no agreement has succeeded.  Cancelling it ends all agreements.
    """

    def __init__(self, reactor: IReactorTime, sources: int) -> None:
        self._reactor = reactor
        self._sources = sources
        self._waiting: deque[Begin] = deque()
        self._running: list[Deferred[CodeAgreement]] = []
        self._errors: list[Failure] = []
        self._stagger: IDelayedCall | None = None
        self._is_over = False
        self.first: Deferred[CodeAgreement] = Deferred(lambda _: self._end())

    def add(self, begin: Begin) -> None:
        """Add a candidate.  It is ignored if ``MAX_WAITING`` candidates are already waiting.

        :param begin: function that starts the agreement with the candidate.
        """
        if not self._is_over and len(self._waiting) < MAX_WAITING:
            self._waiting.append(begin)
            self._go_on()

    def source_ended(self, error: Failure | None = None) -> None:
        """Record that a source adds no further candidates.

        Once all sources have ended, the race ends when the last agreement that is running or waiting has ended.

        :param error: reason why the source found no candidate.
        """
        self._sources -= 1
        if error is not None:
            self._errors.append(error)
        self._go_on()

    @property
    def is_idle(self) -> bool:
        """Whether no agreement is running and no candidate waits."""
        return not self._running and not self._waiting

    def _go_on(self) -> None:
        while self._waiting and self._stagger is None and not self._is_over:
            running = self._waiting.popleft()()
            if running is None:
                continue
            self._running.append(running)
            self._stagger = self._reactor.callLater(STAGGER, self._on_slow)
            running.addBoth(self._ended, running)
        if self.is_idle and self._sources <= 0 and not self._is_over:
            self._end()
            self.first.errback(self._why())

    def _on_slow(self) -> None:
        self._stagger = None
        self._go_on()

    def _ended(self, result: CodeAgreement | Failure, running: Deferred[CodeAgreement]) -> None:
        self._running.remove(running)
        if self._is_over:
            return
        if not isinstance(result, Failure):
            self._end()
            self.first.callback(result)
            return
        self._errors.append(result)
        if not self._running:
            cancel_call(self._stagger)
            self._stagger = None
        self._go_on()

    def _why(self) -> Failure:
        """Return the error of the last peer that opened a key agreement; if no peer did, combine the last errors."""
        telling = [error for error in self._errors if error.check(CodeUsedUp, CodeProtocolError) is not None]
        if telling or len(self._errors) == 1:
            return (telling or self._errors)[-1]
        texts = dict.fromkeys(str(error.value) for error in self._errors)
        return Failure(NobodyNearby("; ".join(list(texts)[-MAX_TEXTS:]) or "nobody offers this code"))

    def _end(self) -> None:
        self._is_over = True
        cancel_call(self._stagger)
        self._waiting.clear()
        for one in list(self._running):
            one.cancel()


class NearbySource:
    """Source that adds peers on the local network to a race, as candidates.

    :param timeout: seconds after which the search ends; also the seconds that opening one stream may take.
    """

    def __init__(
        self, reactor: IReactorTime, nearby: Nearby, code: Code, race: AgreementRace, *, timeout: float
    ) -> None:
        self._reactor = reactor
        self._code = code
        self._race = race
        self._timeout = timeout
        self._reached: set[PubKey] = set()
        self._search = nearby.search(code.nameplate, self._found)
        self._until = reactor.callLater(timeout, self._end)
        self._stopped: Deferred[None] | None = None

    def _found(self, peer: NearbyPeer) -> None:
        def begin() -> Deferred[CodeAgreement] | None:
            # A peer that was reached is not tried again at another of its addresses: each key agreement gives a false
            # sender one guess at the code.
            return None if peer.key in self._reached else Deferred.fromCoroutine(self._agree(peer))

        self._race.add(begin)

    async def _agree(self, peer: NearbyPeer) -> CodeAgreement:
        def opened(protocol: IProtocol) -> IProtocol:
            self._reached.add(peer.key)
            return protocol

        def connect(factory: IProtocolFactory) -> Deferred[IProtocol]:
            return peer.connect(factory, PORT, timeout=self._timeout).addCallback(opened)

        try:
            return await prove_code(self._reactor, self._code, connect)
        except CodeUsedUp:
            if self._until.active() and self._until.getTime() > self._reactor.seconds() + GRACE:
                self._until.reset(GRACE)
            raise
        except CancelledError:
            raise
        except (
            Exception
        ) as error:  # All exceptions are caught, because Twisted's connection errors have no common base class.
            if peer.key in self._reached:
                raise
            raise NobodyNearby(
                f"somebody on this network offers this code, but cannot be reached: {shorten(str(error))}; does a "
                "firewall there block connections from this network?"
            ) from None

    def _end(self) -> None:
        error = None if self._search.announcers else Failure(_nobody(self._search, self._timeout))
        self.stop()
        self._race.source_ended(error)

    def stop(self) -> Deferred[None]:
        """End the search.  Streams to peers that were found stay open."""
        cancel_call(self._until)
        if self._stopped is None:
            self._stopped = self._search.stop()
        return self._stopped


def _nobody(search: NearbySearch, seconds: float) -> NobodyNearby:
    if not search.interfaces:
        return NobodyNearby("this machine is in no network where others can be asked for the code")
    ignored = ", ".join(f"{reason}: {number}" for reason, number in sorted(search.drops.items()))
    return NobodyNearby(
        f"nobody on this network offers this code (asked for {seconds:g} s): is 'dmsg send' running with --lan, and "
        "do the network and the firewalls of both machines let them reach each other?"
        + (f" (ignored answers: {ignored})" if ignored else "")
    )
