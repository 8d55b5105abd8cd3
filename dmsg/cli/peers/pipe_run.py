"""Implementation of ``dmsg listen``, ``connect`` and ``nc``: standard input and output over a stream."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IDelayedCall, IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.cli.access import Access
from dmsg.cli.client_run import listening_at
from dmsg.cli.output import notice, say
from dmsg.cli.reconnect_notice import resume_timeout_of, watch_connection
from dmsg.errors import DmsgError
from dmsg.keys import PubKey
from dmsg.net.reactor import cancel_call
from dmsg.net.streams.address import DmsgAddress

if TYPE_CHECKING:
    from twisted.internet.interfaces import IAddress

    from dmsg.cli.standard_io import Console
    from dmsg.clients.client import AnyClient
    from dmsg.messaging.client import Client as MessagingClient
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


class _Console(Protocol):
    """Protocol of standard input and output.  Each direction is paused while its receiver does not accept data."""

    def __init__(self, stream: _Stream, wait: float | None) -> None:
        self._stream = stream
        self._wait = wait

    def connectionMade(self) -> None:
        assert self.transport is not None and self._stream.transport is not None
        self._stream.transport.registerProducer(self.transport, True)  # type: ignore[attr-defined]
        self.transport.registerProducer(self._stream.transport, True)  # type: ignore[attr-defined]

    def dataReceived(self, data: bytes) -> None:
        if self._stream.transport is not None:
            self._stream.transport.write(data)

    def readConnectionLost(self) -> None:
        """Handle the end of standard input."""
        self._stream.end_of_input(self._wait)

    def writeConnectionLost(self) -> None:
        """Do nothing: a failure has already been reported to :meth:`_Stream.output_failed`."""

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._stream.end_of_input(0)


@implementer(IHalfCloseableProtocol)
class _Stream(Protocol):
    """Protocol of the stream that is connected to standard input and output.

    :param done: Deferred that fires when the stream has ended, and fails if data was lost.
    :param wait: seconds until this side closes the stream after the end of input.  With None, the stream is
        half-closed, and continues until the other side ends; if the other side cannot half-close, the stream is closed
        at once.
    """

    def __init__(self, reactor: Reactor, done: Deferred[None], wait: float | None) -> None:
        self._reactor = reactor
        self._done = done
        self._wait = wait
        self._console: Console | None = None
        self._ending = False
        self._is_closed = False
        self._close_call: IDelayedCall | None = None
        self._failure: Failure | None = None

    def connectionMade(self) -> None:
        from dmsg.cli.standard_io import Console

        self._console = Console(_Console(self, self._wait), self._reactor, self.output_failed)

    def dataReceived(self, data: bytes) -> None:
        assert self._console is not None
        self._console.write(data)

    def end_of_input(self, wait: float | None) -> None:
        """Half-close the stream, so that the other side can finish. Close it instead after ``wait`` seconds if they are
        given, and at once if the stream cannot be half-closed."""
        if self._ending or self.transport is None:
            return
        self._ending = True
        if wait is None and getattr(self.transport, "can_half_close", False):
            self.transport.unregisterProducer()  # type: ignore[attr-defined]
            self.transport.loseWriteConnection()  # type: ignore[attr-defined]
            return
        self._close_call = self._reactor.callLater(wait or 0, self._close)

    def readConnectionLost(self) -> None:
        """Close standard output, because the other side sends no more data.  At a terminal, close the whole stream."""
        assert self._console is not None
        self._console.unregisterProducer()
        self._console.loseWriteConnection()
        # The stream is closed if this side has already sent all of its data. At a terminal the stream is always closed,
        # because a person would otherwise have to type an end of input.
        if self._ending or os.isatty(0):
            self._ending = True
            self._close()

    def writeConnectionLost(self) -> None:
        """Do nothing: this event only means that the other side knows that no more data follows."""

    def output_failed(self, error: Exception) -> None:
        """Abort the stream, because received data cannot be written.  The peer thus learns that the data did not
        arrive.
        """
        self._failure = Failure(error)
        self.interrupt()

    def interrupt(self) -> None:
        """Abort the stream, for example because the command was cancelled by Ctrl-C."""
        if not self._is_closed and self.transport is not None:
            self._ending = True
            self.transport.abortConnection()  # type: ignore[attr-defined]

    def _close(self) -> None:
        assert self.transport is not None
        # Like a TCP connection, a stream closes only after its producer is unregistered.
        self.transport.unregisterProducer()  # type: ignore[attr-defined]
        self.transport.loseConnection()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        cancel_call(self._close_call)
        left = getattr(self.transport, "unacknowledged", 0)
        if left and reason.check(ConnectionDone):
            reason = Failure(DmsgError("the other side ended the connection before all of the input had arrived"))
        self._ending = self._is_closed = True
        if self._console is not None:
            self._console.unregisterProducer()
            self._console.loseConnection()
        # The delay lets standard output write the received data first.
        self._reactor.callLater(0.05, self._tell, None if reason.check(ConnectionDone) else reason)

    def _tell(self, reason: Failure | None) -> None:
        if not self._done.called:
            self._done.callback(self._failure or reason)


class OneStreamFactory(Factory):
    """Factory that accepts one stream, and refuses further ones."""

    noisy = False

    def __init__(self, reactor: Reactor, wait: float | None, access: Access) -> None:

        self.admits = access
        self.done: Deferred[None] = Deferred()
        self._reactor = reactor
        self._wait = wait
        self._used = False
        self._stream: _Stream | None = None

    def buildProtocol(self, addr: IAddress | None) -> Protocol | None:
        if self._used or addr is None or not self.admits(addr):
            return None
        self._used = True
        self._stream = _Stream(self._reactor, self.done, self._wait)
        say(f"connected: {addr.text if isinstance(addr, DmsgAddress) else addr}", err=True)
        return self._stream

    async def wait_until_ended(self, client: object) -> None:
        """Wait until the stream has ended.  Print notices while the other side cannot be reached."""
        with watch_connection(
            self._reactor, lambda: getattr(self._stream, "transport", None), resume_timeout_of(client), notice
        ):
            try:
                await self.done
            except CancelledError:
                # The stream is aborted here. If the client closed it, the other side would believe that all data had
                # been sent.
                if self._stream is not None:
                    self._stream.interrupt()
                raise


async def take_one(reactor: Reactor, client: AnyClient, wait: float | None, access: Access, port: int = 0) -> None:
    """Accept one stream, and connect it to standard input and output until it ends.

    :param wait: seconds until this side closes the stream after the end of input, see :class:`_Stream`.
    """

    factory = OneStreamFactory(reactor, wait, access)
    listening = await listening_at(client, factory, port, access=access, offers="standard input and output")
    say(f"listening: {DmsgAddress(client.public_key, port).text}", err=True)
    access.show()
    try:
        await factory.wait_until_ended(client)
    finally:
        await maybeDeferred(listening.stopListening)


async def open_one(
    reactor: Reactor, client: Client | MessagingClient, remote: PubKey | DmsgAddress, timeout: float, wait: float | None
) -> None:
    """Open a stream, and connect it to standard input and output until it ends.

    :param timeout: seconds that opening the stream may take.
    :param wait: seconds until this side closes the stream after the end of input, see :class:`_Stream`.
    """
    # The stream is opened to the peer that the user has named, so it needs no access rule: ``Access(())`` admits every
    # peer.
    factory = OneStreamFactory(reactor, wait, Access(()))
    await client.connect(remote, factory, timeout=timeout)
    await factory.wait_until_ended(client)
