"""Clients with keys of their own that mean harm to another client: they flood it, and try to take over its streams.

They use real sessions with real servers, and send through them what an honest client does not send.
"""

from __future__ import annotations

from random import Random

from twisted.internet.defer import Deferred

from dmsg.keys import PubKey
from dmsg.streams.core.agreement import Hello, Proposal, Resume
from dmsg.streams.core.resumption import INITIAL_WINDOW
from dmsg.streams.core.secure import SecureEnd
from dmsg.testing.lab import Lab
from dmsg.v2019.client import Client
from dmsg.v2019.core.wire import ID_COUNT, REQUEST, encode_frame
from dmsg.v2019.outgoing import REQUEST_TIMEOUT
from dmsg.v2019.session import ClientSession

STRANGERS = 4
REQUESTS = 500
"""Number of REQUESTs that each stranger sends at once."""
_MESSAGE = 177
"""Bytes of a KK message."""


class Strangers:
    """Clients ``eve-1`` and so on of one server, which mean harm to one other client.

    :param server: name of the server.
    :param victim: key of the client that they attack; it is connected to the same server.
    :ivar flooded: whether they have flooded the server, which may blame them from then on.
    """

    def __init__(self, lab: Lab, server: str, victim: PubKey) -> None:
        self._lab = lab
        self._victim = victim
        self.flooded = False
        key = lab.key(server).public
        names = [f"eve-{number}" for number in range(1, STRANGERS + 1)]
        self._clients = [(name, lab.add_client(name, only=[key], min_servers=1)) for name in names]

    def _sessions(self) -> list[tuple[Client, ClientSession]]:
        return [(client, session) for _, client in self._clients for session in client.sessions() if session.connected]

    def flood(self, random: Random) -> None:
        """Send REQUESTs to the victim: plain ones, and ones whose handshake message is not authentic."""
        self.flooded = True
        for client, session in self._sessions():
            keys = bytes(client.public_key) + bytes(self._victim)
            frames = []
            for _ in range(REQUESTS):
                message = random.choice((b"", random.randbytes(_MESSAGE)))
                frames.append(encode_frame(REQUEST, random.randrange(0, ID_COUNT, 2), keys + message))
            assert session._link is not None  # noqa: SLF001  # An honest client has no way to send this.
            session._link.send(b"".join(frames))  # noqa: SLF001

    def resume(self, end: SecureEnd, random: Random) -> list[Deferred[object]]:
        """Ask the victim to resume a stream of another client, whose token and position the strangers know.

        :param end: end of that stream at the other client.
        :returns: Deferreds of the answers; each fails if the victim refuses.
        """
        if end.token is None:
            return []
        position = end.position()
        generation = end.generation + random.choice((0, 1, 1, 1000))
        received = position.received + random.choice((0, 0, 1))
        asked: list[Deferred[object]] = []
        for client, session in self._sessions():
            resume = Resume(end.token, generation, received, position.hash)
            proposal = Proposal(client.streams.key, self._victim, Hello(0, INITIAL_WINDOW, resume=resume))
            waiting, _ = session._outgoing._request(  # noqa: SLF001
                self._victim, proposal, None, INITIAL_WINDOW, REQUEST_TIMEOUT
            )
            answer: Deferred[object] = waiting  # type: ignore[assignment]
            asked.append(answer)
            session.flush()
        return asked
