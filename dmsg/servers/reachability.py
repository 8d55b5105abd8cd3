"""Reachability check: a server connects to its own public address, with the whole handshake."""

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

CHECK_TIMEOUT = 10.0
"""Seconds that the check of the server's own reachability may take."""


class _Visitor:
    """User of the test link, which closes it after the handshake. The handshake has proved that the server has the
    expected key.
    """

    def link_up(self, link: Link) -> None:
        link.close()

    def frames_received(self, buffer: bytearray, end: int) -> int:
        return end

    def link_congested(self) -> None:
        """Do nothing, because this end sends nothing."""

    def link_relieved(self) -> None:
        """Do nothing, because this end sends nothing."""

    def link_lost(self, reason: Failure) -> None:
        """Do nothing, because this end closed the link."""


def check_reachability(
    reactor: IReactorTime,
    address: str,
    make_link: MakeLink,
    carriers: Sequence[Carrier] = (),
) -> Deferred[_Visitor]:
    """Return a Deferred that fires if the server at ``address`` (``host:port``) has the key that ``make_link``
    expects.

    :param carriers: carriers of the server besides plain TCP. If one of them has the port of ``address``, it is used.

    The Deferred fails with DmsgError for a malformed address, or with a connection error of Twisted.
    """
    port = parse_address(address)[1]
    carrier = next((one for one in carriers if one.port == port), PLAIN)
    endpoint = carrier_endpoint(reactor, address, carrier, encrypted=False, timeout=CHECK_TIMEOUT)
    connecting = LinkClientEndpoint(reactor, endpoint, make_link).connect(lambda remote: _Visitor())
    # The endpoint limits only the TCP connection. So the whole check has a timeout: another program at the address may
    # accept the connection and then send nothing.
    return connecting.addTimeout(CHECK_TIMEOUT, reactor)
