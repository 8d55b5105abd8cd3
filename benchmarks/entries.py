"""Discovery as it grows: many entries in one store, many processes on one store."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.discovery import KEYS, exchange, post_request
from benchmarks.machine import Entity, away, cpu_of
from dmsg.discovery.entries.entry import ClientMeta, Entry, ServerMeta
from dmsg.discovery.entries.rules import Terms
from dmsg.discovery.store.base import IEntryStore
from dmsg.discovery.store.sqlite import SQLiteStore
from dmsg.keys import SecKey, sha256

ENTRIES = 100_000
"""Number of entries, one in five hundred of a server; ``python -m benchmarks.entries 1000000`` takes five minutes."""
PROCESSES = (1, 2, 4)
EXCHANGES = 1500
"""POSTs, and as many GETs, of each process."""
LOOK_UPS = 100
SIGNATURE = "ab" * 65


def _key(number: int) -> str:
    return "02" + sha256(b"%d" % number).hex()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(store: Any, entries: int) -> None:
    """Fill the store with ``entries`` clients, and one server for each 500 of them. Each has an address of its own."""
    servers = [_key(-number) for number in range(1, entries // 500 + 1)]
    for number, key in enumerate(servers):
        meta = ServerMeta("192.0.2.1:80", 100, None)
        place = Terms(place=f"s{number}", lasts=3600.0)
        store.post(Entry("0.0.1+relay1", 0, 1, key, server=meta, signature=SIGNATURE), 0.0, place)
    for number in range(entries):
        meta_ = ClientMeta((servers[number % len(servers)], servers[number * 7 % len(servers)]))
        place = Terms(place=f"c{number}", lasts=3600.0)
        entry = Entry("0.0.1+refresh1.secure1", 0, 1, _key(number), client=meta_, signature=SIGNATURE)
        store.post(entry, 0.0, place)


def _median_ms(act: Any) -> float:
    times = []
    for _ in range(LOOK_UPS):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _measure(kind: str, entries: int, directory: str) -> dict[str, Any]:
    """Measure the cost of ``entries`` entries, in this process."""
    path = str(Path(directory) / "entries.sqlite")
    before, start = _resident(), time.process_time()
    store: Any = SQLiteStore(":memory:" if kind == "memory" else path)
    assert IEntryStore.providedBy(store)
    fill(store, entries)
    row: dict[str, Any] = {
        "store": kind,
        "entries": entries,
        "servers": entries // 500,
        "resident_bytes_each": (_resident() - before) / entries,
        "post_us": (time.process_time() - start) / entries * 1e6,
        "get_ms": _median_ms(lambda: store.get(_key(entries // 2))),
        "available_ms": _median_ms(lambda: store.available(10, -1.0)),
    }
    store.close()
    if kind == "sqlite":
        start = time.perf_counter()
        SQLiteStore(path).close()
        row |= {"open_ms": (time.perf_counter() - start) * 1e3, "file_bytes_each": os.path.getsize(path) / entries}
    return row


def size_rows(entries: int = ENTRIES) -> list[dict[str, Any]]:
    """Memory, times of look-ups and of a start; without signatures, which cost the same however many there are."""
    rows = []
    for kind in ("memory", "sqlite"):
        # Each store runs in a process of its own, so that the memory of another store is not counted.
        command = [sys.executable, "-m", "benchmarks.entries", str(entries), kind]
        rows.append(json.loads(subprocess.check_output(command, text=True)))
    return rows


def _requests(process: int) -> tuple[list[bytes], list[bytes]]:
    """Return the requests of one process: its own keys, each posted repeatedly."""
    keys = [SecKey.from_seed(b"many %d %d" % (process, number)) for number in range(KEYS // 4)]
    posts = []
    for number in range(EXCHANGES):
        key, sequence = keys[number % len(keys)], number // len(keys)
        entry = Entry("0.0.1", sequence, number + 1, key.public.hex(), ClientMeta((keys[0].public.hex(),)))
        posts.append(post_request(entry.sign(key)))
    paths = [keys[number % len(keys)].public.hex().encode() for number in range(EXCHANGES)]
    return posts, [b"GET /discovery/entries/%s HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in paths]


def _many(store: str, processes: int, of_redis: Any) -> dict[str, Any]:
    arguments = ("--listen=tcp:0:interface=127.0.0.1", f"--store={store}", "--rate-limit=0")
    entities = [Entity("dmsg-discovery", *arguments, core=away()) for _ in range(processes)]
    row: dict[str, Any] = {"store": store.partition(":")[0], "processes": processes}
    try:
        asked = [(one.address(), _requests(number)) for number, one in enumerate(entities)]
        for which, name in enumerate(("post", "get")):
            before, redis_before = sum(one.cpu() for one in entities), of_redis()
            failed: list[BaseException] = []

            def ask(address: tuple[str, int], requests: list[bytes], failed: list[BaseException] = failed) -> None:
                try:
                    exchange(address, requests)
                except Exception as error:
                    failed.append(error)

            threads = [threading.Thread(target=ask, args=(address, one[which])) for address, one in asked]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if failed:
                raise failed[0]
            number = processes * EXCHANGES
            row[f"{name}_us"] = (sum(one.cpu() for one in entities) - before) / number * 1e6
            row[f"{name}_redis_us"] = (of_redis() - redis_before) / number * 1e6
    finally:
        for one in entities:
            one.stop()
    return row


def many_rows(redis_url: str | None, redis: Any) -> list[dict[str, Any]]:
    """CPU for each request, of all processes together: what they cost each other."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dmsg-bench-") as directory:
        rows += [_many(f"sqlite:{directory}/{number}.sqlite", number, lambda: 0.0) for number in PROCESSES]
    if redis_url is not None:
        numbers = enumerate(PROCESSES, 7)
        rows += [_many(f"{redis_url}{database}", number, lambda: cpu_of(redis.pid)) for database, number in numbers]
    return rows


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="dmsg-bench-") as place:
        for wanted in sys.argv[2:] or ("memory", "sqlite"):
            print(json.dumps(_measure(wanted, int(sys.argv[1]), place)))
