"""Addresses of the siege: a network namespace of its own, in which loopback has addresses of the whole internet.

As root the siege moves into a new namespace (``unshare --net``): its loopback device takes every address of ``PUBLIC``
and ``PUBLIC_IPV6`` as its own, and nothing leads out. Elsewhere enemies come from 127.0.0.0/8, and scenes that need
public addresses or IPv6 are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path

PUBLIC = "11.0.0.0/8"
"""Addresses that count as public: those set aside for benchmarks do not, as rules of discovery see them."""
PUBLIC_IPV6 = "2a00::/16"
_INSIDE = "DMSG_SIEGE_NETWORK"
"""Environment variable that says that the process is in its own namespace already."""
_SETUP = (
    ("ip", "link", "set", "lo", "up"),
    ("ip", "route", "add", "local", PUBLIC, "dev", "lo"),
    ("ip", "-6", "route", "add", "local", PUBLIC_IPV6, "dev", "lo"),
)
_OPTIONS = (
    "/proc/sys/net/ipv6/ip_nonlocal_bind",
    # Many test addresses in turn connect to the same port.
    "/proc/sys/net/ipv4/tcp_tw_reuse",
)
"""Network options of the kernel that are set to 1 in the namespace."""


def enter(arguments: list[str]) -> str:
    """Start this program again in a namespace of its own, with the same arguments.

    :returns: why that is not possible; empty: the process is in its namespace.
    """
    if os.environ.get(_INSIDE):
        for words in _SETUP:
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        for option in _OPTIONS:
            Path(option).write_text("1")
        return ""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("unshare", "ip") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    done = subprocess.run(
        ["unshare", "--net", "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False
    )
    if not done.returncode:
        command = ["unshare", "--net", sys.executable, "-m", "benchmarks.siege", *arguments]
        os.execvpe(command[0], command, {**os.environ, _INSIDE: "1"})
    return f"no network namespace can be made: {done.stderr.strip()}"


def is_namespace() -> bool:
    """Whether there are public addresses."""
    return bool(os.environ.get(_INSIDE))


def enemy(number: int) -> str:
    """Return an address of an enemy; each number up to 60,000 has one of another /24."""
    if is_namespace():
        return f"11.{66 + number // 250}.{number % 250}.2"
    return f"127.{66 + number // 250 % 100}.{number % 250}.2"


def enemy_ipv6(block: int, of_block: int = 1) -> str:
    """Return an IPv6 address of an enemy; each ``block`` up to 511 has a /64, all of one /55."""
    return f"2a00:66:0:{block:x}::{of_block:x}"


class Innocents:
    """Addresses of people who do not know each other, each of another /24."""

    def __init__(self) -> None:
        self._numbers = count()

    def next(self) -> str:
        """Return an address that nobody has used so far."""
        number = next(self._numbers)
        if is_namespace():
            return f"11.{1 + number // 250 % 60}.{number % 250}.3"
        return f"127.{1 + number // 250 % 60}.{number % 250}.3"
