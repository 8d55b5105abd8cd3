"""``make long WHICH=siege``: entities under attack, and what those feel who have nothing to do with it.

For each attack an entity of its own, with default limits; innocents that do
something all the time, and newcomers again and again, before and during
it.  A row fails when its bounds are exceeded (:mod:`benchmarks.siege.verdict`).
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import begin_child, scheduled
from benchmarks.siege.network import enter
from benchmarks.siege.scene import LOST, Scene
from benchmarks.siege.scenes import SCENES
from benchmarks.siege.verdict import GOES_ON, Measured, faults_of, percentile

BYSTANDER = "while True: pass"
"""Takes its part of the machine as an enemy does, and sends nothing.  "Before" is beside it: what an enemy's process
takes from the innocent's by being there is no doing of the server's."""
WORKING, WORKING_EVERY = 0.5, 0.25
"""Part of a core from which on an entity counts as working, and seconds for which that is measured."""
BUSY = 0.25
"""Part of the time for which an entity may have waited for a core before the siege says so."""
BEGINS = 0.5
"""Seconds after which an attack that is prepared has begun."""
PREPARED_WITHIN = 120.0
"""Seconds that an attack may take for its preparations."""
LEAST_SECONDS = 2.0
"""Seconds of the shortest attack: what the innocent feel is measured from the second on that follows the first."""
NEWCOMER_EVERY = 0.1
"""Seconds between one newcomer and the next."""


class Innocents:
    """Round trips of the innocent, one after the other."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.cut = 0

    def act(self, seconds: float) -> tuple[float, float]:
        """Return p50 and p99 of the round trips within ``seconds``."""
        end = time.perf_counter() + seconds
        times = []
        while (started := time.perf_counter()) < end:
            try:
                self._scene.there_and_back()
            except LOST:
                self.cut += 1
                self._restore(end)
            times.append(time.perf_counter() - started)
            time.sleep(0.002)
        return percentile(times, 50), percentile(times, 99)

    def _restore(self, end: float) -> None:
        while time.perf_counter() < end:
            try:
                self._scene.restore()
                return
            except LOST:
                time.sleep(0.2)


