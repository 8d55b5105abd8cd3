"""Adapters that make a stream of dmsg usable as a reader and a writer of asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol, IPushProducer
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.stream import StreamTransport
from dmsg.net.streams.transports import stream_of

READ_LIMIT = 64 * 1024
"""Limit of the StreamReader: maximum number of bytes of a line. Reading pauses at twice as many unread bytes."""


class Stream(NamedTuple):
    """Open stream.

    :ivar reader: reader of the data that the peer sends.
    :ivar writer: writer of data to the peer. ``writer.get_extra_info("peername")`` returns the peer's
        :class:`~dmsg.DmsgAddress`, and ``writer.get_extra_info("dmsg")`` returns the :class:`~dmsg.StreamTransport`.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class _Transport(asyncio.Transport):
    """Adapter from a stream of dmsg to the interface of asyncio's transports."""

    def __init__(self, stream: StreamTransport, protocol: asyncio.BaseProtocol) -> None:
        super().__init__({"peername": stream.getPeer(), "sockname": stream.getHost(), "dmsg": stream})
        self._stream = stream
        self._protocol = protocol
        self._closing = False

    def write(self, data: Any) -> None:
        if not self._closing:
            self._stream.write(bytes(data))

    def can_write_eof(self) -> bool:
        return self._stream.can_half_close

    def write_eof(self) -> None:
        """:raises NotImplementedError: the peer's program does not support half-close."""
        if not self.can_write_eof():
            raise NotImplementedError(
                "the peer's program does not support half-close, so write_eof() would close the whole stream"
            )
        # The producer is unregistered first, because a stream does not half-close while it has a producer.
        self._stream.unregisterProducer()
        self._stream.loseWriteConnection()

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Close the stream after the peer has acknowledged all written data."""
        if not self._closing:
            self._closing = True
            self._stream.unregisterProducer()
            self._stream.loseConnection()

    def abort(self) -> None:
        self._closing = True
        self._stream.abortConnection()

    def pause_reading(self) -> None:
        self._stream.pauseProducing()

    def resume_reading(self) -> None:
        self._stream.resumeProducing()

    def is_reading(self) -> bool:
        return not self._closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol


@implementer(IHalfCloseableProtocol, IPushProducer)
class StreamBridge(Protocol):
    """Twisted protocol that passes the events of a stream to asyncio's :class:`asyncio.StreamReaderProtocol`.

    :ivar stream: reader and writer, once the stream is open.
    :param on_opened: called with the bridge when the stream is open.
    """

    stream: Stream

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_opened: Callable[[StreamBridge], object] = lambda bridge: None
    ) -> None:
        self._loop = loop
        self._on_opened = on_opened
        self._reader = asyncio.StreamReader(READ_LIMIT, loop)
        self._aio = asyncio.StreamReaderProtocol(self._reader, loop=loop)

    def connectionMade(self) -> None:
        stream = stream_of(self)
        transport = _Transport(stream, self._aio)
        self._aio.connection_made(transport)
        # The bridge is the stream's producer, so that drain() waits while the stream's send buffer is full.
        stream.registerProducer(self, True)
        self.stream = Stream(self._reader, asyncio.StreamWriter(transport, self._aio, self._reader, self._loop))
        self._on_opened(self)

    def dataReceived(self, data: bytes) -> None:
        self._aio.data_received(data)

    def readConnectionLost(self) -> None:
        self._aio.eof_received()

    def writeConnectionLost(self) -> None:
        pass

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        error = None if reason.check(ConnectionDone) else cast(Exception, reason.value)
        self._aio.connection_lost(error)

    # --- producer: called by the stream ---

    def pauseProducing(self) -> None:
        self._aio.pause_writing()

    def resumeProducing(self) -> None:
        self._aio.resume_writing()

    def stopProducing(self) -> None:
        pass

    @property
    def peer(self) -> DmsgAddress:
        """Address of the peer at the other end of the stream."""
        return cast(DmsgAddress, stream_of(self).getPeer())
