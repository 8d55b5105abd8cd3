"""Names of carriers, by which a server's entry announces how the server can be reached besides plain TCP. No I/O.

An entry contains the names as features of its version, which programs of 2019 ignore:

* ``ws``: a websocket at the server's address itself;
* ``wss-PORT``: a websocket over TLS at a port of the same host, for example of a reverse proxy on port 443;
* ``tls-PORT``: TLS at a port of the same host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

TCP, WEBSOCKET, SECURE_WEBSOCKET, TLS = "tcp", "ws", "wss", "tls"
ALPN = {SECURE_WEBSOCKET: b"http/1.1", TLS: b"dmsg"}
"""ALPN name that a client offers in TLS, by kind of carrier. A reverse proxy can share one port between servers of
several protocols, because it selects the server by the ALPN name. Without an ALPN name, a web server may answer in
HTTP/2, which opens websockets in another way.
"""
MAX_CARRIERS = 4
"""Maximum number of carriers of an entry that a client tries besides plain TCP."""


@dataclass(frozen=True, slots=True)
class Carrier:
    """Carrier by which a server is reached, and its port.

    :ivar kind: ``tcp``, ``ws``, ``wss`` or ``tls``.
    :ivar port: port on the host of the server's address; 0 for the port in that address.
    """

    kind: str
    port: int = 0

    @property
    def feature(self) -> str:
        """Feature by which an entry announces the carrier, such as ``wss-443``."""
        return f"{self.kind}-{self.port}" if self.port else self.kind

    @property
    def secure(self) -> bool:
        """Whether the carrier is inside TLS."""
        return self.kind in (SECURE_WEBSOCKET, TLS)

    def __str__(self) -> str:
        return f"{self.kind}:{self.port}" if self.port else self.kind


PLAIN = Carrier(TCP)
"""Plain TCP at the server's address, which every server offers."""
WEBSOCKET_HERE = Carrier(WEBSOCKET)
"""Websocket at the server's address, which every server of this package offers."""


def parse_carrier(text: str) -> Carrier:
    """Parse ``wss:PORT`` or ``tls:PORT``, as operators write it.

    :raises ValueError: the text is neither.
    """
    kind, _, port = text.partition(":")
    found = _carrier(kind, port)
    if found is None or not found.secure:
        raise ValueError(f"{text[:80]!r} is not wss:PORT or tls:PORT")
    return found


def carriers_of(features: Iterable[str], port: int = 0) -> list[Carrier]:
    """Return the carriers that the features of an entry name, plain TCP first. Other features are ignored.

    :param port: port of the server's address. If the features name a TLS carrier at this port, the port speaks TLS
        only. The result then begins with that carrier and contains neither plain TCP nor ``ws``.
    """
    found = [_carrier(*feature.partition("-")[::2]) for feature in sorted(features)]
    # ``ws`` is tried before ``wss``, because ``ws`` needs no reverse proxy.
    others = sorted((one for one in found if one is not None), key=lambda one: (one.secure, one.port, one.kind))
    here = [one for one in others if one.port == port and port]
    elsewhere = [one for one in others if one.port and one not in here]
    return ([*here, *elsewhere] if here else [PLAIN, *others])[: 1 + MAX_CARRIERS]


def _carrier(kind: str, port: str) -> Carrier | None:
    if kind == WEBSOCKET and not port:
        return Carrier(WEBSOCKET)
    if kind not in (SECURE_WEBSOCKET, TLS) or not port.isascii() or not port.isdigit() or len(port) > 5:
        return None
    number = int(port)
    return Carrier(kind, number) if 0 < number < 65536 else None
