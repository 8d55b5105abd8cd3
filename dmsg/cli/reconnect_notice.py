"""Notices to the person when the connection to the peer is lost for long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from twisted.internet.task import LoopingCall

from dmsg.net.reactor import Reactor
from dmsg.streams.timeouts import RESUME_TIMEOUT

LOOK_INTERVAL = 0.5
"""Seconds between looks whether the other side is there."""
TELL_AFTER = 2.0
"""Seconds after which it is said that it is not."""


def clock_time(seconds: float) -> str:
    """The time of day so many seconds from now."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))


def patience_of(client: object) -> float:
    """Seconds after which a stream of a client that is away ends by itself; of the agent's, those of its default."""
    streams = getattr(client, "streams", None)
    return float(getattr(streams, "resume_timeout", RESUME_TIMEOUT))


@contextmanager
def watch_connection(
    reactor: Reactor, transport_of: Callable[[], object], patience: float, tell_it: Callable[[str], None]
) -> Iterator[None]:
    """Say when the way to the other side is lost for long, until when it is waited for, and when it is found again.

    :param transport_of: gives the stream, or None while there is none.
    :param patience: seconds after which the stream ends by itself.
    """
    away = False

    def look() -> None:
        nonlocal away
        since = getattr(transport_of(), "away_since", None)
        if not away and since is not None and (gone := reactor.seconds() - since) >= TELL_AFTER:
            away = True
            until = clock_time(max(0.0, patience - gone))
            tell_it(f"the other side is away; it is waited for until {until}, Ctrl-C gives up")
        elif away and since is None:
            away = False
            tell_it("the other side is back")

    looking = LoopingCall(look)
    looking.clock = reactor
    looking.start(LOOK_INTERVAL, now=False).addErrback(lambda _: None)
    try:
        yield
    finally:
        looking.stop()
