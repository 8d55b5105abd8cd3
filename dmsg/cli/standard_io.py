"""Standard input and output as a transport that reports why a write failed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol, IPushProducer
from twisted.internet.main import CONNECTION_LOST
from twisted.internet.protocol import Protocol
from twisted.internet.stdio import StandardIO
from twisted.python.failure import Failure
from zope.interface import directlyProvides, implementer

from dmsg.cli.output import cannot_write


class Console(StandardIO):
    """Standard input and output of a half-closable protocol.

    Twisted's class discards the reason of a failed write, and reports no failure that happens while it is closed.

    :param write_failed: callback invoked once with the error if data cannot be written.
    :param reads_input: whether to read standard input; otherwise the input is left to other programs.
    """

    def __init__(
        self, protocol: Protocol, reactor: Any, write_failed: Callable[[Exception], None], *, reads_input: bool = True
    ) -> None:
        self._write_failed = write_failed
        self._error: OSError | None = None
        self._unwritten = 0
        self._is_closing = False
        directlyProvides(protocol, IHalfCloseableProtocol)
        is_blocking = os.get_blocking(0)
        super().__init__(protocol, reactor=reactor)  # type: ignore[no-untyped-call]
        if not reads_input:
            reader: Any = self._reader  # type: ignore[has-type]
            reader.stopReading()
            self._reader = None
            os.set_blocking(0, is_blocking)
        writer: Any = self._writer  # type: ignore[attr-defined]

        def write_some_data(data: bytes) -> int | Exception:
            try:
                written = os.write(writer.fileno(), data)
            except (BlockingIOError, InterruptedError):
                return 0
            except OSError as error:
                self._error = error
                return CONNECTION_LOST
            self._unwritten -= written
            if written == len(data) and writer.enableReadHack:
                writer.startReading()
            return written

        writer.writeSomeData = write_some_data

    def write(self, data: bytes) -> None:
        self._unwritten += len(data)
        super().write(data)  # type: ignore[no-untyped-call]

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        super().registerProducer(producer, streaming)  # type: ignore[no-untyped-call]

    def unregisterProducer(self) -> None:
        super().unregisterProducer()  # type: ignore[no-untyped-call]

    def loseWriteConnection(self) -> None:
        self._is_closing = True
        super().loseWriteConnection()  # type: ignore[misc]

    def loseConnection(self) -> None:
        self._is_closing = True
        super().loseConnection()  # type: ignore[no-untyped-call]

    def childConnectionLost(self, fd: str, reason: Failure) -> None:
        # If the reader of a pipe ends, the reactor may report a clean end.
        is_clean = self._is_closing and not self._unwritten and reason.check(ConnectionDone)
        if fd == "write" and not is_clean:
            self._write_failed(cannot_write(self._error))
        super().childConnectionLost(fd, reason)  # type: ignore[misc]


@implementer(IPushProducer)
class PausedOnly:
    """Producer that pauses and resumes a stream, but does not close the stream when the output fails.

    The other side must still get the reason of the failure.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def pauseProducing(self) -> None:
        self._stream.pauseProducing()

    def resumeProducing(self) -> None:
        self._stream.resumeProducing()

    def stopProducing(self) -> None:
        """Do nothing: the callback ``write_failed`` of :class:`Console` closes the stream."""


class StandardOutput(Protocol):
    """Protocol that writes the data of a stream to standard output.  If its reader is slow, the stream is paused.

    :param source: transport of the stream.
    :param write_failed: callback invoked once with the error if data cannot be written.
    """

    def __init__(self, reactor: Any, source: Any, write_failed: Callable[[Exception], None]) -> None:
        self._written: Deferred[None] = Deferred()
        self._console = Console(self, reactor, write_failed, reads_input=False)
        self._console.registerProducer(PausedOnly(source), True)

    def write(self, data: bytes) -> None:
        """Write data to standard output."""
        self._console.write(data)

    def readConnectionLost(self) -> None:
        """Do nothing, because standard input is not read."""

    def writeConnectionLost(self) -> None:
        self.abandon()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Stop waiting for the queued data to be written.

        Otherwise Ctrl-C would not end the command while the reader of standard output does not read.
        """
        if not self._written.called:
            self._written.callback(None)

    def close(self) -> Deferred[None]:
        """Close standard output once all data is written.

        :returns: Deferred that fires when all data is written, or once the failure to write it was reported.
        """
        self._console.unregisterProducer()
        self._console.loseConnection()
        closed: Deferred[None] = Deferred()
        self._written.chainDeferred(closed)
        return closed
