"""Registered producer of a stream's data, which is paused while the send queue is above its high-water mark."""

from __future__ import annotations

from twisted.internet.interfaces import IProducer, IPullProducer, IPushProducer

SEND_HIGH_WATER = 512 * 1024
"""High-water mark of the send queue in bytes, above which a producer is paused. It is twice the size of a tunnel's
reads."""


class ProducerHolder:
    """Holder of the producer that an application has registered, if any."""

    __slots__ = ("_paused", "_streaming", "producer")

    def __init__(self) -> None:
        self.producer: IPushProducer | IPullProducer | None = None
        self._streaming = False
        self._paused = False

    def register(self, producer: IProducer, streaming: bool) -> None:
        """Register a producer.

        :param streaming: whether ``producer`` is a push producer.
        :raises RuntimeError: a producer is already registered.
        """
        if self.producer is not None:
            raise RuntimeError("a producer is registered already")
        self.producer = producer  # type: ignore[assignment]
        self._streaming = streaming
        self._paused = False
        if not streaming:
            producer.resumeProducing()  # type: ignore[attr-defined]

    def take_out(self) -> IPushProducer | IPullProducer | None:
        """Remove and return the producer. It is not called any more."""
        producer, self.producer = self.producer, None
        return producer

    @property
    def is_waited_for(self) -> bool:
        """Whether a closing stream must wait for the producer: for a paused push producer, or any pull producer."""
        return self.producer is not None and (not self._streaming or self._paused)

    def control(self, unsent: int, empty: bool) -> bool:
        """Pause or resume the producer, depending on the send queue.

        :param unsent: number of bytes that wait to be sent.
        :param empty: whether the queue is empty.
        :returns: whether a paused push producer was resumed.
        """
        producer = self.producer
        if producer is None:
            return False
        if not self._streaming:
            # A pull producer writes once per call, so it is called again whenever the queue is empty.
            if empty:
                producer.resumeProducing()
        elif unsent > SEND_HIGH_WATER:
            if not self._paused:
                self._paused = True
                producer.pauseProducing()  # type: ignore[union-attr]
        # The producer is resumed at half of the high-water mark, so that it is not paused and resumed with each frame.
        elif self._paused and unsent <= SEND_HIGH_WATER // 2:
            self._paused = False
            producer.resumeProducing()
            return True
        return False
