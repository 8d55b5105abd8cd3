"""Faults that ended or stalled the 2019 reference, over real TCP.  Numbers are those of the reference's list of
defects.
"""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path
from typing import Any

import treq
from hypothesis import given, strategies as st
from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.protocol import Protocol
from twisted.trial.unittest import SynchronousTestCase

from dmsg.cli.processes import address_of, start_twistd, stop
from dmsg.discovery.entries.entry import ClientMeta, Entry
from dmsg.errors import CloseReason, DropReason
from dmsg.keys import SecKey
from dmsg.net import socketopts
from dmsg.net.flush import TurnFlush
from dmsg.net.links.connect import LinkClientEndpoint
from dmsg.net.links.records import record_links
from dmsg.noise.xk import XKHandshake
from dmsg.testing.raw_client import RawClient
from dmsg.v2019.core import congestion
from dmsg.v2019.core.table import ClientConnection
from dmsg.v2019.core.wire import ACCEPT, CLOSE, FWD, REQUEST, Frame
from dmsg.v2019.session import ClientSession
from tests.net.support import EntityCase
from tests.support import SERVER_KEY, Accepting, MemoryNetwork, Recorder, asynchronous

TERMINATED = 128 + 15
"""Exit status of twistd after it stopped its services for a SIGTERM."""


class Raw(Protocol):
    """Plain TCP."""

    def __init__(self) -> None:
        self.received = b""
        self.closed = False

    def dataReceived(self, data: bytes) -> None:
        self.received += data

    def connectionLost(self, reason: Any = None) -> None:
        self.closed = True


class FaultCase(EntityCase):
    """A server on real TCP."""

    async def raw(self, server: Any) -> Raw:
        """A connection that says nothing by itself."""
        port = server.ports[0].getHost().port
        raw: Raw = await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", port), Raw())
        self.addCleanup(lambda: raw.transport.abortConnection())  # type: ignore[union-attr]
        return raw

    async def open(self, one: RawClient, two: RawClient, own_id: int = 2) -> int:
        """A transport of two raw clients; the responder's id."""
        payload = bytes(one.key.public + two.key.public)
        one.send(Frame(REQUEST, own_id, payload).encode())
        await self.until(lambda: two.frames)
        (request,) = two.take()
        two.send(Frame(ACCEPT, request.id, payload).encode())
        await self.until(lambda: one.frames)
        self.assertEqual(one.take()[0].type, ACCEPT)
        responder_id: int = request.id
        return responder_id

    async def assert_serves(self, server: Any) -> None:
        """Assert that two new clients reach each other through the server."""
        one, two = await self.raw_client(server), await self.raw_client(server)
        own_id = await self.open(one, two)
        one.send(Frame(FWD, 2, b"\0\1alive").encode())
        await self.until(lambda: two.frames)
        self.assertEqual(two.take(), [Frame(FWD, own_id, b"\0\1alive")])
        server.factory.relay.check()


