"""Events of discovery: entries accepted, requests refused, and look-ups of absent entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from twisted.internet.interfaces import IAddress

from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.entries.rules import Deletion

if TYPE_CHECKING:
    from dmsg.telemetry.service import Telemetry


class DiscoveryTelemetry:
    """Recorder of discovery's events; does nothing without telemetry.

    The source of a request is recorded as a pseudonym of its network address. Behind a reverse proxy, all requests have
    the proxy's address.

    :param now: clock, in seconds since 1970.
    """

    def __init__(self, telemetry: Telemetry | None, now: Callable[[], float]) -> None:
        self._telemetry = telemetry
        self._now = now

    def posted(self, entry: Entry, result: str) -> None:
        """Record an accepted entry. The event has the key of a server, which is public, or a pseudonym of a client."""
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
        """Record that an owner deleted an entry."""
        if self._telemetry is not None:
            fields = {"subject": bytes.fromhex(key), "result": "deleted", "sequence": deletion.sequence}
            self._telemetry.record("entry", fields)

    def refused(self, address: IAddress | None, reason: str) -> None:
        """Record a refused request."""
        if self._telemetry is not None:
            source = self._source(address)
            self._telemetry.record_repeated("entry_refuse", (reason, source), {"reason": reason, "source": source})

    def record_absent(self, address: IAddress | None, key: str) -> None:
        """Record a look-up of an absent entry."""
        if self._telemetry is not None:
            source = self._source(address)
            self._telemetry.record_repeated("lookup_fail", (source,), {"source": source}, bytes.fromhex(key))

    def _source(self, address: IAddress | None) -> str | None:
        assert self._telemetry is not None
        return self._telemetry.network(str(getattr(address, "host", "")))
