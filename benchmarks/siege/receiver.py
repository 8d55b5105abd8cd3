"""Receiver of parcels, to which large directories are sent."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from twisted.internet.protocol import Factory

from benchmarks.machine import Entity
from benchmarks.siege.enemies import run_clients
from benchmarks.siege.peer import Peer
from benchmarks.siege.programs import Program
from benchmarks.siege.receiving import PORT
from benchmarks.siege.scene import LOST
from dmsg.apps.parcels.sender import FilesSender
from dmsg.apps.parcels.walk import walk
from dmsg.keys import PubKey
from dmsg.v2019.client import Client

CHAINS, DEEP = 100, 60
"""Directories of a parcel: so many chains, each so deep."""


def _directories(seconds: float, host: str, port: str, server: str, victim: str, url: str, directory: str) -> None:
    """A parcel of 6,000 directories, 60 deep, again and again.

    :param directory: where they are made; whoever kills this process removes it.
    """
    tree = Path(directory) / "tree"
    for number in range(CHAINS):
        (tree / str(number) / "/".join("d" * (DEEP - 1))).mkdir(parents=True)
    walked = walk([tree])

    async def send(client: Client) -> None:
        sender = FilesSender(walked)
        await client.connect(PubKey.from_hex(victim), Factory.forProtocol(lambda: sender), port=PORT)
        await sender.done

    async def act(clients: list[Client]) -> None:
        while True:
            with suppress(*LOST):
                await send(clients[0])

    run_clients(seconds, url, 1, act)


class ReceiverScene(Peer):
    """A client that measures round trips to the receiver, and strangers that want to send a parcel."""

    PORT = PORT
    attacks = {"6,000 directories, 60 deep": _directories}
    prepared = frozenset(attacks)

    def _start(self) -> Entity:
        inbox = self._relay.directory / "inbox"
        inbox.mkdir()
        program = Program("-m", "benchmarks.siege.receiving", self._url, str(self._key_file), str(inbox))
        program.wait_for("online")
        return program

    def words(self) -> list[str]:
        return [*super().words(), str(self._relay.directory)]
