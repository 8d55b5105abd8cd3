"""Header of the PROXY protocol before the first bytes of a link."""

from __future__ import annotations

from collections.abc import Callable

from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.net.carriers.proxy_header import ProxyHeader, ProxyHeaderError
from dmsg.net.links.link import Link, OnFirstBytes


class ProxyFirst:
    """Receiver of the first bytes of a link, until the header of its proxy is complete.

    The link's timer of the handshake also limits the header.

    :param named: called with the link and the client's address, which is empty if the proxy names none; returns why
        the client is refused, or None.
    :param then: receiver of what follows the header.
    """

    def __init__(self, named: Callable[[Link, str], DropReason | None], then: OnFirstBytes) -> None:
        self._named = named
        self._then = then
        self._header = ProxyHeader()

    def received(self, link: Link, data: bytes) -> bool:
        """Process bytes of the header. Return True: they are no part of a handshake.

        :raises RemoteProtocolError: they are not a header.
        """
        header = self._header
        try:
            if not header.feed(data):
                return True
        except ProxyHeaderError as error:
            raise RemoteProtocolError(DropReason.BAD_PROXY_HEADER, f"header of the PROXY protocol: {error}") from None
        link.first_bytes = self._then
        refusal = self._named(link, header.client)
        if refusal is not None:
            link.abort(refusal)
        elif header.rest:
            link.receive_behind(header.rest)
        return True
