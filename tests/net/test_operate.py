"""A server process as its operator runs it: settings in a file, SIGHUP, lists, a hook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.web.resource import Resource
from twisted.web.server import Site

from dmsg.cli.processes import start_twistd
from dmsg.errors import DmsgTimeout
from dmsg.keys import SecKey
from dmsg.transport.service import Client
from tests.net.support import LOOPBACK, EntityCase
from tests.support import Accepting, asynchronous


class OperateTests(EntityCase):
    """One server, real signals."""

    async def start_child(self, text: str) -> Any:
        """A server with these settings; the file may be changed."""
        self.url = await self.start_discovery()
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.file = self.directory / "server.toml"
        self.file.write_text(f'listen = "{LOOPBACK}"\ndiscovery = "{self.url}"\nkey-file = "server.key"\n{text}')
        child = start_twistd(reactor, "dmsg-server", "--config=server.toml", "--create", directory=str(self.directory))
        self.addCleanup(self._end, child)
        await child.line("registered in discovery")
        return child

    @staticmethod
    def _end(child: Any) -> Any:
        if child.status is None:
            child.signal("KILL")
            return child.ended
        return None

    async def refused(self, key: SecKey) -> str:
        """What a client is told that cannot connect."""
        client = Client(reactor, key, [self.url])
        client.startService()
        try:
            await client.when_online(3)
        except DmsgTimeout as error:
            return str(error)
        else:
            self.fail("it is online")
        finally:
            await client.stopService()

    @asynchronous
    async def test_lists_change_without_a_restart(self) -> None:
        """By SIGHUP and by the change of the file alone; live connections too."""
        alice, bob = SecKey.generate(), SecKey.generate()
        self.url = await self.start_discovery()
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        (self.directory / "allow").write_text(f"{alice.public}\n")
        child = start_twistd(
            reactor,
            "dmsg-server",
            f"--listen={LOOPBACK}",
            f"--discovery={self.url}",
            "--key-file=server.key",
            "--create",
            "--allow=allow",
            directory=str(self.directory),
        )
        self.addCleanup(self._end, child)
        await child.line("registered in discovery")
        first = await self.start_client(self.url, key=alice)
        self.assertIn("this key is not admitted", await self.refused(bob))
        (self.directory / "allow").write_text(f"{bob.public}\n")
        child.signal("HUP")
        await child.line("settings and lists were read again")
        await self.until(lambda: first.status == "searching")
        await self.start_client(self.url, key=bob)
        # and without a signal; a broken list is refused
        (self.directory / "allow").write_text("nonsense\n")
        await child.line("list stays as it was: allow, line 1")
        (self.directory / "allow").write_text(f"{bob.public}\n{alice.public}\n")
        await self.until(lambda: first.status == "online")

    @asynchronous
    async def test_settings_change_at_hangup(self) -> None:
        child = await self.start_child("max-transports = 100\n")
        alice, bob = await self.start_client(self.url), await self.start_client(self.url)
        bob.listen(Accepting())
        await alice.connect(bob.public_key, Accepting())
        self.file.write_text(self.file.read_text().replace("100", "1"))
        child.signal("HUP")
        await child.line("settings and lists were read again")
        with self.assertRaises(Exception) as caught:
            await alice.connect(bob.public_key, Accepting())
        self.assertIn("too many transports", str(caught.exception))
        self.file.write_text("max-transports = nonsense\n")
        child.signal("HUP")
        await child.line("settings stay as they were: server.toml")

    @asynchronous
    async def test_a_hook_over_http(self) -> None:
        asked: list[bytes] = []

        class Answers(Resource):
            isLeaf = True

            def render_POST(self, request: Any) -> bytes:
                asked.append(request.content.read())
                request.setResponseCode(200 if alice.public.hex().encode() in asked[-1] else 403)
                return b""

        alice = SecKey.generate()
        site = Site(Answers())  # type: ignore[no-untyped-call]
        site.noisy = False
        port: Any = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(site)
        self.addCleanup(lambda: port.stopListening())
        await self.start_child(f'admission-hook = "http://127.0.0.1:{port.getHost().port}/"\n')
        client = await self.start_client(self.url, key=alice)
        self.assertIn("this key is not admitted", await self.refused(SecKey.generate()))
        self.assertEqual(client.status, "online")
        self.assertGreaterEqual(len(asked), 2)
