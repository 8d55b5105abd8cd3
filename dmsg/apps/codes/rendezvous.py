"""Rendezvous by a code: one program offers a code, and the program whose user types the code opens a stream to it.

A code's nameplate is a number that discovery maps to a key for some minutes.  The offering program claims the
nameplate, renews the claim while the offer lasts, and then releases it.  A code can also be offered on the local
network, in addition to discovery or without discovery.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from secrets import randbelow
from typing import TYPE_CHECKING, Protocol, TypeVar

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.apps.codes.pake import WrongCode
from dmsg.apps.codes.receiver_proof import prove_code
from dmsg.apps.codes.stream import MAX_WRONG_GUESSES, PORT, CodeAgreement, CodeFactory, CodeUsedUp
from dmsg.apps.codes.words import DEFAULT_WORDS, MAX_RECEIVERS, MAX_WORDS, MIN_WORDS, Code
from dmsg.base.timeouts import CONNECT_TIMEOUT
from dmsg.errors import DiscoveryError
from dmsg.keys import PubKey
from dmsg.net.reactor import cancel_call
from dmsg.net.streams.endpoints import StreamOpener

if TYPE_CHECKING:
    from dmsg.apps.codes.nearby import Nearby
    from dmsg.discovery.lookup.nameplates import Nameplate

FIRST_NAMEPLATE, NAMEPLATES = 1000, 9000
"""First nameplate that a program may draw without discovery, and number of such nameplates.  They have four digits,
like those of discovery.
"""
FAILURES_BEFORE_WARNING = 2
"""Number of consecutive failed renewals after which ``on_warning`` is called."""

T = TypeVar("T")

_log = Logger()


class CodeClient(StreamOpener, Protocol):
    """Interface of a client, as the functions for codes use it."""

    async def claim_nameplate(self) -> Nameplate:
        """Claim a nameplate that discovery maps to this client's key."""

    async def find_nameplate(self, number: int) -> PubKey:
        """Return the key to which discovery maps a nameplate."""


def offer_code(
    reactor: IReactorTime,
    client: CodeClient | None,
    *,
    nearby: Nearby | None = None,
    words: int = DEFAULT_WORDS,
    receivers: int = 1,
    expires: float | None = None,
    on_agreed: Callable[[CodeAgreement], object] = lambda agreed: None,
    on_wrong_guess: Callable[[int], object] = lambda left: None,
    on_warning: Callable[[str], object] = lambda text: _log.warn("{text}", text=text),
) -> Deferred[OfferedCode]:
    """Claim a nameplate, draw the words of a code, and accept peers that know the code at port 25 of the client.

    A client offers one code at a time.

    :param client: a running :class:`dmsg.Client`.  Peers can find it once ``client.when_published()`` has fired.  None
        offers the code on the local network only, with a random nameplate.
    :param nearby: object that also offers the code on this machine's local networks; None for discovery only.  Wrong
        guesses are counted together for both.
    :param words: number of words of the code, 3 to 12; each has 11 bits.
    :param receivers: number of peers that may use the code, 1 to 100.  Each peer has a key agreement of its own.
    :param expires: seconds after which no peer may use the code; None for no limit.
    :param on_agreed: callback invoked with the :class:`CodeAgreement` of each peer.
    :param on_wrong_guess: callback invoked after each wrong guess except the last one allowed, with the number of
        guesses left.
    :param on_warning: callback invoked with a sentence if the nameplate may be lost, which would make the code useless.
    :raises ValueError: ``words`` or ``receivers`` is out of bounds, or ``client`` and ``nearby`` are both None.
    :raises ~dmsg.DiscoveryError: no discovery assigned a nameplate.
    :raises ~twisted.internet.error.CannotListenError: port 25 of the client is in use.
    """
    if not MIN_WORDS <= words <= MAX_WORDS:
        raise ValueError(f"a code has {MIN_WORDS} to {MAX_WORDS} words, not {words}")
    if not 1 <= receivers <= MAX_RECEIVERS:
        raise ValueError(f"a code can have 1 to {MAX_RECEIVERS} receivers, not {receivers}")
    if client is None and nearby is None:
        raise ValueError("offer_code needs a client, nearby, or both")

    async def offer() -> OfferedCode:
        factory = CodeFactory(reactor, None, on_wrong_guess, receivers=receivers, on_agreed=on_agreed)
        stops: list[Callable[[], object]] = []
        nameplate = None
        try:
            if client is not None:
                # The port is opened before the claim. If another offer of this client uses the port, discovery would
                # assign the nameplate of that offer, which must not be released.
                stops.append(client.listen(factory, PORT).stopListening)
                nameplate = await client.claim_nameplate()
            number = FIRST_NAMEPLATE + randbelow(NAMEPLATES) if nameplate is None else nameplate.number
            factory.code = code = Code.make(number, words)
            if nearby is not None:
                stops.append(nearby.offer(number, factory, PORT).stop)
        except BaseException:
            await _withdraw(nameplate, stops)
            raise
        offered = OfferedCode(reactor, code, factory, stops, nameplate, on_warning)
        if expires is not None:
            expiry = reactor.callLater(expires, factory.expire)
            offered.agreed.addBoth(_cancel_with, expiry)
        return offered

    return Deferred.fromCoroutine(offer())


