"""Reports about discovery's store, for health checks, metrics and the status page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from dmsg.discovery.service.settings import DiscoverySettings
from dmsg.discovery.store.base import KINDS, IEntryStore
from dmsg.discovery.store.measured import MeasuredStore, StoreUnavailable
from dmsg.telemetry.metrics import Metrics

MISSED_FOR = 3600.0
"""Seconds for which the status page still shows a server that has stopped posting and is therefore no longer listed."""


class Reports:
    """Reports about one store.

    :param entries: the store.
    :param store: object through which the methods of ``entries`` are called and measured.
    :param clock: clock of the store, in seconds since 1970.
    """

    def __init__(
        self,
        entries: IEntryStore,
        store: MeasuredStore,
        clock: Callable[[], float],
        metrics: Metrics,
        settings: DiscoverySettings,
    ) -> None:
        self._entries = entries
        self._store = store
        self._now = clock
        self._metrics = metrics
        self._settings = settings

    async def health_report(self) -> dict[str, object]:
        """Return the content of ``/health``. Its ``status`` is ``ok`` if the last write to the store succeeded.

        :raises StoreUnavailable: the store does not answer.
        """
        count = await self._store.ask(self._entries.count)
        return {"status": "the store cannot be written to" if self._store.full else "ok", "entries": count}

    async def rendered_metrics(self) -> bytes:
        """Return the metrics. While the store does not answer, the numbers of entries are outdated, and all others are
        correct.
        """
        try:
            counts = await self._store.ask(self._entries.counts)
            self._metrics.entries.set(sum(counts.values()))
            for kind in KINDS:
                self._metrics.kinds.labels(kind).set(counts.get(kind, 0))
            size = await self._store.ask(self._entries.size)
            self._metrics.entries_bytes.set(size)
        except StoreUnavailable:
            pass
        return self._metrics.render()

    async def counts(self) -> tuple[dict[str, int], int]:
        """Return the number of entries by kind, and their total size in bytes.

        :raises StoreUnavailable: the store does not answer.
        """
        return await self._store.ask(self._entries.counts), await self._store.ask(self._entries.size)

    async def servers_of_each_kind(self, limit: int) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """Return the entries of three kinds of servers, at most ``limit`` of each.

        The kinds are listed servers that post regularly, quiet servers that a recent check has found, and servers that
        stopped posting within the last hour.
        """
        since = self._now() - self._settings.server_ttl if self._settings.server_ttl else -math.inf
        listed = await self._store.ask(self._entries.available, limit, since)
        before = await self._store.ask(self._entries.available, limit, since - MISSED_FOR)
        keys = [str(json.loads(body)["static"]) for body in before]
        still = await self._store.ask(self._entries.listed, keys, since)
        alive = set(still)
        silent = [body for body in before if body not in alive]
        return listed, await self._store.ask(self._entries.quiet, limit, since), silent

    async def entry_of(self, static: str) -> bytes:
        """Return the JSON of a key's entry.

        :raises EntryNotFound: the key has no entry.
        :raises StoreUnavailable: the store does not answer.
        """
        return await self._store.ask(self._entries.get, static)
