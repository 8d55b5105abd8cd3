"""Blocking calls, where there are threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar, cast

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.interfaces import IReactorFromThreads, IReactorTime
from twisted.internet.threads import deferToThreadPool

_P = ParamSpec("_P")
_T = TypeVar("_T")

PART = 0.001
"""Seconds for which a thread computes before it lets the reactor's thread go on, and for which it then sleeps.
Otherwise the reactor's thread would wait up to 5 ms for the interpreter after each of its system calls, of which one
answer needs about ten."""


def in_thread(
    reactor: IReactorTime | None, act: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs
) -> Deferred[_T]:
    """Call in a thread of the reactor's; at once by a clock, which has none, or without a reactor."""
    pool = getattr(reactor, "getThreadPool", None)
    if pool is None:
        return maybeDeferred(act, *arguments, **options)
    return deferToThreadPool(cast(IReactorFromThreads, reactor), pool(), act, *arguments, **options)


def giving_way(items: Iterable[_T]) -> Iterator[_T]:
    """Iterate in a thread so that the reactor's thread is not kept waiting: it has half of the time."""
    began = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - began >= PART:
            time.sleep(PART)
            began = time.monotonic()
