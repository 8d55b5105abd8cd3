"""An agent in this process, and programs at its real socket."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
from pathlib import Path
from typing import Any, cast

from twisted.internet import reactor
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.threads import deferToThread

from dmsg.agent import program_service, programs, service
from dmsg.agent.client import AgentClient
from dmsg.agent.local_stream import LocalStream
from dmsg.agent.service import Agent
from dmsg.agent.socket_path import AgentError, find_agent, lines
from dmsg.agent.wire import WINDOW, Kind, encode_close, encode_frame, encode_line
from dmsg.apps.splice import SpliceFactory
from dmsg.errors import CloseReason, ConnectFailed, DmsgError, EntryNotFound
from dmsg.keys import SecKey
from dmsg.net.streams.address import DmsgAddress, StreamLost
from tests.net.support import TIMEOUT, EntityCase
from tests.support import Accepting, Recorder, asynchronous, some
from tests.v2019.test_half_close import Halves


class Greedy(Protocol):
    """Protocol that sends much data, and reads nothing until the test says so."""

    size = 8 * WINDOW

    def connectionMade(self) -> None:
        self.transport.pauseProducing()  # type: ignore[union-attr]
        self.transport.write(bytes(self.size))  # type: ignore[union-attr]


class Answering(Recorder, Protocol):
    """Application that answers each piece of data."""

    def dataReceived(self, data: bytes) -> None:
        super().dataReceived(data)
        self.transport.write(b"answer")  # type: ignore[union-attr]


class AgentCase(EntityCase):
    """A network with one server, an agent, and a client somewhere else."""

    async def up(self) -> None:
        self.url = await self.start_discovery()
        await self.start_server(f"--discovery={self.url}")
        self.path = Path(self.mktemp()) / "agent.sock"
        if len(os.fsencode(self.path.absolute())) > 100:
            self.path = Path(f"/tmp/dmsg-test-{os.getpid()}-{id(self):x}") / "agent.sock"
            self.addCleanup(lambda: self.path.parent.exists() and self.path.parent.rmdir())
        self.downs: list[None] = []
        self.agent = await self.start_agent(SecKey.generate())
        self.peer = await self.start_client(self.url)
        self.program = await self.start_program()

    async def start_agent(self, key: SecKey) -> Agent:
        from dmsg.v2019.client import Client

        client = Client(reactor, key, [self.url])
        agent = Agent(reactor, client, self.path, (self.url,), lambda: self.downs.append(None))
        agent.startService()
        self.addCleanup(agent.stopService)
        await client.when_published(TIMEOUT)
        return agent

    async def start_program(self) -> AgentClient:
        found = some(await deferToThread(find_agent, self.path))
        self.told: list[str] = []
        program = AgentClient(reactor, found, "a test", on_warning=self.told.append)
        self.addCleanup(program.stopService)
        return program

    async def joined(self) -> tuple[Any, Any]:
        """A stream of a program, and its other end."""
        accepting = Accepting()
        port = self.peer.listen(accepting, 7)
        self.addCleanup(port.stopListening)
        here: Any = await self.program.connect(self.peer.public_key, Factory.forProtocol(Recorder), port=7)
        return here, await self.until(lambda: accepting.built and accepting.built[0])

    async def turns(self) -> None:
        """A hundred turns of the reactor."""
        for _ in range(100):
            waiting: Deferred[None] = Deferred()
            reactor.callLater(0, waiting.callback, None)
            await waiting


class ProgramTests(AgentCase):
    """Programs use the agent over its socket."""

    @asynchronous
    async def test_the_socket_is_this_users_alone(self) -> None:
        await self.up()
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), 0o600)
        self.assertEqual(stat.S_IMODE(self.path.parent.stat().st_mode), 0o700)
        with self.assertRaisesRegex(AgentError, "an agent runs there already"):
            other = Agent(reactor, self.agent.client, self.path, (), lambda: None)
            await deferToThread(other._listen)
        await self.agent.stopService()
        self.assertFalse(self.path.exists())

    @asynchronous
    async def test_each_direction_can_end_on_its_own(self) -> None:
        """Each direction of a stream ends independently through the agent, also for listening programs."""
        await self.up()
        accepting, taken = Accepting(Halves), Accepting(Halves)
        port = self.peer.listen(accepting, 7)
        self.addCleanup(port.stopListening)
        here: Any = await self.program.connect(self.peer.public_key, Factory.forProtocol(Halves), port=7)
        there = await self.until(lambda: accepting.built and accepting.built[0])
        listening: Any = await self.program.listen(taken, 8)
        back: Any = await self.peer.connect(self.program.public_key, Factory.forProtocol(Halves), port=8)
        service = await self.until(lambda: taken.built and taken.built[0].transport and taken.built[0])
        for first, second in ((here, there), (there, here), (back, service)):
            if first.transport.writing_ended:
                continue
            first.transport.write(b"x" * 100_000)
            await first.transport.end_writing()
            await self.until(lambda end=second: "no more comes" in end.told)
            self.assertEqual(len(second.data), 100_000)
            if first is back:
                second.transport.write(b"answer")
                second.transport.loseWriteConnection()
        await self.until(lambda: all(one.lost for one in (here, there, back, service)))
        self.assertEqual(back.data, b"answer")
        self.assertEqual({one.lost.type for one in (here, there, back, service)}, {ConnectionDone})
        self.assertEqual(here.transport.acknowledged_bytes, 100_000)
        await listening.stopListening()

    @asynchronous
    async def test_a_stream_to_a_peer_is_acknowledged_and_bound_to_both_keys(self) -> None:
        """A stream to a peer is acknowledged, bound to both keys, and closed after all written data were sent."""
        await self.up()
        here, there = await self.joined()
        transport: LocalStream = here.transport
        await transport.send(b"hello")
        self.assertEqual(there.data, b"hello")
        self.assertEqual(transport.acknowledged_bytes, 5)
        # The empty frame measures the way to the peer. It does not count as a byte of the stream.
        await transport.send(b"")
        there.transport.write(b"x" * 200_000)
        await self.until(lambda: len(here.data) == 200_000)
        self.assertEqual(transport.binding, there.transport.binding)
        self.assertTrue(transport.secure)
        self.assertEqual(transport.getPeer(), there.transport.getHost())
        self.assertEqual(transport.getHost().public_key, self.agent.client.public_key)  # type: ignore[attr-defined]
        self.assertEqual(transport.server, there.transport.server)
        transport.write(b"y" * 300_000)
        transport.loseConnection()
        await self.until(lambda: there.lost and here.lost)
        self.assertEqual(len(there.data), 300_005)
        await self.until(lambda: not self.agent.bridges)

    @asynchronous
    async def test_a_reason_crosses_both_ways(self) -> None:
        await self.up()
        here, there = await self.joined()
        there.transport.abort(CloseReason.STALLED)
        await self.until(lambda: here.lost)
        self.assertEqual(here.lost.value.close_reason, CloseReason.STALLED)
        port = self.peer.listen(accepting := Accepting(), 8)
        self.addCleanup(port.stopListening)
        here = cast(Any, await self.program.connect(self.peer.public_key, Factory.forProtocol(Recorder), port=8))
        there = await self.until(lambda: accepting.built and accepting.built[0])
        here.transport.abortConnection()
        await self.until(lambda: there.lost)
        self.assertEqual(there.lost.value.close_reason, CloseReason.ABORTED)

    @asynchronous
    async def test_a_program_that_stops_reading_is_sent_at_most_a_window(self) -> None:
        """A window each way: neither the agent nor the program holds more, and all of it arrives in the end."""
        await self.up()
        accepting = Accepting(Recorder)
        self.addCleanup(self.peer.listen(accepting, 7).stopListening)
        here: Any = await self.program.connect(self.peer.public_key, Factory.forProtocol(Recorder), port=7)
        there = await self.until(lambda: accepting.built and accepting.built[0])
        here.transport.pauseProducing()
        there.transport.write(bytes(6 * WINDOW))
        there.transport.pauseProducing()
        here.transport.write(bytes(6 * WINDOW))
        bridge = next(iter(self.agent.bridges))
        await self.until(lambda: bridge.bytes_in > WINDOW)
        for _ in range(5):
            await self.turns()
        self.assertLess(bridge.bytes_in, 2 * WINDOW)
        self.assertLess(here.transport._carrier.bytes_in_flight, 2 * WINDOW)
        here.transport.resumeProducing()
        there.transport.resumeProducing()
        await self.until(lambda: len(here.data) == len(there.data) == 6 * WINDOW)

    @asynchronous
    async def test_agent_errors_equal_those_of_a_client(self) -> None:
        await self.up()
        factory = Factory.forProtocol(Recorder)
        with self.assertRaisesRegex(ConnectFailed, "nobody listens at"):
            await self.program.connect(self.peer.public_key, factory, port=99)
        stranger = SecKey.generate().public
        with self.assertRaises(EntryNotFound) as caught:
            await self.program.connect(stranger, factory)
        self.assertEqual(caught.exception.key, str(stranger))

    @asynchronous
    async def test_peers_reach_the_program_that_holds_the_port(self) -> None:
        """Streams of peers come to the program that has the port, with the peers' keys; another program cannot have
        the port.
        """
        await self.up()
        accepting = Accepting()
        port = await self.program.listen(accepting, 80)
        streams: list[Any] = []
        for number in range(3):
            one: Any = await self.peer.connect(self.agent.client.public_key, Factory.forProtocol(Recorder), port=80)
            one.transport.write(b"number %d" % number)
            streams.append(one)
        await self.until(lambda: [each.data for each in accepting.built] == [b"number 0", b"number 1", b"number 2"])
        self.assertEqual(accepting.built[0].transport.getPeer().public_key, self.peer.public_key)
        accepting.built[0].transport.write(b"answer")
        await self.until(lambda: streams[0].data == b"answer")
        with self.assertRaisesRegex(DmsgError, r"port 80 .* is in use by a test \(process \d+\)"):
            await self.program.listen(Accepting(), 80)
        told = self.agent.status()
        self.assertEqual([(one["port"], one["taken"]) for one in told["services"]], [(80, 3)])
        self.assertEqual(len(told["streams"]), 3)
        await maybeDeferred(port.stopListening)
        await self.until(lambda: not self.agent.services)
        with self.assertRaisesRegex(ConnectFailed, "nobody listens at"):
            await self.peer.connect(self.agent.client.public_key, Factory.forProtocol(Recorder), port=80)
        self.assertEqual(self.agent.client.refused["refused"], 1)

    @asynchronous
    async def test_a_program_can_refuse_a_stream(self) -> None:
        await self.up()

        class Closed(Factory):
            noisy = False

            def buildProtocol(self, addr: object) -> None:
                return None

        await self.program.listen(Closed(), 80)
        one: Any = await self.peer.connect(self.agent.client.public_key, Factory.forProtocol(Recorder), port=80)
        await self.until(lambda: one.lost)
        self.assertIsInstance(one.lost.value, StreamLost)
        self.assertEqual(one.lost.value.close_reason, CloseReason.REFUSED)
        self.assertEqual(self.agent.status()["services"][0]["refused"], 1)

    @asynchronous
    async def test_an_agent_that_ends_and_comes_back(self) -> None:
        """Streams end for a reason; services are there again, and who connects meanwhile waits."""
        await self.up()
        key = self.agent.client._key
        accepting = Accepting()
        await self.program.listen(accepting, 80)
        here, there = await self.joined()
        await self.agent.stopService()
        await self.until(lambda: here.lost)
        self.assertEqual(here.lost.value.close_reason, CloseReason.PEER_DISCONNECTED)
        await self.until(lambda: there.lost)
        self.assertEqual(there.lost.value.close_reason, CloseReason.ABORTED)  # The program had not ended its output.
        connecting = self.program.connect(self.peer.public_key, Factory.forProtocol(Recorder), port=7)
        self.agent = await self.start_agent(key)
        again: Any = await connecting
        await again.transport.send(b"again")
        await self.until(lambda: self.agent.services)
        one: Any = await self.peer.connect(key.public, Factory.forProtocol(Recorder), port=80)
        await one.transport.send(b"hi")
        await self.until(lambda: accepting.built and accepting.built[-1].data == b"hi")
        self.assertEqual(len(self.told), 2, self.told)

    @asynchronous
    async def test_a_service_that_stops_while_it_is_registered_again(self) -> None:
        """The agent closes the port again."""
        await self.up()
        key = self.agent.client._key
        listening: Any = await self.program.listen(Accepting(), 80)
        register, registered = listening.register, list[bool]()

        async def register_and_stop() -> None:
            await register()
            # The service is stopped as if the answer of the agent had not arrived yet.
            lines, listening._lines = listening._lines, None
            await listening.stopListening()
            listening._lines = lines
            registered.append(True)

        listening.register = register_and_stop
        await self.agent.stopService()
        self.agent = await self.start_agent(key)
        await self.until(lambda: registered and not self.agent.services)
        self.assertEqual(len(self.told), 1, self.told)

    @asynchronous
    async def test_a_program_that_is_killed_ends_its_streams(self) -> None:
        await self.up()
        here, there = await self.joined()
        here.transport._carrier._transport.abortConnection()
        await self.until(lambda: there.lost)
        self.assertEqual(there.lost.value.close_reason, CloseReason.ABORTED)
        self.assertFalse(self.agent.bridges)

    @asynchronous
    async def test_data_arrives_before_the_close_that_follows_it(self) -> None:
        """A peer that sends and closes at once; the program reads while the agent has said its last."""
        await self.up()
        accepting = Accepting()
        await self.program.listen(accepting, 80)
        for number in range(15):
            one: Any = await self.peer.connect(self.agent.client.public_key, Factory.forProtocol(Recorder), port=80)
            one.transport.write(bytes(900_000))
            one.transport.loseConnection()
            there = await self.until(lambda number=number: len(accepting.built) > number and accepting.built[number])
            await self.until(lambda there=there: there.lost)
            self.assertEqual(len(there.data), 900_000)
            self.assertIsInstance(there.lost.value, ConnectionDone)
        await self.until(lambda: not self.agent.bridges and self.agent.shared.unread == 0)

    @asynchronous
    async def test_more_streams_than_the_backlog_are_all_served(self) -> None:
        await self.up()
        accepting = Accepting()
        await self.program.listen(accepting, 80)
        # A client takes no more than 200 handshakes at once of a key that it has not met; data makes the peer known.
        met: Any = await self.peer.connect(self.agent.client.public_key, Factory.forProtocol(Recorder), 80)
        await met.transport.send(b"known")
        opened = [
            self.peer.connect(self.agent.client.public_key, Factory.forProtocol(Recorder), 80, timeout=60)
            for _ in range(400)
        ]
        for one in opened:
            protocol: Any = await one
            await protocol.transport.send(b"hello")
        await self.until(lambda: sum(one.data == b"hello" for one in accepting.built) == 400)
        self.assertEqual(self.agent.services[80].refused, 0)
        self.assertEqual(self.agent.services[80].stream_count, 401)

    @asynchronous
    async def test_an_agent_with_another_key_is_not_used_in_place_of_the_first(self) -> None:
        """An agent that comes back as somebody else is not used in the first one's name."""
        await self.up()
        await self.program.listen(Accepting(), 80)
        await self.agent.stopService()
        await self.until(lambda: len(self.told) == 1)
        self.agent = await self.start_agent(SecKey.generate())
        await self.until(lambda: len(self.told) == 2)
        self.assertRegex(
            self.told[1], f"^the agent now runs with another key, {self.agent.client.public_key.text}; trying again"
        )
        self.assertEqual(self.agent.services, {})
        with self.assertRaisesRegex(DmsgError, "now runs with another key"):
            await self.program.connect(self.peer.public_key, Factory.forProtocol(Recorder))


