"""Resumption of a client's streams: after a server is lost, their transports are requested again over other servers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.logger import Logger

from dmsg.base.bounded_tables import remember
from dmsg.errors import CloseReason, TransportRefused
from dmsg.keys import PubKey
from dmsg.net.deadlines import no_answer
from dmsg.net.pacing import PacedQueue
from dmsg.net.reactor import Reactor
from dmsg.net.streams.address import DmsgAddress
from dmsg.streams.carrier import ClientStream
from dmsg.v2019.outgoing import REQUEST_TIMEOUT
from dmsg.v2019.session import ClientSession
from dmsg.v2019.transport_streams import TransportStreams

RESUME_ATTEMPT = 5.0
"""Maximum seconds of one attempt to resume a stream through one server."""
RESUME_DELAY = 0.1
"""Seconds between the first two rounds of attempts to resume a stream. A round tries all servers. After each round the
delay is multiplied by 1.5, up to ``RESUME_MAX_DELAY``."""
RESUME_MAX_DELAY = 2.0
RESUME_BACK_OFF = 0.25
"""Seconds by which each refusal RATE_LIMITED delays further attempts to resume streams to the same peer through the
same server, up to ``RESUME_MAX_DELAY`` in total. Attempts to other peers are not delayed, because the refusal may come
from the peer."""
RESUME_RATE = 200.0
"""Maximum number of REQUESTs per second for resuming streams; the peers take turns. When a server is lost, all its
streams are resumed at once, and the next server would refuse requests above its own rate limit."""
REFUSED_SIZE = 1024
"""Maximum number of (server, peer) pairs for which the delay after RATE_LIMITED is remembered."""

_log = Logger()


class Resumption:
    """Resumption of the streams that one client has opened.

    :param servers_of: returns the servers of a remote, in the order in which to try them. The second argument is
        whether to fetch the remote's entry again instead of using a cached one.
    :param open_session: returns the session with a server; connects to the server if there is none.
    :param reopen: requests a transport for a stream over a session, within a number of seconds.
    """

    def __init__(
        self,
        reactor: Reactor,
        random: Random,
        streams: TransportStreams,
        *,
        servers_of: Callable[[PubKey, bool], Coroutine[Deferred[Any], Any, list[PubKey]]],
        open_session: Callable[[PubKey], Deferred[ClientSession]],
        reopen: Callable[[ClientStream, ClientSession, float], Deferred[None]],
    ) -> None:
        self._reactor = reactor
        self._random = random
        self._streams = streams
        self._servers_of = servers_of
        self._open_session = open_session
        self._reopen = reopen
        self._resumed = PacedQueue(reactor, lambda: RESUME_RATE)
        self._resume_after: OrderedDict[tuple[PubKey, PubKey], float] = OrderedDict()
        """Times before which no stream to a peer is resumed through a server, by server and peer."""

    async def resume(self, stream: ClientStream) -> None:
        """Resume a stream over any server that both ends have in common. Try all of these servers repeatedly until the
        resume timeout.

        A stream that still has a transport keeps this transport until another server is found.
        """
        peer = stream.getPeer()
        assert isinstance(peer, DmsgAddress)
        remote = peer.public_key
        left_behind = stream.server
        deadline = self._reactor.seconds() + self._streams.resume_timeout
        if (pause := self._streams.before_moving(stream)) > 0.0:
            await deferLater(self._reactor, pause)
        rounds = 0
        # The loop checks is_live, because a cancelled attempt may fail with an error other than CancelledError.
        # Attempts are cancelled when the stream is closed or the client stops.
        while self._reactor.seconds() < deadline and self._streams.is_live(stream):
            moving = stream.secure_end.transport is not None
            for server in await self._servers_to(remote, left_behind, moving=moving, fresh=rounds > 0):
                if not self._streams.is_live(stream):
                    return
                try:
                    await self._turn_to_resume(server, remote)
                    session = await self._open_session(server).addTimeout(RESUME_ATTEMPT, self._reactor, no_answer)
                    await self._reopen(stream, session, min(RESUME_ATTEMPT, REQUEST_TIMEOUT))
                except TransportRefused as error:
                    if error.final:
                        raise
                    if error.reason == CloseReason.RATE_LIMITED:
                        self._back_off(server, remote)
                except CancelledError:
                    raise
                except Exception as error:
                    # Exception is caught, because the errors of connections in Twisted have no common base class.
                    _log.debug(
                        "the stream could not be resumed through server {server}: {error}",
                        server=server.short,
                        error=str(error),
                    )
                else:
                    return
            rounds += 1
            delay = min(RESUME_MAX_DELAY, RESUME_DELAY * 1.5**rounds)
            await deferLater(self._reactor, delay * (0.7 + 0.6 * self._random.random()))

    async def _turn_to_resume(self, server: PubKey, remote: PubKey) -> None:
        wait = self._resume_after.get((server, remote), 0.0) - self._reactor.seconds()
        if wait > 0.0:
            await deferLater(self._reactor, wait)
        await self._resumed.wait(remote)

    def _back_off(self, server: PubKey, remote: PubKey) -> None:
        now = self._reactor.seconds()
        before = max(now, self._resume_after.get((server, remote), 0.0))
        after = min(before + RESUME_BACK_OFF, now + RESUME_MAX_DELAY)
        remember(self._resume_after, (server, remote), after, REFUSED_SIZE)

    async def _servers_to(
        self, remote: PubKey, left_behind: PubKey | None, *, moving: bool, fresh: bool
    ) -> list[PubKey]:
        """Return the servers through which to resume a stream to ``remote``, in the order in which to try them.

        :param left_behind: server of the stream's last transport, or None. It is tried last.
        :param moving: whether the stream still has a transport over ``left_behind``. If so, that server is not tried.
        :param fresh: whether to fetch the entry of ``remote`` again instead of using a cached one.
        """
        others = [server for server in await self._servers_of(remote, fresh) if server != left_behind]
        if moving or left_behind is None:
            return others
        # The last server is tried even if the entry does not name it: the entry may be outdated, and the remote may
        # still be connected to that server or have returned to it.
        return [*others, left_behind]
