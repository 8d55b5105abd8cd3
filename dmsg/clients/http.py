"""HTTP to public keys: lets the HTTP clients of Twisted and treq reach ``http://KEY/`` and
``http://NAME/`` over dmsg.
"""

from __future__ import annotations

from twisted.web.client import URI
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from dmsg.base.timeouts import CONNECT_TIMEOUT
from dmsg.clients.address_book import AddressBook
from dmsg.net.streams.endpoints import DmsgClientEndpoint, StreamOpener


@implementer(IAgentEndpointFactory)
class DmsgEndpointFactory:
    """Endpoint factory for :meth:`twisted.web.client.Agent.usingEndpointFactory`.

    The host of a URL is a public key (:attr:`~dmsg.PubKey.text`) or a name of the address book, with or without
    ``.dmsg`` appended. The port is a port of the remote.

    :param client: client that opens the streams.
    :param timeout: seconds that a connect may take as a whole.
    """

    def __init__(self, client: StreamOpener, *, timeout: float = CONNECT_TIMEOUT) -> None:
        self._client = client
        self._timeout = timeout

    def endpointForURI(self, uri: URI) -> DmsgClientEndpoint:
        """Return the endpoint for a URL; see :class:`twisted.web.iweb.IAgentEndpointFactory`.

        :raises UnknownName: the host is neither a public key nor a name of the address book.
        """
        key = AddressBook().find_host(uri.host.decode("ascii", "replace"))
        return DmsgClientEndpoint(self._client, key, uri.port, timeout=self._timeout)