class StrangerTests(FaultCase):
    """Defects 1 to 3: data that any stranger can send before a handshake."""

    @asynchronous
    async def test_1a_51_bytes_of_a_bad_key(self) -> None:
        server = await self.start_server()
        for ephemeral in (bytes(33), b"\x02" + b"\xff" * 32, b"\x04" + bytes(32)):
            raw = await self.raw(server)
            raw.transport.write(b"\0\x31" + ephemeral + bytes(16))  # type: ignore[union-attr]
            await self.until(lambda raw=raw: raw.closed)
        self.assertEqual(server.factory.relay.drops[DropReason.HANDSHAKE_FAILED], 3)
        await self.assert_serves(server)

    @asynchronous
    async def test_1b_short_records(self) -> None:
        server = await self.start_server()
        for length in (0, 3, 4, 19):
            client = await self.raw_client(server)
            client.transport.write(length.to_bytes(2, "big") + bytes(length))  # type: ignore[union-attr]
            await self.until(lambda client=client: client.closed)
        self.assertEqual(server.factory.relay.drops[DropReason.BAD_RECORD], 4)
        await self.assert_serves(server)

    @asynchronous
    async def test_1c_a_length_that_was_cut_to_16_bits(self) -> None:
        """The reference's own client does this to it by writing 65509 bytes."""
        server = await self.start_server()
        client = await self.raw_client(server)
        client.transport.write(b"\0\0" + bytes(65536))  # type: ignore[union-attr]
        await self.until(lambda: client.closed)
        await self.assert_serves(server)

    @asynchronous
    async def test_1d_a_frame_over_two_records(self) -> None:
        server = await self.start_server()
        one, two = await self.raw_client(server), await self.raw_client(server)
        own_id = await self.open(one, two)
        for size in (65509, 65511, 65533):
            frame = Frame(FWD, 2, b"\0\1" + os.urandom(size)).encode()
            one.send(frame[:40_000])
            one.send(frame[40_000:])
            await self.until(lambda: two.frames)
            self.assertEqual(two.take(), [Frame(FWD, own_id, frame[5:])])

    @asynchronous
    async def test_2_silent_and_slow_connections_by_the_hundred(self) -> None:
        """Other clients can connect at once beside 300 silent or slow connections."""
        server = await self.start_server()
        raws = await gatherResults(
            [
                connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", server.ports[0].getHost().port), Raw())
                for _ in range(300)
            ]
        )
        first = XKHandshake(SecKey.generate(), server._key.public).data_to_send()
        for number, raw in enumerate(raws):
            raw.transport.write(first[: number % 51])
        await self.until(lambda: server.factory.handshakes == 300)
        started = reactor.seconds()
        await self.assert_serves(server)
        self.assertLess(reactor.seconds() - started, 5.0)
        for raw in raws:
            raw.transport.abortConnection()
        await self.until(lambda: server.factory.handshakes == 0)

    @asynchronous
    async def test_3_failed_handshakes_leave_no_connections(self) -> None:
        server = await self.start_server()
        server.factory._handshake_timeout = 0.2
        raws = [await self.raw(server) for _ in range(20)]
        for raw in raws[:10]:
            raw.transport.write(os.urandom(60))  # type: ignore[union-attr]
        await self.until(lambda: all(raw.closed for raw in raws))
        drops = server.factory.relay.drops
        self.assertEqual(drops[DropReason.HANDSHAKE_FAILED] + drops[DropReason.HANDSHAKE_TIMEOUT], 20)

    @asynchronous
    async def test_3_descriptors_used_up(self) -> None:
        """The server stays up and recovers; its process has few descriptors."""
        child = start_twistd(
            reactor,
            "dmsg-server",
            "--listen=tcp:0:interface=127.0.0.1:backlog=200",
            "--key-file=server.key",
            "--create",
            directory=self._directory(),
        )
        self.addCleanup(lambda: self._stop(child))
        match = await child.line(r"server ([0-9a-f]{66}) listens")
        host, _, port = (await address_of(reactor, child)).partition(":")
        pid = child.transport.pid  # type: ignore[union-attr]
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 20, hard))
        sockets = []
        for _ in range(100):
            sockets.append(socket.create_connection((host, int(port)), 10))
        await self.until(lambda: len(os.listdir(f"/proc/{pid}/fd")) >= used + 15)
        self.assertIsNone(child.status)
        for one in sockets:
            one.close()

        async def serves() -> bool:
            from dmsg.keys import PubKey

            client = RawClient(SecKey.generate(), PubKey.from_hex(match[1].decode()))
            await connectProtocol(TCP4ClientEndpoint(reactor, host, int(port)), client)
            await self.until(lambda: client.frames or client.closed)
            client.transport.abortConnection()  # type: ignore[union-attr]
            return bool(client.frames)

        await self.until(lambda: len(os.listdir(f"/proc/{pid}/fd")) < used + 15)
        # Closed connections from the backlog use all descriptors again, until the server has accepted them all.
        while not await serves():
            pass
        self.assertIsNone(child.status)

    def _directory(self) -> str:
        directory = Path(self.mktemp())
        directory.mkdir()
        return str(directory)

    def _stop(self, child: Any) -> Any:
        return Deferred.fromCoroutine(stop(reactor, child))


