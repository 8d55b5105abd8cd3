"""Servers of both families above their memory limit. Only clients that do not read lose their buffers."""

from __future__ import annotations

from typing import Any

from dmsg.errors import DropReason
from dmsg.messaging.client import Client as MessagingClient
from dmsg.tap import messaging as messaging_tap
from dmsg.v2019.core.wire import ACCEPT, FWD, REQUEST, Frame
from tests.net.support import EntityCase
from tests.support import Accepting, asynchronous


class ServerMemoryTests(EntityCase):
    """Real TCP; the limit is small."""

    async def look(self, server: Any) -> None:
        """Let the server measure its links, as its timer does."""
        await self.until(lambda: server.memory.dropped, 60)

    async def pairs(self, url: str, number: int, **options: Any) -> list[tuple[Any, Any]]:
        """Senders, and receivers that read nothing any more."""
        found = []
        for _ in range(number):
            theirs = Accepting()
            receiver = await self.start_client(url, min_servers=1, **options)
            receiver.listen(theirs)
            sender = await self.start_client(url, min_servers=1, **options)
            mine: Any = await sender.connect(receiver.public_key, Accepting())
            await self.until(lambda theirs=theirs: theirs.built)
            (session,) = receiver.sessions()
            session._link.transport.pauseProducing()
            found.append((mine, receiver))
        return found

    async def stopped_receiver(self, server: Any) -> Any:
        """A client of plain frames with a transport to one that reads nothing any more."""
        receiver, sender = await self.raw_client(server), await self.raw_client(server)
        sender.send(Frame(REQUEST, 0, bytes(sender.key.public + receiver.key.public)).encode())
        await self.until(lambda: receiver.frames)
        (request,) = receiver.take()
        receiver.send(Frame(ACCEPT, request.id, request.payload).encode())
        await self.until(lambda: sender.frames)
        receiver.transport.pauseProducing()  # type: ignore[union-attr]
        return sender

    @asynchronous
    async def test_clients_that_do_not_read_lose_their_data_first(self) -> None:
        url = await self.start_discovery()
        server = await self.start_server(f"--discovery={url}", "--memory=3")
        self.assertEqual(server.memory.limit, 3 << 20)
        honest = Accepting()
        reader = await self.start_client(url, min_servers=1)
        reader.listen(honest)
        writer = await self.start_client(url, min_servers=1)
        good: Any = await writer.connect(reader.public_key, Accepting())
        senders = [await self.stopped_receiver(server) for _ in range(5)]
        for sender in senders:
            for number in range(180):
                sender.send(Frame(FWD, 0, number.to_bytes(2, "big") + bytes(60_000)).encode())
        await self.look(server)
        await self.until(lambda: server.drops()[DropReason.MEMORY])
        good.transport.write(b"x" * 3_000_000)
        await self.until(lambda: len(honest.built[0].data) == 3_000_000)
        self.assertIsNone(good.lost)
        await self.until(lambda: server.memory.total <= server.memory.limit)
        self.assertEqual(server.gauges()["memory_limit_bytes"][1], 3 << 20)
        self.assertGreaterEqual(server.counters()["memory_given"][1], 1)

    @asynchronous
    async def test_only_active_links_are_checked(self) -> None:
        """A link that keeps quiet and holds nothing costs a look nothing; with the first byte it is seen again."""
        url = await self.start_discovery()
        server = await self.start_server(f"--discovery={url}")
        factory = server.factory
        quiet = [await self.raw_client(server) for _ in range(5)]
        await self.until(lambda: len(factory.sessions) == 5)
        server.memory.check()
        server.memory.check()
        self.assertEqual(factory.active_links, {})
        quiet[0].transport.write((500).to_bytes(2, "big") + b"the first bytes of a record")  # type: ignore[union-attr]
        await self.until(lambda: factory.active_links)
        server.memory.check()
        (link,) = factory.active_links
        self.assertEqual(link.buffered_bytes, 29)
        quiet[0].transport.abortConnection()  # type: ignore[union-attr]
        await self.until(lambda: not factory.active_links)

    @asynchronous
    async def test_the_messaging_server_keeps_the_memory_limit(self) -> None:
        url = await self.start_discovery()
        server = await self.start_server(f"--discovery={url}", "--memory=2", "--drain-timeout=0", tap=messaging_tap)
        pairs = await self.pairs(url, 4, family=MessagingClient)
        for mine, _ in pairs:
            mine.transport.write(bytes(8 << 20))
        await self.look(server)
        await self.until(lambda: server.drops()[DropReason.MEMORY])
        await self.until(lambda: server.memory.total <= server.memory.limit)
