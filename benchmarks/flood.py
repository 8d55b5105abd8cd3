"""Round trips of a pair of clients while another client floods the relay with control frames."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from benchmarks.machine import away, start_server
from benchmarks.wire import Connection, open_transport
from dmsg.errors import DmsgError
from dmsg.keys import PubKey, SecKey
from dmsg.v2019.core.wire import ACCEPT, CLOSE, FWD, PING, REQUEST, encode_frame

COUNT = 3000
"""Round trips measured each time."""
FRAMES_PER_SECOND = 20_000
"""Frames per second of the flooding client, forty times the relay's default limit.  A larger number would measure how
the machine shares its cores.
"""
RECORD = 100
"""Frames in one record of the flooder."""


def flood_rows() -> list[dict[str, Any]]:
    """p50 and p99 of a round trip, alone and under each flood; the relay has its default limits."""
    rows = []
    server, where, key = start_server("--request-rate=500", core=away())
    with server:
        alone: dict[str, float] = {}
        for name in ("none", "REQUEST", "ACCEPT", "CLOSE", "PING", "none"):
            flooder = None
            if name != "none":
                flooder = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.flood", *map(str, where), key.hex(), name]
                )
                time.sleep(0.5)
            cpu, started = server.cpu(), time.perf_counter()
            times = _round_trips(where, key)
            row = {
                "flood": name,
                "p50_ms": times[len(times) // 2] * 1e3,
                "p99_ms": times[len(times) * 99 // 100] * 1e3,
                "relay_load": (server.cpu() - cpu) / (time.perf_counter() - started),
            }
            if flooder is not None:
                flooder.terminate()
                flooder.wait()
            else:
                alone = alone or {name: float(row[name]) for name in ("p50_ms", "p99_ms")}
            row["p99_of_unloaded"] = float(row["p99_ms"]) / alone["p99_ms"]
            rows.append(row)
    return rows


def _round_trips(where: tuple[str, int], key: PubKey) -> list[float]:
    """A frame to the other client and back, over raw connections; sorted."""
    one, two = Connection(where, key), Connection(where, key)
    their_id = open_transport(one, two, 2)
    times = []
    there, back = encode_frame(FWD, 2, bytes(66)), encode_frame(FWD, their_id, bytes(66))
    for _ in range(COUNT):
        started = time.perf_counter()
        one.send(there)
        two.receive()
        two.send(back)
        one.receive()
        times.append(time.perf_counter() - started)
        time.sleep(0.0003)
    one.close()
    two.close()
    return sorted(times)


def _flood(host: str, port: int, key: PubKey, name: str) -> None:
    """Flood the relay; connect again whenever the relay ends the connection."""
    frame_type = {"REQUEST": REQUEST, "ACCEPT": ACCEPT, "CLOSE": CLOSE, "PING": PING}[name]
    victim = SecKey.generate().public
    while True:
        try:
            wire = Connection((host, port), key)
            payload = bytes(wire.key.public + victim) if frame_type == REQUEST else b"x"
            frames = b"".join(
                encode_frame(frame_type, 0 if frame_type == PING else 2 * number, payload)
                for number in range(1, RECORD + 1)
            )
            following = time.perf_counter()
            while True:
                wire.send(frames)
                wire.skip()
                following += RECORD / FRAMES_PER_SECOND
                time.sleep(max(0.0, following - time.perf_counter()))
        except (OSError, DmsgError, EOFError):
            time.sleep(0.005)


if __name__ == "__main__":
    _flood(sys.argv[1], int(sys.argv[2]), PubKey.from_hex(sys.argv[3]), sys.argv[4])
