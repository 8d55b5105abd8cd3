"""``python -m benchmarks``: everything, as tables and as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.carriers import carrier_rows
from benchmarks.client import client_rows
from benchmarks.discovery import discovery_rows
from benchmarks.entries import many_rows, size_rows
from benchmarks.flood import flood_rows
from benchmarks.herd import herd_rows
from benchmarks.machine import CIPHER, aead, cores, pin, raise_descriptor_limit
from benchmarks.messaging import messaging_rows
from benchmarks.path import path_rows
from benchmarks.relay import connect_row, crowd_rows, memory_rows, mixed_rows, relay_rows, transport_row
from benchmarks.report import show
from benchmarks.rmb import rmb_rows
from benchmarks.start import start_rows
from benchmarks.telemetry import telemetry_rows
from benchmarks.tunnel import tunnel_rows
from dmsg.keys import PubKey, SecKey

PARTS = (
    "start",
    "relay",
    "carriers",
    "crowd",
    "client",
    "flood",
    "connects",
    "transports",
    "memory",
    "discovery",
    "entries",
    "many",
    "herd",
    "path",
    "tunnel",
    "telemetry",
    "messaging",
    "rmb",
)


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": len(cores()),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {name: version(name) for name in ("dmsg", "twisted", "cryptography", "coincurve")},
        "cipher": CIPHER.value,
        "aead_64_us": aead(71) * 1e6,
        "load": os.getloadavg()[0],
    }


def _redis() -> tuple[str | None, Any]:
    """A redis-server of our own, if there is one on this machine."""
    try:
        from tests.redis import RedisServer, redis_server
    except ImportError:
        return None, None
    if redis_server() is None:
        return None, None
    server = RedisServer()
    return server.url, server


def relay_at(address: str, key: str) -> list[dict[str, Any]]:
    """The rates of any dmsg server at an address; its CPU cannot be seen from here."""
    from benchmarks.relay import SIZES, frames

    class Unseen:
        def cpu(self) -> float:
            return time.perf_counter()

    host, _, port = address.rpartition(":")
    rows = []
    for size in SIZES:
        for pairs in (1, 8):
            row = frames((socket.gethostbyname(host), int(port)), Unseen(), PubKey.from_hex(key), size, pairs, False)
            rows.append({name: row[name] for name in ("size", "pairs", "frames_per_second", "megabytes_per_second")})
    return rows


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), help="where the figures go")
    parser.add_argument("--server", metavar="HOST:PORT", help="measure the rates of a running server instead")
    parser.add_argument("--server-key", metavar="KEY", help="its public key")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")

    raise_descriptor_limit()
    if arguments.server:
        show(f"relay at {arguments.server}", relay_at(arguments.server, arguments.server_key or ""))
        return
    SecKey.generate()
    results: dict[str, Any] = {"machine": machine()}
    show("machine", [{k: v for k, v in results["machine"].items() if k != "versions"}])
    pin(cores()[-1])
    wanted = arguments.parts or PARTS
    redis_url, redis = _redis() if {"discovery", "many", "rmb"} & set(wanted) else (None, None)
    measures = {
        "start": ("CPU, modules and memory of a program until its end, or until it is ready", start_rows),
        "relay": (
            "relayed frames: CPU of the relay per frame, one and eight pairs",
            lambda: relay_rows() + mixed_rows(),
        ),
        "carriers": ("relayed frames inside websockets and TLS, beside plain TCP: CPU of the relay", carrier_rows),
        "crowd": ("the cost per frame among 1,000 and 9,000 connections, and theirs idle", crowd_rows),
        "client": ("through the client API, 64 messages in flight, each acknowledged", client_rows),
        "flood": ("round trips of a pair while another client floods the relay with control frames", flood_rows),
        "herd": ("what is asked of discovery and servers when something large goes and comes back", herd_rows),
        "path": ("one stream over 100 ms and 1 Gbit/s, beside plain TCP (network namespaces, root)", path_rows),
        "tunnel": ("TCP through expose and forward over a relay, beside ssh -L and loopback (iperf3)", tunnel_rows),
        "connects": ("connections: TCP, handshake, OK", lambda: [connect_row()]),
        "transports": ("transports opened and closed, one after the other", lambda: [transport_row()]),
        "memory": ("resident memory of the relay per idle connection", memory_rows),
        "telemetry": ("what telemetry costs the relay: CPU per frame with and without, in one run", telemetry_rows),
        "messaging": ("the Messaging System: the server alone, then through its clients", messaging_rows),
        "rmb": ("the message bus: one relay, two relays, queues, connects, memory", lambda: rmb_rows(redis_url)),
        "discovery": ("discovery, and a bare Klein application", lambda: discovery_rows(redis_url)),
        "entries": ("discovery with many entries", size_rows),
        "many": (
            "many discoveries on one store: CPU of all for each request",
            lambda: many_rows(redis_url, redis),
        ),
    }
    try:
        for part in PARTS:
            if part in wanted:
                title, measure = measures[part]
                results[part] = measure()
                show(title, results[part])
    finally:
        if redis is not None:
            redis.stop()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"figures: {arguments.json}")


if __name__ == "__main__":
    main()
