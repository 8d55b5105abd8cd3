"""Standard input and output as a transport that reports why a write failed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

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
    """

    def __init__(self, protocol: Protocol, reactor: Any, write_failed: Callable[[Exception], None]) -> None:
        self._write_failed = write_failed
        self._error: OSError | None = None
        self._unwritten = 0
        self._is_closing = False
        directlyProvides(protocol, IHalfCloseableProtocol)
        super().__init__(protocol, reactor=reactor)  # type: ignore[no-untyped-call]
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