class ReceiverTests(FaultCase):
    """Defects 4, 5, 6 and 12: effects of one client on others."""

    @asynchronous
    async def test_4_a_receiver_that_stops_reading(self) -> None:
        """Other receivers of the same sender are served, memory is bounded, and the blocked transport ends with a
        reason.
        """
        server = await self.start_server()
        sender, stuck, well = [await self.raw_client(server) for _ in range(3)]
        await self.open(sender, stuck, 2)
        own_id = await self.open(sender, well, 4)
        stuck.transport.pauseProducing()  # type: ignore[union-attr]
        block = Frame(FWD, 2, bytes(60_002)).encode()
        probes = 0
        refused: list[Frame] = []
        for number in range(400):
            sender.send(block)
            if number % 20 == 0:
                sender.send(Frame(FWD, 4, b"\0\1probe").encode())
                await self.until(lambda: well.frames)
                self.assertEqual(well.take(), [Frame(FWD, own_id, b"\0\1probe")])
                probes += 1
            refused += sender.take()
            if any(frame.id == 2 and frame.type == CLOSE for frame in refused):
                break
        self.assertEqual(refused[0], Frame(CLOSE, 2, bytes([CloseReason.QUEUE_FULL])))
        self.assertGreater(probes, 2)
        self.assertEqual(server.factory.relay.drops[DropReason.QUEUE_FULL], 1)
        sender.send(Frame(FWD, 4, b"\0\2after").encode())
        await self.until(lambda: well.frames)

    @asynchronous
    async def test_4_one_sender_one_stuck_receiver(self) -> None:
        """Reading from the sender stops for a moment only; another pair never notices."""
        server = await self.start_server()
        sender, stuck, one, two = [await self.raw_client(server) for _ in range(4)]
        await self.open(sender, stuck, 2)
        own_id = await self.open(one, two, 2)
        stuck.transport.pauseProducing()  # type: ignore[union-attr]
        for _ in range(200):
            sender.send(Frame(FWD, 2, bytes(60_002)).encode())
        for _ in range(20):
            one.send(Frame(FWD, 2, b"\0\1x").encode())
            await self.until(lambda: two.frames)
            self.assertEqual(two.take(), [Frame(FWD, own_id, b"\0\1x")])
        await self.until(lambda: sender.frames)
        self.assertEqual(sender.take()[0].payload, bytes([CloseReason.QUEUE_FULL]))

    @asynchronous
    async def test_5_a_flood_of_requests(self) -> None:
        """Ids of a peer are given back when the flooder leaves; others are served meanwhile."""
        server = await self.start_server("--max-transports=500", "--request-rate=0")
        flooder, victim, other = [await self.raw_client(server) for _ in range(3)]
        payload = bytes(flooder.key.public + victim.key.public)
        for number in range(2000):
            flooder.send(Frame(REQUEST, 2 * number, payload).encode())
        await self.until(lambda: len(flooder.frames) >= 1500)
        self.assertTrue(all(f.payload == bytes([CloseReason.TOO_MANY_TRANSPORTS]) for f in flooder.take()))
        self.assertEqual(len(victim.take()), 500)
        flooder.transport.abortConnection()  # type: ignore[union-attr]
        await self.until(lambda: server.factory.relay.route_count == 0)
        await self.until(lambda: len(victim.frames) == 500)
        victim.take()
        await self.open(other, victim, 2)

    @asynchronous
    async def test_6_a_flood_of_useless_frames_ends_its_sender(self) -> None:
        """Answers that are not read end the flooder, not the server."""
        # The limits themselves are tested in test_relay. Each megabyte of answers takes a second of the processor.
        self.patch(congestion, "PEER_QUEUE_MAXIMUM", 256 * 1024)
        self.patch(congestion, "ANSWERS_MAXIMUM", 256 * 1024)
        # On a busy machine, the kernel would drop the flooder, which does not read, before the limit is reached.
        patient = [(*option[:2], 0 if option[1] == "TCP_USER_TIMEOUT" else option[2]) for option in socketopts._OPTIONS]
        # The kernel would otherwise hold megabytes of answers at both ends before the bound is reached.
        self.patch(socketopts, "_OPTIONS", [(socket.SOL_SOCKET, "SO_SNDBUF", 64 * 1024), *patient])
        server = await self.start_server("--request-rate=0")
        flooder = await self.raw_client(server)
        connection: Any = flooder.transport
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        connection.pauseProducing()
        block = Frame(FWD, 9, b"").encode() * 12_000
        for _ in range(600):
            if flooder.closed or not server.factory.sessions:
                break
            flooder.send(block)
            await self.until(lambda: not connection._tempDataBuffer or not server.factory.sessions)
        await self.until(lambda: not server.factory.sessions)
        self.assertEqual(server.factory.relay.drops[DropReason.SEND_BUFFER_FULL], 1)
        await self.assert_serves(server)

    @asynchronous
    async def test_12_the_second_connection_of_a_key(self) -> None:
        server = await self.start_server()
        key = SecKey.generate()
        first, other = await self.raw_client(server, key), await self.raw_client(server)
        old_id = await self.open(other, first, 2)
        second = await self.raw_client(server, key)
        await self.open(other, second, 4)
        other.send(Frame(FWD, 2, b"\0\1old").encode())
        await self.until(lambda: first.frames)
        self.assertEqual(first.take(), [Frame(FWD, old_id, b"\0\1old")])
        first.transport.abortConnection()  # type: ignore[union-attr]
        await self.until(lambda: other.frames)
        self.assertEqual(other.take(), [Frame(CLOSE, 2, bytes([CloseReason.PEER_DISCONNECTED]))])
        await self.open(other, second, 6)

    @asynchronous
    async def test_14_replayed_records(self) -> None:
        server = await self.start_server()
        one, two = await self.raw_client(server), await self.raw_client(server)
        await self.open(one, two)
        record = bytes(one.sealer.seal(Frame(FWD, 2, b"\0\1once").encode()))
        one.transport.write(record)  # type: ignore[union-attr]
        await self.until(lambda: two.frames)
        one.transport.write(record)  # type: ignore[union-attr]
        await self.until(lambda: one.closed)
        await self.until(lambda: len(two.frames) == 2)
        self.assertEqual([frame.type for frame in two.take()], [FWD, CLOSE])


