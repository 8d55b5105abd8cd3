"""``make siege``: a server under attack, and what those feel who have nothing to do with it.

For each attack a server of its own, with default limits; a pair that sends a
frame to and fro, and a client that connects again and again, before and during
it.  A row fails when its bounds are exceeded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.attacks import ATTACKS
from benchmarks.machine import Entity, away
from benchmarks.wire import Connection, open_transport
from dmsg.keys import PubKey
from dmsg.transport.wire import FWD, encode_frame

SLOWER = 3.0
"""So many times its p99 before an innocent pair may have during an attack, or ..."""
NOISE = 0.050
"""... so many seconds more: attackers, server and pair share two cores, perhaps with others.  What this is to find is
a server that stands still for its enemy: that was 190 to 320 ms."""
CONNECT = 1.0
"""Seconds within which a new client is in, half of the times."""
MEMORY_BACK = 1.2
"""Part of the memory before that may be left ``SETTLE`` seconds after, and ``MEMORY_SLACK`` bytes."""
MEMORY_SLACK = 24 << 20
SETTLE = 20.0


class Pair:
    """Two who have nothing to do with it: a frame there and back, all the time."""

    def __init__(self, where: tuple[str, int], key: PubKey) -> None:
        self._one, self._two = Connection(where, key), Connection(where, key)
        their_id = open_transport(self._one, self._two, 2)
        self._there, self._back = encode_frame(FWD, 2, bytes(66)), encode_frame(FWD, their_id, bytes(66))

    def p99(self, seconds: float) -> tuple[float, float]:
        """p50 and p99 of the round trips of so many seconds."""
        end = time.perf_counter() + seconds
        times = []
        while (started := time.perf_counter()) < end:
            self._one.send(self._there)
            self._two.receive()
            self._two.send(self._back)
            self._one.receive()
            times.append(time.perf_counter() - started)
            time.sleep(0.002)
        times.sort()
        return times[len(times) // 2], times[len(times) * 99 // 100]


class Watch:
    """Looks at a process from beside: its memory, and whether somebody new gets in."""

    def __init__(self, entity: Entity, where: tuple[str, int], key: PubKey) -> None:
        self._entity, self._where, self._key = entity, where, key
        self._over = threading.Event()
        self.most = 0
        self.connects: list[float] = []
        self.refused = 0
        self._threads = [threading.Thread(target=self._memory), threading.Thread(target=self._connect)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _memory(self) -> None:
        while not self._over.wait(0.05):
            self.most = max(self.most, self._entity.memory())

    def _connect(self) -> None:
        while not self._over.wait(0.3):
            started = time.perf_counter()
            try:
                Connection(self._where, self._key).close()
            except (OSError, AssertionError):
                self.refused += 1
            else:
                self.connects.append(time.perf_counter() - started)


def _cpu(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, IndexError):
        return 0.0


def besiege(name: str, seconds: float) -> dict[str, Any]:
    """One attack; its row."""
    server = Entity(
        "dmsg-server", "--listen=tcp:0:interface=127.0.0.1", "--key-file=server.key", "--create", core=away()
    )
    with server:
        key = PubKey.from_hex(server.wait_for(r"server ([0-9a-f]{66}) listens")[1])
        where = server.address()
        pair = Pair(where, key)
        p50_before, p99_before = pair.p99(seconds / 2)
        memory_before = server.memory()
        command = [sys.executable, "-m", "benchmarks.attacks", name, str(seconds + 1), *map(str, where), key.hex()]
        attacker = subprocess.Popen(command)
        try:
            time.sleep(1.0)
            cpu, theirs, began = server.cpu(), _cpu(attacker.pid), time.perf_counter()
            with Watch(server, where, key) as watch:
                p50, p99 = pair.p99(seconds - 1)
                cpu, theirs = server.cpu() - cpu, _cpu(attacker.pid) - theirs
                took = time.perf_counter() - began
        finally:
            attacker.kill()
            attacker.wait()
        after = server.memory()
        settled = time.monotonic() + SETTLE
        while after > memory_before * MEMORY_BACK + MEMORY_SLACK and time.monotonic() < settled:
            time.sleep(0.5)
            after = server.memory()
    connects = sorted(watch.connects)
    row: dict[str, Any] = {
        "attack": name,
        "p50_ms": [p50_before * 1e3, p50 * 1e3],
        "p99_ms": [p99_before * 1e3, p99 * 1e3],
        "connect_ms": connects[len(connects) // 2] * 1e3 if connects else float("inf"),
        "refused": watch.refused,
        "memory_mib": [memory_before >> 20, watch.most >> 20, after >> 20],
        "server_load": cpu / took,
        "attacker_load": theirs / took,
    }
    faults = []
    if p99 > max(SLOWER * p99_before, p99_before + NOISE):
        faults.append("the pair waits")
    if row["connect_ms"] > CONNECT * 1e3 or watch.refused > len(connects):
        faults.append("nobody new gets in")
    if after > memory_before * MEMORY_BACK + MEMORY_SLACK:
        faults.append("memory stays")
    row["verdict"] = ", ".join(faults) or "held"
    return row


def main() -> int:
    """All of them, as a table and as JSON; the status says whether all held."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.siege", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=12.0, help="of each attack")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("names", nargs="*", help=f"of attacks: {'; '.join(ATTACKS)}")
    arguments = parser.parse_args()
    table = Table(
        "attack", "p50 ms", "p99 ms", "new client ms", "refused", "memory MiB", "load: server, enemy", "verdict"
    )
    rows = []
    for name in arguments.names or ATTACKS:
        row = besiege(name, arguments.seconds)
        rows.append(row)
        table.add_row(
            name,
            *(f"{before:.2f} > {during:.2f}" for before, during in (row["p50_ms"], row["p99_ms"])),
            f"{row['connect_ms']:.1f}",
            str(row["refused"]),
            " > ".join(map(str, row["memory_mib"])),
            f"{row['server_load']:.2f}, {row['attacker_load']:.2f}",
            row["verdict"],
        )
    Console(width=150).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(row["verdict"] == "held" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
