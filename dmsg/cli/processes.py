"""Child processes of a command: starts them, waits for lines of their output, and ends them with the command."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.error import ProcessDone, ProcessExitedAlready
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from dmsg.errors import DmsgError
from dmsg.net.deadlines import no_answer
from dmsg.net.reactor import Reactor

START_TIMEOUT = 30.0
"""Seconds to wait until an entity has logged where it listens."""
STOP_TIMEOUT = 12.0
"""Seconds to wait until an entity has stopped.  A server needs less time to shut down."""
KEPT_OUTPUT = 64 * 1024
"""Maximum bytes of a process's last output that are stored, to be searched and printed."""


class Child(ProcessProtocol):
    """Process protocol of a child process.

    :param name: name of the process in messages.
    :param log: callback invoked with each line of its output.
    :ivar ended: Deferred that fires with the exit status.  If a signal ended the process, that is 128 plus the signal's
        number.
    """

    def __init__(self, name: str, log: Callable[[str], object] | None = None) -> None:
        self.name = name
        self._log = log
        self._unlogged = b""
        self.ended: Deferred[int] = Deferred()
        self.status: int | None = None
        self._output = b""
        self._patterns: list[tuple[re.Pattern[bytes], Deferred[re.Match[bytes]]]] = []

    def line(self, pattern: str) -> Deferred[re.Match[bytes]]:
        """Return a Deferred that fires with the first match of a regular expression in the output.

        It fails if the process ends before, or has ended.
        """
        found: Deferred[re.Match[bytes]] = Deferred()
        self._patterns.append((re.compile(pattern.encode()), found))
        self._search()
        if self.status is not None:
            self._fail_all()
        return found

    def outReceived(self, data: bytes) -> None:
        self._output = (self._output + data)[-KEPT_OUTPUT:]
        if self._log is not None:
            *lines, rest = (self._unlogged + data).split(b"\n")
            self._unlogged = rest[-KEPT_OUTPUT:]
            for line in lines:
                self._log(line.decode(errors="replace"))
        self._search()

    @property
    def last_line(self) -> str:
        """Last line of the output, or ``no output``."""
        return (self._output.decode(errors="replace").strip().splitlines()[-1:] or ["no output"])[0]

    errReceived = outReceived

    def _search(self) -> None:
        for wanted in list(self._patterns):
            match = wanted[0].search(self._output)
            if match is not None:
                self._patterns.remove(wanted)
                if not wanted[1].called:
                    wanted[1].callback(match)

    def processEnded(self, reason: Failure) -> None:
        if reason.check(ProcessDone):
            self.status = 0
        else:  # If a signal ended the process, the status is 128 plus its number, as in a shell.
            signal = getattr(reason.value, "signal", None)
            self.status = 128 + signal if signal else getattr(reason.value, "exitCode", None) or 1
        self._fail_all()
        self.ended.callback(self.status)

    def _fail_all(self) -> None:
        """Report to all who wait for a line that the process has ended."""
        patterns, self._patterns = self._patterns, []
        for _, found in patterns:
            if not found.called:
                found.errback(DmsgError(f"{self.name} ended: {self.last_line}"))

    def signal(self, name: str) -> None:
        """Send a signal to the process, unless it has ended.

        :param name: name of the signal without SIG, such as ``TERM``.
        """
        try:
            assert self.transport is not None
            self.transport.signalProcess(name)
        except ProcessExitedAlready:
            pass


def start_twistd(reactor: Reactor, name: str, *arguments: str, directory: str) -> Child:
    """Start an entity as ``twistd --nodaemon NAME ARGUMENTS``."""
    child = Child(name)
    command = [sys.executable, "-P", "-c", "from twisted.scripts.twistd import run; run()", "--nodaemon", "--pidfile="]
    reactor.spawnProcess(child, sys.executable, [*command, name, *arguments], env=None, path=directory)
    return child


async def address_of(reactor: Reactor, child: Child) -> str:
    """Return ``HOST:PORT`` at which an entity listens, once its log says so."""

    def too_late(_: object, seconds: float) -> None:
        raise DmsgError(f"{child.name} did not start within {seconds:g} s")

    match: re.Match[bytes] | None = await child.line(
        r"listens on IPv4Address\(type='TCP', host='([^']+)', port=(\d+)\)"
    ).addTimeout(START_TIMEOUT, reactor, too_late)
    assert match is not None
    return f"{match[1].decode()}:{match[2].decode()}"


async def stop(reactor: Reactor, child: Child) -> int:
    """Stop a process with SIGTERM, or with SIGKILL if it does not end in time, and return its exit status."""
    if child.status is None:
        child.signal("TERM")
        waiting: Deferred[None] = Deferred()

        def ended(status: int) -> int:
            if not waiting.called:
                waiting.callback(None)
            return status

        child.ended.addCallback(ended)
        try:
            await waiting.addTimeout(STOP_TIMEOUT, reactor, no_answer)
        except TimeoutError:
            child.signal("KILL")
            await child.ended
    assert child.status is not None
    return child.status


class Entities:
    """Discovery, servers and other entities, each in a process of its own, with random ports on loopback.

    :ivar children: processes in the order of their start.  :meth:`stop` stops them in reverse order.
    """

    def __init__(self, reactor: Reactor, directory: Path) -> None:
        self._reactor = reactor
        self._directory = directory
        self.children: list[Child] = []

    def start(self, name: str, *options: str) -> Child:
        """Start an entity.

        :param name: name of its plugin of twistd.
        """
        child = start_twistd(self._reactor, name, *options, directory=str(self._directory))
        self.children.append(child)
        return child

    def _start(self, name: str, *options: str) -> Child:
        return self.start(name, "--listen=tcp:0:interface=127.0.0.1", *options)

    async def discovery(self, *options: str) -> str:
        """Start a discovery without a rate limit, and return its URL."""
        child = self._start("dmsg-discovery", "--rate-limit=0", *options)
        return f"http://{await address_of(self._reactor, child)}"

    def server(self, name: str, url: str, *options: str) -> Child:
        """Start a server, with a key file of this name.

        :param url: URL of the discovery with which the server registers.
        """
        return self._start(
            "dmsg-server", f"--discovery={url}", f"--key-file={self._directory / name}.key", "--create", *options
        )

    async def stop(self) -> None:
        """Stop all processes, the last one first."""
        for child in reversed(self.children):
            await stop(self._reactor, child)
