"""Bus of real processes under load, any of which is killed at random.

The bus has two relays, two peers, a Redis for each peer, and a registry.  A client of one peer sends requests, and a
service of the other peer answers; client and service neither lose nor repeat anything themselves when their Redis is
killed.

Two relays, two peers, a Redis for each peer, a registry.  A client of one peer asks, a service of the other answers;
both are written so that they themselves lose and repeat nothing when their Redis is killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from base64 import b64encode
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.secrets import TwinSecret, write_secret
from dmsg.rmb.twins.twin import Twin
from tests.ports import free_port
from tests.redis import redis_server

RET = "answers"
_PUSH = """
if redis.call('SADD', KEYS[1], ARGV[1]) == 1 then redis.call('LPUSH', KEYS[2], ARGV[2]) end
"""
_ANSWER = """
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 1 then
  redis.call('LPUSH', KEYS[2], ARGV[2])
  redis.call('HINCRBY', 'handled', ARGV[3], 1)
end
"""


class Process:
    """Process that is started again after it was killed."""

    def __init__(self, directory: Path, name: str, command: list[str], port: int | None) -> None:
        self.name, self.port = name, port
        self._directory = directory
        self._command = command
        self.log = directory / f"{name}.log"
        self.kills = 0
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=self._directory, stdout=log, stderr=log, start_new_session=True
            )

    def ready(self) -> None:
        for _ in range(600):
            if self.process.poll() is not None:
                raise AssertionError(f"{self.name} ended: {self.log.read_text()[-2000:]}")
            if self.port is None:
                return
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"{self.name} does not listen")

    def kill(self) -> None:
        """Kill the process with SIGKILL and start it again."""
        self.kills += 1
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.start()

    def supervise(self) -> None:
        """Start the process again if it has ended, as an operator's supervisor does: a peer ends with an error if its
        Redis cannot be reached at the start.
        """
        if self.process.poll() is not None:
            self.start()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def twistd(name: str, *options: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        "from twisted.scripts.twistd import run; run()",
        "--nodaemon",
        "--pidfile=",
        name,
        *options,
    ]


class Bus:
    """All processes of the bus.

    :ivar processes: processes by name; ``killable``: those that a run may kill.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: dict[str, Process] = {}
        ports = {name: free_port() for name in ("registry", "relay1", "relay2", "redis1", "redis2")}
        self.registry = f"http://127.0.0.1:{ports['registry']}"
        self._start(
            "registry",
            twistd(
                "rmb-registry",
                f"--listen=tcp:{ports['registry']}:interface=127.0.0.1",
                "--store=sqlite:registry.sqlite",
                "--rate-limit=0",
            ),
            ports["registry"],
        )
        for number in (1, 2):
            self._start_redis(f"redis{number}", ports[f"redis{number}"])
            self._start(
                f"relay{number}",
                twistd(
                    "rmb-relay",
                    f"--listen=tcp:{ports[f'relay{number}']}:interface=127.0.0.1",
                    f"--domain=http://127.0.0.1:{ports[f'relay{number}']}",
                    f"--registry={self.registry}",
                    f"--queue=sqlite:relay{number}.sqlite",
                ),
                ports[f"relay{number}"],
            )
        for process in self.processes.values():
            process.ready()
        self.twins = [self._twin(number) for number in (1, 2)]
        self.redis = [redis.Redis(port=ports[f"redis{number}"], socket_timeout=5) for number in (1, 2)]
        for number in (1, 2):
            self._start(
                f"peer{number}",
                twistd(
                    "rmb-peer",
                    f"--key-file=twin{number}",
                    f"--registry={self.registry}",
                    f"--relay=ws://127.0.0.1:{ports[f'relay{number}']}",
                    f"--redis=redis://127.0.0.1:{ports[f'redis{number}']}",
                ),
                None,
            )

        self._wait_for_peers()

    def _wait_for_peers(self) -> None:
        """Wait until the registry has the relay of each twin."""
        for _ in range(600):
            twins = [json.load(urllib.request.urlopen(f"{self.registry}/twins/{twin}")) for twin in self.twins]
            if all(twin["relay"] for twin in twins):
                return
            time.sleep(0.05)
        raise AssertionError("the peers did not come up")

    def _start(self, name: str, command: list[str], port: int | None) -> None:
        self.processes[name] = Process(self.directory, name, command, port)

    def _start_redis(self, name: str, port: int) -> None:
        program = redis_server()
        assert program is not None
        directory = self.directory / name
        directory.mkdir()
        options = {"port": str(port), "bind": "127.0.0.1", "save": "", "appendonly": "yes", "appendfsync": "always"}
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        self._start(name, [program, *words, "--dir", str(directory)], port)

    def _twin(self, number: int) -> int:
        secret = TwinSecret("0x" + bytes([number] * 32).hex(), "ed25519")
        write_secret(str(self.directory / f"twin{number}"), secret)
        identity: Identity = secret.identity()
        statement = Twin(0, identity.account, counter=1).sign(identity)
        request = urllib.request.Request(f"{self.registry}/twins", statement.to_json(), method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            twin: int = json.load(answer)["id"]
        return twin

    def stop(self) -> None:
        for process in self.processes.values():
            process.stop()


def insist(call: Callable[[], Any], stop: threading.Event) -> Any:
    """Repeat the call while Redis cannot be reached; return its result."""
    while not stop.is_set():
        try:
            return call()
        except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
            time.sleep(0.05)
    return None


class Load:
    """Load on the bus: a client that sends ``number`` requests, and a service that answers them.

    :ivar allowed: number of requests that may be sent at present.
    """

    def __init__(self, bus: Bus, number: int) -> None:
        self.bus, self.number = bus, number
        self.stop = threading.Event()
        self.collected = 0
        self.allowed = 0
        self._threads = [threading.Thread(target=one, daemon=True) for one in (self._ask, self._serve, self._collect)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        server = self.bus.redis[0]
        for number in range(self.number):
            message = json.dumps(
                {
                    "ver": 1,
                    "ref": str(number),
                    "cmd": "echo",
                    "exp": 1800,
                    "dat": b64encode(b"%d" % number).decode(),
                    "dst": [self.bus.twins[1]],
                    "ret": RET,
                    "shm": "application/json",
                    "now": int(time.time()),
                }
            )
            insist(lambda: server.eval(_PUSH, 2, "pushed", "msgbus.system.local", str(number), message), self.stop)
            if number % 50 == 0:
                while number > min(self.collected + 1500, self.allowed) and not self.stop.is_set():
                    time.sleep(0.01)

    def _serve(self) -> None:
        server = self.bus.redis[1]
        while not self.stop.is_set():
            raw = insist(lambda: server.lindex("working", -1), self.stop)
            if raw is None:
                raw = insist(lambda: server.blmove("msgbus.echo", "working", 1, "RIGHT", "LEFT"), self.stop)
            if raw is None:
                continue
            request = json.loads(raw)
            answer = json.dumps(
                {
                    "ver": 1,
                    "ref": request["ref"],
                    "dat": request["dat"],
                    "dst": request["src"],
                    "shm": request["shm"],
                    "now": int(time.time()),
                }
            )
            insist(lambda: server.eval(_ANSWER, 2, "working", request["ret"], raw, answer, request["dat"]), self.stop)

    def _collect(self) -> None:
        server = self.bus.redis[0]
        while not self.stop.is_set():
            moved = insist(lambda: server.blmove(RET, "collected", 1, "RIGHT", "LEFT"), self.stop)
            if moved is not None:
                self.collected = insist(lambda: server.llen("collected"), self.stop) or self.collected

    def answers(self) -> Counter[tuple[str, bool]]:
        """Count the answers by request: the keys are the reference, and whether the answer is without an error."""
        found: Counter[tuple[str, bool]] = Counter()
        for raw in self.bus.redis[0].lrange("collected", 0, -1):
            message = json.loads(raw)
            found[message["ref"], message["err"] is None] += 1
        return found

    def errors(self) -> list[str]:
        """Return the errors that came as answers."""
        found = [json.loads(raw) for raw in self.bus.redis[0].lrange("collected", 0, -1)]
        return [f"{one['ref']} of {one['src']!r}: {one['err']}" for one in found if one["err"] is not None]

    def end(self) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(10)


def run(directory: Path, number: int, kills: int, seconds: float, seed: int) -> dict[str, Any]:
    """Send ``number`` requests while ``kills`` processes are killed; return the counts.

    :param seconds: maximum duration of the run.
    """
    rng = random.Random(seed)
    bus = Bus(directory)
    try:
        load = Load(bus, number)
        began = time.monotonic()
        victims = ["relay1", "relay2", "peer1", "peer2", "redis1", "redis2"]
        rng.shuffle(victims)
        at = 0
        while load.collected < number and time.monotonic() - began < seconds:
            time.sleep(0.02)
            for process in bus.processes.values():
                process.supervise()
            # The kills are spread evenly over the work. The next requests wait for the next kill: otherwise a fast bus
            # would answer all of them before the last kill.
            load.allowed = number * (at + 1) // (kills + 1)
            if at < kills and load.collected >= number * (at + 0.5) / (kills + 1):
                bus.processes[victims[at % len(victims)]].kill()
                at += 1
                time.sleep(rng.uniform(0.0, 1.0))
        time.sleep(1.0)
        load.end()
        answers = load.answers()
        return {
            "kills": {name: process.kills for name, process in bus.processes.items() if process.kills},
            "lost": [str(n) for n in range(number) if not answers[str(n), True]],
            "twice": [ref for (ref, _), count in answers.items() if count > 1],
            "handled_twice": [key for key, count in bus.redis[1].hgetall("handled").items() if int(count) > 1],
            "errors": load.errors(),
            "seconds": time.monotonic() - began,
        }
    finally:
        bus.stop()
