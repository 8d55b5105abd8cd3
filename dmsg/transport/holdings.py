"""What a client holds for those it talks to: a source of :mod:`dmsg.memory`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from dmsg.memory import Holding, Memory
from dmsg.net.stream import DmsgAddress, StreamTransport
from dmsg.transport.secure import INITIAL_WINDOW

LOOK_INTERVAL = 1.0
"""Seconds between looks at the streams of a client."""
SMALL = INITIAL_WINDOW // 4
"""Bytes below which a stream is not worth a look, unless it has no transport."""
STREAM_SIZE = 16 * 1024
"""Bytes that a stream is taken to hold beside its data."""

_log = Logger()


class StreamHoldings:
    """What is unsent, unacknowledged and unread of a client's streams, by peer.

    :param streams: those that there are now.
    """

    def __init__(self, reactor: IReactorTime, memory: Memory, streams: Callable[[], Iterable[StreamTransport]]) -> None:
        self._reactor = reactor
        self._memory = memory
        self._streams = streams
        self._moved: dict[StreamTransport, tuple[Any, float]] = {}
        self._call = LoopingCall(self._look)
        self._call.clock = reactor

    def start(self) -> None:
        """Look from time to time."""
        self._memory.add(self._holdings)
        self._call.start(LOOK_INTERVAL, now=False).addErrback(lambda failure: _log.failure("no more looks", failure))

    def stop(self) -> None:
        """Look no more."""
        self._memory.remove(self._holdings)
        if self._call.running:
            self._call.stop()

    def _look(self) -> None:
        try:
            given = self._memory.look()
        except Exception:
            _log.failure("what is held could not be seen")
            return
        if given:
            _log.warn(
                "more than {limit} MiB were held for others: {given} streams that stood still were ended",
                limit=self._memory.limit >> 20,
                given=given,
            )

    def _holdings(self) -> Iterator[Holding]:
        now = self._reactor.seconds()
        before, self._moved = self._moved, {}
        for stream in self._streams():
            end = stream.end
            size = stream.held + (end.in_flight_bytes if end is not None else 0)
            away = stream.away_since is not None
            if size < SMALL and not away:
                continue
            gone = (end.acknowledged, end.consumed) if end is not None else stream.held
            last = before.get(stream)
            since = last[1] if last is not None and last[0] == gone else now
            self._moved[stream] = (gone, since)
            peer = stream.getPeer()
            assert isinstance(peer, DmsgAddress)
            yield Holding(
                (bytes(peer.public_key),),
                "suspended" if away else "streams",
                size + STREAM_SIZE,
                now - since,
                stream.abortConnection,
            )
