"""Isolated calls: an exception in one call is logged and does not prevent the next call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from twisted.logger import Logger

_log = Logger()

_T = TypeVar("_T")


def call_isolated(call: Callable[..., object], *arguments: object) -> bool:
    """Make a call, and log any exception with its traceback.

    :returns: whether the call returned without an exception.
    """
    try:
        call(*arguments)
    except Exception:
        _log.failure("unhandled error in {call!r}", call=call)
        return False
    return True


def dispatch(
    events: Iterable[_T],
    handlers: Mapping[type, Callable[..., object]],
    handler: object,
    on_lost: Callable[[_T], object],
) -> None:
    """Call the handler for the type of each event. An exception in one handler does not prevent the next call.

    :param handlers: functions by type of event, which are called with ``handler`` and the event.
    :param on_lost: called with each event whose handler raised an exception.
    """
    for event in events:
        if not call_isolated(handlers[type(event)], handler, event):
            call_isolated(on_lost, event)
