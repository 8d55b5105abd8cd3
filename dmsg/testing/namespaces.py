"""Lab of real processes over real TCP. Each host is a network namespace (Linux, root).

The calls of this lab block, and use no reactor. The lab is for tests and experiments that start programs.

.. code-block:: python

    with NamespaceLab(["relay", "alice", "bob"], seed=1) as lab:
        lab.path("relay", "bob", delay=0.05, rate=125e6)
        relay = lab.run("relay", "twistd", "-n", "dmsg-server", ...)
        lab.pause(relay)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from dmsg.errors import DmsgError

START_TIMEOUT = 30.0
"""Default seconds to wait for a line in the output of a process."""


class LabError(DmsgError):
    """Error: the lab cannot be created, or a process in it did not do what was expected."""


def available() -> str:
    """Return the reason why this lab cannot be used on this machine; an empty text if it can be used."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    name = f"dmsg-probe-{os.getpid()}"
    try:
        done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    except OSError:
        return "there is no ip command (package iproute2)"
    if done.returncode:
        return f"no network namespace can be made: {done.stderr.strip()}"
    try:
        tun = ["ip", "netns", "exec", name, "ip", "tuntap", "add", "dev", "probe", "mode", "tun"]
        done = subprocess.run(tun, capture_output=True, text=True, check=False)
        return f"no TUN device can be made: {done.stderr.strip()}" if done.returncode else ""
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False)


class Running:
    """Process in a network namespace. Its output is written to a file."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self._output = output

    @property
    def output(self) -> str:
        """Output of the process so far."""
        return self._output.read_text(errors="replace")

    def line(self, pattern: str, timeout: float = START_TIMEOUT) -> re.Match[str]:
        """Wait until the output matches a pattern, and return the match.

        :param pattern: regular expression.
        :raises LabError: the process has ended, or the timeout is over.
        """
        end = time.monotonic() + timeout
        while (match := re.search(pattern, self.output)) is None:
            if self.process.poll() is not None or time.monotonic() > end:
                raise LabError(f"{pattern!r} is not in the output: {self.output[-2000:]}")
            time.sleep(0.02)
        return match

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for the process to end, and return its exit status.

        :raises LabError: the process does not end in time.
        """
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise LabError(f"the process does not end: {self.output[-2000:]}") from None

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """Pause the process with SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the process with SIGCONT."""
        self.process.send_signal(signal.SIGCONT)


class Namespaces:
    """Base class of labs in which each host is a network namespace.

    :param hosts: names of the hosts.
    :ivar directory: working directory of all programs of the lab.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)
        self._prefix = f"dmsg{os.getpid()}"
        self._running: list[Running] = []
        self._directory = tempfile.TemporaryDirectory(prefix="dmsg-lab-")
        self.directory = Path(self._directory.name)

    def _connect(self) -> None:
        """Connect the hosts to each other. Their namespaces exist already."""
        raise NotImplementedError

    def _disconnect(self) -> None:
        """Remove what :meth:`_connect` created. The programs of the lab have ended before."""

    def __enter__(self) -> Self:
        problem = available()
        if problem:
            raise LabError(problem)
        try:
            for name in self.hosts:
                subprocess.run(["ip", "netns", "add", self._namespace(name)], check=True)
            self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running:
            running.resume()
            running.kill()
        self._disconnect()
        for name in self.hosts:
            subprocess.run(["ip", "netns", "delete", self._namespace(name)], check=False, capture_output=True)
        with contextlib.suppress(OSError):
            self._directory.cleanup()

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def set_network_option(self, host: str, name: str, value: str) -> None:
        """Set a network option of the kernel in the namespace of a host.

        The file is written directly, because ``sysctl`` is missing from the PATH of many users and from small images.

        :param name: name with dots, as ``sysctl`` takes it, for example ``net.ipv4.tcp_rmem``.
        """
        path = "/proc/sys/" + name.replace(".", "/")
        write = ("sh", "-c", 'printf %s "$1" > "$2"', "sh", value, path)
        subprocess.run(["ip", "netns", "exec", self._namespace(host), *write], check=True)

    def run(self, host: str, *arguments: str, environment: dict[str, str] | None = None) -> Running:
        """Start a program on a host, in the lab's directory."""
        output = self.directory / f"output-{len(self._running)}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace(host), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env={**os.environ, **(environment or {})},
            )
        running = Running(process, output)
        self._running.append(running)
        return running


class NamespaceLab(Namespaces):
    """Lab of network namespaces, one for each host. The process ``dmsg.testing.wire`` forwards packets between them.

    :param hosts: names of the hosts.
    :param seed: seed of the random events of the network.
    :param ipv6: whether the hosts have only IPv6 addresses, instead of only IPv4 addresses.
    :ivar addresses: address of each host, by name.
    """

    def __init__(self, hosts: Sequence[str], *, seed: int = 0, ipv6: bool = False) -> None:
        super().__init__(hosts)
        self._seed = seed
        # The host's number is added to the first address as an integer. Added to the last part of its text, the number
        # could exceed 255, and would be wrong for IPv6, whose text is hexadecimal.
        first = ip_address("fd77::1" if ipv6 else "10.77.0.1")
        self.addresses = {name: str(first + number) for number, name in enumerate(hosts)}
        self._wire: subprocess.Popen[str] | None = None

    def _connect(self) -> None:
        hosts = [f"{self._namespace(name)}={address}" for name, address in self.addresses.items()]
        self._wire = subprocess.Popen(
            [sys.executable, "-P", "-m", "dmsg.testing.wire", str(self._seed), *hosts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._wire.stdout is not None
        if self._wire.stdout.readline() != "ready\n":
            raise LabError("the wire did not start")

    def _disconnect(self) -> None:
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()

    # --- faults by name ---

    def _order(self, **order: object) -> None:
        assert self._wire is not None and self._wire.stdin is not None and self._wire.stdout is not None
        self._wire.stdin.write(json.dumps(order) + "\n")
        self._wire.stdin.flush()
        if self._wire.stdout.readline() != "ok\n":
            raise LabError("the wire is broken")

    def path(self, first: str, second: str, **settings: float) -> None:
        """Set properties of the network between two hosts, in both directions.

        :param settings: ``delay`` in seconds, ``rate`` in bytes per second (0 for no limit), ``loss`` and ``reorder``
            as shares of packets.
        """
        for source, target in ((first, second), (second, first)):
            self._order(**{"from": self.addresses[source], "to": self.addresses[target]}, **settings)

    def only_port(self, first: str, second: str, port: int) -> None:
        """Forward only TCP packets to or from a port between two hosts. Port 0 removes this restriction."""
        self.path(first, second, port=port)

    def partition(self, first: str, second: str) -> None:
        """Drop all packets between two hosts."""
        self.path(first, second, cut=1)

    def heal(self, first: str, second: str) -> None:
        """Forward packets between two hosts again."""
        self.path(first, second, cut=0)

    def reset(self, host: str, seconds: float = 0.5) -> None:
        """Reset those TCP connections of a host that carry data within the next ``seconds`` seconds."""
        self._order(reset=self.addresses[host], seconds=seconds)
