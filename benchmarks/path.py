"""A stream over a path with high bandwidth and long delay, compared with plain TCP over the same path."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from dmsg.keys import SecKey, write_key_file
from dmsg.testing.namespaces import NamespaceLab, available

DELAY = 0.05
"""Seconds in each direction."""
RATE = 125e6
"""Bytes a second."""
SECONDS = 8.0
SETTINGS = {"net.ipv4.tcp_rmem": "4096 131072 67108864", "net.ipv4.tcp_wmem": "4096 131072 67108864"}
"""TCP buffers that such a path needs; the kernel's own allow a quarter of it."""

_TWISTD = (sys.executable, "-c", "from twisted.scripts.twistd import run; run()", "-n", "--pidfile=")
_DMSG = (sys.executable, "-c", "from dmsg.cli.entry import entry; entry()")
_SINK = """
import socket, sys
s = socket.create_server((sys.argv[1], 5000)); print('listens', flush=True)
c, _ = s.accept()
while c.recv(1 << 18): pass
"""
_SOURCE = """
import socket, sys, time
s = socket.create_connection((sys.argv[1], 5000)); block = bytes(1 << 18); sent = 0
start = time.monotonic()
while time.monotonic() < start + float(sys.argv[2]): s.sendall(block); sent += len(block)
s.shutdown(socket.SHUT_WR); s.recv(1)
print(sent / (time.monotonic() - start))
"""


def path_rows() -> list[dict[str, Any]]:
    """Bytes a second from the first byte to the last one acknowledged, slow start and all."""
    if problem := available():
        return [{"not measured": problem}]
    # Child processes inherit the CPU affinity. The four programs and the wire have to share all cores.
    here = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        return [_row(tuned=tuned) for tuned in (True, False)]
    finally:
        os.sched_setaffinity(0, here)


def _row(*, tuned: bool) -> dict[str, Any]:
    with NamespaceLab(("relay", "alice", "bob"), seed=1) as lab:
        for host in lab.addresses if tuned else ():
            for name, value in SETTINGS.items():
                lab.set_network_option(host, name, value)
        lab.path("relay", "bob", delay=DELAY, rate=RATE)
        lab.path("alice", "bob", delay=DELAY, rate=RATE)
        lab.path("alice", "relay", rate=RATE)
        tcp = _tcp(lab)
        dmsg = _dmsg(lab)
        return {
            "tcp_buffers": "64 MiB" if tuned else "of the kernel",
            "round_trip_ms": DELAY * 2e3,
            "path_mb_s": RATE / 1e6,
            "tcp_mb_s": tcp / 1e6,
            "dmsg_mb_s": dmsg / 1e6,
            "of_tcp": dmsg / tcp,
        }


def _tcp(lab: NamespaceLab) -> float:
    address = lab.addresses["bob"]
    sink = lab.run("bob", sys.executable, "-c", _SINK, address)
    sink.line("listens")
    source = lab.run("alice", sys.executable, "-c", _SOURCE, address, str(SECONDS))
    source.wait(SECONDS + 60)
    return float(source.output)


def _dmsg(lab: NamespaceLab) -> float:
    address = lab.addresses["relay"]
    url = f"http://{address}:9090"
    lab.run("relay", *_TWISTD, "dmsg-discovery", f"--listen=tcp:9090:interface={address}", "--store=memory:").line(
        "listens on"
    )
    server = (f"--listen=tcp:8080:interface={address}", "--key-file=relay.key", "--create", f"--discovery={url}")
    lab.run("relay", *_TWISTD, "dmsg-server", *server).line("registered")
    key = SecKey.generate()
    write_key_file(lab.directory / "bob.key", key)
    lab.run("bob", *_DMSG, "iperf", "--serve", "-k", "bob.key", "--create", "-d", url).line("measured at")
    sender = lab.run("alice", *_DMSG, "iperf", str(key.public), "-t", str(SECONDS), "-d", url)
    sender.wait(SECONDS + 60)
    size, seconds = sender.output.splitlines()[-1].split(", ")[0].split(" in ")
    number, unit = size.split()
    scale = {"MB": 1e6, "GB": 1e9}[unit]
    return float(number) * scale / float(seconds.split()[0])


if __name__ == "__main__":
    started = time.monotonic()
    for row in path_rows():
        sys.stdout.write(f"{row}\n")
    sys.stdout.write(f"{time.monotonic() - started:.0f} s\n")
