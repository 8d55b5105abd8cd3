"""CPU time of the relay per frame between clients in websockets and TLS, as a multiple of that on plain TCP."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import away, start_server
from benchmarks.relay import SIZES, frames
from dmsg.net.carriers.names import PLAIN, SECURE_WEBSOCKET, TLS, WEBSOCKET, Carrier
from tests.testing.certificates import certificate_for

PAIRS = 8
CARRIERS = tuple(map(Carrier, (WEBSOCKET, TLS, SECURE_WEBSOCKET)))


def carrier_rows(sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """Coalesced frames of each size: on plain TCP, inside each carrier, and again on plain TCP, all on one server."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="dmsg-bench-") as directory:
        pem = Path(directory, "tls.pem")
        pem.write_text(certificate_for("127.0.0.1")[0])
        server, plain_at, key = start_server(f"--listen=ssl:0:privateKey={pem}:interface=127.0.0.1", core=away())
        with server:
            tls_at = server.address(1)

            def measured(carrier: Carrier, size: int) -> dict[str, Any]:
                address = tls_at if carrier.secure else plain_at
                return frames(address, server, key, size, PAIRS, coalesced=True, carrier=carrier)

            for size in sizes:
                before = measured(PLAIN, size)
                found = [(carrier, measured(carrier, size)) for carrier in CARRIERS]
                after = measured(PLAIN, size)
                plain = (before["cpu_us"] + after["cpu_us"]) / 2
                rows += [
                    {"carrier": carrier.kind, **row, "times_plain": row["cpu_us"] / plain}
                    for carrier, row in [(PLAIN, before), *found, (PLAIN, after)]
                ]
    return rows
