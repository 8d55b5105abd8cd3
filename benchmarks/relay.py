"""The relay: frames, connects, transports, memory."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.machine import aead, away, key_agreement, splice, start_server
from benchmarks.wire import Connection, close_transport, open_transport, pump, seal_frames
from dmsg.net.carriers.names import PLAIN, Carrier

IDLE = 12.0
"""Seconds after which idle connections have released what they can make again, and the allocator has returned it."""
SIZES = (64, 1024, 16 * 1024, 60 * 1024)
FRAME_OVERHEAD = 7
VOLUME = 24 * 1024 * 1024
MAX_FRAMES = 40_000
RUNS = 5
IDLE_SECONDS = 10.0
GO_2019 = {64: 6.7, 1024: 7.4, 16 * 1024: 8.8, 60 * 1024: 8.7}
"""Time of the 2019 reference for a frame of one record, as a multiple of the time of AEAD alone on its machine."""


def frames(
    address: tuple[str, int],
    server: Any,
    key: Any,
    size: int,
    pairs: int,
    coalesced: bool,
    mixed: bool = False,
    carrier: Carrier = PLAIN,
) -> dict[str, Any]:
    """CPU per relayed frame, and the rate, medians of some runs.

    :param address: where the server accepts connections of the carrier.
    """
    initiators = [Connection(address, key, carrier=carrier) for _ in range(pairs)]
    responders = [Connection(address, key, carrier=carrier) for _ in range(pairs)]
    for initiator, responder in zip(initiators, responders, strict=True):
        open_transport(initiator, responder, 2)
    each = max(50, min(MAX_FRAMES, VOLUME // size) // pairs)
    costs, rates, records = [], [], []
    for run in range(RUNS + 1):
        senders = [(one, seal_frames(one, 2, size, each, coalesced, mixed)) for one in initiators]
        before = server.cpu()
        seconds, received = pump(senders, responders, each * pairs * (size + FRAME_OVERHEAD))
        if run:  # The first run warms up.
            costs.append((server.cpu() - before) / (each * pairs))
            rates.append(each * pairs / seconds)
            records.append(each * pairs / received)
    for connection in initiators + responders:
        connection.close()
    cost = statistics.median(costs)
    return {
        "size": size,
        "pairs": pairs,
        "coalesced": coalesced,
        "cpu_us": cost * 1e6,
        "best_cpu_us": min(costs) * 1e6,
        "frames_per_second": statistics.median(rates),
        "megabytes_per_second": statistics.median(rates) * size / 1e6,
        "frames_per_record_out": statistics.median(records),
    }


def relay_rows(idle: int = 0) -> list[dict[str, Any]]:
    """Every size, 1 and 8 pairs, frame per record and coalesced, with the machine's limits."""
    rows = []
    server, address, key = start_server(core=away())
    with server:
        waiting = [Connection(address, key) for _ in range(idle)]
        for size in SIZES:
            for pairs in (1, 8):
                for coalesced in (False, True):
                    limit = aead(size + FRAME_OVERHEAD)
                    row = frames(address, server, key, size, pairs, coalesced)
                    row["aead_us"] = min(limit, aead(size + FRAME_OVERHEAD)) * 1e6
                    row["splice_us"] = splice(size + FRAME_OVERHEAD) * 1e6
                    row["share_of_aead"] = row["aead_us"] / row["cpu_us"]
                    row["share_of_both"] = (row["aead_us"] + row["splice_us"]) / row["cpu_us"]
                    if not coalesced:
                        row["times_go_2019"] = GO_2019[size] * row["aead_us"] / row["cpu_us"]
                    rows.append(row)
        for connection in waiting:
            connection.close()
    return rows


def mixed_rows() -> list[dict[str, Any]]:
    """Frames of changing sizes, for which no two headers in a row are equal: the loop without its short cut."""
    server, address, key = start_server(core=away())
    rows: list[dict[str, Any]] = []
    with server:
        rows += [
            frames(address, server, key, 64, 8, coalesced, mixed=True) | {"size": "48-80"}
            for coalesced in (False, True)
        ]
    return rows


