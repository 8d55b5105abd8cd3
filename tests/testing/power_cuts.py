"""Power cuts under the product's stores, on a simulated disk: ``python -m tests.testing.power_cuts``.

A run makes random changes to a store until the power fails, during any operation of the disk. Then it restores the
power, opens the store again, and compares it with every change that was acknowledged. Sometimes the disk is full, or an
operation fails, or the power fails again while the store is being opened.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import globalLogBeginner

from dmsg.discovery.entries.entry import ClientMeta, Entry
from dmsg.discovery.entries.rules import Deletion
from dmsg.discovery.store.base import StoreError
from dmsg.discovery.store.sqlite import SQLiteStore
from dmsg.errors import EntryNotFound
from dmsg.net.turn_end import at_turn_end
from dmsg.rmb.errors import QueueUnavailable, RegistryUnavailable, TwinNotFound
from dmsg.rmb.registry.table import TableRegistry
from dmsg.rmb.relay.queue.sqlite import RETRY_EVERY, SQLiteQueue
from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.twin import Twin
from dmsg.testing.disk import Disk, Operation
from dmsg.testing.sqlite_disk import sqlite_on

DISTANCES = (10, 100, 1000, 10_000)
"""Numbers of operations on the disk within which the power fails; a run draws among them."""


@dataclass
class Losses:
    """What a store lost.

    :ivar acknowledged: number of changes that the store acknowledged.
    :ivar lost: number of these that were not there after a power cut.
    :ivar worst: largest number of changes that one power cut lost.
    :ivar damaged: number of power cuts after which the database was damaged, or had what nobody had written and what
        cannot have returned.
    :ivar refused: number of changes that the store refused, because the disk was full, failed or had no power.
    """

    acknowledged: int = 0
    lost: int = 0
    worst: int = 0
    damaged: int = 0
    refused: int = 0
    power_cuts: int = 0
    seconds: float = field(default=0.0, compare=False)


class StoreUnderTest(ABC):
    """A store of the product on a simulated disk.

    A change that a power cut has lost can return after a later one. SQLite's log still has a part of it then, and the
    next change may write the same bytes in place of the part that was lost: ``TornLogTests`` shows how. A change that
    was synced since makes this impossible, so an acknowledged change of a durable store does.
    """

    def __init__(self, path: str, random: Random, *, durable: bool = True) -> None:
        self.path = path
        self.random = random
        self.durable = durable
        self.losses = Losses()
        self._can_return: set[int] = set()
        """Hashes of the changes that power cuts have lost, and that can return."""

    @abstractmethod
    def open(self) -> None:
        """:raises OSError: the store cannot be opened."""

    @abstractmethod
    def change(self) -> None:
        """Make random changes, and note which are acknowledged."""

    @abstractmethod
    def compare(self) -> tuple[int, bool]:
        """Compare the open store with the acknowledged changes. From then on its present content counts.

        :returns: number of acknowledged changes that are missing, and whether it has others that nobody made.
        """

    @abstractmethod
    def close(self) -> None: ...

    @property
    @abstractmethod
    def database(self) -> Any:
        """Connection of the open store."""

    def note(self, result: Deferred[Any], acknowledged: Callable[[Any], object]) -> None:
        """Count a change whose Deferred fires, now or later."""

        def succeeded(value: Any) -> None:
            self.losses.acknowledged += 1
            if self.durable:
                self._can_return.clear()
            acknowledged(value)

        def failed(_: Any) -> None:
            self.losses.refused += 1

        result.addCallbacks(succeeded, failed)


class QueueUnderTest(StoreUnderTest):
    """Queue of a relay: messages are appended and, once they are acknowledged, removed."""

    def __init__(self, path: str, random: Random, *, durable: bool = True) -> None:
        super().__init__(path, random, durable=durable)
        self._clock = Clock()
        self._number = 0
        self._stored: dict[Any, tuple[str, bytes]] = {}
        self._uncertain: set[tuple[str, bytes]] = set()
        """Messages that are being appended or removed: they may be there or not."""

    def open(self) -> None:
        self._clock = Clock()
        try:
            self._queue = SQLiteQueue(self.path, self._clock, durable=self.durable)
        except QueueUnavailable as error:
            raise OSError(str(error)) from None

    @property
    def database(self) -> Any:
        return self._queue._db  # noqa: SLF001

    def change(self) -> None:
        random = self.random
        for _ in range(random.choice((1, 1, 1, 2, 5, 20))):
            if len(self._stored) > 200 or (self._stored and random.random() < 0.3):
                number = random.choice(list(self._stored))
                message = self._stored.pop(number)
                self._uncertain.add(message)
                self._queue.remove(message[0], [number])
                continue
            self._number += 1
            size = random.choice((0, 100, 100, 100, 1000, 5000))
            message = (f"{random.randrange(3)}", b"%d " % self._number + random.randbytes(size))
            self._uncertain.add(message)
            self.note(self._queue.append(*message, until=1e9), partial(self._appended, message))
        self._clock.advance(0)
        if self._queue.trouble is not None:
            self._clock.advance(RETRY_EVERY)

    def _appended(self, message: tuple[str, bytes], number: Any) -> None:
        self._uncertain.discard(message)
        self._stored[number] = message

    def compare(self) -> tuple[int, bool]:
        found: dict[Any, tuple[str, bytes]] = {}
        for session in "012":
            after = None
            while batch := _result(self._queue.read(session, after)):
                found |= {one.id: (session, one.data) for one in batch}
                after = batch[-1].id
        missing = sum(found.get(number) != message for number, message in self._stored.items())
        known = {*self._stored.values(), *self._uncertain}
        others = [one for one in found.values() if one not in known and hash(one) not in self._can_return]
        self._can_return.update(map(hash, known.difference(found.values())))
        self._stored, self._uncertain = found, set()
        return missing, bool(others)

    def close(self) -> None:
        self._queue.close()


class DiscoveryUnderTest(StoreUnderTest):
    """Store of discovery: entries are posted, posted again and deleted."""

    KEYS = 100

    def __init__(self, path: str, random: Random, *, durable: bool = True) -> None:
        super().__init__(path, random, durable=durable)
        self._clock = Clock()
        self._keys = [random.randbytes(33).hex() for _ in range(self.KEYS)]
        self._time = 1
        self._stored: dict[str, bytes | None] = {}
        """JSON of the entry of each key; None once it is deleted."""
        self._uncertain: dict[str, list[bytes | None]] = {}

    def open(self) -> None:
        try:
            self._store = SQLiteStore(self.path, at_turn_end=at_turn_end(self._clock), durable=self.durable)
        except StoreError as error:
            raise OSError(str(error)) from None

    @property
    def database(self) -> Any:
        return self._store._db  # noqa: SLF001

    def change(self) -> None:
        for static in self.random.sample(self._keys, self.random.choice((1, 1, 2, 10))):
            self._change(static)
        self._clock.advance(0)

    def _change(self, static: str) -> None:
        self._time += 1
        stored = self._stored.get(static)
        sequence = -1 if stored is None else json.loads(stored)["sequence"]
        if stored is not None and self.random.random() < 0.1:
            value = None
            result: Deferred[Any] = self._store.delete(Deletion(static, sequence, self._time), 0.0)
        else:
            entry = Entry("0.0.1", sequence + 1, self._time, static, client=ClientMeta(()))
            value = entry.to_json()
            result = self._store.post(entry, 0.0)
        self._uncertain.setdefault(static, []).append(value)
        self.note(result, lambda _: self._acknowledged(static, value))

    def _acknowledged(self, static: str, value: bytes | None) -> None:
        self._uncertain.pop(static, None)
        self._stored[static] = value

    def compare(self) -> tuple[int, bool]:
        found = {static: self._get(static) for static in self._keys}
        missing = 0
        for static, value in found.items():
            uncertain = self._uncertain.get(static, [])
            if value != self._stored.get(static) and value not in uncertain:
                # A value of an earlier change means that this one is lost.
                missing += hash((static, value)) not in self._can_return
            self._can_return.update(hash((static, one)) for one in uncertain if one != value)
        counted = _result(self._store.count())
        others = counted != sum(value is not None for value in found.values())
        self._stored, self._uncertain = found, {}
        return missing, others

    def _get(self, static: str) -> bytes | None:
        try:
            value: bytes = _result(self._store.get(static))
        except EntryNotFound:
            return None
        return value

    def close(self) -> None:
        self._store.close()


class RegistryUnderTest(StoreUnderTest):
    """Registry of twins: twins are created and changed. None may change its number."""

    def __init__(self, path: str, random: Random) -> None:
        super().__init__(path, random)
        self._signers: dict[bytes, Identity] = {}
        self._stored: dict[bytes, tuple[int, int]] = {}
        """Number and counter of the statement of each account."""
        self._uncertain: dict[bytes, int] = {}

    def open(self) -> None:
        try:
            self._table = TableRegistry(self.path)
        except RegistryUnavailable as error:
            raise OSError(str(error)) from None

    @property
    def database(self) -> Any:
        return self._table._db  # noqa: SLF001

    def change(self) -> None:
        if not self._signers or (len(self._signers) < 300 and self.random.random() < 0.1):
            signer = Identity("0x" + self.random.randbytes(32).hex(), "ed25519")
            self._signers[signer.account] = signer
        account, signer = self.random.choice(list(self._signers.items()))
        counter = max(self._stored.get(account, (0, 0))[1], self._uncertain.get(account, 0)) + 1
        self._uncertain[account] = counter
        statement = Twin(0, account, counter=counter).sign(signer)
        self.note(self._table.put(statement), lambda twin: self._acknowledged(twin, counter))

    def _acknowledged(self, twin: Twin, counter: int) -> None:
        self._uncertain.pop(twin.account, None)
        self._stored[twin.account] = (twin.id, counter)

    def compare(self) -> tuple[int, bool]:
        missing, others = 0, False
        for account in self._signers:
            number, counter = self._stored.get(account, (0, 0))
            try:
                found: Twin = _result(self._table.get(_result(self._table.id_by_account(account))))
            except TwinNotFound:
                missing += number > 0
                self._stored.pop(account, None)
                continue
            missing += number not in (0, found.id) or found.counter < counter
            if found.counter > max(counter, self._uncertain.get(account, 0)):
                others |= hash((account, found.counter)) not in self._can_return
            self._stored[account] = (found.id, found.counter)
        for account, newest in self._uncertain.items():
            _, counter = self._stored.get(account, (0, 0))
            self._can_return.update(hash((account, lost)) for lost in range(counter + 1, newest + 1))
        self._uncertain.clear()
        return missing, others

    def close(self) -> None:
        self._table.close()


def _result(deferred: Deferred[Any]) -> Any:
    """Return the result of a Deferred that has fired."""
    found: list[Any] = []
    errors: list[Any] = []
    deferred.addCallbacks(found.append, errors.append)
    if errors:
        errors[0].raiseException()
    return found[0]


STORES: dict[str, Callable[[str, Random], StoreUnderTest]] = {
    "queue": QueueUnderTest,
    "queue-without-durable": partial(QueueUnderTest, durable=False),
    "discovery": DiscoveryUnderTest,
    "discovery-without-durable": partial(DiscoveryUnderTest, durable=False),
    "registry": RegistryUnderTest,
}


def is_durable(store: str) -> bool:
    """Whether a store must lose nothing."""
    return not store.endswith("-without-durable")


def cut_power(make: Callable[[str, Random], StoreUnderTest], seed: int, changes: int) -> Losses:
    """Cut the power of one store again and again, until it has acknowledged this number of changes."""
    random = Random(seed)
    disk = Disk(random)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, sqlite_on(disk):
        store = make(str(Path(directory) / "store.sqlite"), random)
        losses = store.losses
        while losses.acknowledged < changes:
            _open_with_power_cuts(store, disk, random)
            if disk.power_cuts:
                missing, others = store.compare()
                check = store.database.execute("PRAGMA integrity_check").fetchone()[0]
                losses.lost += missing
                losses.worst = max(losses.worst, missing)
                losses.damaged += others or check != "ok"
            disk.cut_at = disk.operations + random.randint(1, random.choice(DISTANCES))
            if random.random() < 0.3:
                disk.fail(random.choice(list(Operation)), random.randrange(100))
            if random.random() < 0.2:
                disk.capacity = disk.used + random.randrange(100_000)
            turns = 0
            while disk.has_power and turns < 2 * max(DISTANCES):
                store.change()
                turns += 1
                if turns % 1000 == 0:
                    disk.capacity = None
            store.close()
            disk.capacity = None
            disk.cut_power()
            disk.restore_power()
        losses.power_cuts = disk.power_cuts
    losses.seconds = time.monotonic() - began
    return losses


def _open_with_power_cuts(store: StoreUnderTest, disk: Disk, random: Random) -> None:
    """Open a store. In one of five cases, the power fails while it is opened."""
    while random.random() < 0.2:
        disk.cut_at = disk.operations + random.randint(1, 10)
        with suppress(OSError):
            store.open()
            store.close()
        disk.cut_power()
        disk.restore_power()
    store.open()


def main(arguments: list[str]) -> int:
    """Cut the power of stores again and again, and print what each lost. The exit status is 1 if a durable store lost
    anything, or any store was damaged."""
    parser = argparse.ArgumentParser(prog="python -m tests.testing.power_cuts", description=main.__doc__)
    parser.add_argument("stores", nargs="*", default=list(STORES), help=f"Stores to test: {', '.join(STORES)}")
    parser.add_argument("--changes", type=int, default=10_000, help="Number of acknowledged changes of each store")
    parser.add_argument("--seed", type=int, default=1, help="Seed of the run")
    options = parser.parse_args(arguments)
    globalLogBeginner.beginLoggingTo([], discardBuffer=True, redirectStandardIO=False)
    failed = False
    for name in options.stores:
        losses = cut_power(STORES[name], options.seed, options.changes)
        failed |= losses.damaged > 0 or (is_durable(name) and losses.lost > 0)
        sys.stdout.write(f"seed {options.seed}, {name}: {losses}\n")
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
