"""Simulated Unix sockets between the processes of one machine, for :mod:`dmsg.testing.network`.

Each process is a :class:`Process`, a host of its own, so that a test can kill and pause it alone. The file of a socket
is real, but no real process listens at it. If a program connects to the file through the kernel, as the agent does when
it starts, the connection is refused, as at the socket of a killed process.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from twisted.internet.address import IPv4Address, UNIXAddress
from twisted.internet.defer import Deferred
from twisted.internet.error import CannotListenError, ConnectionRefusedError, UserError
from twisted.internet.interfaces import IConnector, IListeningPort
from twisted.internet.protocol import ClientFactory, ServerFactory
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.testing.network import Host, Network
from dmsg.testing.tcp import End

_CREDENTIALS = struct.Struct("3i")
"""Layout of the option ``SO_PEERCRED``: process id, user id and group id."""


class Process(Host):
    """Process that has Unix sockets, besides the TCP connections of a host.

    :param sockets: listening Unix sockets of the machine, by path. All processes of the machine share it.
    :ivar pid: process id.
    """

    def __init__(self, network: Network, name: str, sockets: dict[str, UNIXPort]) -> None:
        number = len(network.hosts) + 1
        super().__init__(network, name, f"10.0.0.{number}")
        network.hosts[name] = self
        self.pid = 1000 + number
        self._sockets = sockets

    def listenUNIX(
        self, address: str, factory: ServerFactory, backlog: int = 50, mode: int = 0o666, wantPID: bool = False
    ) -> IListeningPort:
        """Listen at the path of a Unix socket, and create its file.

        :raises CannotListenError: the file exists.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
                channel.bind(address)
        except OSError as error:
            raise CannotListenError(None, address, error) from None
        os.chmod(address, mode)
        listening = UNIXPort(self, address, factory, self._sockets)
        listening.startListening()
        return listening

    def connectUNIX(
        self, address: str, factory: ClientFactory[Any], timeout: float = 30, checkPID: bool = False
    ) -> IConnector:
        """Connect to a Unix socket of the same machine."""
        connector = UNIXConnector(self, address, factory, self._sockets)
        connector.connect()
        return connector

    def network_ends(self) -> list[End]:
        # Faults of the network do not affect connections over Unix sockets.
        return [end for end in self.ends if not isinstance(end, LocalEnd)]

    def kill(self) -> None:
        for path in [path for path, port in self._sockets.items() if port.host is self]:
            del self._sockets[path]  # As with the kernel, the file of the socket is not removed.
        super().kill()


@implementer(IListeningPort)
class UNIXPort:
    """Listening Unix socket."""

    def __init__(self, host: Process, path: str, factory: ServerFactory, sockets: dict[str, UNIXPort]) -> None:
        self.host = host
        self.factory = factory
        self._path = path
        self._sockets = sockets

    def startListening(self) -> None:
        self._sockets[self._path] = self
        self.factory.doStart()

    def stopListening(self) -> Deferred[None] | None:
        if self._sockets.get(self._path) is self:
            del self._sockets[self._path]
            os.unlink(self._path)
            self.factory.doStop()
        return None

    def getHost(self) -> UNIXAddress:
        return UNIXAddress(self._path)

    def accept(self, end: LocalEnd) -> None:
        """Accept a connection. The connecting process may have sent data before."""
        if end.dead or end.loss_reason is not None:
            return
        protocol = self.factory.buildProtocol(UNIXAddress(None))
        if protocol is None:
            end.abortConnection()
            return
        end.protocol = protocol
        protocol.makeConnection(end)
        end.deliver()


class _Credentials:
    """Handle of a simulated Unix socket. A program reads from it which process is at the other end."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """Return the credentials of the process at the other end, which belongs to this user."""
        assert (level, option, size) == (socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return _CREDENTIALS.pack(self._pid, os.getuid(), os.getgid())


class LocalEnd(End):
    """One end of a connection between two processes of one machine."""

    def __init__(self, host: Process, peer: Process, number: int, lost: Callable[[Failure], None] | None) -> None:
        own, other = (IPv4Address("TCP", name, number) for name in (host.name, peer.name))
        super().__init__(host, peer, host.network.path(host, peer), own, other, lost)
        self._credentials = _Credentials(peer.pid)

    def getHandle(self) -> _Credentials:
        """Return the object from which a program reads the credentials of the other end."""
        return self._credentials


@implementer(IConnector)
class UNIXConnector:
    """Attempt to connect to a Unix socket. As with the kernel, it succeeds if a process listens at the socket, even
    while this process is paused.
    """

    def __init__(self, host: Process, path: str, factory: ClientFactory[Any], sockets: dict[str, UNIXPort]) -> None:
        self._host = host
        self._path = path
        self._factory = factory
        self._sockets = sockets
        self._end: LocalEnd | None = None
        self._state = "disconnected"

    def getDestination(self) -> UNIXAddress:
        return UNIXAddress(self._path)

    def connect(self) -> None:
        self._state = "connecting"
        self._factory.doStart()
        self._factory.startedConnecting(self)
        self._host.callLater(0, self._try)

    def _try(self) -> None:
        if self._state != "connecting":
            return
        port = self._sockets.get(self._path)
        if port is None:
            self._fail(ConnectionRefusedError())
            return
        number = self._host.free_port()
        here = self._end = LocalEnd(self._host, port.host, number, self._lost)
        there = LocalEnd(port.host, self._host, number, None)
        here.other, there.other = there, here
        self._host.ends[here] = None
        port.host.ends[there] = None
        self._host.network.clock.callLater(0, port.host.do, lambda: port.accept(there))
        protocol = self._factory.buildProtocol(self.getDestination())
        if protocol is None:
            here.abortConnection()
            return
        self._state = "connected"
        here.protocol = protocol
        protocol.makeConnection(here)

    def _fail(self, error: Exception) -> None:
        self._state = "disconnected"
        self._factory.clientConnectionFailed(self, Failure(error))
        self._factory.doStop()

    def stopConnecting(self) -> None:
        if self._state == "connecting":
            self._fail(UserError())

    def disconnect(self) -> None:
        if self._state == "connecting":
            self.stopConnecting()
        elif self._end is not None:
            self._end.loseConnection()

    def _lost(self, reason: Failure) -> None:
        self._state = "disconnected"
        self._factory.clientConnectionLost(self, reason)
        self._factory.doStop()