class OfferedCode:
    """Code that is being offered, returned by :func:`offer_code`.

    :ivar code: the :class:`Code`.  Its ``str()`` is the text that one person tells the other.
    :ivar agreed: Deferred that fires with a :class:`CodeAgreement` when the last receiver has proved that it knows the
        code.  It fails with :class:`CodeUsedUp` after five wrong guesses in all, and with :class:`CodeExpired` when the
        time is over.  Cancel it to withdraw the offer.  Before it fires, the nameplate is released and the port is
        closed.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        code: Code,
        factory: CodeFactory,
        stops: Sequence[Callable[[], object]],
        nameplate: Nameplate | None,
        on_warning: Callable[[str], object],
    ) -> None:
        """:param stops: functions that end the offer: one for discovery, one for the local network."""
        self._reactor = reactor
        self._stops = stops
        self._nameplate = nameplate
        self._on_warning = on_warning
        self._renewing: Deferred[None] | None = None
        if nameplate is not None:
            self._renewing = Deferred.fromCoroutine(self._renew(nameplate))
            # The renewal ends by being cancelled, which is no error.
            self._renewing.addErrback(lambda _: None)
        self.code = code
        self.agreed: Deferred[CodeAgreement] = factory.agreed.addErrback(_used_up)
        self.agreed.addBoth(self._ended)

    def _ended(self, result: object) -> Deferred[object]:
        if self._renewing is not None:
            self._renewing.cancel()
        return Deferred.fromCoroutine(_withdraw(self._nameplate, self._stops)).addCallback(lambda _: result)

    async def _renew(self, nameplate: Nameplate) -> None:
        """Renew the claim on the nameplate periodically, until discovery has assigned the nameplate to another key."""
        failed = 0
        while True:
            await deferLater(self._reactor, nameplate.renew_every)
            try:
                if not await nameplate.renew():
                    self._on_warning("discovery has given the number of this code to somebody else: make another code")
                    return
                failed = 0
            except DiscoveryError as error:
                failed += 1
                if failed == FAILURES_BEFORE_WARNING:
                    self._on_warning(f"{error}; the code may be lost with it")
            except Exception:
                _log.failure("unhandled error while the number of a code was renewed in discovery")


async def _withdraw(nameplate: Nameplate | None, stops: Sequence[Callable[[], object]]) -> None:
    """Release the nameplate of a code, and end its offers."""
    if nameplate is not None:
        with suppress(DiscoveryError):  # A nameplate that cannot be released expires by itself.
            await nameplate.release()
    for stop in stops:
        await maybeDeferred(stop)


def _cancel_with(result: T, call: IDelayedCall) -> T:
    cancel_call(call)
    return result


def _used_up(failure: Failure) -> Failure:
    """Return the failure with WrongCode replaced by an error for the person who offered the code."""
    if failure.check(WrongCode) is None:
        return failure
    return Failure(CodeUsedUp(f"wrong codes were tried {MAX_WRONG_GUESSES} times: this one is used up, make another"))


def accept_code(
    reactor: IReactorTime, client: CodeClient, code: Code, *, timeout: float = CONNECT_TIMEOUT
) -> Deferred[CodeAgreement]:
    """Find the peer that offers a code, open a stream to it, and prove that this side knows the code.

    :param client: a running :class:`dmsg.Client`.
    :param code: code that a person typed, see :meth:`Code.parse`.
    :param timeout: seconds that opening the stream may take.  The proof may take 30 more.
    :raises ~dmsg.DiscoveryError: no discovery has the nameplate, or no discovery answered.
    :raises ~dmsg.ConnectFailed: the peer cannot be reached.
    :raises CodeUsedUp: the code is wrong or used up, or the peer did not answer in time.
    :raises CodeProtocolError: the peer does not use this protocol.
    """

    async def accept() -> CodeAgreement:
        peer = await client.find_nameplate(code.nameplate)
        return await prove_code(reactor, code, lambda factory: client.connect(peer, factory, PORT, timeout=timeout))

    return Deferred.fromCoroutine(accept())
