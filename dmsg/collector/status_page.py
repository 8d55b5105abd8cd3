"""Status page of a collector."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from dmsg.base.units import human_count, human_size, human_time
from dmsg.base.version import program_version
from dmsg.collector.receiver import ReceiverFactory
from dmsg.collector.store import Store
from dmsg.keys import PubKey
from dmsg.pages.model import BAD, GOOD, Chart, Fact, Line, StatusSource, Table
from dmsg.pages.process import process_facts

SHOWN_SENDERS = 100
"""Maximum number of senders in the table. Senders with the longest time since their last file come first."""
FILE_OVERDUE_AFTER = 1800.0
"""Seconds without a file from a sender after which the page reports this as a problem."""


class Health(TypedDict):
    """Content of ``/health``.

    :ivar newest_file_seconds: age of each sender's last file, in seconds.
    """

    status: str
    servers: int
    files: int
    bytes_held: int
    newest_file_seconds: dict[str, int]


class CollectorStatus(StatusSource):
    """Content of the status page of a collector."""

    kind = "dmsg collector"
    charts = (
        Chart("Files stored", "/s", (Line("stored", "files", rate=True),)),
        Chart("Bytes stored", "bytes/s", (Line("stored", "bytes", rate=True),)),
        Chart("Size of the store", "bytes", (Line("all files", "held"),)),
        Chart("Refused", "/s", (Line("all reasons", "refused", rate=True),)),
    )

    def __init__(
        self, key: PubKey, started: float, factory: ReceiverFactory, store: Store, health: Callable[[], Health]
    ) -> None:
        self._key = key
        self._started = started
        self._factory = factory
        self._store = store
        self._health = health

    @property
    def key(self) -> str:
        return str(self._key)

    def facts(self) -> list[Fact]:
        health = self._health()
        status = health["status"]
        return [
            Fact("State", status, GOOD if status == "ok" else BAD, is_event=True),
            *process_facts(self._started),
            Fact("Connected servers", str(health["servers"]), is_event=True),
            Fact("Senders with files", human_count(len(health["newest_file_seconds"]))),
            Fact("Files stored since the start", human_count(health["files"])),
            Fact("Size of the store", human_size(health["bytes_held"])),
            Fact("Version", f"dmsg {program_version()}"),
        ]

    def problems(self) -> list[str]:
        health = self._health()
        found = []
        if health["status"] != "ok":
            found.append("The collector is not connected to a server: senders cannot reach it.")
        late = [origin for origin, age in health["newest_file_seconds"].items() if age > FILE_OVERDUE_AFTER]
        if late:
            senders = "1 sender" if len(late) == 1 else f"{len(late)} senders"
            found.append(f"{senders} sent no file for at least {human_time(FILE_OVERDUE_AFTER)}.")
        return found

    def numbers(self) -> dict[str, float]:
        factory = self._factory
        return {
            "files": factory.file_count,
            "bytes": factory.byte_count,
            "held": self._store.total,
            "refused": sum(factory.refusals.values()),
        }

    def reasons(self) -> dict[str, float]:
        return {name: float(number) for name, number in self._factory.refusals.items()}

    async def tables(self) -> list[Table]:
        ages = sorted(self._health()["newest_file_seconds"].items(), key=lambda one: -one[1])
        rows = [(origin, f"{human_time(age)} ago") for origin, age in ages[:SHOWN_SENDERS]]
        return [Table("Senders, longest silence first", ("Sender", "Last file"), rows, "no sender has sent a file")]