class StrangeTests(AgentCase):
    """Programs of this user that keep to no rule: their connection ends, and nobody else's."""

    async def say(self, data: bytes) -> bytes:
        """Return the agent's whole answer."""

        def talk() -> bytes:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
                channel.settimeout(20)
                channel.connect(os.fspath(self.path))
                channel.sendall(data)
                answer = b""
                while got := channel.recv(65536):
                    answer += got
                return answer

        return await deferToThread(talk)

    @asynchronous
    async def test_malformed_requests_end_the_connection(self) -> None:
        await self.up()
        for request in (
            b"hello\n",
            b"[]\n",
            b"{}\n",
            b'{"do": "connectionMade"}\n',
            b'{"do": ["hello"]}\n',
            b'{"do": "connect"}\n',
            b'{"do": "connect", "to": 7}\n',
            b'{"do": "connect", "to": "02ab", "port": 1}\n',
            encode_line({"do": "connect", "to": str(self.peer.public_key), "port": 70000}),
            encode_line({"do": "connect", "to": str(self.peer.public_key), "port": "x"}),
            encode_line({"do": "connect", "to": str(self.peer.public_key), "timeout": -1}),
            encode_line({"do": "connect", "to": str(self.peer.public_key), "timeout": 1e99}),
            encode_line({"do": "connect", "to": str(self.peer.public_key), "via": "me"}),
            encode_line({"do": "ping", "to": str(self.peer.public_key), "count": 0}),
            encode_line({"do": "ping", "to": str(self.peer.public_key), "count": 10**9}),
            encode_line({"do": "ping", "to": str(self.peer.public_key), "count": "many"}),
            encode_line({"do": "listen", "port": -1}),
            encode_line({"do": "accept"}),
            encode_line({"do": "accept", "stream": 7}),
            encode_line({"do": "accept", "stream": "7"}),
            encode_line({"do": "wait", "timeout": True}),
            b"x" * 70_000,
            b"x" * 700_000,
        ):
            answer = await self.say(request)
            self.assertIn(b'"error"', answer, request)
            self.assertEqual(answer.count(b"\n"), 1, request)
        self.assertFalse(self.flushLoggedErrors())
        await self.program.when_online()

    @asynchronous
    async def test_malformed_frames_end_the_connection(self) -> None:
        await self.up()
        self.addCleanup(self.peer.listen(Accepting(), 7).stopListening)
        request = encode_line({"do": "connect", "to": str(self.peer.public_key), "port": 7})
        for sent in (
            encode_frame(Kind.TAKEN, b"\0\0\0\1"),
            encode_frame(Kind.WAY, b"{}"),
            encode_frame(Kind.CLOSE, b""),
            encode_frame(Kind.READ, b"1"),
            b"\7\0\0\0\0",
            b"\0\xff\xff\xff\xff",
        ):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
                channel.connect(os.fspath(self.path))

                def talk(channel: socket.socket = channel, sent: bytes = sent) -> bytes:
                    channel.settimeout(20)
                    channel.sendall(request)
                    channel.recv(65536)
                    channel.sendall(sent)
                    answer = b""
                    while got := channel.recv(65536):
                        answer += got
                    return answer

                self.assertEqual(await deferToThread(talk), b"", sent)  # The connection ends.
        await self.until(lambda: not self.agent.bridges)
        self.assertFalse(self.flushLoggedErrors())

    async def serve_port(self, port: int) -> socket.socket:
        """Return the socket of a program that serves a port and does nothing more by itself."""
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.addCleanup(channel.close)
        channel.connect(os.fspath(self.path))
        channel.sendall(encode_line({"do": "listen", "port": port}))
        await self.until(lambda: port in self.agent.services)
        return channel

    @asynchronous
    async def test_peers_are_refused_when_a_program_accepts_no_streams(self) -> None:
        """Peers are refused when too many streams wait for the program; the agent continues."""
        await self.up()
        self.patch(program_service, "MAX_STREAMS_PER_SERVICE", 50)
        channel = await self.serve_port(9)
        taken = self.agent.services[9]
        opened = [
            self.peer.connect(self.agent.client.public_key, Factory.forProtocol(Recorder), port=9) for _ in range(70)
        ]
        for one in opened:
            await one
        await self.until(lambda: taken.refused == 20)
        self.assertEqual(len(taken.waiting), 50)
        channel.close()
        await self.until(lambda: not self.agent.untaken)

    @asynchronous
    async def test_a_program_cannot_accept_the_stream_of_another(self) -> None:
        """A program that guesses numbers gets no stream that a peer has opened to another program."""
        await self.up()
        channel = await self.serve_port(9)
        peers: list[Any] = [
            await self.peer.connect(self.agent.client.public_key, Factory.forProtocol(Recorder), port=9)
            for _ in range(3)
        ]
        owner = self.agent.services[9]
        await self.until(lambda: len(owner.waiting) == 3)

        def offered() -> list[int]:
            with channel.makefile("rb") as told:
                told.readline()
                return [json.loads(told.readline())["stream"] for _ in range(3)]

        numbers = await deferToThread(offered)
        for guess in (*range(-2, 40), 2**53 - 1):
            answer = await self.say(encode_line({"do": "accept", "stream": guess}) + encode_close(CloseReason.STALLED))
            self.assertIn(b"there is no such stream", answer, guess)
        other = await self.serve_port(10)
        # A program that learned a number in another way can still not refuse the stream over its own connection.
        other.sendall(b"".join(encode_line({"refuse": number}) for number in numbers))
        await self.say(encode_line({"do": "hello"}))
        self.assertEqual((len(owner.waiting), owner.refused, [one.lost for one in peers]), (3, 0, [None] * 3))
        self.assertLess(max(numbers), 2**53)  # JavaScript and others read JSON's numbers as doubles.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
            own.connect(os.fspath(self.path))
            own.sendall(encode_line({"do": "accept", "stream": numbers[1]}) + encode_frame(Kind.DATA, b"mine"))
            await self.until(lambda: any(one.data == b"mine" for one in peers))
        self.assertEqual(owner.stream_count, 1)

    @asynchronous
    async def test_a_peer_with_many_streams_keeps_no_other_out(self) -> None:
        """At the limit of one service or of all services, a peer with many streams loses one to another peer."""
        await self.up()
        self.patch(program_service, "MAX_STREAMS_PER_SERVICE", 10)
        self.patch(service, "MAX_PROGRAMS", 30)
        greedy, modest, me = self.peer, await self.start_client(self.url), self.agent.client.public_key
        taken = {port: Accepting() for port in (80, 81)}
        for port, accepting in taken.items():
            await self.program.listen(accepting, port)

        async def open_streams(count: int, port: int, client: Any) -> list[Any]:
            return [await client.connect(me, Factory.forProtocol(Recorder), port=port) for _ in range(count)]

        first = await open_streams(10, 80, greedy)
        await self.until(lambda: len(taken[80].built) == 10)
        refused: Any = await greedy.connect(me, Factory.forProtocol(Recorder), port=80)
        await self.until(lambda: refused.lost)
        (one,) = await open_streams(1, 80, modest)
        await one.transport.send(b"here")
        await self.until(lambda: sum(bool(each.lost) for each in first) == 1)
        self.assertEqual(first[-1].lost.value.close_reason, CloseReason.TOO_MANY_TRANSPORTS)
        second = await open_streams(5, 81, greedy)
        await self.until(lambda: len(taken[81].built) == 5)
        (other,) = await open_streams(1, 81, modest)
        await other.transport.send(b"here, too")
        await self.until(lambda: second[-1].lost)
        self.assertEqual([one.lost, other.lost, sum(bool(each.lost) for each in (*first, *second))], [None, None, 2])
        self.assertEqual(sum(service.open_count for service in self.agent.services.values()), 15)

    @asynchronous
    async def test_new_keys_keep_no_peer_out_that_was_served_before(self) -> None:
        """Each new key has no more streams than it may keep, and together they fill the table."""
        await self.up()
        self.patch(program_service, "MAX_STREAMS_PER_SERVICE", 4)
        self.patch(program_service, "PROTECTED_DIVISOR", 2)
        me, accepting = self.agent.client.public_key, Accepting()
        await self.program.listen(accepting, 80)

        async def open_stream(client: Any) -> Any:
            return await client.connect(me, Factory.forProtocol(Recorder), port=80)

        served = await open_stream(self.peer)
        await self.until(lambda: len(accepting.built) == 1)
        served.transport.loseConnection()
        await self.until(lambda: self.agent.services[80].open_count == 0)
        streams = []
        for _ in range(2):
            client = await self.start_client(self.url)
            streams += [await open_stream(client) for _ in range(2)]
        await self.until(lambda: len(accepting.built) == 5)
        new = await open_stream(await self.start_client(self.url))
        await self.until(lambda: new.lost)
        again = await open_stream(self.peer)
        await self.until(lambda: streams[-1].lost)
        await again.transport.send(b"served")
        self.assertEqual([bool(one.lost) for one in (*streams, again)], [False, False, False, True, False])

    @asynchronous
    async def test_streams_that_ended_before_they_were_accepted_take_no_place(self) -> None:
        """A program whose streams end before it accepts them accepts others afterwards: none of them is counted."""
        await self.up()
        factory = SpliceFactory(lambda made: Deferred(), max_pairs=3)
        listening: Any = await self.program.listen(factory, 80)
        address = DmsgAddress(self.peer.public_key, 0)
        for number in range(5):
            await listening._take(number, address, listening._lines)  # The agent does not have this stream any more.
        self.assertEqual(factory.pair_count, 0)
        await self.peer.connect(self.agent.client.public_key, Factory.forProtocol(Recorder), port=80)
        await self.until(lambda: factory.pair_count == 1)

    @asynchronous
    async def test_status_and_down_are_answered_at_the_connection_limit(self) -> None:
        """A program can still ask for the agent's state, and stop the agent."""
        await self.up()
        self.patch(service, "MAX_PROGRAMS", 20)
        channels = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(21)]
        for channel in channels:
            self.addCleanup(channel.close)
            channel.connect(os.fspath(self.path))
        await self.until(lambda: self.agent.is_full)
        self.assertIsNotNone(await deferToThread(find_agent, self.path))
        with self.assertRaisesRegex(DmsgError, "limit of connections from programs"):
            await self.program.connect(self.peer.public_key, Factory.forProtocol(Recorder))
        with self.assertRaisesRegex(AgentError, "an agent runs there already"):
            await deferToThread(Agent(reactor, self.agent.client, self.path, (), lambda: None)._listen)
        for _ in range(3):
            self.assertIn(b'"pid"', await self.say_first(encode_line({"do": "down"})))
        await self.until(lambda: len(self.downs) == 3)

    @asynchronous
    async def test_offers_that_a_program_does_not_read_fill_no_memory(self) -> None:
        """A stopped program is offered no more streams until it reads again."""
        await self.up()
        channel = await self.serve_port(9)
        owner, address = self.agent.services[9], DmsgAddress(self.peer.public_key, 0)

        def offer() -> bool:
            """Offer a stream that ends at once, and return whether the service took it."""
            taken = owner.buildProtocol(address) is not None
            owner.stop()
            return taken

        for _ in range(100):
            offers = sum(offer() for _ in range(100))
            await self.turns()
            if not offers:
                break
        self.assertEqual(offers, 0)
        channel.setblocking(False)

        def read() -> bool:
            with contextlib.suppress(BlockingIOError):
                while channel.recv(1 << 20):
                    pass
            return not owner.is_congested

        await self.until(read)
        self.assertTrue(offer())
        await self.agent.stopService()
        await self.until(lambda: not self.agent._factory.open)

    @asynchronous
    async def test_an_agent_that_may_open_few_files_accepts_fewer_programs(self) -> None:
        """Otherwise even ``status`` and ``down`` would fail, because the agent could accept no connection."""
        await self.up()
        self.assertEqual(self.agent.max_programs, program_service.MAX_PROGRAMS)
        self.patch(service, "max_connections", lambda: programs.RESERVED_CONNECTIONS + 20)
        self.assertEqual(self.agent.max_programs, 20)
        channels = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(21)]
        for channel in channels:
            self.addCleanup(channel.close)
            channel.connect(os.fspath(self.path))
        await self.until(lambda: self.agent.is_full)
        self.assertIsNotNone(await deferToThread(find_agent, self.path))

    async def say_first(self, data: bytes) -> bytes:
        """The first line that the agent answers."""

        def talk() -> bytes:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
                channel.settimeout(20)
                channel.connect(os.fspath(self.path))
                channel.sendall(data)
                return channel.recv(65536)

        return await deferToThread(talk)

    @asynchronous
    async def test_more_frames_than_the_window_has(self) -> None:
        """Empty ones count, too."""
        await self.up()
        self.addCleanup(self.peer.listen(Accepting(), 7).stopListening)
        request = encode_line({"do": "connect", "to": str(self.peer.public_key), "port": 7})

        def talk() -> int:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
                channel.settimeout(20)
                channel.connect(os.fspath(self.path))
                channel.sendall(request)
                channel.recv(65536)
                with contextlib.suppress(OSError):
                    for _ in range(1000):
                        channel.sendall(encode_frame(Kind.DATA) * 5000)
                    return 1000
                return 0

        self.assertEqual(await deferToThread(talk), 0)
        await self.until(lambda: not self.agent.bridges)

    @asynchronous
    async def test_frames_written_behind_a_request_belong_to_the_stream(self) -> None:
        """Frames behind the request, in the same write, are the first of the stream; and it may only write at first."""
        await self.up()
        accepting = Accepting()
        self.addCleanup(self.peer.listen(accepting, 7).stopListening)
        request = encode_line({"do": "connect", "to": str(self.peer.public_key), "port": 7})
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.connect(os.fspath(self.path))
            channel.sendall(request + encode_frame(Kind.DATA, b"early"))
            there = await self.until(lambda: accepting.built and accepting.built[0])
            await self.until(lambda: there.data == b"early")
            # The agent reads from a program even if it cannot write to this program.
            there.transport.write(bytes(900_000))
            bridge = next(iter(self.agent.bridges))
            await self.until(lambda: bridge.bytes_in == 900_000)
            await deferToThread(channel.sendall, encode_frame(Kind.DATA, b"late"))
            await self.until(lambda: there.data == b"earlylate")
            channel.sendall(encode_close(CloseReason.UNSPECIFIED))
            await self.until(lambda: there.lost)
            self.assertIsInstance(there.lost.value, ConnectionDone)
            self.assertFalse(self.agent.bridges)

    @asynchronous
    async def test_a_close_right_after_data_while_the_peer_answers(self) -> None:
        """All data arrives, although the peer answers while nobody reads the stream any more."""
        await self.up()
        accepting = Accepting(Answering)
        self.addCleanup(self.peer.listen(accepting, 7).stopListening)
        request = encode_line({"do": "connect", "to": str(self.peer.public_key), "port": 7})
        frames = encode_frame(Kind.DATA, bytes(60_000)) * 8
        await self.say(request + frames + encode_close(CloseReason.UNSPECIFIED))
        there = await self.until(lambda: accepting.built and accepting.built[0])
        await self.until(lambda: there.lost)
        self.assertEqual(len(there.data), 480_000)
        self.assertIsInstance(there.lost.value, ConnectionDone)
        self.assertEqual(self.agent.shared.unread, 0)

    @asynchronous
    async def test_a_program_that_writes_too_much_receives_the_reason_of_its_end(self) -> None:
        """A socket that is closed with something unread takes with it what the other side has not read yet."""
        await self.up()
        request = encode_line({"do": "connect", "to": str(SecKey.generate().public), "port": 7})

        def talk() -> bytes:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
                channel.connect(os.fspath(self.path))
                channel.settimeout(20)
                channel.sendall(request)
                poll = select.poll()
                poll.register(channel, select.POLLRDHUP)
                with contextlib.suppress(OSError):
                    while not poll.poll(0):
                        channel.sendall(b"x")
                answer = b""
                while got := channel.recv(65536):
                    answer += got
                return answer

        for _ in range(30):
            answer = await deferToThread(talk)
            self.assertIn(b'"error"', answer)
            self.assertEqual(answer.count(b"\n"), 1)

    @asynchronous
    async def test_pings_come_line_by_line(self) -> None:
        await self.up()
        request = {"do": "ping", "to": str(self.peer.public_key), "count": 3, "interval": 0}
        told = await deferToThread(lambda: list(lines(self.path, request)))
        self.assertEqual(told[0]["connected"], str(self.peer.public_key))
        self.assertEqual([one["number"] for one in told[1:]], [1, 2, 3])
        self.assertTrue(all(one["seconds"] > 0 for one in told))

    @asynchronous
    async def test_files_in_the_place_of_the_socket_are_respected(self) -> None:
        await self.up()
        await self.agent.stopService()
        self.path.write_text("mine")
        with self.assertRaisesRegex(AgentError, "is not a socket"):
            self.agent._listen()
        self.assertEqual(self.path.read_text(), "mine")
        self.path.unlink()
        left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        left.bind(os.fspath(self.path))
        left.close()  # A killed agent leaves its socket file like this.
        self.assertIsNone(find_agent(self.path))
        port = self.agent._listen()
        self.addCleanup(port.stopListening)
