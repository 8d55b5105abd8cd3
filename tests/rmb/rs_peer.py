"""Peer that behaves as the reference's peer, and a relay between two such peers that is killed.

The reference's peer never sends a message again, answers pings, does not know which messages it has received, and
connects again after two seconds.

Such a peer never sends a message again, answers pings, does not know what it has had, and connects again after two
seconds.
"""

from __future__ import annotations

import json
import os
import random
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue

from dmsg.net.websocket import frames
from dmsg.rmb.envelope import wire
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.twins import token
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.twin import Twin
from tests.ports import free_port
from tests.rmb.killing import Process, twistd

RECONNECT = 2.0
"""Seconds before the peer connects again, as in the reference."""
RATE = 1500
"""Requests per second; the reference's peer signs about as many."""
AHEAD = 100
"""Number of unanswered requests at which the client waits. A relay that cannot keep up loses data that it has not read
when it is killed, and losing that data says nothing about the relay.
"""
KEY = b"mask"


class RsPeer:
    """Twin that runs in threads of its own.

    :param handle: called with each message; the result is sent as the answer.
    :ivar got: number of received messages by kind and uid.
    :ivar failed: number of messages that could not be written to the socket.

    :param handle: called with each message; what it returns is sent.
    :ivar got: messages that came, by kind and uid.
    :ivar failed: messages that its socket did not take.
    """

    def __init__(self, port: int, number: int, handle: Callable[[Envelope], Envelope | None]) -> None:
        self.identity = Identity(f"0x{number:064x}", "ed25519")
        self.session = Session(number)
        self._port = port
        self._handle = handle
        self.got: Counter[tuple[str, str]] = Counter()
        self.failed = 0
        self._lock = threading.Lock()
        self._connected = threading.Event()
        self._stop = threading.Event()
        self._socket: socket.socket | None = None
        self._answers: SimpleQueue[Envelope] = SimpleQueue()
        """Answers of the service; in the reference, answers wait in Redis until the peer is connected."""
        for work in (self._run, self._send_answers):
            threading.Thread(target=work, daemon=True).start()

    def _send_answers(self) -> None:
        while not self._stop.is_set():
            try:
                self.send(self._answers.get(timeout=0.1))
            except Empty:
                continue

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._converse()
            except OSError:
                pass
            self._connected.clear()
            self._stop.wait(RECONNECT)

    def _converse(self) -> None:
        """Serve a connection until it is lost."""
        query = token.make(self.identity, self.session, int(time.time()), resends=False)
        with socket.create_connection(("127.0.0.1", self._port), 5) as self._socket:
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(
                f"GET /?{query} HTTP/1.1\r\nHost: relay\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
            )
            head = b""
            while b"\r\n\r\n" not in head:
                data = self._socket.recv(65536)
                if not data:
                    return
                head += data
            if not head.startswith(b"HTTP/1.1 101"):
                return
            self._connected.set()
            reader = frames.Frames(False, wire.MAX_MESSAGE)
            data = head.partition(b"\r\n\r\n")[2]
            while True:
                for kind, content in reader.feed(data):
                    self._received(kind, content)
                data = self._socket.recv(65536)
                if not data:
                    return

    def _received(self, kind: int, content: bytes) -> None:
        if kind == frames.PING:
            self._write(frames.encode(frames.PONG, content, KEY))
        elif kind == frames.BINARY:
            envelope = wire.decode(content)
            self.got[wire.kind_of(envelope), envelope.uid] += 1
            answer = self._handle(envelope)
            if answer is not None:
                self._answers.put(answer)

    def _write(self, data: bytes) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.sendall(data)

    def send(self, envelope: Envelope) -> None:
        """Send a message once, as soon as the peer is connected. The message may be lost with the connection."""
        wire.set_address(envelope.source, self.session)
        envelope.timestamp, envelope.expiration = int(time.time()), 600
        envelope.signature = self.identity.sign(wire.challenge(envelope))
        while not self._connected.wait(0.1):
            if self._stop.is_set():
                return
        try:
            self._write(frames.encode(frames.BINARY, envelope.SerializeToString(), KEY))
        except OSError:
            self._connected.clear()
            self.failed += 1

    def ready(self) -> None:
        """Wait until the peer is connected."""
        if not self._connected.wait(10):
            raise AssertionError("the peer does not come to its relay")

    def stop(self) -> None:
        self._stop.set()
        connection = self._socket
        if connection is not None:
            connection.close()


