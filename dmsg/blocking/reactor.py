"""Twisted's reactor in a thread of its own, and functions with which other threads run code in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar, cast

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from dmsg.errors import DmsgError
from dmsg.net.reactor import Reactor, the_reactor, use_monotonic_clock
from dmsg.net.threads import let_process_end

T = TypeVar("T")

_starting = threading.Lock()


class NotPossibleHere(DmsgError):
    """Error: a blocking call was made in the reactor's own thread, where it would wait for itself for ever."""


def running_reactor() -> Reactor:
    """Return the running reactor of this process. If it does not run yet, start it in a thread of its own.

    :raises NotPossibleHere: the caller is in the thread in which the reactor runs.
    """
    from twisted.python import threadable

    reactor = the_reactor()
    with _starting:
        if not reactor.running:
            _start(reactor)
    if threadable.ioThread == threading.get_ident():
        raise NotPossibleHere(
            "dmsg.blocking would block Twisted's reactor in this thread: use dmsg, dmsg.aio or another thread"
        )
    return reactor


def _start(reactor: Reactor) -> None:
    running = threading.Event()

    def run() -> None:
        use_monotonic_clock(reactor)
        let_process_end(reactor)
        reactor.callWhenRunning(running.set)
        # The reactor must not handle signals: Ctrl-C is to interrupt the blocking call that waits in the main thread.
        cast(Any, reactor).run(installSignalHandlers=False)

    threading.Thread(target=run, name="dmsg-reactor", daemon=True).start()
    running.wait()


def wait(make: Callable[[], Coroutine[Deferred[Any], Any, T]], timeout: float | None = None) -> T:
    """Run a coroutine in the reactor's thread, wait for it, and return its result.

    If the wait ends early, by Ctrl-C or the timeout, the coroutine is cancelled.

    :param make: function that creates the coroutine; called in the reactor's thread.
    :param timeout: seconds to wait; None for any length of time.
    :raises TimeoutError: the coroutine did not end within the timeout.
    """
    reactor = running_reactor()
    result: Future[T] = Future()
    running: list[Deferred[T]] = []

    def failed(failure: Failure) -> None:
        with suppress(InvalidStateError):
            result.set_exception(failure.value)

    def done(value: T) -> None:
        with suppress(InvalidStateError):
            result.set_result(value)

    def start() -> None:
        deferred = Deferred.fromCoroutine(make())
        running.append(deferred)
        deferred.addCallbacks(done, failed)

    def cancel() -> None:
        for one in running:
            one.cancel()

    call_in_reactor(reactor, start)
    try:
        return result.result(timeout)
    except BaseException:
        if not result.done():
            call_in_reactor(reactor, cancel)
        raise


def call_in_reactor(reactor: Reactor, call: Callable[..., object], *arguments: object) -> None:
    """Schedule a call of a function in the reactor's thread, and return at once."""
    cast(Any, reactor).callFromThread(call, *arguments)
