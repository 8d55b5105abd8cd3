"""The Messaging System: links, channels, messages; the server alone and through its clients."""

from __future__ import annotations

import json
import os
import select
import selectors
import socket
import statistics
import struct
import subprocess
import sys
import time
from typing import Any

from benchmarks.machine import Entity, aead, away, key_agreement, splice, tcp_echo
from dmsg.base.cipher_names import Cipher
from dmsg.keys import PubKey, SecKey
from dmsg.messaging.core.handshake import JSONHandshake
from dmsg.messaging.core.wire import (
    CHANNEL_CLOSED,
    CHANNEL_OPENED,
    CLOSE_CHANNEL,
    OPEN_CHANNEL,
    SEND,
    Frame,
    FrameBuffer,
    Profile,
    encode_frame,
)

SIZES = (64, 1024, 16 * 1024, 60 * 1024)
PAIRS = (1, 8)
VOLUME = 48 * 1024 * 1024
MAX_FRAMES = 80_000
RUNS = 5
OVERHEAD = 3 + 3 + 16
"""Bytes of a Send around its message."""
PROFILE = Profile.SEED
TIMEOUT = 30.0


class Connection:
    """A link on a plain socket."""

    def __init__(self, address: tuple[str, int], server: PubKey, source: str = "") -> None:
        """:param source: the address to come from."""
        self.key = SecKey.generate()
        self.socket = socket.create_connection(address, TIMEOUT, (source, 0) if source else None)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._frames = FrameBuffer(PROFILE)
        self._ready: list[Frame] = []
        self._handshake = JSONHandshake(self.key, server, profile=PROFILE)
        self.socket.sendall(self._handshake.data_to_send())

    def go_on(self) -> bool:
        """Read once and answer; whether the link is up."""
        data = self.socket.recv(4096)
        if not data:
            raise ConnectionError("server ended the handshake")
        self._handshake.receive_data(data)
        self.socket.sendall(self._handshake.data_to_send())
        if self._handshake.remote is None:
            return False
        self._ready += self._frames.feed(self._handshake.trailing_data().removeprefix(b"\n"))
        return True

    def up(self) -> Connection:
        """Finish the handshake."""
        while not self.go_on():
            pass
        return self

    def send(self, frame_type: int, body: bytes) -> None:
        """Send a frame."""
        self.socket.sendall(encode_frame(PROFILE, frame_type, body))

    def receive(self) -> Frame:
        """The next frame."""
        while not self._ready:
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionError("server closed the link")
            self._ready += self._frames.feed(data)
        return self._ready.pop(0)

    def skip(self) -> None:
        """Read what there is, and look at none of it."""
        while select.select([self.socket], [], [], 0)[0]:
            if not self.socket.recv(1 << 16):
                raise ConnectionError("server closed the link")

    def open(self, other: Connection, number: int) -> int:
        """A channel; its id at the other end."""
        self.send(OPEN_CHANNEL, bytes((number,)) + other.key.public + bytes(49))
        there = other.receive().body[0]
        other.send(CHANNEL_OPENED, bytes((there,)) + bytes(49))
        assert self.receive().type == CHANNEL_OPENED
        return there

    def close_channel(self, other: Connection, number: int, there: int) -> None:
        """CloseChannel and ChannelClosed."""
        self.send(CLOSE_CHANNEL, bytes((number,)))
        assert other.receive().type == CLOSE_CHANNEL
        other.send(CHANNEL_CLOSED, bytes((there,)))
        assert self.receive().type == CHANNEL_CLOSED

    def close(self) -> None:
        """End it."""
        self.socket.close()


def start() -> tuple[Entity, tuple[str, int], PubKey]:
    """A messaging server on loopback: the process, its address and its key."""
    entity = Entity(
        "dmsg-messaging-server",
        "--listen=tcp:0:interface=127.0.0.1:backlog=1024",
        "--key-file=server.key",
        "--create",
        "--open-rate=0",
        "--max-per-address=0",
        "--drain-timeout=0",
        core=away(),
    )
    try:
        key = PubKey.from_hex(entity.wait_for(r"server ([0-9a-f]{66}) listens")[1])
        return entity, entity.address(), key
    except BaseException:
        entity.stop()
        raise


