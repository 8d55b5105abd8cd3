"""Memory that a client's streams use for their peers, reported to the memory account of :mod:`dmsg.base.memory`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.base.memory import Holding, Memory
from dmsg.net.memory_watch import MemoryWatch
from dmsg.net.streams.address import DmsgAddress
from dmsg.streams.carrier import ClientStream
from dmsg.streams.core.resumption import INITIAL_WINDOW

CHECK_INTERVAL = 1.0
"""Seconds between checks of a client's streams."""
MIN_REPORTED_SIZE = INITIAL_WINDOW // 4
"""Number of buffered bytes below which a stream is not reported, unless it is suspended."""
STREAM_SIZE = 16 * 1024
"""Number of bytes that are counted for each stream in addition to its data."""

_log = Logger()


class StreamHoldings(MemoryWatch[ClientStream]):
    """Periodic check of the number of unsent, unacknowledged and unread bytes of a client's streams, added up for each
    peer.

    :param streams: returns the present streams.
    """

    interval = CHECK_INTERVAL

    def __init__(self, reactor: IReactorTime, memory: Memory, streams: Callable[[], Iterable[ClientStream]]) -> None:
        super().__init__(reactor, memory)
        self._streams = streams

    def start(self) -> None:
        """Start the periodic checks."""
        self._memory.add(self._holdings)
        super().start()

    def stop(self) -> None:
        """Stop the periodic checks."""
        self._memory.remove(self._holdings)
        super().stop()

    def note_dropped(self, count: int) -> None:
        """Log one line for all streams that a memory check has ended."""
        _log.warn(
            "buffers exceeded {limit} MiB: {given} streams whose peers do not read were ended",
            limit=self._memory.limit >> 20,
            given=count,
        )

    def _holdings(self) -> Iterator[Holding]:
        self.next_check()
        for stream in self._streams():
            end = stream.end
            size = stream.held + (end.in_flight_bytes if end is not None else 0)
            away = stream.away_since is not None
            if size < MIN_REPORTED_SIZE and not away:
                continue
            gone = end.acknowledged + end.consumed if end is not None else -stream.held
            peer = stream.getPeer()
            assert isinstance(peer, DmsgAddress)
            yield Holding(
                (bytes(peer.public_key),),
                "suspended" if away else "streams",
                size + STREAM_SIZE,
                self.age(stream, gone, gone + size),
                stream.abortConnection,
            )
