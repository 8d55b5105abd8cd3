"""Reachability check: a server connects to its own public address, and completes a handshake with itself."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.net.addresses import parse_address
from dmsg.net.carriers.endpoint import carrier_endpoint
from dmsg.net.carriers.names import PLAIN, Carrier
from dmsg.net.links.connect import LinkClientEndpoint, MakeLink
from dmsg.net.links.link import Link
from dmsg.net.own_pauses import add_fair_timeout

CHECK_TIMEOUT = 10.0
"""Seconds that the reachability check may take."""


class _Visitor:
    """User of the link that the check opens. It closes the link after the handshake, which proves the server's key."""

    def link_up(self, link: Link) -> None:
        link.close()

    def frames_received(self, buffer: bytearray, end: int) -> int:
        return end

    def link_congested(self) -> None:
        """Ignore that the link's output queue is full, because this end sends no frames."""

    def link_relieved(self) -> None:
        """Ignore that the link's output queue is empty again, because this end sends no frames."""

    def link_lost(self, reason: Failure) -> None:
        """Ignore the loss of the link, because this end closed it."""


def check_reachability(
    reactor: IReactorTime,
    address: str,
    make_link: MakeLink,
    carriers: Sequence[Carrier] = (),
) -> Deferred[_Visitor]:
    """Check whether the server at ``address`` (``host:port``) has the key that ``make_link`` expects.

    The Deferred fires if the server proves the key. Otherwise it fails with a connection error of Twisted, or with
    DmsgError for a malformed address.

    :param carriers: carrier protocols of the server besides plain TCP. If one of them has the port of ``address``, the
        check uses it.
    """
    port = parse_address(address)[1]
    carrier = next((one for one in carriers if one.port == port), PLAIN)
    endpoint = carrier_endpoint(reactor, address, carrier, encrypted=False, timeout=CHECK_TIMEOUT)
    connecting = LinkClientEndpoint(reactor, endpoint, make_link).connect(lambda remote: _Visitor())
    # The timeout of the endpoint covers only the connection. The handshake needs one, too, because another program at
    # the address may accept the connection and then send nothing.
    return add_fair_timeout(connecting, CHECK_TIMEOUT, reactor)
