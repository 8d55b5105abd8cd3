"""The Messaging System on real TCP: server, clients, discovery, strings, the command line."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import treq
from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.endpoints import TCP4ClientEndpoint, clientFromString, connectProtocol, serverFromString
from twisted.internet.protocol import Protocol
from twisted.python.usage import UsageError

from dmsg.discovery.entries.entry import ClientMeta, Entry, features
from dmsg.errors import ConnectFailed, DmsgTimeout, DropReason, EntryNotFound, TransportClosed
from dmsg.keys import PubKey, SecKey, write_key_file
from dmsg.messaging import strings
from dmsg.messaging.client import Client
from dmsg.messaging.core.wire import OPEN_CHANNEL, Profile, encode_frame
from dmsg.tap import messaging as messaging_tap
from tests.cli.test_commands import CommandCase
from tests.messaging.stock import StockChannel, StockClient
from tests.messaging.support import RawClient
from tests.messaging.test_old_clients import ERAS
from tests.net.support import HEALTH, LOOPBACK, TIMEOUT, EntityCase
from tests.support import Accepting, Recorder, asynchronous


class Echo(Protocol):
    """Protocol that sends back all data."""

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)


class MessagingCase(EntityCase):
    """Starts servers and clients of the Messaging System too."""

    async def start_messaging_server(self, *options: str) -> Any:
        """Listening; registered when it has a discovery."""
        return await self.start_server("--drain-timeout=0", *options, tap=messaging_tap)

    async def start_messaging_client(self, url: str, **options: Any) -> Client:
        """Start a client that other clients can find."""
        client: Client = await self.start_client(url, family=Client, **options)
        return client


class NetworkTests(MessagingCase):
    """A whole network in one process."""

    @asynchronous
    async def test_two_clients_and_a_megabyte(self) -> None:
        for profile in Profile:
            url = await self.start_discovery()
            # Servers of the other family are in the same discovery, and are ignored.
            await self.start_server(f"--discovery={url}")
            server = await self.start_messaging_server(f"--discovery={url}", f"--profile={profile.value}")
            alice, bob = await gatherResults(
                [
                    self._client(url, profile),
                    self._client(url, profile),
                ]
            )
            self.assertEqual((alice.servers, bob.servers), ([server._key.public], [server._key.public]))
            self.assertEqual(features((await alice.entry(bob.public_key)).version), {profile.feature, "refresh1"})
            bob.listen(Accepting(Echo))
            mine: Any = await alice.connect(bob.public_key, Accepting())
            data = SecKey.generate().to_bytes() * 32768
            mine.transport.write(data)
            await self.until(lambda mine=mine: len(mine.data) == 1 << 20)
            self.assertEqual(hashlib.sha256(mine.data).digest(), hashlib.sha256(data).digest())
            self.assertIsNotNone(alice.round_trips[server._key.public])
            mine.transport.loseConnection()
            await self.until(lambda mine=mine: mine.lost)
            await self.until(lambda server=server: server.factory.relay.channel_count == 0)
            with self.assertRaises(ValueError):
                alice.connect(bob.public_key, Accepting(), port=5)
            with self.assertRaises(ValueError):
                alice.listen(Accepting(), 5)

    def _client(self, url: str, profile: Profile) -> Any:
        return Deferred.fromCoroutine(self.start_messaging_client(url, profile=profile, min_servers=1))

    @asynchronous
    async def test_P_advertising_and_creating_a_channel(self) -> None:
        """The procedures of the seed document: available servers, links, own entry; the remote's entry and servers."""
        url = await self.start_discovery()
        one, two = [await self.start_messaging_server(f"--discovery={url}") for _ in range(2)]
        alice = await self.start_messaging_client(url, only=[one._key.public])
        bob = await self.start_messaging_client(url, only=[two._key.public])
        entry = await alice.entry(alice.public_key)
        assert entry.client is not None
        self.assertEqual((entry.sequence, entry.client.delegated_servers), (0, (one._key.public.hex(),)))
        bob.listen(Accepting(Echo))
        mine: Any = await alice.connect(bob.public_key, Accepting())
        self.assertEqual(mine.transport.server, two._key.public)
        # While there is a link to the remote's server, the entry names that server, too.
        both = tuple(sorted(server._key.public.hex() for server in (one, two)))
        await self.until(lambda: alice._publisher.published == both)
        alice._entries.forget()
        entry = await alice.entry(alice.public_key)
        assert entry.client is not None
        self.assertEqual((entry.sequence, entry.client.delegated_servers), (1, both))
        # A shared server is used again.
        again: Any = await alice.connect(bob.public_key, Accepting())
        self.assertEqual(again.transport.server, two._key.public)
        self.assertEqual(two.factory.connections_opened, 2)
        # For an unknown key and for a client without servers, there is an error and no frame.
        frames = one.factory.relay.frames + two.factory.relay.frames
        with self.assertRaises(EntryNotFound):
            await alice.connect(SecKey.generate().public, Accepting())
        nowhere = Entry("0.0.1", 0, 1, (key := SecKey.generate()).public.hex(), client=ClientMeta(())).sign(key)
        await treq.post(f"{url}/discovery/entries", nowhere.to_json(), persistent=False)
        with self.assertRaises(ConnectFailed) as caught:
            await alice.connect(key.public, Accepting())
        self.assertIn("is not connected to a server", str(caught.exception))
        self.assertEqual(one.factory.relay.frames + two.factory.relay.frames, frames)

    @asynchronous
    async def test_a_dmsg_client_is_no_remote(self) -> None:
        url = await self.start_discovery()
        await self.start_server(f"--discovery={url}")
        await self.start_messaging_server(f"--discovery={url}")
        dmsg = await self.start_client(url, min_servers=1)
        alice = await self.start_messaging_client(url, min_servers=1)
        with self.assertRaises(ConnectFailed) as caught:
            await alice.connect(dmsg.public_key, Accepting())
        self.assertIn("does not support messaging-seed", str(caught.exception))
        self.assertEqual(len(dmsg.servers), 1)
        other = Client(reactor, SecKey.generate(), [url], profile=Profile.SKYWIRE)
        other.startService()
        self.addCleanup(other.stopService)
        with self.assertRaises(DmsgTimeout) as late:
            await other.when_online(0.5)
        self.assertIn("no server that speaks this protocol", str(late.exception))

    @asynchronous
    async def test_a_lost_server_ends_streams_and_another_is_found(self) -> None:
        url = await self.start_discovery()
        servers = [await self.start_messaging_server(f"--discovery={url}") for _ in range(2)]
        alice, bob = [await self.start_messaging_client(url, min_servers=1) for _ in range(2)]
        bob.listen(Accepting(Echo))
        mine: Any = await alice.connect(bob.public_key, Accepting())
        (server,) = [one for one in servers if one._key.public == mine.transport.server]
        await server.stop_for_test()
        await self.until(lambda: mine.lost)
        # Visits are made to the server where the remote is. The entry names that server.
        await self.until(lambda: server._key.public not in bob.servers and bob.servers)
        await bob.when_published(TIMEOUT)
        alice._entries.forget()
        again: Any = await alice.connect(bob.public_key, Accepting(), timeout=TIMEOUT)
        again.transport.write(b"again")
        await self.until(lambda: again.data == b"again")

    @asynchronous
    async def test_leaving_waits_for_channels(self) -> None:
        url = await self.start_discovery()
        server = await self.start_messaging_server(f"--discovery={url}", "--drain-timeout=20")
        alice, bob = [await self.start_messaging_client(url, min_servers=1) for _ in range(2)]
        bob.listen(Accepting(Echo))
        mine: Any = await alice.connect(bob.public_key, Accepting())
        stopping = server.stop_for_test()
        await self.until(lambda: server.factory.relay.draining)
        with self.assertRaises(ConnectFailed):
            await alice.connect(bob.public_key, Accepting(), timeout=2, via=server._key.public)
        mine.transport.write(b"still served")
        await self.until(lambda: mine.data == b"still served")
        mine.transport.loseConnection()
        await stopping
        await self.until(lambda: mine.lost)

    @asynchronous
    async def test_lists_metrics_and_health(self) -> None:
        good = SecKey.generate()
        path = self.mktemp()
        with open(path, "w") as file:
            file.write(f"{good.public}\n")
        server = await self.start_messaging_server(f"--allow={path}", f"--metrics={LOOPBACK}")
        admitted, other = await self.raw(server, good), await self.raw(server)
        await self.until(lambda: other.lost)
        self.assertIsNone(admitted.lost)
        self.assertEqual(server.drops()[DropReason.NOT_ADMITTED], 1)
        base = f"http://127.0.0.1:{server.metrics_port.getHost().port}"
        health = json.loads(await (await treq.get(f"{base}/health", persistent=False)).text())
        self.assertEqual(health, {**HEALTH, "connections": 1, "channels": 0})
        text = await (await treq.get(f"{base}/metrics", persistent=False)).text()
        self.assertIn("dmsg_messaging_server_connections 1.0", text)
        self.assertIn('dmsg_messaging_server_drops_total{reason="not_admitted"} 1.0', text)

    async def raw(self, server: Any, key: SecKey | None = None) -> RawClient:
        from dmsg.messaging.core.handshake import JSONHandshake

        client = RawClient(key or SecKey.generate(), Profile.SEED)
        client.handshake = JSONHandshake(client.key, server._key.public)
        port = server.ports[0].getHost().port
        await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", port), client)
        self.addCleanup(lambda: client.transport.abortConnection())  # type: ignore[union-attr]
        await self.until(lambda: client.up)
        return client

    @asynchronous
    async def test_a_client_that_does_not_read_holds_its_sender(self) -> None:
        """The sender waits, with little in the server's memory, and other clients continue; then all data arrives."""
        url = await self.start_discovery()
        server = await self.start_messaging_server(f"--discovery={url}")
        alice, bob, carol, friend = [await self.start_messaging_client(url, min_servers=1) for _ in range(4)]
        stopped, quick = Accepting(), Accepting(Echo)
        bob.listen(stopped)
        carol.listen(quick)
        slow: Any = await alice.connect(bob.public_key, Accepting())
        await self.until(lambda: stopped.built)
        stopped.built[0].transport.pauseProducing()
        size = 30_000_000
        slow.transport.write(bytes(size))
        relay = server.factory.relay
        await self.until(lambda: any(peer.is_paused for peer in relay.peers))
        queued = sum(peer.port.queued() for peer in relay.peers) + relay.congestion.total
        self.assertLess(queued, 4_000_000)
        other: Any = await friend.connect(carol.public_key, Accepting(), timeout=2)
        other.transport.write(b"to others")
        await self.until(lambda: other.data == b"to others")
        stopped.built[0].transport.resumeProducing()
        await self.until(lambda: sum(map(len, stopped.built[0].received)) == size)
        self.assertIsNone(slow.lost)

    @asynchronous
    async def test_a_flood_ends_the_link(self) -> None:
        server = await self.start_messaging_server("--open-rate=10")
        client = await self.raw(server)
        frame = encode_frame(Profile.SEED, OPEN_CHANNEL, b"\0" + SecKey.generate().public + bytes(49))
        assert client.transport is not None
        client.transport.write(frame * 1000)
        await self.until(lambda: client.lost)
        self.assertEqual(server.drops()[DropReason.FLOOD], 1)

    @asynchronous
    async def test_endpoint_strings_name_the_messaging_system(self) -> None:
        url = await self.start_discovery()
        await self.start_messaging_server(f"--discovery={url}")
        escaped = url.replace(":", "\\:")
        key_file = self.mktemp()
        port = await serverFromString(reactor, f"dmsg-messaging:discovery={escaped}:key={key_file}").listen(
            Accepting(Echo)
        )
        bob = strings.shared_client(reactor, url, key_file, Profile.SEED, None, False)
        self.addCleanup(self._forget)
        await bob.when_published(TIMEOUT)
        client = clientFromString(reactor, f"dmsg-messaging:{bob.public_key}:discovery={escaped}:timeout=10")
        protocol: Any = await client.connect(Accepting())
        protocol.transport.write(b"by string")
        await self.until(lambda: protocol.data == b"by string")
        await port.stopListening()
        for text in (
            "dmsg-messaging:",
            "dmsg-messaging:02ab",
            f"dmsg-messaging:{bob.public_key}:profile=x",
            f"dmsg-messaging:{bob.public_key}:acks=perhaps",
        ):
            self.assertRaises((ValueError, TypeError), clientFromString, reactor, text)

    def _forget(self) -> Any:
        return Deferred.fromCoroutine(strings._clients.stop())

    @asynchronous
    async def test_stopping_a_client_notifies_its_remotes(self) -> None:
        url = await self.start_discovery()
        await self.start_messaging_server(f"--discovery={url}")
        alice, bob = [await self.start_messaging_client(url, min_servers=1) for _ in range(2)]
        accepting = Accepting(Recorder)
        bob.listen(accepting)
        mine: Any = await alice.connect(bob.public_key, Accepting())
        mine.transport.write(b"goodbye")
        await self.until(lambda: accepting.built and accepting.built[0].data == b"goodbye")
        await alice.stopService()
        await self.until(lambda: accepting.built[0].lost)
        with self.assertRaises(TransportClosed):
            await mine.transport.send(b"x")

    def test_options_that_cannot_be(self) -> None:
        for option in ("--profile=old", "--max-per-pair=257", "--open-rate=-1", "--listen=x", "--listen=tcp:99999"):
            parsed = messaging_tap.Options()
            self.assertRaises(UsageError, parsed.parseOptions, [f"--key-file={self.mktemp()}", option])


