"""``dmsg doctor``: what is found, and what is said to do."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource
from twisted.web.server import Site

from dmsg.cli.client_run import ONLINE_TIMEOUT
from dmsg.cli.doctor_run import CHECK_TIMEOUT, Verdict, _server
from dmsg.discovery.entries.entry import VERSION, Entry, ServerMeta
from dmsg.discovery.entries.recognition import VERSION_1
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.keys import SecKey, write_key_file
from tests.cli.test_tools import ToolCase
from tests.discovery.entries.test_recognition import NOBODY, Elsewhere
from tests.net.test_own_pauses import PausingClock, pass_time
from tests.support import asynchronous


class _Elsewhere(Resource):
    """A web server that is no discovery, and whose clock is wrong."""

    isLeaf = True

    def render_GET(self, request: Any) -> bytes:
        request.setHeader(b"date", b"Thu, 01 Jan 2015 00:00:00 GMT")
        return b"<html>hello</html>"


class OtherNetworkTests(ToolCase):
    """Commands whose discovery is one of another network."""

    @asynchronous
    async def test_a_discovery_of_another_network_fails_at_once_in_one_line(self) -> None:
        """The command does not wait for the time in which an absent discovery may return."""
        there = Elsewhere(dmsg_discovery_available_servers=(404, NOBODY))
        port: Any = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Site(there))
        self.addCleanup(port.stopListening)
        url = f"http://127.0.0.1:{port.getHost().port}"
        key = SecKey.generate().public.hex()
        for arguments in (("ping", key), ("nc", "-l", "7", "-k", "x.key", "--create"), ("discovery", "show", key)):
            began = reactor.seconds()
            status, out, err = await self.run_command(*arguments, "-d", url)
            self.assertEqual((status > 0, out, err), (True, "", f"dmsg: discovery {url}: {VERSION_1}\n"), arguments)
            self.assertLess(reactor.seconds() - began, ONLINE_TIMEOUT)


class DoctorTests(ToolCase):
    """Real processes."""

    async def examined(self, *arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
        """Run `dmsg doctor`; return its exit status and the last result of each check."""
        environment = {"DMSG_NAMES": "names", "XDG_DATA_HOME": str(self.directory.absolute()), **environment}
        status, out, err = await self.run_command("doctor", "--json", *arguments, **environment)
        self.assertEqual(err, "")
        found = {}
        for line in out.splitlines():
            one = json.loads(line)
            self.assertLessEqual({"check", "verdict", "text"}, set(one))
            found[one["check"]] = one
            if one["verdict"] == "wrong":
                self.assertTrue(one.get("advice"), one)
        return status, found

    def verdicts(self, found: dict[str, dict[str, Any]]) -> dict[str, str]:
        return {check: one["verdict"] for check, one in found.items()}

    @asynchronous
    async def test_a_healthy_installation_has_no_problems(self) -> None:
        await self.network()
        listening = self.tool("listen", "-k", "alice.key", "--wait", "60", "--min-servers=1")
        await self.said(listening, "listening")
        status, found = await self.examined("-d", self.url, "-k", "alice.key")
        checks = "versions", "config", "names", "key", "clock", "discovery", "server", "stream", "entry"
        self.assertEqual((status, self.verdicts(found)), (0, dict.fromkeys(checks, "ok")), found)
        self.assertIn("through 1 of its 1", found["entry"]["text"])
        status, out, _ = await self.run_command("doctor", "-d", self.url, "-k", "alice.key", DMSG_NAMES="names")
        self.assertEqual((status, {line[:5] for line in out.splitlines()}), (0, {"ok   "}))

    @asynchronous
    async def test_a_key_whose_program_was_killed(self) -> None:
        await self.network()
        listening = self.tool("listen", "-k", "alice.key", "--wait", "60", "--min-servers=1")
        await self.said(listening, "listening")
        transport: Any = listening.transport
        transport.signalProcess("KILL")
        await listening.ended
        status, found = await self.examined("-d", self.url, "-k", "alice.key")
        self.assertEqual((status, found["entry"]["verdict"]), (1, "wrong"))
        self.assertIn("through none", found["entry"]["text"])

    @asynchronous
    async def test_a_network_whose_host_has_another_key_now(self) -> None:
        await self.network()
        lookup = Lookup(reactor, self.url)
        self.addCleanup(lookup.close)
        # The server is registered, but discovery lists it only once it has checked it.
        while not (servers := await lookup.available_servers()):
            await deferLater(reactor, 0.05)
        known = servers[0].key
        for key, verdict in ((known, "ok"), (SecKey.generate().public, "wrong")):
            (self.directory / "config.toml").write_text(
                f'discovery = "home"\n[networks.home]\ndiscovery = "{self.url}"\nserver = "{key.text}"\n'
            )
            _, found = await self.examined(DMSG_DISCOVERY="")
            self.assertEqual(found["network"]["verdict"], verdict, found)
        self.assertIn("dmsg join", found["network"]["advice"])

    @asynchronous
    async def test_local_problems_are_reported(self) -> None:
        (self.directory / "names").write_text("nonsense\n")
        (self.directory / "config.toml").write_text("nonsense\n")
        status, found = await self.examined("-k", "none.key")
        wrong = {check for check, verdict in self.verdicts(found).items() if verdict == "wrong"}
        self.assertEqual((status, wrong), (1, {"config", "names", "key", "discovery"}))

    @asynchronous
    async def test_problems_of_the_network_are_named(self) -> None:
        url = await self.start_discovery()
        status, found = await self.examined("-d", url)
        self.assertEqual((status, found["discovery"]["verdict"]), (1, "wrong"))
        self.assertIn("lists no server", found["discovery"]["text"])
        port: Any = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Site(_Elsewhere()))
        self.addCleanup(port.stopListening)
        status, found = await self.examined("-d", f"http://127.0.0.1:{port.getHost().port}")
        self.assertEqual(
            (status, self.verdicts(found)["clock"], self.verdicts(found)["discovery"]), (1,) + ("wrong",) * 2
        )
        self.assertIn("ahead of", found["clock"]["text"])
        status, found = await self.examined("-d", "http://127.0.0.1:1")
        self.assertEqual((status, found["discovery"]["verdict"]), (1, "wrong"))
        self.assertIn("refused", found["discovery"]["text"])

    @asynchronous
    async def test_refused_entries_are_counted_and_explained(self) -> None:
        """The discovery does list servers, but this program cannot use their entries."""
        key = SecKey.generate()
        good = Entry(VERSION, 0, 1, key.public.hex(), server=ServerMeta("127.0.0.1:1", 5)).sign(key).to_json()
        changed = good.replace(b'"timestamp":1', b'"timestamp":2')
        for listed, usable in (([changed] * 3, 0), ([good, changed], 1)):
            there = Elsewhere(discovery_available_servers=(200, b"[%s]" % b",".join(listed)))
            port: Any = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Site(there))
            self.addCleanup(port.stopListening)
            url = f"http://127.0.0.1:{port.getHost().port}"
            refused = len(listed) - usable
            why = f"discovery {url}: {refused} of {len(listed)} server entries are refused: invalid signature"
            for options in ((), ("--json",)):
                status, out, err = await self.run_command("discovery", "list", "-d", url, *options)
                self.assertEqual((status, err), (0 if usable else 1, f"dmsg: {why}\n"), options)
                self.assertEqual("127.0.0.1:1" in out, bool(usable), out)
            status, out, _ = await self.run_command("doctor", "-d", url)
            said = " ".join(out.split())
            self.assertEqual(status, 1)
            self.assertIn(f"{'note' if usable else 'wrong'} {why}", said)
            self.assertNotIn("lists no server", said)
            if not usable:
                status, _, err = await self.run_command("ping", SecKey.generate().public.hex(), "-d", url)
                self.assertIn(why, err)

    @asynchronous
    async def test_servers_of_the_other_protocol_are_named(self) -> None:
        """Such servers are not reported as unreachable."""
        from dmsg.tap import messaging

        self.url = await self.start_discovery()
        await self.start_server(f"--discovery={self.url}", tap=messaging)
        await self.until_listed(self.url, 1)
        status, found = await self.examined("-d", self.url)
        self.assertEqual((status, found["discovery"]["verdict"]), (1, "wrong"))
        self.assertIn("0 servers of dmsg and 1 of the Messaging System", found["discovery"]["text"])
        await self.start_server(f"--discovery={self.url}")
        await self.until_listed(self.url, 2)
        status, found = await self.examined("-d", self.url)
        self.assertEqual((status, found["server"]["verdict"], found["stream"]["verdict"]), (0, "ok", "ok"), found)

    @asynchronous
    async def test_a_key_without_a_running_program_is_reported(self) -> None:
        await self.network()
        write_key_file(self.directory / "other.key", SecKey.generate())
        status, found = await self.examined("-d", self.url, "-k", "other.key")
        self.assertEqual((status, found["entry"]["verdict"]), (0, "note"))
        status, found = await self.examined("-d", self.url)
        self.assertEqual((status, found["key"]["verdict"]), (0, "note"))


class PauseTests(SynchronousTestCase):
    """The command on a machine that pauses."""

    def test_a_server_that_answered_during_the_pause(self) -> None:
        clock = PausingClock()
        printed: list[Any] = []
        examination: Any = SimpleNamespace(print_result=lambda verdict, *texts: printed.append(verdict))
        client: Any = SimpleNamespace(server_session=lambda key: Deferred())
        meta = ServerMeta("192.0.2.1:80", 5)
        entry = Entry(VERSION, 0, 1, SecKey.from_seed(b"server").public.hex(), server=meta)
        checking = Deferred.fromCoroutine(_server(cast(Any, clock), examination, client, entry))
        pass_time(clock, 1.0)
        clock.advance(10 * CHECK_TIMEOUT)
        pass_time(clock, CHECK_TIMEOUT - 2.0)
        self.assertEqual(printed, [])
        pass_time(clock, 2.0)
        self.assertEqual((printed, self.successResultOf(checking)), ([Verdict.NOTE], False))
