"""Entries end: what was not posted again in time is dropped, a little at a time; what was dropped is counted."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.base.seldom import Seldom
from dmsg.discovery.store.base import IEntryStore
from dmsg.net.again import Again
from dmsg.telemetry.metrics import Metrics

SWEEP_EVERY = 30.0
"""Seconds between sweeps when nothing is left to drop."""
FIRST_SWEEP = 2400.0
"""Seconds after the start: clients post every half hour, and discovery may have been away for longer than they last."""
SLICE = 100
"""Entries that are dropped at a time: in SQLite this takes a few milliseconds of the reactor."""
PAUSE = 0.05
"""Seconds between slices."""
TOLD_EVERY = 60.0
"""Seconds between lines of the log about addresses that lose entries because there are too many."""

_log = Logger()


class Drops:
    """Counts the entries that a store drops, and writes into the log now and then whose they were."""

    def __init__(self, seconds: Callable[[], float], metrics: Metrics) -> None:
        """:param seconds: of a clock that does not go back."""
        self._metrics = metrics
        self._seldom = Seldom(seconds, TOLD_EVERY)

    def tell(self, reason: str, place: str, number: int) -> None:
        """Count entries; see :data:`~dmsg.discovery.store.base.Dropped`."""
        self._metrics.dropped.labels(reason).inc(number)
        if reason in ("ended", "deleted") or self._seldom.left_out() is None:
            return
        why = "it has more than an address may have" if reason == "address" else "there are too many in all"
        whose = place or "an unknown address"
        _log.warn("entries of {whose} are dropped, the oldest first: {why}", whose=whose, why=why)


class Sweep:
    """Drops what is over.

    :param now: seconds since 1970, by the clock of the store.
    """

    def __init__(self, reactor: IReactorTime, store: IEntryStore, now: Callable[[], float]) -> None:
        self._reactor = reactor
        self._store = store
        self._now = now
        self._not_before = 0.0
        self._again = Again(reactor, self._sweep, lambda failures: SWEEP_EVERY, "dropping old entries")

    def start(self) -> None:
        """From now on."""
        self._again.start()
        self.postpone()

    def postpone(self) -> None:
        """Drop nothing for as long as clients need to post their entries again: all of them may look old now."""
        self._not_before = self._reactor.seconds() + FIRST_SWEEP
        self._again.soon(FIRST_SWEEP)

    def stop(self) -> None:
        """No more."""
        self._again.stop()

    async def _sweep(self) -> float:
        early = self._not_before - self._reactor.seconds()
        if early > 0:
            return early
        try:
            swept = await self._store.sweep(self._now(), SLICE)
        except Exception as error:  # the store is away; who asks discovery something has it logged
            _log.info("old entries could not be removed: {error}", error=str(error))
            swept = 0
        return PAUSE if swept == SLICE else SWEEP_EVERY
