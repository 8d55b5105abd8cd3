"""``make siege``: entities under attack, and what those feel who have nothing to do with it.

For each attack an entity of its own, with default limits; innocents that do
something all the time, and a client that comes again and again, before and during
it.  A row fails when its bounds are exceeded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import begin_child
from benchmarks.siege.scene import LOST, Scene
from benchmarks.siege.scenes import SCENES

SLOWER = 3.0
"""So many times its p99 before an innocent pair may have during an attack, or ..."""
NOISE = 0.050
"""... so many seconds more: attackers, server and pair share two cores, perhaps with others.  What this is to find is
a server that stands still for its enemy: that was 190 to 320 ms."""
BYSTANDER = "while True: pass"
"""Takes its part of the machine as an enemy does, and sends nothing.  "Before" is beside it: what an enemy's process
takes from the innocent's by being there is no doing of the server's."""
CONNECT = 1.0
"""Seconds within which a new client is in, half of the times."""
MEMORY_BACK = 1.2
"""Part of the memory before that may be left ``SETTLE`` seconds after, and ``MEMORY_SLACK`` bytes."""
MEMORY_SLACK = 24 << 20
SETTLE = 20.0
CHEAP = 0.75
"""Of a core: so much more than its enemy an entity may work."""
DEARER = 2.0
"""For an attack that is nothing but data: so many times what the entity works for each second of an honest sender, in
the same run.  To open a record, seal it again and write it is more than to write it, and what an enemy gets of the
machine beside others is less: both are so for honest data too."""


def percentiles(act: Callable[[], None], seconds: float) -> tuple[float, float]:
    """p50 and p99 of how long something takes that is done all the time for so many seconds."""
    end = time.perf_counter() + seconds
    times = []
    while (started := time.perf_counter()) < end:
        act()
        times.append(time.perf_counter() - started)
        time.sleep(0.002)
    times.sort()
    return times[len(times) // 2], times[len(times) * 99 // 100]


class Watch:
    """Looks at a process from beside: its memory, and whether somebody new gets in."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
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
            self.most = max(self.most, self._scene.entity.memory())

    def _connect(self) -> None:
        while not self._over.wait(0.3):
            started = time.perf_counter()
            try:
                self._scene.newcomer()
            except LOST:
                self.refused += 1
            else:
                self.connects.append(time.perf_counter() - started)


def _cpu(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _ratio(row: dict[str, Any]) -> float:
    return float(row["server_load"] / max(row["attacker_load"], 1e-3))


def besiege(kind: str, name: str, seconds: float, anchor: dict[str, Any] | None) -> dict[str, Any]:
    """One attack; its row.

    :param anchor: the row of honest data, for an attack that is nothing but data.
    """
    with SCENES[kind]() as scene:
        entity = scene.entity
        bystander = subprocess.Popen([sys.executable, "-c", BYSTANDER], preexec_fn=begin_child)
        try:
            p50_before, p99_before = percentiles(scene.there_and_back, seconds / 2)
        finally:
            bystander.kill()
            bystander.wait()
        memory_before = entity.memory()
        command = [sys.executable, "-m", "benchmarks.siege.attack", kind, name, str(seconds + 1), *scene.words()]
        attacker = subprocess.Popen(command, preexec_fn=begin_child)
        try:
            time.sleep(1.0)
            cpu, theirs, began = entity.cpu(), _cpu(attacker.pid), time.perf_counter()
            with Watch(scene) as watch:
                p50, p99 = percentiles(scene.there_and_back, seconds - 1)
                cpu, theirs = entity.cpu() - cpu, _cpu(attacker.pid) - theirs
                took = time.perf_counter() - began
        finally:
            attacker.kill()
            attacker.wait()
        after = entity.memory()
        settled = time.monotonic() + SETTLE
        while after > memory_before * MEMORY_BACK + MEMORY_SLACK and time.monotonic() < settled:
            time.sleep(0.5)
            after = entity.memory()
    connects = sorted(watch.connects)
    row: dict[str, Any] = {
        "scene": kind,
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
        faults.append("the innocent wait")
    if row["connect_ms"] > CONNECT * 1e3 or watch.refused > len(connects):
        faults.append("nobody new gets in")
    if after > memory_before * MEMORY_BACK + MEMORY_SLACK:
        faults.append("memory stays")
    dear = row["server_load"] > row["attacker_load"] + CHEAP and name not in SCENES[kind].anchors.values()
    if dear and (anchor is None or _ratio(row) > DEARER * _ratio(anchor)):
        faults.append("costs the enemy too little")
    row["verdict"] = ", ".join(faults) or "held"
    return row


def main() -> int:
    """All of them, as a table and as JSON; the status says whether all held."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.siege", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=12.0, help="of each attack")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--scene", choices=SCENES, action="append", help="only these; all by default")
    parser.add_argument("names", nargs="*", help="of attacks, as the table has them; all by default")
    arguments = parser.parse_args()
    table = Table(
        "scene",
        "attack",
        "p50 ms",
        "p99 ms",
        "new client ms",
        "refused",
        "memory MiB",
        "load: server, enemy",
        "verdict",
    )
    rows = []
    wanted = [
        (kind, name)
        for kind in arguments.scene or SCENES
        for name in SCENES[kind].attacks
        if not arguments.names
        or name in arguments.names
        or name in [SCENES[kind].anchors.get(each) for each in arguments.names]
    ]
    measured: dict[tuple[str, str], dict[str, Any]] = {}
    for kind, name in wanted:
        anchor = measured.get((kind, SCENES[kind].anchors.get(name, "")))
        row = measured[kind, name] = besiege(kind, name, arguments.seconds, anchor)
        rows.append(row)
        table.add_row(
            kind,
            name,
            *(f"{before:.2f} > {during:.2f}" for before, during in (row["p50_ms"], row["p99_ms"])),
            f"{row['connect_ms']:.1f}",
            str(row["refused"]),
            " > ".join(map(str, row["memory_mib"])),
            f"{row['server_load']:.2f}, {row['attacker_load']:.2f}",
            row["verdict"],
        )
    Console(width=170).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(row["verdict"] == "held" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
