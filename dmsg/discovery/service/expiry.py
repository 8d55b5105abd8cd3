"""Expiry of entries: a periodic sweep drops expired entries in small batches, and dropped entries are counted."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.base.log_throttle import LogThrottle
from dmsg.discovery.store.base import IEntryStore
from dmsg.net.retry_loop import RetryLoop
from dmsg.telemetry.metrics import Metrics

SWEEP_INTERVAL = 30.0
"""Seconds from a sweep that found no more expired entries until the next one."""
FIRST_SWEEP = 2400.0
"""Seconds after the start until the first sweep. Discovery may have been down for longer than entries last. Clients
post every half hour, so after this time the entries of running clients have been posted again.
"""
BATCH_SIZE = 100
"""Maximum number of entries in a batch. With SQLite, a batch blocks the reactor for some milliseconds."""
BATCH_PAUSE = 0.05
"""Seconds between two batches of dropped entries."""
LOG_INTERVAL = 60.0
"""Minimum seconds between two log lines about addresses whose entries are dropped because a limit is reached."""

_log = Logger()


class DropLog:
    """Counter of dropped entries. If a limit was the reason, it logs the poster's address, at most once a minute."""

    def __init__(self, seconds: Callable[[], float], metrics: Metrics) -> None:
        """Start with no entries counted.

        :param seconds: monotonic clock.
        """
        self._metrics = metrics
        self._log_throttle = LogThrottle(seconds, LOG_INTERVAL)

    def count(self, reason: str, place: str, number: int) -> None:
        """Count dropped entries; for the arguments see :data:`~dmsg.discovery.store.base.Dropped`."""
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
        """Stop sweeping until clients have had time to post their entries again. All entries may seem expired now,
        because the clock was set forward or discovery was down.
        """
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
            swept = await self._store.sweep(self._now(), BATCH_SIZE)
        # Each HTTP request that fails because of the store is logged as an error, so a line of level info is enough
        # here.
        except Exception as error:
            _log.info("old entries could not be removed: {error}", error=str(error))
            swept = 0
        return BATCH_PAUSE if swept == BATCH_SIZE else SWEEP_INTERVAL
