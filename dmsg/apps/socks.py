"""The part of SOCKS5 (RFC 1928) that a proxy to peers needs: the command CONNECT with a host name, without
authentication.

:class:`SocksRequest` does no I/O; :class:`SocksProtocol` is the Twisted part.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocol, IReactorTime
from twisted.python.failure import Failure

from dmsg.apps.splice import SplicedConnection, join
from dmsg.net.own_pauses import FairTimeout, stop_timeout
from dmsg.net.streams.transports import transport_of

VERSION = 5
NO_AUTHENTICATION = 0x00
NO_METHOD = 0xFF
CONNECT = 0x01
IPV4, NAME, IPV6 = 0x01, 0x03, 0x04
REQUEST_LIMIT = 520
"""Maximum bytes of the greeting and the request together.  A correct client sends fewer."""
REQUEST_TIMEOUT = 10.0
"""Seconds that a client may take to send the greeting and the request."""

OK, FAILED, NOT_ALLOWED, UNREACHABLE, REFUSED = 0x00, 0x01, 0x02, 0x04, 0x05
UNSUPPORTED_COMMAND, UNSUPPORTED_ADDRESS = 0x07, 0x08


class SocksError(Exception):
    """Error: a request is refused.

    :ivar code: code for the reply; None if the client does not speak SOCKS5, and therefore gets no reply.
    """

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code


def reply(code: int) -> bytes:
    """Return a SOCKS5 reply with this reply code and an empty address."""
    return struct.pack(">BBBB4sH", VERSION, code, 0, IPV4, bytes(4), 0)


class SocksRequest:
    """Incremental parser of the greeting and the request.

    :ivar target: host and port once the request is complete, before that None.
    :ivar rest: bytes that followed the request.
    """

    def __init__(self) -> None:
        self._data = b""
        self._greeted = False
        self.target: tuple[str, int] | None = None
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Process received bytes, and return the bytes to answer with.

        :raises SocksError: the request is refused.
        """
        self._data += data
        answer = b""
        if not self._greeted:
            if self._data and self._data[0] != VERSION:
                raise SocksError(None)
            if len(self._data) < 2 or len(self._data) < 2 + self._data[1]:
                return b""
            methods = self._data[2 : 2 + self._data[1]]
            self._data = self._data[2 + len(methods) :]
            self._greeted = True
            if NO_AUTHENTICATION not in methods:
                return bytes((VERSION, NO_METHOD))
            answer = bytes((VERSION, NO_AUTHENTICATION))
        data = self._data
        if len(data) < 5:
            return answer
        version, command, _, kind, length = struct.unpack_from(">BBBBB", data)
        if version != VERSION:
            raise SocksError(None)
        size = {IPV4: 4, IPV6: 16, NAME: 1 + length}.get(kind)
        if size is None:
            raise SocksError(UNSUPPORTED_ADDRESS)
        if len(data) < 4 + size + 2:
            if len(data) > REQUEST_LIMIT:
                raise SocksError(None)
            return answer
        if command != CONNECT:
            raise SocksError(UNSUPPORTED_COMMAND)
        if kind != NAME:
            raise SocksError(NOT_ALLOWED)  # An IP address cannot be served, because peers have only names and keys.
        host = data[5 : 4 + size].decode("ascii", "replace")
        self.target = host, int.from_bytes(data[4 + size : 6 + size], "big")
        self.rest = data[6 + size :]
        return answer


class SocksProtocol(SplicedConnection):
    """Protocol of the connection from a program to the proxy.

    :param dial: function called with host, port and a connection to splice.  It returns a Deferred that fires when the
        connection to the peer is open.
    :param code_of: function that returns the reply's code for a failure to connect.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        dial: Callable[[str, int, SplicedConnection], Deferred[IProtocol]],
        code_of: Callable[[Failure], int],
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(None, on_lost)
        self._reactor = reactor
        self._dial = dial
        self._code_of = code_of
        self._request: SocksRequest | None = SocksRequest()
        self._timeout: FairTimeout | None = None

    def connectionMade(self) -> None:
        self._timeout = FairTimeout(self._reactor, REQUEST_TIMEOUT, self._give_up)

    def readConnectionLost(self) -> None:
        super().readConnectionLost()
        if self._request is not None and self.transport is not None:
            # The program sends no more data, so the request will never be complete.
            self.transport.loseConnection()

    def _give_up(self) -> None:
        assert self.transport is not None
        self.transport.loseConnection()

    def dataReceived(self, data: bytes) -> None:
        request = self._request
        if request is None:
            super().dataReceived(data)
            return
        transport = transport_of(self)
        try:
            transport.write(request.feed(data))
        except SocksError as error:
            if error.code is not None:
                transport.write(reply(error.code))
            transport.loseConnection()
            return
        if request.target is not None:
            self._request = None
            stop_timeout(self._timeout)
            transport.pauseProducing()
            self._open(*request.target, request.rest)

    def _open(self, host: str, port: int, rest: bytes) -> None:
        other = SplicedConnection()
        transport = transport_of(self)

        def connected(_: IProtocol) -> None:
            if self.loss is None:
                transport.write(reply(OK))
            join(self, other)
            if rest and other.transport is not None:
                other.transport.write(rest)

        def failed(failure: Failure) -> None:
            if self.loss is None:
                transport.write(reply(self._code_of(failure)))
                transport.loseConnection()

        self._dial(host, port, other).addCallbacks(connected, failed)

    def connectionLost(self, reason: Failure = Failure(Exception("lost"))) -> None:
        stop_timeout(self._timeout)
        super().connectionLost(reason)
