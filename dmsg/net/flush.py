"""Flushing at the end of a reactor turn, so that all data queued in the turn are sent together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.net.turn_end import at_turn_end

_log = Logger()


class Flushable(Protocol):
    """Interface of an object that queues data until the reactor turn ends."""

    def flush(self) -> None:
        """Send the queued data; called at the end of the reactor turn."""


def _flush_all(links: list[Flushable]) -> None:
    """Flush each object. An exception of one object, which may come from an application's producer, does not stop the
    others."""
    for one in links:
        try:
            one.flush()
        except Exception:
            _log.failure("unhandled error while {one!r} was flushed", one=one)


class TurnFlush:
    """List of streams and links to flush when the reactor turn ends.

    Streams are flushed first, because the links then send the streams' frames in the same turn.
    """

    __slots__ = ("_at_end", "_began", "_links", "_on_measured", "_reactor", "_scheduled", "_streams")

    def __init__(self, reactor: IReactorTime, on_measured: Callable[[float], None] | None = None) -> None:
        """:param on_measured: called with the seconds from the time when the first object was added in a turn to the
        end of all flushes.
        """
        self._reactor = reactor
        self._at_end = at_turn_end(reactor)
        self._on_measured = on_measured
        self._began = 0.0
        self._links: list[Flushable] = []
        self._streams: list[Flushable] = []
        self._scheduled = False

    def add(self, link: Flushable) -> None:
        """Flush ``link`` at the end of this turn, after all readable connections have been read."""
        self._links.append(link)
        if not self._scheduled:
            self._schedule()

    def add_stream(self, stream: Flushable) -> None:
        """Flush ``stream`` at the end of this turn, before the links."""
        self._streams.append(stream)
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        if self._on_measured is not None:
            self._began = self._reactor.seconds()
        self._at_end(self._run)

    def _run(self) -> None:
        if self._streams:
            streams, self._streams = self._streams, []
            _flush_all(streams)
        links, self._links = self._links, []
        _flush_all(links)
        if self._on_measured is not None:
            now = self._reactor.seconds()
            self._on_measured(now - self._began)
            self._began = now
        if self._streams or self._links:
            self._at_end(self._run)
        else:
            self._scheduled = False
