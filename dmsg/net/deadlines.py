"""Waiting with a time limit, and the text of the errors of Deferreds that did not fire in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from twisted.internet.defer import CancelledError, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

_T = TypeVar("_T")


def no_answer(result: _T | Failure, seconds: float) -> _T:
    """Raise an error whose text people can read; to be passed to :meth:`~twisted.internet.defer.Deferred.addTimeout`.

    Without this function the text would be ``(5.0, 'Deferred')``.

    :raises twisted.internet.defer.TimeoutError: the Deferred did not fire in time.
    """
    if isinstance(result, Failure) and result.check(CancelledError):
        raise TimeoutError(f"no answer within {seconds:.3g} s") from None
    return cast(_T, result)


async def wait_until(reactor: IReactorTime, is_met: Callable[[], bool], timeout: float, interval: float) -> bool:
    """Wait until a condition is met, and return whether it is.

    :param timeout: maximum seconds to wait.
    :param interval: seconds between two checks of the condition.
    """
    end = reactor.seconds() + timeout
    while not is_met():
        if reactor.seconds() >= end:
            return False
        await deferLater(reactor, interval)
    return True
