"""HTTP to public keys: Twisted's and treq's clients reach ``http://KEY/`` and ``http://NAME/`` over dmsg."""

from __future__ import annotations

from twisted.web.client import URI
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from dmsg.clients.address_book import Names
from dmsg.net.streams.endpoints import CONNECT_TIMEOUT, DmsgClientEndpoint, StreamOpener


@implementer(IAgentEndpointFactory)
class DmsgEndpointFactory:
    """Endpoint factory for :meth:`twisted.web.client.Agent.usingEndpointFactory`.

    Hosts of URLs are public keys (:attr:`~dmsg.PubKey.text`) or names of the address book, with or without ``.dmsg``
    behind them; ports are those of the remote.

    :param client: opens the streams.
    :param timeout: seconds for the whole of a connect.
    """

    def __init__(self, client: StreamOpener, *, timeout: float = CONNECT_TIMEOUT) -> None:
        self._client = client
        self._timeout = timeout

    def endpointForURI(self, uri: URI) -> DmsgClientEndpoint:
        """As in :class:`twisted.web.iweb.IAgentEndpointFactory`.

        :raises UnknownName: the host is neither a public key nor a name of the address book.
        """
        key = Names().find_host(uri.host.decode("ascii", "replace"))
        return DmsgClientEndpoint(self._client, key, uri.port, timeout=self._timeout)
