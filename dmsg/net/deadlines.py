"""Text of the errors of Deferreds that did not fire in time."""

from __future__ import annotations

from typing import TypeVar, cast

from twisted.internet.defer import CancelledError, TimeoutError
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
