"""Ports for processes that must be given a port before they start."""

from __future__ import annotations

import random
import socket
from typing import Any


def port_of(listening: Any) -> int:
    """Return the TCP port of a listening object."""
    port: int = listening.getHost().port
    return port


def free_port() -> int:
    """Return a free port below those that the kernel gives to outgoing connections.

    A program that connects repeatedly to a port of that range, while nothing listens there, is some day connected to
    itself, and then the port is in use.
    """
    # Workers of the test runner are forked, so their shared generators would all draw the same ports.
    drawn = random.SystemRandom()
    for _ in range(1000):
        port = drawn.randrange(15_000, 30_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no port is free")
