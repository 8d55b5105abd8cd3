"""Streams of the blocking API. Received data is buffered until a thread reads it."""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol, IPushProducer
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.blocking.reactor import call_in_reactor
from dmsg.net.reactor import Reactor
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.transports import stream_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from dmsg.net.streams.stream import StreamTransport

UNREAD_LIMIT = 1024 * 1024
"""Number of received bytes that no thread has read yet, above which the peer is paused."""
CLOSE_TIMEOUT = 10.0
"""Seconds that :meth:`Stream.close` waits until the peer has received all data."""


@implementer(IHalfCloseableProtocol, IPushProducer)
class StreamProtocol(Protocol):
    """Twisted protocol of a stream. It runs in the reactor's thread, and passes data to the threads that read the
    stream.

    :ivar changed: lock for the fields below, and condition variable that is notified when they change.
    :ivar unread: received data that no thread has read yet.
    :ivar ended: whether the peer has ended its direction of the stream.
    :ivar loss: error with which the stream was closed; None while it is open.
    :ivar may_write: whether the stream accepts more data.
    """

    def __init__(self, on_opened: Callable[[StreamProtocol], object] = lambda protocol: None) -> None:
        self._on_opened = on_opened
        self.changed = threading.Condition()
        self.unread: deque[bytes] = deque()
        self.size = 0
        self.ended = False
        self.loss: BaseException | None = None
        self.may_write = True

    def connectionMade(self) -> None:
        stream_of(self).registerProducer(self, True)
        self._on_opened(self)

    def dataReceived(self, data: bytes) -> None:
        with self.changed:
            self.unread.append(data)
            self.size += len(data)
            if self.size >= UNREAD_LIMIT:
                stream_of(self).pauseProducing()
            self.changed.notify_all()

    def readConnectionLost(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def writeConnectionLost(self) -> None:
        pass

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        with self.changed:
            self.ended = True
            self.loss = reason.value
            self.changed.notify_all()

    def pauseProducing(self) -> None:
        with self.changed:
            self.may_write = False

    def resumeProducing(self) -> None:
        with self.changed:
            self.may_write = True
            self.changed.notify_all()

    def stopProducing(self) -> None:
        pass


class Stream:
    """Open stream, for use in a ``with`` statement. The end of the block closes the stream; an exception aborts it.

    :ivar timeout: seconds that each call of a method may wait; None for any length of time.
    """

    def __init__(self, reactor: Reactor, protocol: StreamProtocol, timeout: float | None) -> None:
        self._reactor = reactor
        self._protocol = protocol
        self._stream: StreamTransport = stream_of(protocol)
        self.timeout = timeout

    @property
    def peer(self) -> DmsgAddress:
        """Address of the peer at the other end of the stream."""
        return cast(DmsgAddress, self._stream.getPeer())

    def send(self, data: bytes) -> None:
        """Send data; wait while the send buffer of the stream is full.

        :raises ConnectionError: the stream is closed; the cause of the error says why.
        :raises TimeoutError: the send buffer stayed full, because the peer reads nothing.
        """
        protocol = self._protocol
        with protocol.changed:
            self._wait_until(lambda: protocol.may_write or protocol.loss is not None)
            if protocol.loss is not None:
                raise ConnectionResetError(str(protocol.loss)) from protocol.loss
        call_in_reactor(self._reactor, self._stream.write, bytes(data))

    def recv(self, size: int = 65536) -> bytes:
        """Wait for data, and return at most ``size`` bytes of it; return ``b""`` at the end of the peer's data.

        :raises ConnectionError: the stream was lost before the peer ended its data. Data received before the loss is
            returned first.
        :raises TimeoutError: no data arrived within ``timeout`` seconds.
        """
        protocol = self._protocol
        with protocol.changed:
            self._wait_until(lambda: bool(protocol.unread) or protocol.ended)
            if not protocol.unread:
                if protocol.loss is not None and not isinstance(protocol.loss, ConnectionDone):
                    raise ConnectionResetError(str(protocol.loss)) from protocol.loss
                return b""
            data = protocol.unread.popleft()
            if len(data) > size:
                protocol.unread.appendleft(data[size:])
                data = data[:size]
            was_full = protocol.size >= UNREAD_LIMIT
            protocol.size -= len(data)
            if was_full and protocol.size < UNREAD_LIMIT and protocol.loss is None:
                call_in_reactor(self._reactor, self._stream.resumeProducing)
        return data

    def recv_exactly(self, size: int) -> bytes:
        """Wait for exactly ``size`` bytes, and return them. Other errors are those of :meth:`recv`.

        :raises EOFError: the peer ended its data earlier.
        """
        parts: list[bytes] = []
        while size and (data := self.recv(size)):
            parts.append(data)
            size -= len(data)
        if size:
            raise EOFError(f"the peer ended the stream {size} bytes too early")
        return b"".join(parts)

    def end(self) -> None:
        """Half-close the stream: end the data to the peer. Reading remains possible."""
        call_in_reactor(self._reactor, self._end)

    def _end(self) -> None:
        self._stream.unregisterProducer()
        self._stream.loseWriteConnection()

    def close(self) -> None:
        """Close the stream after the peer has received all data.

        :raises TimeoutError: the peer did not receive all data within ``CLOSE_TIMEOUT`` seconds; the stream is aborted
            then.
        """
        call_in_reactor(self._reactor, self._close)
        protocol = self._protocol
        with protocol.changed:
            if not protocol.changed.wait_for(lambda: protocol.loss is not None, CLOSE_TIMEOUT):
                self.abort()
                raise TimeoutError("the peer did not read all sent data in time")

    def _close(self) -> None:
        # Reading is resumed, because a paused stream would not learn that the peer has closed it.
        self._stream.resumeProducing()
        self._stream.unregisterProducer()
        self._stream.loseConnection()

    def abort(self) -> None:
        """Close the stream at once, without waiting for unsent data; the peer gets an error."""
        call_in_reactor(self._reactor, self._stream.abortConnection)

    def makefile(self) -> io.BufferedRWPair:
        """Return a buffered binary file for reading and writing the stream, for example for ``pickle`` or
        ``readline()``.
        """
        raw = _RawStream(self)
        return io.BufferedRWPair(raw, raw)

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        if not self._protocol.changed.wait_for(ready, self.timeout):
            raise TimeoutError(f"the stream made no progress for {self.timeout:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class _RawStream(io.RawIOBase):
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._stream.recv(len(view))
        view[: len(data)] = data
        return len(data)

    def write(self, data: ReadableBuffer) -> int:
        whole = bytes(data)
        self._stream.send(whole)
        return len(whole)
