"""``python -m benchmarks.siege.receiving URL KEY-FILE DIRECTORY``: take every parcel that is offered."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet import reactor as _reactor
from twisted.internet.protocol import Factory
from twisted.internet.threads import deferToThread

from dmsg.apps.parcels.destination import Destination
from dmsg.apps.parcels.receiver import ParcelReceiver
from dmsg.keys import read_key_file
from dmsg.v2019.client import Client

PORT = 26

reactor: Any = _reactor


class Receiving(Factory):
    """Puts each parcel into a directory of its own, which is removed when the connection is gone."""

    noisy = False

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def buildProtocol(self, addr: Any) -> ParcelReceiver:
        place = Path(tempfile.mkdtemp(dir=self._directory))
        receiver = ParcelReceiver(Destination(place), lambda offer: None)
        receiver.done.addErrback(lambda _: None)
        receiver.closed.addCallback(lambda _: deferToThread(shutil.rmtree, place, ignore_errors=True))
        return receiver


if __name__ == "__main__":
    client = Client(reactor, read_key_file(Path(sys.argv[2])), [sys.argv[1]], min_servers=1)
    client.listen(Receiving(sys.argv[3]), PORT)
    client.startService()
    client.when_online().addCallback(lambda _: print("online", flush=True))
    reactor.run()
