"""Whether clients can reach a server where it says that it is: it connects to itself, with the whole handshake."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.net.links.connect import LinkClientEndpoint, MakeLink, tcp_endpoint
from dmsg.net.links.link import Link

LOOK_TIMEOUT = 10.0
"""Seconds for it."""


class _Visitor:
    """Leaves as soon as the handshake is done: that the key is the right one is all that is asked."""

    def link_up(self, link: Link) -> None:
        link.close()

    def frames_received(self, buffer: bytearray, end: int) -> int:
        return end

    def link_congested(self) -> None:
        """Nothing is sent."""

    def link_relieved(self) -> None:
        """Nothing is sent."""

    def link_lost(self, reason: Failure) -> None:
        """As it should be."""


def look_at_self(
    reactor: IReactorTime,
    address: str,
    make_link: MakeLink,
) -> Deferred[_Visitor]:
    """Fires when whoever answers at ``address`` (``host:port``) has the key that ``make_link`` asks for.

    :raises DmsgError: through the Deferred, as Twisted's connect errors.
    """
    endpoint = tcp_endpoint(reactor, address, LOOK_TIMEOUT)
    connecting = LinkClientEndpoint(reactor, endpoint, make_link).connect(lambda remote: _Visitor())
    return connecting.addTimeout(LOOK_TIMEOUT, reactor)