class ClientTests(FaultCase):
    """Defects 7 to 11, 13 and 15: effects of the reference's client on itself."""

    @asynchronous
    async def test_7_to_10_32_writers_of_one_transport(self) -> None:
        """The reference manages 65 messages a second; here each is there once, in order, acknowledged."""
        url = await self.start_discovery()
        await self.start_server(f"--discovery={url}")
        alice, bob = await self.start_client(url, min_servers=1), await self.start_client(url, min_servers=1)
        accepting = Accepting()
        bob.listen(accepting)
        protocol: Any = await alice.connect(bob.public_key, Accepting())
        sent = [b"%02d %04d\n" % (writer, number) for number in range(200) for writer in range(32)]
        await gatherResults([protocol.transport.send(message) for message in sent])
        self.assertEqual(accepting.built[0].data, b"".join(sent))

    @asynchronous
    async def test_9_ten_thousand_deferred_acks(self) -> None:
        """In the reference, the ACKs overflow a record and the transport ends silently."""
        url = await self.start_discovery()
        await self.start_server(f"--discovery={url}")
        alice = await self.start_client(url, min_servers=1, encryption="off")
        bob = await self.start_client(url, min_servers=1, encryption="off")
        accepting = Accepting()
        bob.listen(accepting)
        protocol: Any = await alice.connect(bob.public_key, Accepting())
        await protocol.transport.send(b"start")
        receiver = accepting.built[0]
        receiver.transport.pauseProducing()
        sending = [protocol.transport.send(bytes(65_000)) for _ in range(2)]
        sending += [protocol.transport.send(b"x") for _ in range(12_000)]
        session = bob.sessions()[0]
        await self.until(lambda: any(len(t.held_acks) > 8000 for t in session.core.transports.values()))
        receiver.transport.resumeProducing()
        await gatherResults(sending)
        self.assertEqual(len(receiver.data), 5 + 130_000 + 12_000)

    @asynchronous
    async def test_15_entries_of_the_other_kind(self) -> None:
        """A key that has a server's entry, and a delegated server that is a client: errors, not a crash."""
        url = await self.start_discovery()
        server = await self.start_server(f"--discovery={url}")
        alice = await self.start_client(url, min_servers=1, encryption="prefer")
        key = SecKey.generate()
        for delegated in ((alice.public_key.hex(),), (key.public.hex(),), ("00" * 33,), None):
            await alice._lookups.update(
                key,
                lambda entry, delegated=delegated: Entry(
                    entry.version, entry.sequence, entry.timestamp, entry.static, client=ClientMeta(delegated)
                ),
            )
            alice._entries.forget()
            for target in (key.public, server._key.public):
                try:
                    await alice.connect(target, Accepting(), timeout=5)
                except Exception as error:
                    self.assertIn(type(error).__name__, ("ConnectFailed",))


