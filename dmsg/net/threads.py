"""Blocking calls in threads of the reactor's pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from threading import Thread
from typing import Any, ParamSpec, TypeVar, cast

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.interfaces import IReactorFromThreads, IReactorTime
from twisted.internet.threads import deferToThreadPool

_P = ParamSpec("_P")
_T = TypeVar("_T")

WORK_SLICE = 0.001
"""Seconds for which a thread computes before it sleeps for the same time, so that the reactor's thread can run. Without
these pauses, the reactor's thread would wait up to 5 ms for the interpreter's lock after each of its system calls, and
one request needs about ten system calls."""


def in_thread(
    reactor: IReactorTime | None, act: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs
) -> Deferred[_T]:
    """Call a function in a thread of the reactor's pool.

    If there is no reactor, or a test's clock without threads, call the function at once in the current thread.
    """
    pool = getattr(reactor, "getThreadPool", None)
    if pool is None:
        return maybeDeferred(act, *arguments, **options)
    return deferToThreadPool(cast(IReactorFromThreads, reactor), pool(), act, *arguments, **options)


def paced(items: Iterable[_T]) -> Iterator[_T]:
    """Iterate over ``items`` in a thread, with pauses that leave half of the time to the reactor's thread."""
    began = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - began >= WORK_SLICE:
            time.sleep(WORK_SLICE)
            began = time.monotonic()


def let_process_end(reactor: object) -> None:
    """Make the threads of the reactor's pool daemonic, for a program that never stops its reactor.

    The threads of the pool, which resolve host names, end only when the reactor is stopped. Without this call, the
    interpreter would wait for them at its exit for ever.
    """
    pool: Any = cast(Any, reactor).getThreadPool()
    pool.threadFactory = partial(Thread, daemon=True)
