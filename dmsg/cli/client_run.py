"""Run of a command in a reactor: starts the client, handles signals, and prints an error as one line."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeVar, cast

import click
from twisted.internet import task
from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.error import CannotListenError, ConnectionLost
from twisted.internet.interfaces import IListeningPort, IProtocolFactory, IReactorFromThreads
from twisted.logger import (
    FilteringLogObserver,
    LogLevel,
    LogLevelFilterPredicate,
    globalLogBeginner,
    textFileLogObserver,
)
from twisted.python.failure import Failure

from dmsg.base.interpreter import keep_large_blocks
from dmsg.cli import output
from dmsg.cli.access import Access
from dmsg.clients.address_book import UnknownName
from dmsg.errors import DmsgError
from dmsg.keys import PubKey
from dmsg.net.descriptors import COMMAND_DESCRIPTORS, raise_descriptor_limit
from dmsg.net.reactor import Reactor, cancel_call, use_monotonic_clock

T = TypeVar("T")
C = TypeVar("C", bound="RunnableClient")
C_co = TypeVar("C_co", bound="RunnableClient", covariant=True)

Main = Callable[[Reactor], Coroutine[Deferred[Any], Any, object]]
"""Function that does the work of a command.  It is a coroutine function, and gets the reactor."""

EXIT_TERMINATED = 143
"""Exit status after SIGTERM: 128 plus the number of the signal."""
EXIT_HUNG_UP = 129
"""Exit status after SIGHUP: 128 plus the number of the signal."""
ONLINE_TIMEOUT = 15.0
"""Seconds to wait until the client is connected to a server."""
MAX_SIGNALS = 3
"""Number of signals, such as Ctrl-C, after which the process ends at once.  The first signal starts an orderly
shutdown, and the second cancels the shutdown's waits.
"""
NOTICE_AFTER = 1.5
"""Seconds after which a command prints what its client is waiting for."""


def run(main: Main, *, logs: bool = False) -> NoReturn:
    """Run ``main(reactor)`` in a reactor, and then end the process.  Errors of dmsg and of the system are printed as
    one line.

    :param logs: whether to write the log to standard error even without ``--verbose``, as a service does.
    """
    verbose = click.get_current_context().find_root().params.get("verbose", False)
    level = LogLevel.debug if verbose else LogLevel.info if logs else LogLevel.critical
    observer = FilteringLogObserver(textFileLogObserver(sys.stderr), [LogLevelFilterPredicate(level)])
    globalLogBeginner.beginLoggingTo([observer], redirectStandardIO=False)

    keep_large_blocks()
    raise_descriptor_limit(COMMAND_DESCRIPTORS)

    def start(reactor: Reactor) -> Deferred[None]:
        use_monotonic_clock(reactor)
        return _Run(reactor, main).ended

    task.react(start)
    raise SystemExit(0)


class _Run:
    """Run of one command in its reactor.

    :ivar ended: Deferred that fires when the command has ended.  If the exit status is not 0, it fails with SystemExit.
    """

    def __init__(self, reactor: Reactor, main: Main) -> None:
        self._reactor = reactor
        self._stopped_with = output.EXIT_INTERRUPTED
        self._finished: Deferred[None] = Deferred()
        self._started: Deferred[None] = Deferred()
        self._running = Deferred.fromCoroutine(self._run_guarded(main))
        output.state.cancel = self._give_up
        if output.state.status is not None:
            self._give_up()
        reactor.callWhenRunning(self._tell_signals_apart)
        # Before the reactor has installed its signal handlers, Ctrl-C would raise an exception inside the command.
        reactor.callWhenRunning(self._started.callback, None)
        reactor.addSystemEventTrigger("before", "shutdown", self._interrupted)
        self.ended = self._running.addBoth(self._end)

    async def _run_guarded(self, main: Main) -> None:
        try:
            await self._started
            await main(self._reactor)
        except CancelledError:
            if self._stopped_with == output.EXIT_INTERRUPTED and sys.stderr.isatty():
                output.say(err=True)  # The terminal shows ^C, after which the shell's prompt needs a line of its own.
            raise SystemExit(self._stopped_with if output.state.status is None else output.state.status) from None
        except BrokenPipeError as error:
            output.mark_output_failed(error, err=False)
            raise SystemExit(output.EXIT_PIPE) from None
        except UnknownName as error:
            output.fail_with(str(error), output.EXIT_USAGE, type(error).__name__)
        except (DmsgError, OSError, ConnectionLost, CannotListenError) as error:
            output.fail(error)
        if output.state.status is not None:
            raise SystemExit(output.state.status)

    def _give_up(self) -> None:
        """Cancel the command in the next reactor turn, because the caller may be in the middle of a write."""
        self._reactor.callLater(0, self._running.cancel)

    def _interrupted(self) -> Deferred[None] | None:
        """Cancel the command, because the reactor shuts down, and wait until it has closed its client and files."""
        if self._finished.called:
            return None
        self._running.cancel()
        return self._finished

    def _shut_down(self) -> None:
        # If the command has ended since the signal, the reactor is already being stopped.
        if not self._finished.called:
            output.state.interrupted = True
            self._reactor.stop()

    def _end(self, result: Failure | None) -> Any:
        self._finished.callback(None)
        return result

    def _tell_signals_apart(self) -> None:
        """Install handlers that record which signal came, because the exit status depends on it."""
        later = cast(IReactorFromThreads, self._reactor).callFromThread
        times = 0

        def ended(number: int, frame: FrameType | None) -> None:
            nonlocal times
            times += 1
            if times == 1:
                if number != signal.SIGINT:
                    self._stopped_with = EXIT_TERMINATED if number == signal.SIGTERM else EXIT_HUNG_UP
                later(self._shut_down)
            elif times == 2:  # The reactor must not be stopped a second time, because Twisted would print a traceback.
                later(self._running.cancel)
            elif times == MAX_SIGNALS:
                os._exit(self._stopped_with)
            output.interrupt_write()

        signal.signal(signal.SIGTERM, ended)
        # If the parent process ignores SIGINT, as a shell does for background jobs, the signal stays ignored.
        if callable(signal.getsignal(signal.SIGINT)):
            signal.signal(signal.SIGINT, ended)
        # SIGHUP means that the terminal was closed. It is handled like SIGTERM, so that peers learn of the end. Under
        # nohup the signal stays ignored.
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            signal.signal(signal.SIGHUP, ended)


class RunnableClient(Protocol):
    """Interface of a client that a command starts and stops: a client of any protocol family, or one of the agent."""

    @property
    def waiting_for(self) -> str:
        """Text that names what the client is waiting for before it is online or its entry is published."""

    def startService(self) -> None:
        """Start the client."""

    def stopService(self) -> Deferred[None]:
        """Stop the client."""

    def expect(self, remote: PubKey) -> None:
        """Prepare for a connection to ``remote`` while the client goes online."""

    def when_online(self, timeout: float | None = None) -> Deferred[None]:
        """Return a Deferred that fires when the client is connected to a server."""

    def when_published(self, timeout: float | None = None) -> Deferred[None]:
        """Return a Deferred that fires when the client's entry is in discovery, so that peers can connect."""


