"""Common parts of the scenes in which a program is attacked by its peers: discovery, a relay, a visitor."""

from __future__ import annotations

from benchmarks.machine import Entity, away
from benchmarks.siege.network import Innocents
from benchmarks.siege.programs import Visitor
from benchmarks.siege.scene import NEWCOMER_TIMEOUT, Scene, listed_server
from benchmarks.wire import Connection
from dmsg.keys import PubKey, SecKey, write_key_file
from dmsg.streams.core.agreement import Hello, Proposal
from dmsg.v2019.core.wire import ACCEPT, REQUEST, encode_frame


class Peer(Scene):
    """A program with a client. Newcomers are keys that nobody has seen, each from an address of its own.

    :cvar PORT: where newcomers find the program.
    """

    PORT = 80

    def __init__(self) -> None:
        self._discovery = Entity("dmsg-discovery", "--listen=tcp:0:interface=127.0.0.1", "--store=memory:", core=away())
        self._url = f"http://127.0.0.1:{self._discovery.address()[1]}"
        self._relay, server_key = listed_server(self._url)
        self._server = PubKey.from_hex(server_key)
        self._where = self._relay.address()
        key = SecKey.generate()
        self._key_file = self._relay.directory / "victim.key"
        write_key_file(self._key_file, key)
        self._victim = key.public
        self._innocents = Innocents()
        self.entity = self._start()
        self._visitor = Visitor(self._url)
        self.there_and_back()

    def _start(self) -> Entity:
        """Start the program with the key of ``_key_file``; returns once it can be reached."""
        raise NotImplementedError

    def restore(self) -> None:
        self.there_and_back()

    def there_and_back(self) -> None:
        self._visitor.ask("probe", key=self._victim.hex())

    def newcomer(self) -> None:
        one = Connection(self._where, self._server, self._innocents.next(), NEWCOMER_TIMEOUT)
        try:
            proposal = Proposal(one.key, self._victim, Hello(port=self.PORT, window=1 << 18))
            one.send(encode_frame(REQUEST, 2, proposal.payload))
            answer = one.receive()
            if answer.type != ACCEPT:
                raise ConnectionError("refused")
            proposal.process_answer(answer.payload)
        finally:
            one.close()

    def words(self) -> list[str]:
        return [*map(str, self._where), self._server.hex(), self._victim.hex(), self._url]

    def close(self) -> None:
        self._visitor.stop()
        self.entity.stop()
        self._relay.stop()
        self._discovery.stop()
