"""What telemetry costs a relay: two servers in the same run, one that writes events and one that does not."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import away, start_server
from benchmarks.relay import frames
from benchmarks.wire import Connection, close_transport, open_transport

ROUNDS = 5
CASES = (
    (64, 1, False, False),
    (64, 8, False, True),
    (64, 8, True, False),
    (1024, 1, False, False),
    (16384, 1, False, False),
)
"""Size, pairs, coalesced, mixed sizes."""


def _openings(address: tuple[str, int], server: Any, key: Any, count: int = 1500) -> float:
    one, two = Connection(address, key), Connection(address, key)
    before = server.cpu()
    for number in range(count):
        own_id = number * 2 % 65536
        open_transport(one, two, own_id)
        close_transport(one, two, own_id)
    cpu = (server.cpu() - before) / count
    one.close()
    two.close()
    return float(cpu)


def telemetry_rows() -> list[dict[str, Any]]:
    """CPU per frame, and per transport opened and closed, with and without; alternately, medians of ratios."""
    rows = []
    directory = Path(tempfile.mkdtemp(prefix="dmsg-bench-"))
    core = away()
    plain = start_server(core=core)
    writing = start_server(f"--telemetry={directory}", core=core)
    with plain[0], writing[0]:
        for size, pairs, coalesced, mixed in CASES:
            without, with_it = [], []
            for _ in range(ROUNDS):
                for (server, address, key), costs in ((plain, without), (writing, with_it)):
                    costs.append(frames(address, server, key, size, pairs, coalesced, mixed=mixed)["cpu_us"])
            ratios = [one / other for one, other in zip(with_it, without, strict=True)]
            rows.append(
                {
                    "what": f"{'48-80' if mixed else size} B, {pairs} pairs{', coalesced' if coalesced else ''}",
                    "without_us": statistics.median(without),
                    "with_us": statistics.median(with_it),
                    "cost_percent": (statistics.median(ratios) - 1) * 100,
                    "spread_percent": (max(ratios) - min(ratios)) * 100,
                }
            )
        without, with_it = [], []
        for _ in range(ROUNDS):
            for (server, address, key), costs in ((plain, without), (writing, with_it)):
                costs.append(_openings(address, server, key) * 1e6)
        ratios = [one / other for one, other in zip(with_it, without, strict=True)]
        rows.append(
            {
                "what": "a transport opened and closed (two events)",
                "without_us": statistics.median(without),
                "with_us": statistics.median(with_it),
                "cost_percent": (statistics.median(ratios) - 1) * 100,
                "spread_percent": (max(ratios) - min(ratios)) * 100,
            }
        )
        time.sleep(1.5)
    return rows
