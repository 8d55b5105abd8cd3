"""Discovery, with its entries in a file."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from itertools import count

from benchmarks.machine import Entity, away
from benchmarks.siege.rest import ask, request
from benchmarks.siege.scene import ENEMY, NEWCOMER_TIMEOUT, Scene, again, listed_server, silent, until
from dmsg.discovery.entries.entry import ClientMeta, Entry, ServerMeta
from dmsg.discovery.service.server_quota import MAX_PER_POSTER
from dmsg.keys import SecKey


def _entry(key: SecKey, size: int = 0) -> Entry:
    servers = tuple(SecKey.from_seed(b"%d" % number).public.hex() for number in range(size))
    return Entry("0.0.1", 0, time.time_ns(), key.public.hex(), ClientMeta(servers)).sign(key)


def _flood(seconds: float, host: str, port: str, requests: list[bytes]) -> None:
    """Send the same requests repeatedly, and keep a few of them unanswered."""
    goes_on = until(seconds)

    def act() -> None:
        with socket.create_connection((host, int(port)), 5, (ENEMY, 0)) as connection:
            connection.settimeout(1.0)
            for number in count():
                if not goes_on():
                    return
                connection.sendall(requests[number % len(requests)])
                connection.setblocking(False)
                with suppress(BlockingIOError):
                    connection.recv(1 << 16)
                connection.settimeout(1.0)

    again(goes_on, act)


def _unsigned(seconds: float, host: str, port: str) -> None:
    """Entries of 64 KB that nobody has signed."""
    body = _entry(SecKey.generate(), 900).to_json()
    _flood(seconds, host, port, [request("POST", "/discovery/entries", body[:-8] + b'000000"}')])


def _signed(seconds: float, host: str, port: str) -> None:
    """Good entries, each of another key."""
    keys = [SecKey.generate() for _ in range(3000)]
    _flood(seconds, host, port, [request("POST", "/discovery/entries", _entry(key, 60).to_json()) for key in keys])


def _fake_servers(seconds: float, host: str, port: str) -> None:
    """Start as many servers as a public address may have: they accept connections and send nothing, and are posted
    again.
    """
    trap = socket.create_server((ENEMY, 0), backlog=1024)
    address = f"{ENEMY}:{trap.getsockname()[1]}"
    keys = [SecKey.generate() for _ in range(MAX_PER_POSTER)]
    requests = []
    for sequence in range(40):
        for key in keys:
            entry = Entry(
                "0.0.1+relay1", sequence, time.time_ns(), key.public.hex(), server=ServerMeta(address, 1000)
            ).sign(key)
            requests.append(request("POST", "/discovery/entries", entry.to_json()))
    _flood(seconds, host, port, requests)


def _lookups(seconds: float, host: str, port: str) -> None:
    _flood(seconds, host, port, [request("GET", "/discovery/available_servers")])


class DiscoveryScene(Scene):
    """A client that looks up an entry, and new clients that look for servers and post their entries."""

    attacks = {
        "unsigned entries of 64 KB": _unsigned,
        "signed entries": _signed,
        "fake servers": _fake_servers,
        "lookups": _lookups,
        "unfinished requests": lambda seconds, host, port: silent(
            seconds, (host, int(port)), b"POST /discovery/entries HTTP/1.1\r\nHost: x\r\n"
        ),
    }

    def __init__(self) -> None:
        self.entity = Entity(
            "dmsg-discovery",
            "--listen=tcp:0:interface=127.0.0.1",
            "--store=sqlite:discovery.sqlite",
            core=away(),
        )
        self._where = self.entity.address()
        self._server, server_key = listed_server(f"http://127.0.0.1:{self._where[1]}")
        self._static = server_key.encode()
        key = SecKey.generate()
        self.restore()
        ask(self._connection, request("POST", "/discovery/entries", _entry(key).to_json()))
        self._get = request("GET", f"/discovery/entries/{key.public}")

    def restore(self) -> None:
        self._connection = socket.create_connection(self._where, 30)

    def there_and_back(self) -> None:
        time.sleep(0.005)  # The rate stays below the limit per address.
        if ask(self._connection, self._get)[0] != 200:
            raise AssertionError("the entry is gone")

    def newcomer(self) -> None:
        with socket.create_connection(self._where, NEWCOMER_TIMEOUT) as connection:
            post = request("POST", "/discovery/entries", _entry(SecKey.generate(), 2).to_json())
            assert ask(connection, request("GET", "/discovery/available_servers"))[0] == 200
            assert ask(connection, post)[0] == 200

    def words(self) -> list[str]:
        return [*map(str, self._where)]

    def close(self) -> None:
        self._connection.close()
        self._server.stop()
        self.entity.stop()
