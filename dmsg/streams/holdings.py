"""What a client holds for those it talks to: a source of :mod:`dmsg.base.memory`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.base.memory import Holding, Memory
from dmsg.net.memory_watch import Looks
from dmsg.net.streams.address import DmsgAddress
from dmsg.streams.carrier import ClientStream
from dmsg.streams.core.resumption import INITIAL_WINDOW

LOOK_INTERVAL = 1.0
"""Seconds between looks at the streams of a client."""
SMALL = INITIAL_WINDOW // 4
"""Bytes below which a stream is not worth a look, unless it has no transport."""
STREAM_SIZE = 16 * 1024
"""Bytes that a stream is taken to hold beside its data."""

_log = Logger()


class StreamHoldings(Looks[ClientStream]):
    """What is unsent, unacknowledged and unread of a client's streams, by peer.

    :param streams: those that there are now.
    """

    interval = LOOK_INTERVAL

    def __init__(self, reactor: IReactorTime, memory: Memory, streams: Callable[[], Iterable[ClientStream]]) -> None:
        super().__init__(reactor, memory)
        self._streams = streams

    def start(self) -> None:
        """Look from time to time."""
        self._memory.add(self._holdings)
        super().start()

    def stop(self) -> None:
        """Look no more."""
        self._memory.remove(self._holdings)
        super().stop()

    def given_up(self, count: int) -> None:
        """One line for all of a look."""
        _log.warn(
            "more than {limit} MiB were held for others: {given} streams that were not read were ended",
            limit=self._memory.limit >> 20,
            given=count,
        )

    def _holdings(self) -> Iterator[Holding]:
        self.next_look()
        for stream in self._streams():
            end = stream.end
            size = stream.held + (end.in_flight_bytes if end is not None else 0)
            away = stream.away_since is not None
            if size < SMALL and not away:
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
