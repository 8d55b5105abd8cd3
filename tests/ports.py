"""Ports for processes that have to be told theirs before they start."""

from __future__ import annotations

import random
import socket
from typing import Any


def port_of(listening: Any) -> int:
    """Of what listens over TCP."""
    port: int = listening.getHost().port
    return port


def free_port() -> int:
    """Below those that the kernel gives to outgoing connections.

    Who connects again and again to a port among these, while nobody listens
    there, is one day connected with itself, and the port is taken.
    """
    for _ in range(1000):
        port = random.randrange(15_000, 30_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no port is free")
