"""Race of carriers: a client connects to a server over the first carrier that works."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime, IStreamClientEndpoint
from twisted.python.failure import Failure

from dmsg.base.printable import shorten
from dmsg.keys import PubKey
from dmsg.net.carriers.names import PLAIN, Carrier
from dmsg.net.links.connect import LinkClientEndpoint, MakeLink
from dmsg.net.links.interfaces import LinkUser
from dmsg.net.links.link import Link, MakeUser, OnFailure
from dmsg.net.reactor import cancel_call

HEAD_START = 0.25
"""Seconds between the starts of two attempts to connect to a server over different carriers. The earlier attempts
continue."""
MAX_REMEMBERED = 256
"""Maximum number of servers for which the last carrier that worked is remembered."""
_U = TypeVar("_U", bound=LinkUser[Link])


class CarrierMemory:
    """Memory of the carrier over which each server was last reached, and of the errors of the other carriers."""

    def __init__(self) -> None:
        self._worked: dict[PubKey, tuple[Carrier, dict[Carrier, str]]] = {}

    def order(self, server: PubKey, carriers: Sequence[Carrier]) -> list[Carrier]:
        """Return the carriers in the order in which to try them. The carrier that worked last comes first."""
        last, failures = self._worked.get(server, (PLAIN, {}))
        for gone in failures.keys() - set(carriers):
            # Errors of carriers that the entry no longer names are dropped. Otherwise a server that names other ports
            # each time could fill the memory.
            del failures[gone]
        return sorted(carriers, key=lambda carrier: carrier != last)

    def record_success(self, server: PubKey, carrier: Carrier, failed: Mapping[Carrier, str]) -> dict[Carrier, str]:
        """Record that a server was reached over ``carrier``.

        :param failed: error messages of the carriers that failed in this race.
        :returns: ``failed``, plus the carriers that failed in earlier races and were not tried in this race.
        """
        _, earlier = self._worked.pop(server, (PLAIN, {}))
        failures = {one: why for one, why in {**earlier, **failed}.items() if one != carrier}
        if carrier != PLAIN:
            self._worked[server] = carrier, failures
        if len(self._worked) > MAX_REMEMBERED:
            del self._worked[next(iter(self._worked))]
        return failures


class CarrierRace:
    """Attempt to connect to one server over several carriers, started at intervals of ``HEAD_START`` seconds or when
    the previous one fails.

    The first carrier over which the server answers the handshake wins, and the other attempts are cancelled. Up to that
    moment no server has received the client's key, so the server never sees two connections of one client.

    :param carriers: carriers in the order in which to try them.
    :param endpoint: returns the endpoint of a carrier.
    :param make_link: makes the link of a connection, see :data:`~dmsg.net.links.connect.MakeLink`.
    :ivar used: carrier of the connection; None until a carrier has won.
    :ivar failed: error messages by carrier. They include carriers that were started before the winner and have not
        answered.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        carriers: Sequence[Carrier],
        endpoint: Callable[[Carrier], IStreamClientEndpoint],
        make_link: MakeLink,
    ) -> None:
        self._reactor = reactor
        self._carriers = list(carriers)
        self._endpoint = endpoint
        self._make_link = make_link
        self.used: Carrier | None = None
        self.failed: dict[Carrier, str] = {}

    def connect(self, make_user: Callable[[PubKey], _U]) -> Deferred[_U]:
        """Connect; see :meth:`~dmsg.net.links.connect.LinkClientEndpoint.connect`.

        If all carriers fail, the Deferred fails with the error of the carrier that failed first.
        """
        return _Run(self._reactor, self, self._carriers, make_user).result

    def begin(self, carrier: Carrier, first_bytes: Callable[[Link, bytes], bool]) -> LinkClientEndpoint:
        """Return the endpoint that connects over a carrier.

        :param first_bytes: called with the first bytes of the server's answer.
        """

        def make_link(make_user: MakeUser, failed: OnFailure) -> Link:
            link = self._make_link(make_user, failed)
            link.first_bytes = first_bytes
            return link

        return LinkClientEndpoint(self._reactor, self._endpoint(carrier), make_link)


class _Run(Generic[_U]):
    """State of one race of carriers."""

    def __init__(
        self, reactor: IReactorTime, race: CarrierRace, carriers: Sequence[Carrier], make_user: Callable[[PubKey], _U]
    ) -> None:
        self._reactor = reactor
        self._race = race
        self._make_user = make_user
        self._waiting = list(carriers)
        self._trying: dict[Carrier, Deferred[_U]] = {}
        self._winner: Carrier | None = None
        self._first_error: Failure | None = None
        self._next: IDelayedCall | None = None
        self.result: Deferred[_U] = Deferred(lambda _: self._give_up())
        self._start_next()

    def _start_next(self) -> None:
        cancel_call(self._next)
        self._next = None
        if not self._waiting or self._winner is not None or self.result.called:
            return
        carrier = self._waiting.pop(0)
        endpoint = self._race.begin(carrier, lambda link, data: self._answered(carrier))
        if self._waiting:
            self._next = self._reactor.callLater(HEAD_START, self._start_next)
        trying = self._trying[carrier] = endpoint.connect(self._make_user)
        trying.addCallbacks(self._connected, lambda failure: self._failed(carrier, failure))

    def _answered(self, carrier: Carrier) -> bool:
        """Let ``carrier``, on which a server has answered, win the race if no other carrier has won.

        :returns: whether another carrier has won, so that this answer is ignored.
        """
        if self._winner is None:
            self._winner = self._race.used = carrier
            self._race.failed.pop(carrier, None)
            cancel_call(self._next)
            self._next = None
            was_earlier = True
            for other, trying in list(self._trying.items()):
                was_earlier = was_earlier and other != carrier
                if was_earlier:
                    self._race.failed[other] = f"no answer before the one by {carrier}"
                if other != carrier:
                    # The cancelled carrier will be tried again if the winner fails, because the answer of the winner
                    # may have come from another service at its address.
                    self._waiting.append(other)
                    del self._trying[other]
                    trying.addErrback(lambda failure: failure.trap(CancelledError) and None)
                    trying.cancel()
        return self._winner != carrier

    def _connected(self, user: _U) -> None:
        if not self.result.called:
            self.result.callback(user)

    def _failed(self, carrier: Carrier, failure: Failure) -> None:
        if self._trying.pop(carrier, None) is None or self.result.called:
            return
        self._race.failed[carrier] = shorten(str(failure.value)) or type(failure.value).__name__
        self._first_error = self._first_error or failure
        if self._winner == carrier:
            self._winner = self._race.used = None
        if self._waiting:
            self._start_next()
        elif not self._trying:
            self.result.errback(self._first_error)

    def _give_up(self) -> None:
        cancel_call(self._next)
        self._next = None
        trying, self._trying = self._trying, {}
        for one in trying.values():
            one.addErrback(lambda failure: failure.trap(CancelledError) and None)
            one.cancel()