class RandomTests(SynchronousTestCase):
    """Random and changed bytes in every state: errors have reasons, the server runs on, and memory does not grow."""

    @given(st.integers(0, 4), st.binary(min_size=1, max_size=300), st.integers(0, 400))
    def test_random_bytes_in_any_state_raise_only_named_errors(self, state: int, data: bytes, where: int) -> None:
        network = MemoryNetwork()
        client = RawClient(SecKey.from_seed(b"random"), SERVER_KEY.public)
        if state == 0:
            network.join(Recorder())
            network.pumps[-1].clientIO.write(data)
        else:
            network.join(client)
            if state == 1:  # The connection ends in the middle of the handshake.
                network.pumps[-1].clientIO.write(data)
            network.settle()
            if state >= 2 and client.opener is not None:
                if state == 2:  # The data are not a record.
                    network.pumps[-1].clientIO.write(data)
                elif state == 3:  # The data are a record, but not of the expected content.
                    client.send(data)
                else:  # The record was changed.
                    record = bytearray(client.sealer.seal(data))
                    record[where % len(record)] ^= 0x55
                    network.pumps[-1].clientIO.write(bytes(record))
        network.settle()
        self.assertEqual(self.flushLoggedErrors(), [])
        network.clock.advance(10)
        network.settle()
        self.assertEqual(network.factory.handshakes, 0)
        self.assertEqual(network.factory.relay.route_count, 0)
        self.assertLessEqual(len(network.factory.sessions), 1)
        survivor = network.client(SecKey.from_seed(b"survivor"))
        self.assertTrue(survivor.connected)

    def test_a_free_id_is_found_while_nearly_all_are_used(self) -> None:
        """Defect 5 at the client: a new id is found at once however many are in use."""
        core = ClientConnection(SERVER_KEY.public)
        for _ in range(32767):
            core.request(SERVER_KEY.public)
        self.assertEqual(core.request(SERVER_KEY.public).id % 2, 0)


class KillTests(FaultCase):
    """kill -9 of discovery between two POSTs of a running stream."""

    @asynchronous
    async def test_every_answered_post_is_there_afterwards(self) -> None:
        directory = Path(self.mktemp())
        directory.mkdir()
        options = (
            "--listen=tcp:0:interface=127.0.0.1",
            f"--store=sqlite:{directory.resolve() / 'discovery.sqlite'}",
            "--rate-limit=0",
        )
        answered: dict[str, bytes] = {}
        for _ in range(3):
            child = start_twistd(reactor, "dmsg-discovery", *options, directory=str(directory))
            url = f"http://{await address_of(reactor, child)}"
            await self._check(url, answered)
            await self._post_until_killed(child, url, answered)
        child = start_twistd(reactor, "dmsg-discovery", *options, directory=str(directory))
        await self._check(f"http://{await address_of(reactor, child)}", answered)
        self.assertGreater(len(answered), 100)
        self.assertEqual(await stop(reactor, child), TERMINATED)

    async def _post_until_killed(self, child: Any, url: str, answered: dict[str, bytes]) -> None:
        enough = len(answered) + 50
        killed = False

        async def stream(number: int) -> None:
            nonlocal killed
            while child.status is None:
                key = SecKey.generate()
                entry = Entry("0.0.1", 0, 1, key.public.hex(), client=ClientMeta(())).sign(key)
                try:
                    response = await treq.post(f"{url}/discovery/entries", entry.to_json(), persistent=False)
                    if response.code == 200:
                        answered[entry.static] = entry.to_json()
                    await response.content()
                except Exception:
                    return
                if len(answered) >= enough and not killed:
                    killed = True
                    child.signal("KILL")

        await gatherResults([Deferred.fromCoroutine(stream(number)) for number in range(8)])
        await child.ended

    async def _check(self, url: str, answered: dict[str, bytes]) -> None:
        for static, body in answered.items():
            response = await treq.get(f"{url}/discovery/entries/{static}", persistent=False)
            self.assertEqual((response.code, await response.content()), (200, body))


