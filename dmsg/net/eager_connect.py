"""TCP connection attempts that start at once, and that end at once if the peer is on the same machine.

Twisted starts an attempt in the next reactor turn, and learns its result in a further turn. A connection over loopback
is open as soon as ``connect`` returns, although a socket that does not block reports EINPROGRESS then. So the attempt
here asks a second time before it waits. This saves two reactor turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from twisted.internet.interfaces import IReactorTCP
from twisted.internet.main import CONNECTION_LOST
from twisted.internet.posixbase import PosixReactorBase
from twisted.internet.protocol import ClientFactory
from twisted.internet.tcp import Client, Connector
from twisted.logger import Logger
from twisted.python.failure import Failure

_log = Logger()


def connect_tcp(
    reactor: IReactorTCP,
    address: str,
    port: int,
    factory: ClientFactory,
    bind_address: tuple[str, int] | None,
) -> None:
    """Connect to an IP address, without a timeout of Twisted, which would count pauses of this process.

    The factory may get the connection, or the error, before this function returns.

    With a reactor that does not connect in the way of Twisted's POSIX reactors, the attempt starts in the next turn.
    """
    no_timeout = cast(float, None)  # Twisted accepts None, but its annotations do not say so.
    if getattr(type(reactor), "connectTCP", None) is not PosixReactorBase.connectTCP:
        reactor.connectTCP(address, port, factory, timeout=no_timeout, bindAddress=bind_address)
        return
    connector = _EagerConnector(address, port, factory, no_timeout, bind_address, reactor)
    connector.connect()
    connector.client.begin()


class _EagerClient(Client):
    """TCP connection whose attempt starts in :meth:`begin`, not in the next reactor turn."""

    _is_prepared = False

    def _finishInit(self, whenDone: Callable[[], object] | None, skt: Any, error: Any, reactor: Any) -> None:
        if whenDone is None:
            super()._finishInit(None, skt, error, reactor)  # type: ignore[no-untyped-call]
        else:
            self._commonConnection.__init__(self, skt, None, reactor)  # type: ignore[arg-type]
            self._is_prepared = True

    def begin(self) -> None:
        """Start the attempt, unless Twisted could not make or bind the socket."""
        if not self._is_prepared:
            return
        # Twisted's method below calls ``connect``, too. Its call then returns the result of this one.
        self.socket.connect_ex(self.addr)
        try:
            self._setRealAddress(self.addr)  # type: ignore[no-untyped-call]
        except Exception:
            # The new protocol has raised an exception. The reactor would do the same two things.
            _log.failure("unhandled error in a new connection to {address}", address=self.addr[0])
            self.connectionLost(Failure(CONNECTION_LOST))  # type: ignore[no-untyped-call]


class _EagerConnector(Connector):
    """Connector whose connection is an :class:`_EagerClient`."""

    client: _EagerClient

    def _makeTransport(self) -> Client:
        self.client = _EagerClient(  # type: ignore[no-untyped-call]
            self.host, self.port, self.bindAddress, self, self.reactor
        )
        return self.client
