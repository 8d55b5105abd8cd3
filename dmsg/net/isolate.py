"""One failing call must not keep the next one from being made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from twisted.logger import Logger

_log = Logger()

_T = TypeVar("_T")


def isolated(call: Callable[..., object], *arguments: object) -> bool:
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


def dispatched(
    events: Iterable[_T],
    handlers: Mapping[type, Callable[..., object]],
    handler: object,
    lost: Callable[[_T], object],
) -> None:
    """Hand each event to the method for its type; a failing one does not keep the next from being handled.

    :param handlers: methods of ``handler``'s class, by type of event.
    :param lost: told of each event whose method raised.
    """
    for event in events:
        if not isolated(handlers[type(event)], handler, event):
            isolated(lost, event)