class MessagingCommandTests(CommandCase, MessagingCase):
    """``dmsg messaging``."""

    @asynchronous
    async def test_listen_connect_ping(self) -> None:
        for profile in Profile:
            url = await self.start_discovery()
            await self.start_messaging_server(f"--discovery={url}", f"--profile={profile.value}")
            common = ("--discovery", url, "--min-servers", "1", "--profile", profile.value)
            write_key_file(self.directory / f"{profile.value}.key", SecKey.generate())
            remote = await self.start_messaging_client(url, profile=profile, min_servers=1)
            remote.listen(Accepting(Echo))
            status, out, _ = await self.run_command(
                "messaging", "ping", str(remote.public_key), "-c", "3", "-i", "0", *common
            )
            self.assertEqual(status, 0)
            self.assertRegex(out.splitlines()[-1], r"3 tried, 0 failed; min [0-9.]+ ms")

            listening = self.start(
                "messaging", "listen", "--key-file", f"{profile.value}.key", "--create", "-w", "30", *common
            )
            found = await self.until(lambda one=listening: re.search(rb"listening: ([a-z2-7]{53})", one.err))
            # The command does not see the other family.
            key = found[1].decode()
            status, out, _ = await self.run_command("messaging", "ping", key, "-c", "2", "-i", "0", *common)
            self.assertEqual((status, listening.ended.called), (0, False), out)
            connecting = self.start("messaging", "connect", key, *common)
            await self.until(lambda one=connecting: b"connected: " in one.err)
            assert connecting.transport is not None
            connecting.transport.write(b"over a channel\n")
            await self.until(lambda one=listening: one.out == b"over a channel\n")
            connecting.transport.closeStdin()
            self.assertEqual(await connecting.ended, 0)
            self.assertEqual(await listening.ended, 0)

    @asynchronous
    async def test_errors_are_one_line(self) -> None:
        url = await self.start_discovery()
        await self.start_messaging_server(f"--discovery={url}")
        await self.until_listed(url, 1)
        key = SecKey.generate().public
        nobody = key.hex()
        status, _, errors = await self.run_command("messaging", "connect", nobody, "--discovery", url)
        self.assertEqual(status, 3)
        self.assertRegex(
            errors,
            rf"^dmsg: discovery {url} has no entry of {key.short}: is its program running.*\n$",
        )
        for wrong in (("ping", "02ab"), ("ping", nobody, "--timeout", "nan"), ("connect", nobody, "-w", "nan")):
            status, _, errors = await self.run_command("messaging", *wrong, "--discovery", url)
            self.assertEqual(status, 2, errors)
        status, _, errors = await self.run_command("messaging", "listen", "--discovery", "")
        self.assertEqual(status, 2, errors)


