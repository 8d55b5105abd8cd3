"""Notices to the user while a stream has been without a connection to the peer for some time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from twisted.internet.task import LoopingCall

from dmsg.base.timeouts import RESUME_TIMEOUT
from dmsg.net.reactor import Reactor

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
    # A command that watches one stream opens another one in its place.
    back = "the other side is back"
    texts = Texts("the other side is away; waiting for it until {until}, Ctrl-C gives up", back, back, back)
    with watch_connections(reactor, lambda: (transport_of(),), resume_timeout, print_notice, texts):
        yield


class Texts(NamedTuple):
    """Texts of the notices about streams.

    :ivar away: at least one stream has lost its connection; contains ``{until}``.
    :ivar back: all lost streams that are left have a connection again.
    :ivar replaced: all lost streams have ended, and another stream to the peer has a connection.
    :ivar ended: all lost streams have ended, and no stream is open.  The peer may be back nevertheless: after a restart
        it refuses to resume the streams of its former run.
    """

    away: str
    back: str
    replaced: str
    ended: str


@contextmanager
def watch_connections(
    reactor: Reactor,
    transports_of: Callable[[], Iterable[object]],
    resume_timeout: float,
    print_notice: Callable[[str], None],
    texts: Texts,
) -> Iterator[None]:
    """Context manager that prints the notices of :func:`watch_connection` about all streams together.

    :param transports_of: function that returns the streams which are open now.
    """
    lost: set[object] = set()

    def look() -> None:
        present = set(transports_of())
        gone = {one: since for one in present if (since := getattr(one, "away_since", None)) is not None}
        if not gone:
            if lost:
                print_notice(texts.back if lost & present else texts.replaced if present else texts.ended)
                lost.clear()
            return
        longest = reactor.seconds() - min(gone.values())
        if not lost and longest < NOTICE_AFTER:
            return
        if not lost:
            print_notice(texts.away.format(until=clock_time(max(0.0, resume_timeout - longest))))
        lost.update(gone)

    looking = LoopingCall(look)
    looking.clock = reactor
    looking.start(CHECK_INTERVAL, now=False).addErrback(lambda _: None)
    try:
        yield
    finally:
        looking.stop()
