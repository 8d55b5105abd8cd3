"""Replacement of a connection's protocol after a handshake, such as the handshake with a proxy."""

from __future__ import annotations

from twisted.internet.interfaces import IProtocol, ITransport
from twisted.protocols.policies import ProtocolWrapper


def change_protocol(transport: ITransport, protocol: IProtocol) -> None:
    """Deliver the bytes that ``transport`` receives to ``protocol`` from now on.

    :param transport: TCP transport, or TLS protocol around one.
    """
    if isinstance(transport, ProtocolWrapper):
        transport.wrappedProtocol = protocol
    else:
        transport.protocol = protocol  # type: ignore[attr-defined]
