"""Strangers: clients that attack another client. They flood it with requests, and try to take over its streams.

They use real sessions with real servers, over which they send frames that an honest client would not send.
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
"""Number of REQUEST frames that each stranger sends at once."""
_MESSAGE = 177
"""Size in bytes of a KK handshake message."""


class Strangers:
    """Clients ``eve-1`` and so on, which are connected to one server and attack another client of this server.

    :param server: name of the server.
    :param victim: key of the attacked client.
    :ivar flooded: whether they have flooded the victim. From then on the server may count violations of the protocol by
        clients (:data:`~dmsg.testing.bystanders.BLAMING_REASONS`).
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
        """Send many REQUESTs to the victim, some of them plain, the others with a handshake message that is not
        authentic."""
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
        """Ask the victim to resume a stream over transports of the strangers. The stream is that of the victim and
        another client. The strangers know the token and the position of the stream, but not its keys.

        :param end: end of the stream at the other client.
        :returns: a Deferred for each request, which fails if the victim refuses.
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