class Settings(Protocol[C_co]):
    """Interface of the settings of a client, which the options of a command set."""

    def make(self, reactor: Reactor) -> C_co:
        """Create the client.  It is not started yet."""


async def with_client(
    reactor: Reactor,
    settings: Settings[C],
    use: Callable[[C], Awaitable[T]],
    *,
    published: bool = False,
    peer: PubKey | None = None,
) -> T:
    """Start a client, call ``use`` with it once it is online, and stop it afterwards.

    :param published: whether to wait also until the client's entry is in discovery.
    :param peer: key of the first peer to which ``use`` connects; the client prepares this connection while it goes
        online.
    """
    client = settings.make(reactor)
    client.startService()
    if peer is not None:
        client.expect(peer)
    waiting = reactor.callLater(NOTICE_AFTER, _tell_of_waiting, reactor, client)
    try:
        await client.when_online(ONLINE_TIMEOUT)
        if published:
            await client.when_published(ONLINE_TIMEOUT)
        cancel_call(waiting)
        return await use(client)
    finally:
        cancel_call(waiting)
        await client.stopService()


def _tell_of_waiting(reactor: Reactor, client: RunnableClient) -> None:
    until = time.strftime("%H:%M:%S", time.localtime(time.time() + ONLINE_TIMEOUT - NOTICE_AFTER))
    # ``waiting_for`` is either a noun, such as "an answer of discovery", or the text of an error, which is a sentence.
    # Both can follow a colon.
    output.notice(f"waiting, at the latest until {until}: {client.waiting_for.rstrip('.')}")


class ListeningClient(Protocol):
    """Interface of a client that accepts streams: a client of any protocol family, or one of the agent."""

    def listen(self, factory: IProtocolFactory, port: int = 0) -> IListeningPort | Deferred[IListeningPort]:
        """Accept streams."""


class _DescribedFactory(Protocol):
    """Interface of a factory with the attributes that an agent reads: an access rule, and a description."""

    admits: Access
    offers: str


async def listening_at(
    client: ListeningClient, factory: IProtocolFactory, port: int = 0, *, access: Access, offers: str = ""
) -> IListeningPort:
    """Accept streams with ``factory``.  If the client works through an agent, wait until the agent has opened the port.

    :param access: peers that may connect; streams of others are refused.
    :param offers: description of the service for ``dmsg status``.
    :raises CannotListenError: another service of this client uses the port.
    :raises DmsgError: another program uses the port of the agent's key.
    """
    described = cast(_DescribedFactory, factory)
    described.admits, described.offers = access, offers
    return await cast("Deferred[IListeningPort]", maybeDeferred(client.listen, factory, port))


async def serve_until_interrupted(port: IListeningPort, *others: IListeningPort) -> None:
    """Wait until a signal cancels the command, and then close the ports."""
    try:
        await Deferred()
    finally:
        for one in (port, *others):
            await maybeDeferred(one.stopListening)