class OldClientTests(CommandCase, MessagingCase):
    """The commands beside programs as they were in March and April 2019, with the entries that these post."""

    async def stock(self, url: str, server: Any, era: str, **options: Any) -> StockClient:
        two_ids, acks = ERAS[era]
        key = SecKey.generate()
        later = reactor.callLater
        client = StockClient(key, server._key.public, later, two_ids=two_ids, acks=acks, **options)
        port = server.ports[0].getHost().port
        await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", port), client)
        self.addCleanup(lambda: client.transport.abortConnection())  # type: ignore[union-attr]
        await self.until(lambda: client.up)
        entry = Entry("0.0.1", 0, 1, key.public.hex(), client=ClientMeta((server._key.public.hex(),))).sign(key)
        await treq.post(f"{url}/messaging-discovery/entry/", entry.to_json(), persistent=False)
        return client

    @asynchronous
    async def test_a_word_from_standard_input_arrives(self) -> None:
        """The sender reads a message from its standard input; the receiver waits for one message."""
        for era, options in (
            ("2019-03-06", ["--acks", "yes"]),
            ("2019-03-13", ["--acks", "yes"]),
            ("2019-04-15", ["--acks", "no"]),
        ):
            url = await self.start_discovery()
            server = await self.start_messaging_server(f"--discovery={url}", "--profile=skywire")
            said: list[bytes] = []

            def answer(channel: StockChannel, data: bytes, said: list[bytes] = said) -> None:
                said.append(data)
                channel.write(b"heard " + data)

            stock = await self.stock(url, server, era, got=answer)
            common = ("--discovery", url, "--min-servers", "1", "--profile", "skywire", *options)
            connecting = self.start("messaging", "connect", str(stock.key.public), *common)
            assert connecting.transport is not None
            connecting.transport.write(b"hell\n")
            await self.until(lambda one=connecting: one.out == b"heard hell\n")
            connecting.transport.closeStdin()
            self.assertEqual(await connecting.ended, 0, connecting.err)
            self.assertEqual((said, stock.panics), ([b"hell\n"], []), era)

    @asynchronous
    async def test_an_unknown_dialect_is_an_error_with_advice(self) -> None:
        """Without the option, the client does not talk to a program of that time, and the error says what to do."""
        url = await self.start_discovery()
        server = await self.start_messaging_server(f"--discovery={url}", "--profile=skywire")
        stock = await self.stock(url, server, "2019-03-13")
        common = ("--discovery", url, "--min-servers", "1", "--profile", "skywire")
        connecting = self.start("messaging", "connect", str(stock.key.public), *common)
        assert connecting.transport is not None
        connecting.transport.write(b"hell\n")
        self.assertEqual(await connecting.ended, 1)
        self.assertIn(b"use --acks yes (acks=True) for a Go program before 2019-04-15, --acks no", connecting.err)
        self.assertEqual((stock.panics, [one.received for one in stock.accepted]), ([], [[]]))

    @asynchronous
    async def test_programs_of_2019_open_channels_to_the_commands(self) -> None:
        for era, options in (
            ("2019-03-06", []),
            ("2019-03-13", ["--ids", "two"]),
            ("2019-04-15", ["--ids", "two"]),
        ):
            url = await self.start_discovery()
            server = await self.start_messaging_server(f"--discovery={url}", "--profile=skywire")
            stock = await self.stock(url, server, era)
            common = ("--discovery", url, "--min-servers", "1", "--profile", "skywire", *options)
            listening = self.start("messaging", "listen", "--key-file", f"{era}.key", "--create", "-w", "30", *common)
            found = await self.until(lambda one=listening: re.search(rb"listening: ([a-z2-7]{53})", one.err))
            channel = stock.dial(PubKey.from_text(found[1].decode()))
            await self.until(lambda one=channel: one.ciphers is not None)
            channel.write(b"hello")
            await self.until(lambda one=listening: one.out == b"hello")
            assert listening.transport is not None
            listening.transport.write(b"and you")
            await self.until(lambda one=channel: one.data == b"and you")
            channel.close()
            self.assertEqual(await listening.ended, 0, listening.err)
            self.assertEqual(stock.panics, [], era)

    @asynchronous
    async def test_options_of_the_other_profile(self) -> None:
        status, _, errors = await self.run_command("messaging", "listen", "-d", "http://127.0.0.1:9", "--acks", "yes")
        self.assertEqual(status, 2, errors)
        self.assertIn("--profile skywire", errors)
        for option in ("--ids=two", "--ids=three"):
            parsed = messaging_tap.Options()
            self.assertRaises(UsageError, parsed.parseOptions, [f"--key-file={self.mktemp()}", option])