def crowd_rows(size: int = 1024, crowds: tuple[int, ...] = (1000, 9000)) -> list[dict[str, Any]]:
    """The cost per frame of a pair alone and of one among many connections, by turns; and what the many cost idle.

    They keep quiet, as a client of 2019 does; the server's own timers and look-ups are what is seen.
    """
    rows = []
    alone, alone_at, alone_key = start_server(core=away())
    crowded, crowded_at, crowded_key = start_server(core=away())
    with alone, crowded:
        waiting: list[Connection] = []
        for crowd in crowds:
            waiting += [Connection(crowded_at, crowded_key) for _ in range(crowd - 2 - len(waiting))]
            time.sleep(1.0)
            before = crowded.cpu()
            time.sleep(IDLE_SECONDS)
            idle = (crowded.cpu() - before) / IDLE_SECONDS
            few, many = [], []
            for _ in range(7):
                few.append(frames(alone_at, alone, alone_key, size, 1, False)["cpu_us"])
                many.append(frames(crowded_at, crowded, crowded_key, size, 1, False)["cpu_us"])
            rows.append(
                {
                    "size": size,
                    "connections": crowd,
                    "cpu_us_alone": min(few),
                    "cpu_us_among_many": min(many),
                    "ratio": min(many) / min(few),
                    "ratio_of_medians": statistics.median(many) / statistics.median(few),
                    "idle_share_of_core": idle,
                }
            )
        for connection in waiting:
            connection.close()
    return rows


def connect_row(count: int = 300) -> dict[str, Any]:
    """Connections made one after the other: TCP, handshake and OK frame."""
    server, address, key = start_server(core=away())
    costs, rates = [], []
    with server:
        for run in range(RUNS + 1):
            before, start = server.cpu(), time.perf_counter()
            connections = [Connection(address, key) for _ in range(count)]
            seconds, cpu = time.perf_counter() - start, server.cpu() - before
            if run:  # The first run warms up.
                costs.append(cpu / count)
                rates.append(count / seconds)
            for connection in connections:
                connection.close()
            time.sleep(0.3)
    limit = key_agreement(3)
    return {
        "connects_per_second": statistics.median(rates),
        "server_cpu_ms": min(costs) * 1e3,
        "server_cpu_ms_median": statistics.median(costs) * 1e3,
        "server_limit_per_second": 1 / min(costs),
        "ecdh_limit_ms": limit * 1e3,
        "share_of_ecdh": limit / min(costs),
    }


def transport_row(count: int = 3000) -> dict[str, Any]:
    """Transports opened and closed one after the other by one client."""
    server, address, key = start_server(core=away())
    with server:
        one, two = Connection(address, key), Connection(address, key)
        before, start = server.cpu(), time.perf_counter()
        for number in range(count):
            own_id = number * 2 % 65536
            open_transport(one, two, own_id)
            close_transport(one, two, own_id)
        seconds, cpu = time.perf_counter() - start, server.cpu() - before
        one.close()
        two.close()
    # The limit covers REQUEST, ACCEPT and CLOSE, each opened and sealed again.
    limit = 2 * aead(71) + aead(6)
    return {
        "opened_and_closed_per_second": count / seconds,
        "server_cpu_us": cpu / count * 1e6,
        "aead_us": limit * 1e6,
        "share_of_aead": limit / (cpu / count),
    }


def memory_rows(counts: tuple[int, ...] = (1000, 5000)) -> list[dict[str, Any]]:
    """Resident memory of the server per idle connection."""
    rows = []
    server, address, key = start_server(core=away())
    with server:
        warm = [Connection(address, key) for _ in range(200)]
        for connection in warm:
            connection.close()
        time.sleep(1)
        base = server.memory()
        connections: list[Connection] = []
        for count in counts:
            while len(connections) < count:
                connections.append(Connection(address, key))
            time.sleep(0.5)
            new = server.memory() - base
            time.sleep(IDLE)
            idle = server.memory() - base
            rows.append(
                {"connections": count, "kib_each_new": new / count / 1024, "kib_each_idle": idle / count / 1024}
            )
        for connection in connections:
            connection.close()
    return rows
