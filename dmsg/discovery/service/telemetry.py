"""What discovery tells, as events: entries that it took, requests that it refused, look-ups in vain."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IAddress

from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.entries.rules import Deletion
from dmsg.telemetry.service import Telemetry


class DiscoveryTelemetry:
    """Says nothing where there is no telemetry.

    :param now: seconds since 1970.

    Networks are named by the addresses that requests come from: behind a proxy all have one.
    """

    def __init__(self, telemetry: Telemetry | None, now: Callable[[], float]) -> None:
        self._telemetry = telemetry
        self._now = now

    def posted(self, entry: Entry, result: str) -> None:
        """An entry was taken.  Servers are public, clients are not."""
        if self._telemetry is None:
            return
        fields: dict[str, object] = {
            "is_server": entry.server is not None,
            "result": result,
            "sequence": entry.sequence,
        }
        fields["subject"] = entry.static if entry.server is not None else entry.key
        if entry.server is not None:
            fields["available"] = entry.server.available_connections
            fields["clock_ms"] = round(entry.timestamp / 1_000_000 - self._now() * 1000)
        if entry.client is not None and entry.client.delegated_servers is not None:
            fields["delegated"] = len(entry.client.delegated_servers)
        self._telemetry.record("entry", fields)

    def deleted(self, key: str, deletion: Deletion) -> None:
        """An entry was deleted by its owner."""
        if self._telemetry is not None:
            fields = {"subject": bytes.fromhex(key), "result": "deleted", "sequence": deletion.sequence}
            self._telemetry.record("entry", fields)

    def refused(self, address: IAddress | None, reason: str) -> None:
        """A request was refused."""
        if self._telemetry is not None:
            source = self._source(address)
            self._telemetry.record_repeated("entry_refuse", (reason, source), {"reason": reason, "source": source})

    def absent(self, address: IAddress | None, key: str) -> None:
        """Somebody asked for an entry that is not there."""
        if self._telemetry is not None:
            source = self._source(address)
            self._telemetry.record_repeated("lookup_fail", (source,), {"source": source}, bytes.fromhex(key))

    def _source(self, address: IAddress | None) -> str | None:
        assert self._telemetry is not None
        return self._telemetry.network(str(getattr(address, "host", "")))
