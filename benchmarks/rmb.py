"""The message bus: one relay, two federated relays, queues, connects, memory, and round trips of Redis."""

from __future__ import annotations

import select
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.bare import bare_connects
from benchmarks.machine import Entity, away, cores
from dmsg.net.websocket import frames
from dmsg.rmb.envelope import wire
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.twins import token
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.twin import Twin

PAYLOAD = 300
"""Bytes; with everything else of the envelope 453, as upstream's tools send."""
MESSAGES = 60_000
QUEUED = 5_000
LATENCIES = 2_000
CONNECTS = 1_000
IDLE = 1_000
KEY = b"abcd"
RUNS = 3


class Twins:
    """Registry with ``number`` twins, whose relay can be set."""

    def __init__(self, number: int) -> None:
        self.entity = Entity(
            "rmb-registry", "--listen=tcp:0:interface=127.0.0.1", "--store=memory:", "--rate-limit=0", core=away()
        )
        host, port = self.entity.address()
        self.url = f"http://{host}:{port}"
        self.identities = [Identity(f"0x{one + 1:064x}", "ed25519") for one in range(number)]
        self._counter = 0

    def set(self, number: int, relay: str) -> None:
        self._counter += 1
        identity = self.identities[number]
        statement = Twin(0, identity.account, relay, counter=self._counter).sign(identity)
        request = urllib.request.Request(f"{self.url}/twins", statement.to_json(), method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()


class WebSocket:
    """A session: plain sockets, so that the relay is what is measured."""

    def __init__(self, port: int, identity: Identity, session: Session, source: str = "") -> None:
        """:param source: the address to come from."""
        self.session = session
        self._identity = identity
        self.socket = socket.create_connection(("127.0.0.1", port), None, (source, 0) if source else None)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        query = token.make(identity, session, int(time.time()))
        self.socket.sendall(
            f"GET /?{query} HTTP/1.1\r\nHost: relay\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._frames = frames.Frames(False, wire.MAX_MESSAGE)
        self._rest = b""
        self.pongs = 0
        self._number = 0
        while b"\r\n\r\n" not in self._rest:
            data = self.socket.recv(65536)
            if not data:
                raise ConnectionError(self._rest.decode("latin-1"))
            self._rest += data
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        if b" 101 " not in head.split(b"\r\n")[0]:
            raise ConnectionError(head.decode("latin-1"))

    def take(self) -> int:
        """Read what is there; pings are answered.  :returns: how many messages it was."""
        data, self._rest = self._rest or self.socket.recv(1 << 18), b""
        if not data:
            raise ConnectionError("the relay closed the connection")
        got = 0
        for kind, content in self._frames.feed(data):
            if kind == frames.BINARY:
                got += 1
            elif kind == frames.PING:
                self.socket.sendall(frames.encode(frames.PONG, content, KEY))
            elif kind == frames.PONG:
                self.pongs += 1
        return got

    def receive(self, number: int) -> None:
        """Receive exactly ``number`` messages."""
        while number > 0:
            number -= self.take()
        if number:
            raise ConnectionError("more came than was sent")

    def settled(self, *others: WebSocket) -> None:
        """Wait until the relay has all messages that were sent, and the other connections have confirmed theirs."""
        self.pongs = 0
        self.socket.sendall(frames.encode(frames.PING, b"settled?", KEY))
        sockets = {one.socket: one for one in (self, *others)}
        while not self.pongs:
            for ready in select.select(list(sockets), [], [])[0]:
                sockets[ready].take()

    def message(self, to: Session, payload: bytes = b"x" * PAYLOAD, number: int = 0) -> bytes:
        """A request, as a frame; signed, for other relays ask for that.

        :param number: makes it another message: other relays take each once.
        """
        envelope = Envelope(uid=f"{number:036d}", timestamp=int(time.time()), expiration=600, schema="application/json")
        envelope.request.command = "testme"
        wire.set_address(envelope.source, self.session)
        wire.set_address(envelope.destination, to)
        envelope.plain = payload
        envelope.signature = self._identity.sign(wire.challenge(envelope))
        return frames.encode(frames.BINARY, envelope.SerializeToString(), KEY)

    def next(self) -> int:
        """A number that no message had."""
        self._number += 1
        return self._number

    def messages(self, to: Session, number: int) -> bytes:
        """Return ``number`` successive messages as frames."""
        return b"".join(self.message(to, number=self.next()) for _ in range(number))

    def close(self) -> None:
        self.socket.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class RunningRelay:
    """A relay in a process of its own."""

    def __init__(self, twins: Twins, queue: str, core: int | None = None) -> None:
        """:param core: to run on; None: not the one of the load."""
        self.port = _free_port()
        self.domain = f"http://127.0.0.1:{self.port}"
        self.entity = Entity(
            "rmb-relay",
            f"--domain={self.domain}",
            f"--listen=tcp:{self.port}:interface=127.0.0.1",
            f"--registry={twins.url}",
            f"--queue={queue}",
            "--connect-rate=0",
            core=away() if core is None else core,
        )
        self.entity.wait_for("relay listens")


def redis_round_trips(url: str, count: int = 5000) -> float:
    """XADD and EXPIRE of as many bytes, one after the other, a second: what the reference does for each message.

    With the usual client of Python, as a service in Python would do it.
    """
    import redis

    server = redis.Redis.from_url(url)
    body = b"x" * 453
    start = time.perf_counter()
    for _ in range(count):
        with server.pipeline(transaction=True) as pipe:
            pipe.xadd("stream:bench", {"_": body}, maxlen=10_000, approximate=True)
            pipe.expire("stream:bench", 3600)
            pipe.execute()
    seconds = time.perf_counter() - start
    server.delete("stream:bench")
    return count / seconds


def redis_at_best(url: str, count: int = 20_000) -> float:
    """The same over a bare socket, without a client and without reading the answer's parts."""
    host, _, port = url.removeprefix("redis://").partition("/")[0].partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    body = b"x" * 453

    def command(*words: bytes) -> bytes:
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)

    request = (
        command(b"MULTI")
        + command(b"XADD", b"stream:bench", b"MAXLEN", b"~", b"10000", b"*", b"_", body)
        + command(b"EXPIRE", b"stream:bench", b"3600")
        + command(b"EXEC")
    )
    start = time.perf_counter()
    for _ in range(count):
        connection.sendall(request)
        answer = b""
        while not answer.endswith(b":1\r\n"):
            answer += connection.recv(4096)
    seconds = time.perf_counter() - start
    connection.close()
    return count / seconds


def _rate(relay: RunningRelay, sender: WebSocket, receiver: WebSocket, number: int) -> tuple[float, float]:
    """Messages a second, and the relay's CPU for each, in us."""
    frames_ = sender.messages(receiver.session, number)
    before, start = relay.entity.cpu(), time.perf_counter()
    sending = threading.Thread(target=lambda: sender.socket.sendall(frames_))
    sending.start()
    receiver.receive(number)
    seconds = time.perf_counter() - start
    sending.join()
    sender.settled(receiver)
    return number / seconds, (relay.entity.cpu() - before) / number * 1e6


def _latency(sender: WebSocket, receiver: WebSocket, number: int) -> tuple[float, float]:
    """p50 and p99 of one message at a time, in ms."""
    ready = [sender.message(receiver.session, number=sender.next()) for _ in range(number)]
    times = []
    for frame in ready:
        start = time.perf_counter()
        sender.socket.sendall(frame)
        receiver.receive(1)
        times.append(time.perf_counter() - start)
    times.sort()
    return times[number // 2] * 1e3, times[number * 99 // 100] * 1e3


def _pair(twins: Twins, one: RunningRelay, two: RunningRelay, name: str) -> tuple[WebSocket, WebSocket]:
    twins.set(0, one.domain)
    twins.set(1, two.domain)
    sender = WebSocket(one.port, twins.identities[0], Session(1, name))
    return sender, WebSocket(two.port, twins.identities[1], Session(2, name))


def _queued(twins: Twins, relay: RunningRelay, name: str) -> dict[str, float]:
    """Measure messages into the queue of an absent session, and out of the queue when the session connects."""
    twins.set(1, relay.domain)
    sender = WebSocket(relay.port, twins.identities[0], Session(1, "q" + name))
    absent = Session(2, "absent" + name)
    frame = sender.message(absent)
    start = time.perf_counter()
    sending = threading.Thread(target=lambda: sender.socket.sendall(frame * QUEUED))
    sending.start()
    sending.join()
    sender.settled()
    into = QUEUED / (time.perf_counter() - start)
    start = time.perf_counter()
    receiver = WebSocket(relay.port, twins.identities[1], absent)
    some = 0
    while not some:
        some = receiver.take()
    first = time.perf_counter() - start
    receiver.receive(QUEUED - some)
    whole = time.perf_counter() - start
    sender.close()
    receiver.close()
    return {"queued_per_second": into, "first_of_backlog_ms": first * 1e3, "backlog_ms": whole * 1e3}


def _connects(twins: Twins, relay: RunningRelay) -> dict[str, float]:
    for number in range(CONNECTS // 2):
        WebSocket(relay.port, twins.identities[0], Session(1, f"w{number}")).close()
    bare = bare_connects(CONNECTS)
    start, cpu = time.perf_counter(), relay.entity.cpu()
    for number in range(CONNECTS):
        WebSocket(relay.port, twins.identities[0], Session(1, f"c{number}")).close()
    rate = CONNECTS / (time.perf_counter() - start)
    time.sleep(0.3)
    return {
        "per_second": rate,
        "relay_cpu_us": (relay.entity.cpu() - cpu) / CONNECTS * 1e6,
        "bare_twisted_and_verify_us": bare * 1e6,
    }


def _memory(twins: Twins, relay: RunningRelay) -> float:
    """KiB of memory for each of ``number`` idle sessions."""
    warm = [WebSocket(relay.port, twins.identities[0], Session(1, f"w{number}")) for number in range(200)]
    for one in warm:
        one.close()
    time.sleep(1.0)
    base = relay.entity.memory()
    sessions = [WebSocket(relay.port, twins.identities[0], Session(1, f"i{number}")) for number in range(IDLE)]
    time.sleep(1.0)
    each = (relay.entity.memory() - base) / IDLE / 1024
    for one in sessions:
        one.close()
    return each


def _of_queue(twins: Twins, queue: str, kind: str, directory: Path, round_trips: float) -> list[dict[str, Any]]:
    def at(name: str) -> str:
        return f"sqlite:{directory / name}.sqlite" if queue == "sqlite" else queue

    rows: list[dict[str, Any]] = []
    relay = RunningRelay(twins, at("one"))
    with relay.entity:
        sender, receiver = _pair(twins, relay, relay, "m")
        _rate(relay, sender, receiver, MESSAGES // 10)  # This run warms up.
        runs = [_rate(relay, sender, receiver, MESSAGES) for _ in range(RUNS)]
        rate, cpu = statistics.median(run[0] for run in runs), statistics.median(run[1] for run in runs)
        p50, p99 = _latency(sender, receiver, LATENCIES)
        rows.append(
            {"queue": kind, "way": "one relay", "per_second": rate, "relay_cpu_us": cpu, "p50_ms": p50, "p99_ms": p99}
            | {"of_redis_round_trips": rate / round_trips}
        )
        queued = [_queued(twins, relay, str(run)) for run in range(RUNS)]
        middle = {name: statistics.median(one[name] for one in queued) for name in queued[0]}
        rows.append(
            {"queue": kind, "way": f"queued, {QUEUED:,}", "per_second": middle.pop("queued_per_second")} | middle
        )
        rows.append({"queue": kind, "way": "connects"} | _connects(twins, relay))
        sender.close()
        receiver.close()
        rows.append({"queue": kind, "way": "idle sessions", "sessions": IDLE, "kib_each": _memory(twins, relay)})
    # Each relay has a core. The second relay shares its core with the load generator.
    one = RunningRelay(twins, at("two"))
    two = RunningRelay(twins, at("three") if queue == "sqlite" else queue + "5", cores()[-1])
    with one.entity, two.entity:
        sender, receiver = _pair(twins, one, two, "f")
        _rate(one, sender, receiver, 200)
        runs, before = [], two.entity.cpu()
        for _ in range(RUNS):
            runs.append(_rate(one, sender, receiver, MESSAGES // 10))
        second = (two.entity.cpu() - before) / (RUNS * (MESSAGES // 10)) * 1e6
        rate, cpu = statistics.median(run[0] for run in runs), statistics.median(run[1] for run in runs)
        p50, p99 = _latency(sender, receiver, LATENCIES // 5)
        rows.append(
            {"queue": kind, "way": "two relays", "per_second": rate, "relay_cpu_us": cpu, "p50_ms": p50, "p99_ms": p99}
            | {"second_relay_cpu_us": second}
        )
        sender.close()
        receiver.close()
    return rows


def rmb_rows(redis_url: str | None) -> list[dict[str, Any]]:
    """Return the rows with SQLite, and with Redis if it is available."""
    twins = Twins(2)
    rows: list[dict[str, Any]] = []
    with twins.entity, tempfile.TemporaryDirectory(prefix="dmsg-bench-") as directory:
        twins.set(0, "http://nowhere:1")
        twins.set(1, "http://nowhere:1")
        round_trips = float("nan")
        if redis_url:
            round_trips = redis_round_trips(redis_url)
            alone = {"queue": "Redis alone", "way": "XADD EXPIRE, one at a time, redis-py"}
            rows.append(alone | {"per_second": round_trips})
            rows.append(alone | {"way": "the same over a bare socket", "per_second": redis_at_best(redis_url)})
        rows += _of_queue(twins, "sqlite", "SQLite", Path(directory), round_trips)
        if redis_url:
            rows += _of_queue(twins, redis_url, "Redis", Path(directory), round_trips)
    return rows
