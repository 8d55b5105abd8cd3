"""Entities in processes of their own, which are started again when they end."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from twisted.internet.defer import Deferred

from dmsg.cli.processes import START_TIMEOUT, Child, stop
from dmsg.clients.invitations import at_port
from dmsg.errors import DmsgError
from dmsg.net.reactor import Reactor
from dmsg.net.retry import retry_delay
from dmsg.net.retry_loop import RetryLoop

MODULES = {"dmsg-discovery": "dmsg.tap.discovery", "dmsg-server": "dmsg.tap.server"}
"""Modules of the plugins of ``twistd``, by their names."""
STEADY_AFTER = 60.0
"""Seconds of running after which earlier failures of a process no longer count towards its backoff."""
_HEAD = re.compile(r"^\S+ \[[^\]]*\] ")
"""Regular expression for date and source, with which a line of twistd's log begins."""
_SERIOUS = re.compile(r"^\S+ \[[^\]]*#(warn|error|critical)\] ")
_CACHE = re.compile(r"^\S+ \[[^\]]*\] Unable to write to plugin cache ")
"""Regular expression for a line that Twisted logs at each start if this user cannot write to the directory of the
installation.  Without the cache, Twisted imports the plugins themselves, which changes nothing else.
"""
_ADDRESS = re.compile(r"IPv[46]Address\(type='TCP', host='([^']*)', port=(\d+)[^)]*\)")
"""Regular expression for an address in the form in which Twisted logs it."""


class CannotStart(DmsgError):
    """Error: an entity ended before it was ready."""


class Supervised:
    """Entity of ``twistd`` in a process that is started again, with exponential backoff, when it ends.

    :param name: name of the entity in messages.
    :param arguments: arguments of ``twistd``: the plugin and its options.
    :param ready: regular expression for the line of the log that says that the entity can be used.
    :param directory: working directory of the process.
    :param log: callback invoked with each line of the entity's log.
    :param notice: callback invoked with each message for the user.
    """

    def __init__(
        self,
        reactor: Reactor,
        name: str,
        arguments: Sequence[str],
        ready: str,
        *,
        directory: Path,
        log: Callable[[str], object],
        notice: Callable[[str], object],
    ) -> None:
        self.name = name
        self._reactor = reactor
        self._arguments = arguments
        self._ready = ready
        self._directory = directory
        self._log = lambda line: None if _CACHE.match(line) else log(with_plain_addresses(line))
        self._notice = notice
        self._random = Random()
        self._failures = 0
        self._stopping = False
        self._first: Deferred[None] | None = None
        self._loop = RetryLoop(reactor, self._run, self._delay, f"running {name}")
        self._over: Deferred[None] | None = None
        self.child: Child | None = None

    def load(self) -> Child:
        """Start the process of the entity, which imports the entity's modules and then waits for :meth:`start`.

        :returns: the process.
        """
        self.child = load_entity(self._reactor, self._arguments, self._directory, self._log)
        return self.child

    def start(self) -> Deferred[None]:
        """Start the entity, in the process of :meth:`load` if there is one.

        :returns: Deferred that fires when the entity can be used.  It fails with :class:`CannotStart` if the entity
            ends first, or is not ready in time; the entity is then not started again.
        """
        first = self._first = Deferred()
        self._loop.start()
        self._loop.now()
        return first

    async def stop(self) -> None:
        """Stop the entity, and wait until its process has ended."""
        self._stopping = True
        self._loop.stop()
        if self.child is not None:
            await stop(self._reactor, self.child)

    async def _run(self) -> float | None:
        """Run the process until it ends, and return the seconds until the next start; None if the entity is being
        stopped.
        """
        began = self._reactor.seconds()
        child = self.child or self.load()
        run_entity(child)
        await self._until_ready(child)
        status = await child.ended
        self.child = None
        if self._stopping:
            return None
        if self._reactor.seconds() - began >= STEADY_AFTER:
            self._failures = 0
        self._failures += 1
        delay = self._delay(self._failures)
        self._notice(
            f"{self.name} ended with status {status} and starts again in {delay:.1f} s; its last line: "
            f"{without_head(child.last_line)}"
        )
        return delay

    async def _until_ready(self, child: Child) -> None:
        """Wait until the entity can be used, and report that.

        The first start is reported by the Deferred of :meth:`start`, later starts by a notice to the user.
        """
        try:
            await child.line(self._ready).addTimeout(START_TIMEOUT, self._reactor, self._too_late)
        except DmsgError as error:
            first, self._first = self._first, None
            if first is not None:
                self._stopping = True
                self._loop.stop()
                await stop(self._reactor, child)
                first.errback(CannotStart(f"{self.name} cannot start: {last_words(child) or error}"))
            return
        first, self._first = self._first, None
        if first is not None:
            first.callback(None)
        else:
            self._notice(f"{self.name} is up again")

    def _too_late(self, result: object, seconds: float) -> None:
        raise DmsgError(f"{self.name} was not ready within {seconds:g} s")

    def _delay(self, failures: int) -> float:
        return retry_delay(failures, self._random)


def load_entity(reactor: Reactor, arguments: Sequence[str], directory: Path, log: Callable[[str], object]) -> Child:
    """Start a process for an entity, which imports the entity's modules and waits for :func:`run_entity`.  The process
    ends when this process ends.

    :param arguments: arguments of ``twistd``: the plugin and its options.
    :param directory: working directory of the process.
    :param log: callback invoked with each line of its output.
    """
    child = Child(arguments[0], log)
    # With -P, Python does not import modules from the working directory, into which other users might write.
    program = [sys.executable, "-P", "-m", "dmsg.cli.network.entity_process"]
    command = [*program, str(os.getpid()), MODULES[arguments[0]], "--nodaemon", "--pidfile=", *arguments]
    reactor.spawnProcess(child, sys.executable, command, env=None, path=str(directory))
    return child


def run_entity(child: Child) -> None:
    """Run the entity in a process of :func:`load_entity`.  If the process has ended, nothing happens."""
    assert child.transport is not None
    child.transport.write(b"\n")


def without_head(line: str) -> str:
    """Return a line of twistd's log without its date and source."""
    return with_plain_addresses(_HEAD.sub("", line))


def with_plain_addresses(line: str) -> str:
    """Return a line of a log in which addresses have the form ``HOST:PORT``, and not that of Twisted."""
    return _ADDRESS.sub(lambda found: at_port(found[1], int(found[2])), line)


def last_words(child: Child) -> str:
    """Return the last line that a process printed before it ended, without the name of its program."""
    line = without_head(child.last_line)
    return line.removeprefix(f"{child.name}: ").removeprefix(f"twistd {child.name}: ")


def is_serious(line: str) -> bool:
    """Whether a line of a log is a warning or an error."""
    return _SERIOUS.match(line) is not None