class CrowdTests(FaultCase):
    """Many clients at once; ``long_crowd`` has a thousand."""

    CLIENTS = 200
    MESSAGES = 5

    @asynchronous
    async def test_many_clients_exchange_messages(self) -> None:
        """Each client has a transport to another one; each message is acknowledged, and received once and in order."""
        server = await self.start_server()
        port = server.ports[0].getHost().port
        turn = TurnFlush(reactor)
        endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", port)
        keys = [SecKey.generate() for _ in range(self.CLIENTS)]
        accepting = [Accepting() for _ in keys]

        async def session(number: int) -> ClientSession:
            key = keys[number]
            make_link = record_links(reactor, turn, key, server._key.public, timeout=60)
            noise = LinkClientEndpoint(reactor, endpoint, make_link)
            made: ClientSession = await noise.connect(
                lambda remote: ClientSession(
                    reactor,
                    turn,
                    key.public,
                    remote,
                    accept=lambda: accepting[number],
                )
            )
            await made.established
            return made

        sessions = []
        for start in range(0, self.CLIENTS, 100):
            sessions += await gatherResults([Deferred.fromCoroutine(session(n)) for n in range(start, start + 100)])
        self.assertEqual(len(server.factory.sessions), self.CLIENTS)
        protocols: list[Any] = await gatherResults(
            [one.open(keys[(n + 1) % self.CLIENTS].public, Accepting(), 60) for n, one in enumerate(sessions)]
        )
        self.assertEqual(server.factory.relay.route_count, 2 * self.CLIENTS)
        await gatherResults(
            [
                protocol.transport.send(b"%d from %d;" % (message, number))
                for message in range(self.MESSAGES)
                for number, protocol in enumerate(protocols)
            ]
        )
        for number in range(self.CLIENTS):
            (receiver,) = accepting[(number + 1) % self.CLIENTS].built
            expected = b"".join(b"%d from %d;" % (message, number) for message in range(self.MESSAGES))
            self.assertEqual(receiver.data, expected)
        server.factory.relay.check()
        for one in sessions:
            one.close()
        await gatherResults([one.lost for one in sessions])
        await self.until(lambda: not server.factory.sessions)
        self.assertEqual(server.factory.relay.route_count, 0)


class SignalTests(FaultCase):
    """SIGTERM drains within ten seconds."""

    @asynchronous
    async def test_sigterm_drains_within_ten_seconds(self) -> None:
        url = await self.start_discovery()
        directory = Path(self.mktemp())
        directory.mkdir()
        child = start_twistd(
            reactor,
            "dmsg-server",
            "--listen=tcp:0:interface=127.0.0.1",
            f"--discovery={url}",
            "--key-file=server.key",
            "--create",
            directory=str(directory),
        )
        await child.line("registered in discovery")
        alice = await self.start_client(url, min_servers=1, resume_timeout=0)
        bob = await self.start_client(url, min_servers=1, resume_timeout=0)
        bob.listen(Accepting())
        protocol: Any = await alice.connect(bob.public_key, Accepting())
        started = reactor.seconds()
        child.signal("TERM")
        status = await child.ended
        self.assertEqual(status, TERMINATED)
        self.assertLess(reactor.seconds() - started, 10)
        self.assertEqual(protocol.lost.value.close_reason, CloseReason.SHUTTING_DOWN)
        self.assertEqual(await alice._lookups.available_servers(), [])
