"""The end of a reactor turn: what was collected in it leaves together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

_log = Logger()


class Flushable(Protocol):
    """Something that collects until the reactor turn ends."""

    def flush(self) -> None:
        """Pass on what was collected."""


def _flush_all(ones: list[Flushable]) -> None:
    """An error in one, which is a producer's or ours, does not keep the others waiting."""
    for one in ones:
        try:
            one.flush()
        except Exception:
            _log.failure("flushing {one!r} failed", one=one)


class TurnFlush:
    """Streams and links that have something to send, until the reactor turn ends.

    Streams first: what they pass on leaves with the links in the same turn.
    """

    __slots__ = ("_began", "_links", "_measured", "_reactor", "_scheduled", "_streams")

    def __init__(self, reactor: IReactorTime, measured: Callable[[float], None] | None = None) -> None:
        """:param measured: told the seconds from the first that was added in a turn to the end of writing."""
        self._reactor = reactor
        self._measured = measured
        self._began = 0.0
        self._links: list[Flushable] = []
        self._streams: list[Flushable] = []
        self._scheduled = False

    def add(self, link: Flushable) -> None:
        """Call ``link.flush()`` when everything readable has been read."""
        self._links.append(link)
        if not self._scheduled:
            self._schedule()

    def add_stream(self, stream: Flushable) -> None:
        """The same, before the links."""
        self._streams.append(stream)
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        if self._measured is not None:
            self._began = self._reactor.seconds()
        self._reactor.callLater(0, self._run)

    def _run(self) -> None:
        streams, self._streams = self._streams, []
        _flush_all(streams)
        links, self._links = self._links, []
        _flush_all(links)
        if self._measured is not None:
            self._measured(self._reactor.seconds() - self._began)
            self._began = self._reactor.seconds()
        if self._streams or self._links:
            self._reactor.callLater(0, self._run)
        else:
            self._scheduled = False
