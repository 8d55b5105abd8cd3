"""TLS as a carrier. The certificate is not checked, because the handshake inside TLS authenticates the server by its
key."""

from __future__ import annotations

from OpenSSL import SSL
from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.endpoints import wrapClientTLS
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator, IStreamClientEndpoint
from twisted.internet.ssl import CertificateOptions
from twisted.protocols.tls import TLSMemoryBIOProtocol
from zope.interface import implementer


@implementer(IOpenSSLClientConnectionCreator)
class _AnyCertificate:
    """Creator of TLS client connections that accept every certificate.

    The handshake inside TLS proves the server's key and encrypts all data after it, so a certificate would add nothing.
    Checking certificates would exclude clients behind a company's proxy that replaces certificates by its own.
    """

    def __init__(self, host: str, protocol: bytes) -> None:
        self._host = b"" if isIPAddress(host) or isIPv6Address(host) else host.encode("idna")
        self._protocol = protocol
        self._context = CertificateOptions().getContext()

    def clientConnectionForTLS(self, tlsProtocol: TLSMemoryBIOProtocol) -> SSL.Connection:
        """Return a TLS connection for ``tlsProtocol``."""
        connection = SSL.Connection(self._context, None)
        connection.set_alpn_protos([self._protocol])
        if self._host:
            connection.set_tlsext_host_name(self._host)
        return connection


def tls_endpoint(endpoint: IStreamClientEndpoint, host: str, protocol: bytes) -> IStreamClientEndpoint:
    """Return an endpoint that starts TLS on the connections of another endpoint.

    :param host: server name that the client sends in TLS (SNI). An IP address is not sent.
    :param protocol: protocol that the client offers by ALPN.
    """
    found: IStreamClientEndpoint = wrapClientTLS(_AnyCertificate(host, protocol), endpoint)
    return found
