"""Connections through a proxy: HTTP CONNECT (RFC 9110, section 9.3.6) and SOCKS5 (RFC 1928, RFC 1929).

The proxy is named by an environment variable, as for other programs: the first of ``DMSG_PROXY``, ``HTTPS_PROXY`` and
``ALL_PROXY`` that is set, each also in lower case. Connections to loopback and to the hosts in ``NO_PROXY`` are direct.
If the proxy fails, no direct connection is tried, because the user may need the proxy for anonymity.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectError
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Factory
from zope.interface import implementer

from dmsg.base.printable import shorten
from dmsg.errors import DmsgError
from dmsg.net.addresses import is_host
from dmsg.net.protocols import Negotiation, change_protocol

VARIABLES = ("DMSG_PROXY", "HTTPS_PROXY", "ALL_PROXY")
"""Environment variables that name a proxy; the first one that is set is used."""
SCHEMES = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
"""URL schemes of proxies, with their default ports. With ``socks5`` and with ``socks5h``, the proxy resolves host
names."""
MAX_ANSWER = 16 * 1024
"""Maximum number of bytes that a proxy may answer before the connection is open."""
_REFUSALS = {
    1: "general failure",
    2: "not allowed by its rules",
    3: "network unreachable",
    4: "host unreachable",
    5: "connection refused",
    6: "time to live expired",
    7: "command not supported",
    8: "address type not supported",
}
"""Messages for the SOCKS5 reply codes (RFC 1928, section 6) by which a proxy refuses a connection."""
_NO_AUTHENTICATION, _PASSWORD = 0, 2


class ProxyError(DmsgError):
    """Error: a proxy failed to connect to a host, or the URL of the proxy is malformed."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """Address and credentials of a proxy.

    :ivar scheme: ``http``, ``https`` (TLS to the proxy), ``socks5`` or ``socks5h``.
    :ivar user: user name; empty for a proxy without authentication.
    """

    scheme: str
    host: str
    port: int
    user: str = ""
    password: str = ""

    @property
    def display_url(self) -> str:
        """URL without user and password, for messages."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def parse_proxy(url: str) -> Proxy:
    """Parse ``SCHEME://[USER:PASSWORD@]HOST[:PORT]``.

    :raises ProxyError: the URL is malformed, or its scheme is unknown. The error does not contain the password.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise ProxyError(f"the proxy's URL is malformed: SCHEME://HOST:PORT is needed, with a scheme of {known}")
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    return Proxy(parts.scheme, host, port or SCHEMES[parts.scheme], user, password)


def proxy_for(host: str, environment: Mapping[str, str] | None = None) -> Proxy | None:
    """Return the proxy for connections to a host, or None for direct connections.

    :raises ProxyError: the environment variable contains a malformed URL.
    """
    environment = os.environ if environment is None else environment
    named = next((found for name in VARIABLES if (found := _variable(environment, name))), "")
    if not named or _is_loopback(host):
        return None
    exempt = _variable(environment, "NO_PROXY")
    if exempt:
        # The import is here, because the module imports 20 others, which commands without a proxy do not need.
        from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

        if proxy_bypass_environment(host, {"no": exempt}):
            return None
    return parse_proxy(named)


def _variable(environment: Mapping[str, str], name: str) -> str:
    return (environment.get(name) or environment.get(name.lower()) or "").strip()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")


@implementer(IStreamClientEndpoint)
class ProxyEndpoint:
    """Client endpoint that connects to a host through a proxy.

    :param endpoint: endpoint of the proxy.
    :param timeout: seconds to wait for the proxy's answer.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        endpoint: IStreamClientEndpoint,
        proxy: Proxy,
        host: str,
        port: int,
        timeout: float,
    ) -> None:
        self._reactor = reactor
        self._endpoint = endpoint
        if proxy.scheme == "https":
            from twisted.internet.endpoints import wrapClientTLS
            from twisted.internet.ssl import optionsForClientTLS

            self._endpoint = wrapClientTLS(optionsForClientTLS(proxy.host), endpoint)
        self._proxy = proxy
        self._host = host
        self._port = port
        self._timeout = timeout

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Connect the factory's protocol. The Deferred fails with :class:`ProxyError`, or with an error of the
        connection to the proxy."""
        return Deferred.fromCoroutine(self._connect(protocolFactory))

    async def _connect(self, inner_factory: IProtocolFactory) -> IProtocol:
        # The host is checked, because a line end in it would add lines to the HTTP request.
        if not is_host(self._host):
            raise ProxyError(f"{self._host[:80]!r} is neither a name in ASCII nor an IP address")
        kind = _Socks if self._proxy.scheme.startswith("socks") else _HTTPConnect
        factory = Factory.forProtocol(lambda: kind(self._proxy, self._host, self._port, inner_factory))
        factory.noisy = False
        try:
            protocol = await self._endpoint.connect(factory)
        except ConnectError as error:
            raise ProxyError(f"cannot connect to the proxy {self._proxy.display_url}: {shorten(str(error))}") from None
        assert isinstance(protocol, _Handshake)
        return await protocol.wait(self._reactor, self._timeout)


class _Handshake(Negotiation):
    """Base of protocols that request a connection from a proxy."""

    errors = ProxyError

    def __init__(self, proxy: Proxy, host: str, port: int, factory: IProtocolFactory) -> None:
        super().__init__(factory)
        self._proxy = proxy
        self._host = host
        self._port = port
        self._step: Callable[[], bool] = lambda: False

    def _negotiate(self) -> None:
        while not self.opened.called and self._step():
            pass
        if not self.opened.called and len(self._received) > MAX_ANSWER:
            raise self._error("sent a longer answer than the protocol allows")

    def _error(self, problem: str) -> ProxyError:
        return ProxyError(f"the proxy {self._proxy.display_url} {problem} (asked for {self._host}:{self._port})")

    def _raise_late(self, seconds: float) -> NoReturn:
        raise ProxyError(f"the proxy {self._proxy.display_url} did not answer within {seconds:g} s")

    def _lost_error(self, tls_error: str) -> ProxyError:
        return self._error(f"cannot be used: {tls_error}" if tls_error else "closed the connection")

    def _take(self, size: int) -> bytes | None:
        """Remove and return ``size`` bytes from the front of the buffer; None if fewer have arrived."""
        if len(self._received) < size:
            return None
        taken, self._received = self._received[:size], self._received[size:]
        return taken

    def _done(self) -> bool:
        transport = self.transport
        assert transport is not None
        protocol = self._factory.buildProtocol(transport.getPeer())
        if protocol is None:
            raise self._error("connected, but the attempt was cancelled meanwhile")
        # The transport now belongs to the caller's protocol, as if that protocol had connected directly.
        change_protocol(transport, protocol)
        protocol.makeConnection(transport)
        rest, self._received = self._received, b""
        self.opened.callback(protocol)
        if rest:
            protocol.dataReceived(rest)
        return False


class _HTTPConnect(_Handshake):
    """Handshake of HTTP CONNECT."""

    def connectionMade(self) -> None:
        at = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        lines = [f"CONNECT {at} HTTP/1.1", f"Host: {at}"]
        if self._proxy.user:
            credentials = base64.b64encode(f"{self._proxy.user}:{self._proxy.password}".encode()).decode()
            lines.append(f"Proxy-Authorization: Basic {credentials}")
        self._step = self._read_answer
        assert self.transport is not None
        self.transport.write("\r\n".join([*lines, "", ""]).encode())

    def _read_answer(self) -> bool:
        head, end, rest = self._received.partition(b"\r\n\r\n")
        if not end:
            return False
        version, _, status = head.split(b"\r\n")[0].decode("latin-1").partition(" ")
        if not version.startswith("HTTP/"):
            raise self._error("is no HTTP proxy")
        if not status.startswith("2"):
            raise self._error(f"refused: {shorten(status)}")
        self._received = rest
        return self._done()


class _Socks(_Handshake):
    """Handshake of SOCKS5, in which the proxy resolves host names."""

    def connectionMade(self) -> None:
        methods = [_NO_AUTHENTICATION] + ([_PASSWORD] if self._proxy.user else [])
        self._step = self._method_chosen
        self._write(bytes([5, len(methods), *methods]))

    def _write(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)

    def _method_chosen(self) -> bool:
        answer = self._take(2)
        if answer is None:
            return False
        if answer[0] != 5:
            raise self._error("is no SOCKS5 proxy")
        if answer[1] == _PASSWORD and self._proxy.user:
            user, password = self._proxy.user.encode(), self._proxy.password.encode()
            if max(len(user), len(password)) > 255:
                raise self._error("cannot get a user or a password of more than 255 bytes")
            self._step = self._read_authentication
            self._write(bytes([1, len(user)]) + user + bytes([len(password)]) + password)
        elif answer[1] == _NO_AUTHENTICATION:
            self._ask()
        else:
            raise self._error("wants a user and a password")
        return True

    def _read_authentication(self) -> bool:
        answer = self._take(2)
        if answer is None:
            return False
        if answer[1] != 0:
            raise self._error("did not accept the user or the password")
        self._ask()
        return True

    def _ask(self) -> None:
        self._step = self._read_answer
        try:
            number = ip_address(self._host)
        except ValueError:
            name = self._host.encode("idna")
            address = bytes([3, len(name)]) + name
        else:
            address = bytes([1 if number.version == 4 else 4]) + number.packed
        self._write(b"\x05\x01\x00" + address + self._port.to_bytes(2, "big"))

    def _read_answer(self) -> bool:
        if len(self._received) < 5:
            return False
        version, code, _, kind = self._received[:4]
        if version != 5:
            raise self._error("is no SOCKS5 proxy")
        if code != 0:
            raise self._error(f"refused: {_REFUSALS.get(code, f'code {code}')}")
        size = {1: 4, 4: 16, 3: 1 + self._received[4]}.get(kind)
        if size is None:
            raise self._error("is no SOCKS5 proxy")
        if self._take(4 + size + 2) is None:
            return False
        return self._done()
