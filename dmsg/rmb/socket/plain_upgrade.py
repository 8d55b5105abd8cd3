"""Fast path for the first bytes of a connection to a relay: a plain upgrade needs no HTTP channel.

Most of the cost of a twin's connection is Twisted's parsing of a request that is always the same. So the first read
is checked here. A complete and unremarkable ``GET`` is passed on directly; everything else, and everything doubtful,
goes to the site, from its first byte.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable
from typing import NamedTuple

from twisted.internet.interfaces import (
    IAddress,
    IConsumer,
    IDelayedCall,
    IProtocol,
    IPushProducer,
    IReactorTime,
    ITCPTransport,
)
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.protocols.policies import ProtocolWrapper
from twisted.python.failure import Failure
from twisted.web.server import Site
from zope.interface import Attribute

from dmsg.net.web.guard import Guard, GuardedConnection

MAX_HEAD = 8192
"""Maximum bytes of a request that is checked here."""
_HEAD = re.compile(rb"GET (/[!-~]*) HTTP/1\.1((?:\r\n[0-9A-Za-z-]+:[^\0\r\n]*){1,100})")
_FIELD = re.compile(rb"\r\n([0-9A-Za-z-]+):([^\r\n]*)")
_ONCE = frozenset((b"host", b"upgrade", b"connection", b"sec-websocket-key", b"sec-websocket-version"))
_ELSEWHERE = frozenset((b"content-length", b"transfer-encoding", b"origin", b"expect", b"te", b"trailer"))


class Upgrade(NamedTuple):
    """Request to become a websocket.

    :ivar headers: headers, with names in lower case.
    :ivar key: the header Sec-WebSocket-Key.
    :ivar rest: bytes that came behind the request.
    """

    target: bytes
    key: bytes
    headers: dict[bytes, bytes]
    rest: bytes


class SocketTransport(ITCPTransport, IConsumer, IPushProducer):
    """TCP transport of a websocket, or of a connection that may become one."""

    protocol: IProtocol = Attribute("Protocol that receives what comes.")


def is_key(key: bytes) -> bool:
    """Whether a Sec-WebSocket-Key is valid: 16 bytes in base64."""
    try:
        return len(key) == 24 and len(b64decode(key, validate=True)) == 16
    except ValueError:
        return False


def plain_upgrade(data: bytes) -> Upgrade | None:
    """Return the upgrade with which these bytes begin, if it is complete and unremarkable, otherwise None."""
    head, blank, rest = data.partition(b"\r\n\r\n")
    if not head.startswith(b"GET ") or not blank or len(head) > MAX_HEAD:
        return None
    # Empty, folded and repeated headers are left to the site.
    whole = _HEAD.fullmatch(head)
    if whole is None:
        return None
    fields = _FIELD.findall(whole[2])
    headers = {name.lower(): value.strip(b" \t") for name, value in fields}
    if len(headers) != len(fields) or not headers.keys() >= _ONCE or _ELSEWHERE & headers.keys():
        return None
    key = headers[b"sec-websocket-key"]
    if (
        headers[b"upgrade"].lower() != b"websocket"
        or b"upgrade" not in headers[b"connection"].lower()
        or headers[b"sec-websocket-version"] != b"13"
        or not is_key(key)
    ):
        return None
    return Upgrade(whole[1], key, headers, rest)


class PlainUpgradeProtocol(GuardedConnection, Protocol):
    """Protocol of a new connection until its first read shows what the connection is for.

    A connection that becomes a session no longer belongs to the site.
    """

    _inner_protocol: IProtocol | None = None
    _silence: IDelayedCall | None = None

    def __init__(self, factory: PlainUpgradeFactory, address: IAddress | None) -> None:
        self._door = factory
        self._address = address

    def connectionMade(self) -> None:
        self._door.guard.add(self)
        # A request reports its progress to the guard of its connection, and looks for these methods on its transport.
        for name in ("request_is_whole", "request_is_answered", "request_is_taken"):
            setattr(self.transport, name, getattr(self, name))
        # A TLS wrapper stays in between, so the site handles the request.
        if isinstance(self.transport, ProtocolWrapper):
            self._open()
        else:
            self._silence = self._door.reactor.callLater(self._door.patience, self._silent)

    def _silent(self) -> None:
        self._silence = None
        self.transport.abortConnection()

    def _cancel(self) -> None:
        self.stop_waiting()
        silence, self._silence = self._silence, None
        if silence is not None:
            silence.cancel()

    def request_is_taken(self) -> None:
        """End the guard of this connection, because its request was an upgrade."""
        self._cancel()
        self._door.guard.remove(self)

    def dataReceived(self, data: bytes) -> None:
        if self._inner_protocol is None:
            self._cancel()
            upgrade = plain_upgrade(data)
            if upgrade is not None and self._door.take(upgrade, self.transport):
                self.request_is_taken()
                if upgrade.rest:
                    self.transport.protocol.dataReceived(upgrade.rest)
                return
            self._open()
        self.start_deadline()
        assert self._inner_protocol is not None
        try:
            self._inner_protocol.dataReceived(data)
        except Exception:
            self.failed()

    def _open(self) -> None:
        behind = self._door.site.buildProtocol(self._address)
        assert behind is not None and self.transport is not None
        self._inner_protocol = behind
        behind.makeConnection(self.transport)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._cancel()
        self._door.guard.remove(self)
        if self._inner_protocol is not None:
            self._inner_protocol.connectionLost(reason)


class PlainUpgradeFactory(Factory):
    """Factory in front of a site.

    :param take: makes a websocket of an upgrade on this transport; returning False leaves the upgrade to the site.
    :param patience: seconds to wait for the first byte.
    """

    noisy = False

    def __init__(
        self,
        site: Site,
        reactor: IReactorTime,
        take: Callable[[Upgrade, SocketTransport], bool],
        patience: float,
        guard: Guard,
    ) -> None:
        """Make a factory.

        :param guard: limits connections that are not sessions, or not yet.
        """
        self.site = site
        self.guard = guard
        self.reactor = reactor
        self.take = take
        self.patience = patience

    def doStart(self) -> None:
        super().doStart()  # type: ignore[no-untyped-call]
        self.site.doStart()

    def doStop(self) -> None:
        super().doStop()  # type: ignore[no-untyped-call]
        self.site.doStop()

    def buildProtocol(self, addr: IAddress | None) -> PlainUpgradeProtocol:
        return PlainUpgradeProtocol(self, addr)
