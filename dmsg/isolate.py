"""One failing call must not keep the next one from being made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.logger import Logger

_log = Logger()


def isolated(call: Callable[..., object], *arguments: Any) -> bool:
    """Make a call among others that have nothing to do with each other.

    What it raises is logged, with its traceback.

    :returns: whether it came back.
    """
    try:
        call(*arguments)
    except Exception:
        _log.failure("unhandled error in {call!r}", call=call)
        return False
    return True
