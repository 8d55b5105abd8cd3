"""Discovery: verified POSTs and GETs a second, for each store."""

from __future__ import annotations

import os
import select
import socket
import statistics
import subprocess
import sys
import time
from itertools import islice
from typing import Any

from benchmarks.machine import MALLOC, Entity, away, begin_child, cpu_of
from dmsg.discovery.entries.entry import ClientMeta, Entry
from dmsg.keys import SecKey

COUNT = 2000
KEYS = 500
DEPTH = 16
ROUNDS = 5
CLIENTS = (1, 16, 64)
"""Numbers of connections. One connection pipelines its requests; several send one request at a time each."""


def exchange(address: tuple[str, int], requests: list[bytes]) -> float:
    """Send all requests over one connection, and keep a few of them unanswered. Return the seconds."""
    connection = socket.create_connection(address, 30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    start = time.perf_counter()
    answered = sent = 0
    tail = b""
    while answered < len(requests):
        while sent < len(requests) and sent - answered < DEPTH:
            connection.sendall(requests[sent])
            sent += 1
        data = connection.recv(1 << 16)
        if not data:
            raise ConnectionError("discovery closed the connection")
        tail += data
        good = tail.count(b"HTTP/1.1 200")
        if tail.count(b"HTTP/1.1 ") != good:
            raise RuntimeError(tail[-600:].decode(errors="replace"))
        answered += good
        tail = tail[-12:] if not tail.endswith(b"HTTP/1.1 200") else b""
    took = time.perf_counter() - start
    connection.close()
    return took


def exchange_over(address: tuple[str, int], requests: list[bytes], clients: int) -> None:
    """Send the requests over several connections, each of which waits for an answer before its next request.

    Requests that are pipelined on one connection are answered one after the other, so that a store behind a socket has
    one request in a reactor turn.
    """
    waiting = iter(requests)
    connections = {}
    poll = select.epoll()
    for _ in range(clients):
        connection = socket.create_connection(address, 30)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connections[connection.fileno()] = connection
        poll.register(connection, select.EPOLLIN)
        connection.sendall(next(waiting))
    answered = 0
    while answered < len(requests):
        for descriptor, _ in poll.poll(30):
            data = connections[descriptor].recv(1 << 16)
            if not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(data[:600].decode(errors="replace"))
            answered += 1
            request = next(waiting, None)
            if request is not None:
                connections[descriptor].sendall(request)
    poll.close()
    for connection in connections.values():
        connection.close()


def post_request(entry: Entry) -> bytes:
    body = entry.to_json()
    return b"POST /discovery/entries HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


class BareKlein:
    """Process with a plain Klein application of one route, which answers with the bytes of an entry."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.discovery"],
            stdout=subprocess.PIPE,
            preexec_fn=lambda: begin_child(away()),
            env={**os.environ, **MALLOC},
        )
        assert self._process.stdout is not None
        self.address = "127.0.0.1", int(self._process.stdout.readline())

    def cpu(self) -> float:
        """Return the CPU seconds of the process so far."""
        return cpu_of(self._process.pid)

    def __enter__(self) -> BareKlein:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def serve_bare_klein() -> None:
    """Run the application of :class:`BareKlein`, and print its port."""
    from klein import Klein
    from twisted.internet import reactor
    from twisted.web.server import Site

    app = Klein()
    body = bytes(400)

    @app.route("/discovery/entries/<static>")
    def entry(request: Any, static: str) -> bytes:
        return body

    class Quiet(Site):
        def log(self, request: Any) -> None:
            """Write no access log, as discovery."""

    listen: Any = reactor.listenTCP
    print(listen(0, Quiet(app.resource()), interface="127.0.0.1").getHost().port, flush=True)
    reactor.run()


def discovery_rows(redis_url: str | None) -> list[dict[str, Any]]:
    """POSTs and GETs by turns, in memory, SQLite, and Redis when there is one: the most and the median of rounds.

    Each round also measures a bare Klein application. The ratio to it depends less on the machine than the rates. It is
    the ratio of the best rounds, because other programs only lower a rate.
    """
    keys = [SecKey.from_seed(b"bench %d" % number) for number in range(KEYS)]
    entries = [
        Entry(
            "0.0.1", number // KEYS, number + 1, keys[number % KEYS].public.hex(), ClientMeta((keys[0].public.hex(),))
        )
        for number in range(ROUNDS * len(CLIENTS) * COUNT)
    ]
    posts = [post_request(entry.sign(keys[number % KEYS])) for number, entry in enumerate(entries)]
    paths = [b"/discovery/entries/%s" % keys[number % KEYS].public.hex().encode() for number in range(COUNT)]
    gets = [b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in paths]
    signature = keys[0].sign(b"payload")
    start = time.process_time()
    for _ in range(1000):
        signature.recover(b"payload")
    verify = (time.process_time() - start) / 1000
    rows: list[dict[str, Any]] = [{"store": "", "request": "a verified signature alone", "per_cpu_second": 1 / verify}]
    for store in ("memory:", "sqlite:bench.sqlite", redis_url):
        if store is not None:
            rows += _rows_of(store, posts, gets)
    return rows


def _rows_of(store: str, posts: list[bytes], gets: list[bytes]) -> list[dict[str, Any]]:
    rates: dict[str, dict[int, list[float]]] = {
        name: {clients: [] for clients in CLIENTS} for name in ("POST", "GET", "GET of klein alone")
    }
    waiting = iter(posts)
    arguments = "--listen=tcp:0:interface=127.0.0.1", f"--store={store}", "--rate-limit=0"
    with Entity("dmsg-discovery", *arguments, core=away()) as entity, BareKlein() as bare:
        address = entity.address()
        for _ in range(ROUNDS):
            for clients in CLIENTS:
                for name, process, to, requests in (
                    ("POST", entity, address, list(islice(waiting, COUNT))),
                    ("GET", entity, address, gets),
                    ("GET of klein alone", bare, bare.address, gets),
                ):
                    before = process.cpu()
                    exchange(to, requests) if clients == 1 else exchange_over(to, requests, clients)
                    rates[name][clients].append(COUNT / (process.cpu() - before))
    klein = rates["GET of klein alone"]
    return [
        {
            "store": store.partition(":")[0],
            "request": name,
            "connections": clients,
            "per_cpu_second": max(found),
            "median": statistics.median(found),
            "of_klein_alone": max(found) / max(klein[clients]),
        }
        for name, of_name in rates.items()
        for clients, found in of_name.items()
    ]


if __name__ == "__main__":
    serve_bare_klein()
