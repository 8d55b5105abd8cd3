"""Cost of telemetry for a relay: two servers in the same run, one with events and one without."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import away, start_server
from benchmarks.relay import frames
from benchmarks.wire import Connection, close_transport, open_transport

ROUNDS = 15
"""Rounds of each server, alternating, so that neither is always the first."""
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


def _row(what: str, cost: Callable[[Any, Any, Any], float], plain: Any, writing: Any) -> dict[str, Any]:
    """The least of many rounds is what the code costs; what is above it is what else the machine did."""
    without: list[float] = []
    with_it: list[float] = []
    for number in range(ROUNDS):
        turn = [(plain, without), (writing, with_it)]
        for server, costs in turn if number % 2 else reversed(turn):
            costs.append(cost(*server))
    return {
        "what": what,
        "without_us": min(without),
        "with_us": min(with_it),
        "cost_percent": (min(with_it) / min(without) - 1) * 100,
        "cost_of_medians_percent": (statistics.median(with_it) / statistics.median(without) - 1) * 100,
        "noise_percent": (statistics.median(without) / min(without) - 1) * 100,
    }


def telemetry_rows() -> list[dict[str, Any]]:
    """CPU per frame, and per transport opened and closed, with and without; in turns."""
    with tempfile.TemporaryDirectory(prefix="dmsg-bench-") as directory:
        return _rows_in(Path(directory))


def _rows_in(directory: Path) -> list[dict[str, Any]]:
    rows = []
    core = away()
    plain = start_server(core=core)
    writing = start_server(f"--telemetry={directory}", core=core)
    with plain[0], writing[0]:
        for size, pairs, coalesced, mixed in CASES:
            rows.append(
                _row(
                    f"{'48-80' if mixed else size} B, {pairs} pairs{', coalesced' if coalesced else ''}",
                    lambda server, address, key: frames(address, server, key, size, pairs, coalesced, mixed=mixed)[  # noqa: B023
                        "cpu_us"
                    ],
                    plain,
                    writing,
                )
            )
        rows.append(
            _row(
                "a transport opened and closed (two events)",
                lambda server, address, key: _openings(address, server, key) * 1e6,
                plain,
                writing,
            )
        )
        time.sleep(1.5)
    return rows
