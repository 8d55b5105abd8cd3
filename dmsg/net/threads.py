"""Blocking calls, where there are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.interfaces import IReactorFromThreads, IReactorTime
from twisted.internet.threads import deferToThreadPool

_T = TypeVar("_T")


def in_thread(reactor: IReactorTime | None, act: Callable[..., _T], *arguments: Any, **options: Any) -> Deferred[_T]:
    """Call in a thread of the reactor's; at once by a clock, which has none, or without a reactor."""
    pool = getattr(reactor, "getThreadPool", None)
    if pool is None:
        return maybeDeferred(act, *arguments, **options)
    return deferToThreadPool(cast(IReactorFromThreads, reactor), pool(), act, *arguments, **options)