class Watch:
    """Looks at a process from beside: its memory, and whether newcomers get in."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._over = threading.Event()
        self.most = 0
        self.connects: list[float] = []
        self.refused = 0
        self._threads = [threading.Thread(target=self._memory)]
        self._threads += [threading.Thread(target=self._connect) for _ in range(scene.newcomers)]

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
        while not self._over.wait(NEWCOMER_EVERY):
            started = time.perf_counter()
            try:
                self._scene.newcomer()
            except LOST:
                self.refused += 1
            else:
                self.connects.append(time.perf_counter() - started)


def _working(pid: int) -> float:
    """Return for how many seconds a process still works, a little more than ``GOES_ON`` at most."""
    began = time.perf_counter()
    while (took := time.perf_counter() - began) < GOES_ON:
        before = sum(scheduled(pid))
        time.sleep(WORKING_EVERY)
        # The time that the process waited for a core counts as work.
        if sum(scheduled(pid)) - before < WORKING * WORKING_EVERY:
            return took
    return took + WORKING_EVERY


def _begin(kind: str, name: str, seconds: float, words: list[str]) -> subprocess.Popen[bytes]:
    """Start an attack that lasts ``seconds``. Return when the attack is under way."""
    command = [sys.executable, "-m", "benchmarks.siege.attack", kind, name, str(seconds + 1), *words]
    attacker = subprocess.Popen(command, preexec_fn=begin_child, stdout=subprocess.PIPE)
    assert attacker.stdout is not None
    if not select.select([attacker.stdout], [], [], PREPARED_WITHIN)[0] or not attacker.stdout.readline():
        attacker.kill()
        attacker.wait()
        raise RuntimeError(f"the attack {name!r} is not prepared")
    time.sleep(BEGINS)
    return attacker


def besiege(kind: str, name: str, seconds: float) -> Measured:
    """Attack an entity, and return what was measured."""
    with SCENES[kind]() as scene:
        entity, innocents = scene.entity, Innocents(scene)
        bystander = subprocess.Popen([sys.executable, "-c", BYSTANDER], preexec_fn=begin_child)
        try:
            honest_cpu, began = scheduled(entity.process.pid)[0], time.perf_counter()
            # The clients without an attack include newcomers, because their cost for the entity and for other clients
            # is not caused by the attacker.
            with Watch(scene):
                p50_before, p99_before = innocents.act(seconds / 2)
                honest_load = (scheduled(entity.process.pid)[0] - honest_cpu) / (time.perf_counter() - began)
        finally:
            bystander.kill()
            bystander.wait()
        before = entity.memory()
        attacker = _begin(kind, name, seconds, scene.words())
        try:
            before_cpu, before_enemy = scheduled(entity.process.pid), scheduled(attacker.pid)
            began = time.perf_counter()
            with Watch(scene) as watch:
                p50, p99 = innocents.act(seconds - 1)
                after_cpu, after_enemy = scheduled(entity.process.pid), scheduled(attacker.pid)
                took = time.perf_counter() - began
        finally:
            attacker.kill()
            attacker.wait()
            if attacker.stdout is not None:
                attacker.stdout.close()
        measured = Measured(
            p50=(p50_before, p50),
            p99=(p99_before, p99),
            cut=innocents.cut,
            connects=watch.connects,
            refused=watch.refused,
            honest_load=honest_load,
            entity_load=(after_cpu[0] - before_cpu[0]) / took,
            entity_waited=(after_cpu[1] - before_cpu[1]) / took,
            enemy_load=(after_enemy[0] - before_enemy[0]) / took,
        )
        measured.went_on = _working(entity.process.pid)
        try:
            scene.newcomer()
        except LOST:
            measured.shut_out = True
        after = entity.memory()
        settled = time.monotonic() + scene.bounds.settle
        while not scene.bounds.is_given_back(before, after) and time.monotonic() < settled:
            time.sleep(0.5)
            after = entity.memory()
        measured.memory = (before, watch.most, after)
    return measured


def _row(kind: str, name: str, measured: Measured, faults: list[str]) -> dict[str, Any]:
    return {
        "scene": kind,
        "attack": name,
        "p50_ms": [each * 1e3 for each in measured.p50],
        "p99_ms": [each * 1e3 for each in measured.p99],
        "cut": measured.cut,
        "went_on_s": measured.went_on,
        "shut_out": measured.shut_out,
        "connect_ms": measured.connect * 1e3,
        "newcomers": len(measured.connects) + measured.refused,
        "refused": measured.refused,
        "memory_mib": [each >> 20 for each in measured.memory],
        "honest_load": measured.honest_load,
        "server_load": measured.entity_load,
        "server_waited": measured.entity_waited,
        "attacker_load": measured.enemy_load,
        "verdict": ", ".join(faults) or "held",
    }


def _columns(row: dict[str, Any]) -> list[str]:
    return [
        row["scene"],
        row["attack"],
        *(f"{before:.2f} > {during:.2f}" for before, during in (row["p50_ms"], row["p99_ms"])),
        f"{row['connect_ms']:.1f}",
        f"{row['refused']} of {row['newcomers']}",
        " > ".join(map(str, row["memory_mib"])),
        f"{row['honest_load']:.2f} > {row['server_load']:.2f} + {row['server_waited']:.2f}, {row['attacker_load']:.2f}",
        row["verdict"],
    ]


def _wanted(scenes: list[str], names: list[str]) -> list[tuple[str, str]]:
    """Return scenes and attacks, each attack after the honest data that it is compared with."""
    return [
        (kind, name)
        for kind in scenes
        for name in SCENES[kind].attacks
        if not names or name in names or name in [SCENES[kind].anchors.get(each) for each in names]
    ]


def main() -> int:
    """Run all scenes, print a table and JSON, and return 0 if all bounds held."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.siege", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=7.0, help="of each attack")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--scene", choices=SCENES, action="append", help="only these; all by default")
    parser.add_argument("names", nargs="*", help="of attacks, as the table has them; all by default")
    arguments = parser.parse_args()
    if not arguments.seconds >= LEAST_SECONDS:
        parser.exit(2, f"{parser.prog}: --seconds is {LEAST_SECONDS:g} or more, not {arguments.seconds:g}\n")
    console = Console(width=170)
    without = enter(sys.argv[1:])
    scenes = arguments.scene or list(SCENES)
    for kind in [each for each in scenes if without and SCENES[each].needs_public]:
        console.print(f"skipped: {kind} ({without})")
        scenes.remove(kind)
    heads = (
        "scene",
        "attack",
        "p50 ms",
        "p99 ms",
        "newcomer ms",
        "refused",
        "memory MiB",
        "load: server + waited, enemy",
    )
    table = Table(*heads, "verdict")
    measured: dict[tuple[str, str], Measured] = {}
    rows = []
    for kind, name in _wanted(scenes, arguments.names):
        anchors = SCENES[kind].anchors
        found = measured[kind, name] = besiege(kind, name, arguments.seconds)
        faults = faults_of(
            found,
            SCENES[kind].bounds,
            anchor=measured.get((kind, anchors.get(name, ""))),
            is_anchor=name in anchors.values(),
        )
        rows.append(_row(kind, name, found, faults))
        table.add_row(*_columns(rows[-1]))
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1))
    console.print(table)
    if any(row["server_waited"] > BUSY for row in rows):
        console.print("Entities waited for a core: other programs of this machine make the times longer.")
    return 0 if all(row["verdict"] == "held" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
