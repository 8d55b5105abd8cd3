"""Header of the PROXY protocol before the first bytes of a link."""

from __future__ import annotations

from collections.abc import Callable

from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.net.carriers.proxy_header import ProxyHeader, ProxyHeaderError
from dmsg.net.links.link import Link, OnFirstBytes


class ProxyFirst:
    """Receiver of the first bytes of a connection from a proxy, until the PROXY protocol header is complete.

    The handshake timeout of the link also limits the header.

    :param named: called with the link and the client's address, which is empty if the proxy names no client; returns
        the reason to refuse the client, or None.
    :param then: receiver of the bytes after the header.
    """

    def __init__(self, named: Callable[[Link, str], DropReason | None], then: OnFirstBytes) -> None:
        self._named = named
        self._then = then
        self._header = ProxyHeader()

    def received(self, link: Link, data: bytes) -> bool:
        """Process bytes of the header. Return True, so that the link does not pass them to the handshake.

        :raises RemoteProtocolError: the bytes are not a valid header.
        """
        header = self._header
        try:
            if not header.feed(data):
                return True
        except ProxyHeaderError as error:
            raise RemoteProtocolError(
                DropReason.BAD_PROXY_HEADER, f"the header of the PROXY protocol is wrong: {error}"
            ) from None
        link.first_bytes = self._then
        refusal = self._named(link, header.client)
        if refusal is not None:
            link.abort(refusal)
        elif header.rest:
            link.receive_rest(header.rest)
        return True
