"""Who fills a stream: Twisted's producer, paused while much waits to be sent."""

from __future__ import annotations

from twisted.internet.interfaces import IProducer, IPullProducer, IPushProducer

SEND_HIGH_WATER = 512 * 1024
"""Unsent bytes from which a producer is paused: twice what a tunnel reads at a time."""


class Producing:
    """The place for one producer."""

    __slots__ = ("_paused", "_streaming", "producer")

    def __init__(self) -> None:
        self.producer: IPushProducer | IPullProducer | None = None
        self._streaming = False
        self._paused = False

    def register(self, producer: IProducer, streaming: bool) -> None:
        """:param streaming: it is a push producer.  :raises RuntimeError: there is one."""
        if self.producer is not None:
            raise RuntimeError("a producer is registered already")
        self.producer = producer  # type: ignore[assignment]
        self._streaming = streaming
        self._paused = False
        if not streaming:
            producer.resumeProducing()  # type: ignore[attr-defined]

    def take_out(self) -> IPushProducer | IPullProducer | None:
        """The producer, which is told nothing more."""
        producer, self.producer = self.producer, None
        return producer

    @property
    def is_waited_for(self) -> bool:
        """A stream that is being closed lets it finish first: it was asked to wait, or waits to be asked."""
        return self.producer is not None and (not self._streaming or self._paused)

    def tell(self, unsent: int, empty: bool) -> bool:
        """Let it pause or go on.

        :param unsent: bytes that wait to be sent.
        :param empty: nothing waits.
        :returns: a push producer was paused, and goes on.
        """
        producer = self.producer
        if producer is None:
            return False
        if not self._streaming:
            if empty:
                producer.resumeProducing()
        elif unsent > SEND_HIGH_WATER:
            if not self._paused:
                self._paused = True
                producer.pauseProducing()  # type: ignore[union-attr]
        elif self._paused and unsent <= SEND_HIGH_WATER // 2:
            self._paused = False
            producer.resumeProducing()
            return True
        return False
