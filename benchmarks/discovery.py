"""Discovery: verified POSTs and GETs a second, for each store."""

from __future__ import annotations

import select
import socket
import statistics
import time
from typing import Any

from benchmarks.machine import Entity, away
from dmsg.discovery.entries.entry import ClientMeta, Entry
from dmsg.keys import SecKey

COUNT = 2000
KEYS = 500
DEPTH = 16
ROUNDS = 7
CLIENTS = 16
"""Number of connections that send one request at a time each."""


def exchange(address: tuple[str, int], requests: list[bytes]) -> float:
    """Send all on one kept connection, a few ahead of the answers; seconds."""
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


def exchange_over(address: tuple[str, int], requests: list[bytes], clients: int = CLIENTS) -> None:
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


def discovery_rows(redis_url: str | None) -> list[dict[str, Any]]:
    """POST and GET by turns, in memory, SQLite, and Redis when there is one: the most and the median of rounds."""
    keys = [SecKey.from_seed(b"bench %d" % number) for number in range(KEYS)]
    rounds = []
    for first in range(0, ROUNDS * COUNT, COUNT):
        posts = []
        for number in range(first, first + COUNT):
            key, sequence = keys[number % KEYS], number // KEYS
            entry = Entry("0.0.1", sequence, number + 1, key.public.hex(), ClientMeta((keys[0].public.hex(),)))
            posts.append(post_request(entry.sign(key)))
        rounds.append(posts)
    paths = [b"/discovery/entries/%s" % keys[number % KEYS].public.hex().encode() for number in range(COUNT)]
    gets = [b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in paths]
    signature = keys[0].sign(b"payload")
    start = time.process_time()
    for _ in range(1000):
        signature.recover(b"payload")
    verify = (time.process_time() - start) / 1000
    rows = []
    for store in ("memory:", "sqlite:bench.sqlite", redis_url):
        if store is None:
            continue
        with Entity(
            "dmsg-discovery",
            "--listen=tcp:0:interface=127.0.0.1",
            f"--store={store}",
            "--rate-limit=0",
            core=away(),
        ) as entity:
            address = entity.address()
            rates: dict[str, list[float]] = {"post": [], "get": [], f"get_over_{CLIENTS}": []}
            for posts in rounds:
                for name, requests, send in (
                    ("post", posts, exchange),
                    ("get", gets, exchange),
                    (f"get_over_{CLIENTS}", gets, exchange_over),
                ):
                    before = entity.cpu()
                    send(address, requests)
                    rates[name].append(COUNT / (entity.cpu() - before))
            row: dict[str, Any] = {"store": store.partition(":")[0]}
            for name, found in rates.items():
                row[f"{name}_per_cpu_second"] = max(found)
                row[f"{name}_median"] = statistics.median(found)
            row["verify_limit_per_cpu_second"] = 1 / verify
            row["share_of_verify"] = row["post_per_cpu_second"] * verify
            rows.append(row)
    return rows
