"""Discovery's checks of servers, which servers that say nothing keep busy."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import count

from benchmarks.machine import Entity, away, raise_descriptor_limit
from benchmarks.siege.honest import key_of
from benchmarks.siege.network import Innocents, enemy_ipv6
from benchmarks.siege.programs import Program
from benchmarks.siege.rest import ask, request
from benchmarks.siege.scene import LOST, NEWCOMER_TIMEOUT, Scene, ready, until
from dmsg.discovery.entries.entry import Entry, ServerMeta
from dmsg.keys import SecKey

BLOCKS, OF_BLOCK = 260, 8
"""Blocks /64, all of one /55, and servers that are posted from each."""
PORTS = 4
"""Ports at which a block has its servers."""
HONEST = 400
"""Servers that come while discovery is attacked, at most."""
LISTED_WITHIN = 10.0
"""Seconds after which a server that is not listed counts as refused."""
SERVER_TTL = 10
"""Seconds after which a server is not listed that was not seen. By default 120: then nothing of what is known would be
looked at again before an attack of some seconds is over."""
AVAILABLE = request("GET", "/discovery/available_servers")


def _post(key: SecKey, sequence: int, address: str, version: str = "0.0.1+relay1") -> bytes:
    entry = Entry(version, sequence, time.time_ns(), key.public.hex(), server=ServerMeta(address, 1000)).sign(key)
    return request("POST", "/discovery/entries", entry.to_json())


def _hold(listener: socket.socket) -> None:
    """Take every connection and say nothing."""
    held: deque[socket.socket] = deque()
    while True:
        with suppress(OSError):
            held.append(listener.accept()[0])
        if len(held) > 2000:
            held.popleft().close()


def _silent_servers(seconds: float, host: str, port: str, host6: str, port6: str) -> None:
    """2,080 servers of 260 blocks, that take connections and say nothing, posted again and again."""
    raise_descriptor_limit()
    listeners = [socket.create_server(("::", 0), family=socket.AF_INET6, backlog=1024) for _ in range(PORTS)]
    for listener in listeners:
        threading.Thread(target=_hold, args=(listener,), daemon=True).start()
    ports = [listener.getsockname()[1] for listener in listeners]
    keys = [[SecKey.generate() for _ in range(OF_BLOCK)] for _ in range(BLOCKS)]

    def post_all(sequence: int) -> None:
        for block, of_block in enumerate(keys):
            source = enemy_ipv6(block)
            posts = [_post(key, sequence, f"[{source}]:{ports[number % PORTS]}") for number, key in enumerate(of_block)]
            with suppress(*LOST), socket.create_connection((host6, int(port6)), 5, (source, 0)) as connection:
                for one in posts:
                    ask(connection, one)

    post_all(0)
    ready()
    goes_on = until(seconds)
    for sequence in count(1):
        if not goes_on():
            return
        post_all(sequence)


class ChecksScene(Scene):
    """A client that looks up an entry, and new servers that want to be listed.

    A server of 2019 that posted its entry once must stay listed; otherwise every newcomer counts as refused.
    """

    attacks = {"silent servers of 260 blocks": _silent_servers}
    prepared = frozenset(attacks)
    needs_public = True
    newcomers = 4

    def __init__(self) -> None:
        self._servers = Program("-m", "benchmarks.siege.honest", str(HONEST))
        self._ports = [int(each) for each in self._servers.wait_for("ports (.*)")[1].split()]
        self._numbers = count()
        self._innocents = Innocents()
        self.entity = Entity(
            "dmsg-discovery",
            "--listen=tcp:0:interface=127.0.0.1",
            r"--listen=tcp6:0:interface=\:\:1",
            "--store=sqlite:discovery.sqlite",
            f"--server-ttl={SERVER_TTL}",
            "--max-servers=1000",
            core=away(),
        )
        self._where = self.entity.address()
        found = self.entity.wait_for(r"listens on IPv6Address\(type='TCP', host='([^']+)', port=(\d+)")
        self._where6 = found[1], found[2]
        self._known = ""
        self._known = self._come("0.0.1")
        self._get = request("GET", f"/discovery/entries/{self._known}")
        self.restore()

    def restore(self) -> None:
        self._connection = socket.create_connection(self._where, 30)

    def there_and_back(self) -> None:
        time.sleep(0.005)  # The rate stays below the limit per address.
        if ask(self._connection, self._get)[0] != 200:
            raise ConnectionError("the entry is gone")

    def _come(self, version: str) -> str:
        number, source = next(self._numbers), self._innocents.next()
        key = key_of(number)
        with socket.create_connection(self._where, NEWCOMER_TIMEOUT, (source, 0)) as connection:
            status, _ = ask(connection, _post(key, 0, f"{source}:{self._ports[number]}", version))
            if status != 200:
                raise ConnectionError(f"status {status}")
            listed: set[str] = set()
            goes_on = until(LISTED_WITHIN)
            while goes_on():
                status, body = ask(connection, AVAILABLE)
                listed = {entry["static"] for entry in json.loads(body)} if status == 200 else set()
                if key.public.hex() in listed:
                    break
                time.sleep(0.05)
            else:
                raise ConnectionError("it is not listed")
        if self._known and self._known not in listed:
            raise ConnectionError("the server that was known is not listed any more")
        return key.public.hex()

    def newcomer(self) -> None:
        self._come("0.0.1+relay1")

    def words(self) -> list[str]:
        return [*map(str, self._where), *self._where6]

    def close(self) -> None:
        self._connection.close()
        self.entity.stop()
        self._servers.stop()
