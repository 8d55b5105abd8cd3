"""Notices to the user while a stream has been without a connection to the peer for some time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from twisted.internet.task import LoopingCall

from dmsg.net.reactor import Reactor
from dmsg.streams.timeouts import RESUME_TIMEOUT

CHECK_INTERVAL = 0.5
"""Seconds between two checks of the stream."""
NOTICE_AFTER = 2.0
"""Seconds without a connection after which a notice is printed."""


def clock_time(seconds: float) -> str:
    """Return the time of day in ``seconds`` from now."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))


def resume_timeout_of(client: object) -> float:
    """Return the seconds after which a lost stream of a client ends.  A client that works through the agent does not
    know them, so the default is returned.
    """
    streams = getattr(client, "streams", None)
    return float(getattr(streams, "resume_timeout", RESUME_TIMEOUT))


@contextmanager
def watch_connection(
    reactor: Reactor, transport_of: Callable[[], object], resume_timeout: float, print_notice: Callable[[str], None]
) -> Iterator[None]:
    """Context manager that prints a notice when a stream has lost its connection for some time, and another when it is
    back.

    The first notice says until when the command waits.

    :param transport_of: function that returns the stream, or None while there is none.
    :param resume_timeout: seconds after which a lost stream ends.
    :param print_notice: function that prints a notice.
    """
    away = False

    def look() -> None:
        nonlocal away
        since = getattr(transport_of(), "away_since", None)
        if not away and since is not None and (gone := reactor.seconds() - since) >= NOTICE_AFTER:
            away = True
            until = clock_time(max(0.0, resume_timeout - gone))
            print_notice(f"the other side is away; waiting for it until {until}, Ctrl-C gives up")
        elif away and since is None:
            away = False
            print_notice("the other side is back")

    looking = LoopingCall(look)
    looking.clock = reactor
    looking.start(CHECK_INTERVAL, now=False).addErrback(lambda _: None)
    try:
        yield
    finally:
        looking.stop()