class Experiment:
    """Relay and two such peers; one sends requests, the other answers.

    :param options: command line options of the relay.
    """

    def __init__(self, directory: Path, *options: str) -> None:
        self.port = free_port()
        name = f"http://127.0.0.1:{self.port}"
        twins = [Twin(0, Identity(f"0x{number:064x}", "ed25519").account, name, counter=1) for number in (1, 2)]
        entries = [{**twin.as_dict(), "id": number} for number, twin in enumerate(twins, 1)]
        (directory / "twins.json").write_text(json.dumps({"twins": entries}))
        words = (f"--listen=tcp:{self.port}:interface=127.0.0.1", f"--domain={name}", "--registry=file:twins.json")
        command = twistd("rmb-relay", *words, "--queue=sqlite:relay.sqlite", *options)
        self.relay = Process(directory, "relay", command, self.port)
        self.relay.ready()
        self.client = RsPeer(self.port, 1, lambda envelope: None)
        self.service = RsPeer(self.port, 2, self._answer)
        for peer in (self.client, self.service):
            peer.ready()

    @staticmethod
    def _answer(request: Envelope) -> Envelope:
        answer = Envelope(uid=request.uid, plain=request.plain, schema=request.schema)
        answer.response.SetInParent()
        wire.set_address(answer.destination, wire.source_of(request))
        return answer

    def run(self, number: int, kills: int, seed: int) -> dict[str, int]:
        """Send ``number`` requests while the relay is killed ``kills`` times; return the counts."""
        rng = random.Random(seed)
        at = sorted(rng.sample(range(number // 10, number * 9 // 10), kills))
        began, paused = time.monotonic(), 0.0
        for count in range(number):
            while count / RATE > time.monotonic() - began - paused:
                time.sleep(0.001)
            behind = time.monotonic()
            while count - len(self.service.got) > AHEAD and time.monotonic() - behind < 0.1:
                time.sleep(0.001)
            if at and count == at[0]:
                at.pop(0)
                self.relay.kill()
                before = time.monotonic()
                self.relay.ready()
                paused += time.monotonic() - before
            request = Envelope(uid=str(count), plain=os.urandom(200), schema="application/json")
            request.request.command = "testme"
            wire.set_address(request.destination, self.service.session)
            self.client.send(request)
        self._settle(number)
        requests = [self.service.got["request", str(count)] for count in range(number)]
        answers = [self.client.got["response", str(count)] for count in range(number)]
        return {
            "requests lost": requests.count(0),
            "requests twice": sum(count > 1 for count in requests),
            "answers lost": sum(got > 0 and not back for got, back in zip(requests, answers, strict=True)),
            "not sent": self.client.failed + self.service.failed,
            "answers twice": sum(back > max(1, got) for got, back in zip(requests, answers, strict=True)),
        }

    def _settle(self, number: int) -> None:
        """Wait until no message has come for a while."""
        before, since = -1, time.monotonic()
        while time.monotonic() - since < 3.0:
            now = sum(self.client.got.values()) + sum(self.service.got.values())
            if now != before:
                before, since = now, time.monotonic()
            time.sleep(0.05)

    def stop(self) -> None:
        for peer in (self.client, self.service):
            peer.stop()
        self.relay.stop()


def run(number: int, kills: int, seed: int, *options: str) -> dict[str, int]:
    """Run an experiment in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="dmsg-rs-") as directory:
        experiment = Experiment(Path(directory), *options)
        try:
            return experiment.run(number, kills, seed)
        finally:
            experiment.stop()