def messaging_rows() -> list[dict[str, Any]]:
    """Everything, one table under the other."""
    server, address, key = start()
    with server:
        rows = [_links(server, address, key, clients) for clients in PAIRS]
        rows.append(_channels(server, address, key))
        for size in SIZES:
            rows += [_frames(server, address, key, size, pairs) for pairs in PAIRS]
        for pairs in PAIRS:
            rows += _through_clients(address, key, pairs)
    return rows


# --- the server alone ---


def _signatures() -> float:
    """CPU seconds of what a server's handshake cannot do without: a signature made and one checked."""
    key = SecKey.generate()
    best = float("inf")
    for _ in range(5):
        begin = time.process_time()
        for _ in range(100):
            key.public.verify(b"x", key.sign(b"x"))
        best = min(best, (time.process_time() - begin) / 100)
    return best


def _bare(links: int, rounds: int, size: int) -> float:
    """CPU seconds, for each link, of a process that accepts it, sends back what comes and knows no protocol."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        if (core := away()) is not None:
            os.sched_setaffinity(0, {core})
        begin = time.process_time()
        for _ in range(links):
            end, _ = listener.accept()
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(rounds):
                end.sendall(end.recv(4096))
            end.recv(1)
            end.close()
        os.write(writer, struct.pack("d", time.process_time() - begin))
        os._exit(0)
    for _ in range(links):
        end = socket.create_connection(listener.getsockname())
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(rounds):
            end.sendall(bytes(size))
            left = size
            while left:
                left -= len(end.recv(4096))
        end.close()
    (cpu,) = struct.unpack("d", os.read(reader, 8))
    os.waitpid(child, 0)
    for one in (reader, writer):
        os.close(one)
    listener.close()
    return float(cpu) / links


def _links(server: Entity, address: tuple[str, int], key: PubKey, clients: int, count: int = 800) -> dict[str, Any]:
    Connection(address, key).up().close()
    before, begin = server.cpu(), time.perf_counter()
    done = 0
    waiting = selectors.DefaultSelector()
    made = []
    while done < count:
        while len(waiting.get_map()) < clients:
            connection = Connection(address, key)
            waiting.register(connection.socket, selectors.EVENT_READ, connection)
        for ready, _ in waiting.select(TIMEOUT):
            if ready.data.go_on():
                waiting.unregister(ready.fileobj)
                made.append(ready.data)
                done += 1
    seconds, cpu = time.perf_counter() - begin, server.cpu() - before
    for one in made:
        one.close()
    limit = _signatures() + _bare(500, 2, 500)
    return {
        "what": "link handshakes",
        "pairs": clients,
        "per_second": done / seconds,
        "server_us": cpu / done * 1e6,
        "per_server_cpu_second": done / cpu,
        "limit_us": limit * 1e6,
        "share_of_limit": limit / (cpu / done),
    }


def _channels(server: Entity, address: tuple[str, int], key: PubKey, count: int = 3000) -> dict[str, Any]:
    one, two = Connection(address, key).up(), Connection(address, key).up()
    before, begin = server.cpu(), time.perf_counter()
    for _ in range(count):
        one.close_channel(two, 0, one.open(two, 0))
    seconds, cpu = time.perf_counter() - begin, server.cpu() - before
    one.close()
    two.close()
    limit = _bare(1, 8000, 60) / 2000  # Four frames are relayed.
    return {
        "what": "channels opened and closed, server alone",
        "pairs": 1,
        "per_second": count / seconds,
        "server_us": cpu / count * 1e6,
        "per_server_cpu_second": count / cpu,
        "limit_us": limit * 1e6,
        "share_of_limit": limit / (cpu / count),
    }


def _frames(server: Entity, address: tuple[str, int], key: PubKey, size: int, pairs: int) -> dict[str, Any]:
    """CPU of the server per Send, and the rate, medians of some runs."""
    senders = [Connection(address, key).up() for _ in range(pairs)]
    receivers = [Connection(address, key).up() for _ in range(pairs)]
    for sender, receiver in zip(senders, receivers, strict=True):
        sender.open(receiver, 0)
    length = size + 16
    frame = encode_frame(PROFILE, SEND, b"\0" + length.to_bytes(2, "big") + bytes(length))
    each = max(50, min(MAX_FRAMES, VOLUME // size) // pairs)
    costs, rates = [], []
    for run in range(RUNS + 1):
        before, begin = server.cpu(), time.perf_counter()
        _pump(senders, receivers, frame * each)
        seconds = time.perf_counter() - begin
        if run:  # The first run warms up.
            costs.append((server.cpu() - before) / (each * pairs))
            rates.append(each * pairs / seconds)
    for connection in senders + receivers:
        connection.close()
    cost, rate = statistics.median(costs), statistics.median(rates)
    limit = splice(size + OVERHEAD)
    return {
        "what": f"Send of {size} B, server alone",
        "pairs": pairs,
        "per_second": rate,
        "mb_s": rate * size / 1e6,
        "server_us": cost * 1e6,
        "per_server_cpu_second": 1 / cost,
        "limit_us": limit * 1e6,
        "share_of_limit": limit / cost,
    }


def _pump(senders: list[Connection], receivers: list[Connection], data: bytes) -> None:
    """Every sender sends ``data``, every receiver gets as much."""
    chosen = selectors.DefaultSelector()
    left = {}
    for one in senders:
        one.socket.setblocking(False)
        chosen.register(one.socket, selectors.EVENT_WRITE, memoryview(data))
    for one in receivers:
        one.socket.setblocking(False)
        left[one.socket] = len(data)
        chosen.register(one.socket, selectors.EVENT_READ)
    while left:
        ready = chosen.select(TIMEOUT)
        if not ready:
            raise TimeoutError("nothing moves")
        for found, _ in ready:
            end: Any = found.fileobj
            if found.data is not None:
                rest = found.data[end.send(found.data) :]
                if rest:
                    chosen.modify(end, selectors.EVENT_WRITE, rest)
                else:
                    chosen.unregister(end)
            else:
                left[end] -= len(end.recv(1 << 18))
                if not left[end]:
                    del left[end]
                    chosen.unregister(end)
    for one in senders + receivers:
        one.socket.settimeout(TIMEOUT)


# --- through the clients ---


def _child(role: str, arguments: dict[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.messaging_ends", role, json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _through_clients(address: tuple[str, int], key: PubKey, pairs: int) -> list[dict[str, Any]]:
    where = {"host": address[0], "port": address[1], "server": key.hex(), "pairs": pairs}
    receiver = _child("receive", where)
    assert receiver.stdout is not None
    where["keys"] = json.loads(receiver.stdout.readline())
    sender = _child("send", where)
    out, _ = sender.communicate(timeout=180)
    receiver.terminate()
    receiver.wait()
    rows = []
    for line in out.splitlines():
        row = {"pairs": pairs, **json.loads(line)}
        size = row.pop("size", None)
        if size is not None:
            # The limit is the cost of sealing the message, which a sender has to do.
            limit = aead(size, kind=Cipher.CHACHA20_POLY1305) / 2
            row["limit_us"] = limit * 1e6
            row["share_of_limit"] = limit * row["per_sender_cpu_second"]
        elif "p50_ms" in row:
            row["limit_us"] = 2 * tcp_echo(row.pop("echo")) * 1e6
            row["share_of_limit"] = row["limit_us"] / row["p50_ms"] / 1e3
        else:
            limit = key_agreement(4)
            row["limit_us"] = limit * 1e6
            row["share_of_limit"] = limit * row["per_sender_cpu_second"]
        rows.append(row)
    return rows
