"""Expiry of entries: drops a few at a time, and counts the dropped entries."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.base.log_throttle import LogThrottle
from dmsg.discovery.store.base import IEntryStore
from dmsg.net.retry_loop import RetryLoop
from dmsg.telemetry.metrics import Metrics

SWEEP_INTERVAL = 30.0
"""Seconds between sweeps when nothing is left to drop."""
FIRST_SWEEP = 2400.0
"""Seconds after the start until the first sweep. Clients post every half hour, and discovery may have been down for
longer than entries last.
"""
SLICE = 100
"""Maximum number of entries dropped at a time; with SQLite this takes some milliseconds of the reactor thread."""
PAUSE = 0.05
"""Seconds between two batches of dropped entries."""
LOG_INTERVAL = 60.0
"""Seconds between log lines about addresses that lose entries because a limit is reached."""

_log = Logger()


class DropLog:
    """Counter of dropped entries; logs at most once a minute from which addresses they came."""

    def __init__(self, seconds: Callable[[], float], metrics: Metrics) -> None:
        """Start with no entries counted.

        :param seconds: monotonic clock.
        """
        self._metrics = metrics
        self._log_throttle = LogThrottle(seconds, LOG_INTERVAL)

    def count(self, reason: str, place: str, number: int) -> None:
        """Count entries; see :data:`~dmsg.discovery.store.base.Dropped`."""
        self._metrics.dropped.labels(reason).inc(number)
        if reason in ("ended", "deleted") or self._log_throttle.count_left_out() is None:
            return
        why = "this address has reached its limit" if reason == "address" else "the limit for all entries is reached"
        whose = place or "an unknown address"
        _log.warn("the oldest entries of {whose} are deleted: {why}", whose=whose, why=why)


class ExpirySweep:
    """Periodic removal of expired entries.

    :param now: clock of the store, in seconds since 1970.
    """

    def __init__(self, reactor: IReactorTime, store: IEntryStore, now: Callable[[], float]) -> None:
        self._reactor = reactor
        self._store = store
        self._now = now
        self._not_before = 0.0
        self._sweep_loop = RetryLoop(reactor, self._sweep, lambda failures: SWEEP_INTERVAL, "dropping old entries")

    def start(self) -> None:
        """Start sweeping, after the initial delay."""
        self._sweep_loop.start()
        self.postpone()

    def postpone(self) -> None:
        """Drop no entries until clients have had time to post their entries again, because all entries may seem expired
        now."""
        self._not_before = self._reactor.seconds() + FIRST_SWEEP
        self._sweep_loop.soon(FIRST_SWEEP)

    def stop(self) -> None:
        """Stop removing expired entries."""
        self._sweep_loop.stop()

    async def _sweep(self) -> float:
        early = self._not_before - self._reactor.seconds()
        if early > 0:
            return early
        try:
            swept = await self._store.sweep(self._now(), SLICE)
        except Exception as error:  # The error is not logged here, because requests that meet a failing store log it.
            _log.info("old entries could not be removed: {error}", error=str(error))
            swept = 0
        return PAUSE if swept == SLICE else SWEEP_INTERVAL
