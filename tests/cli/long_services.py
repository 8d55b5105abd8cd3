"""Six programs on one key, and an agent that is killed: ``make long WHICH=operate``."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

from twisted.internet import reactor, threads
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.protocol import Factory

from dmsg.keys import SecKey, write_key_file
from tests.cli.test_agent import AgentCase
from tests.cli.test_tools import Shout, ToolCase, talk
from tests.support import asynchronous


class SixServicesTests(AgentCase):
    """Six programs on one key, and the agent that they share is killed."""

    @asynchronous
    async def test_six_services_resume_after_the_agent_is_killed(self) -> None:
        await self.network()
        told = await self.up()
        key = told["up"]
        public, inbox = self.directory / "public", self.directory / "inbox"
        for one in (public, inbox, self.directory / "got"):
            one.mkdir()
        (public / "a.txt").write_text("hello\n")
        port: Any = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory.forProtocol(Shout))
        self.addCleanup(port.stopListening)
        services = [
            await self.service("serve", "public", says="is at"),
            await self.service("cp", "--listen", "inbox", "--writable", "--anyone", says="is at"),
            await self.service("expose", str(port.getHost().port), "-p", "7", says="leads to"),
            await self.service("iperf", "--serve", says="measured at"),
            await self.service("bench", "--serve", says="serving at"),
            await self.service("nc", "-l", "9", "-w", "30", says="listening"),
        ]
        self.assertEqual([one["port"] for one in (await self.asked())["services"]], [0, 7, 9, 24, 80, 5201])
        # A second service that asks for an occupied port fails.
        status, _, err = await self.run_command("serve", "inbox", **self.environment)
        self.assertEqual(status, 1)
        self.assertRegex(err, r"^dmsg: port 80 of the agent's key is in use by .*serve \(process \d+\)")
        await self.use_them(key)
        os.kill(told["pid"], 9)
        for each in services[:5]:
            await self.said(each, r"the agent has ended")
        second = await self.up()
        self.assertEqual(second["up"], key)
        for each in services[:5]:
            await self.said(each, r"the agent is back")
        await self.use_them(key)

        def counted() -> list[int]:
            return [one["taken"] for one in told["services"] if one["port"] in (7, 80)]

        told = await self.asked()
        self.assertEqual(counted(), [1, 1])
        for each in services:
            each.transport.signalProcess("INT")  # type: ignore[union-attr]
            await each.ended
        self.assertEqual((await self.asked())["services"], [])

    async def use_them(self, key: str) -> None:
        """Use the services from another machine's side."""
        stranger = ("--no-agent",)
        self.assertEqual(await self.run_it("curl", *stranger, f"dmsg://{key}/a.txt"), "hello\n")
        (self.directory / "sent").write_bytes(os.urandom(100_000))
        (self.directory / "inbox" / "sent").unlink(missing_ok=True)
        await self.run_it("cp", *stranger, "sent", f"{key}:")
        self.assertEqual((self.directory / "inbox" / "sent").read_bytes(), (self.directory / "sent").read_bytes())
        forwarding = await self.service("forward", *stranger, "0", f"{key}:7", says="leads to")
        local = int(re.search(r"127\.0\.0\.1:(\d+) leads to", forwarding.out.decode())[1])  # type: ignore[index]
        self.assertEqual(await threads.deferToThread(talk, local, b"hello", 5), b"HELLO")
        forwarding.transport.signalProcess("INT")  # type: ignore[union-attr]
        await forwarding.ended
        await self.run_it("iperf", *stranger, key, "-t", "0.2")
        await self.run_it("ping", *stranger, key, "-c", "1")

    @asynchronous
    async def test_a_copy_resumes_after_the_agent_is_killed(self) -> None:
        """The agent at the sending end is killed in the middle of a copy, and another one started."""
        await self.network()
        told = await self.up()
        inbox = self.directory / "inbox"
        inbox.mkdir()
        write_key_file(self.directory / "bob.key", bob := SecKey.generate())
        await self.service("cp", "--listen", "inbox", "--writable", "--anyone", "-k", "bob.key", says="is at")
        big = self.directory / "big"
        big.write_bytes(os.urandom(1_000_000) * 150)
        copying = self.tool("cp", "big", f"{bob.public}:")
        part = inbox / ".big.dmsg-part"
        await self.until(lambda: part.exists() and part.stat().st_size > 5_000_000)
        os.kill(told["pid"], 9)
        self.assertFalse(copying.ended.called)
        await self.up()
        self.assertEqual(await copying.ended, 0, copying.err)
        self.assertRegex(copying.err.decode(), r"is back, big resumes at \d")
        self.assertEqual((inbox / "big").read_bytes(), big.read_bytes())


class FromPeerToPeerTests(ToolCase):
    """``dmsg cp alice:x bob:``, through this machine."""

    async def two_peers(self) -> tuple[Path, Path]:
        """A network with Alice and Bob in the address book; what each of them has."""
        await self.network()
        write_key_file(self.directory / "bob.key", bob := SecKey.generate())
        await self.run_command("name", "add", "bob", bob.public.hex(), **self.environment)
        self.environment["XDG_CACHE_HOME"] = str((self.directory / "cache").absolute())
        ours, theirs = self.directory / "ours", self.directory / "theirs"
        (ours / "photos").mkdir(parents=True)
        theirs.mkdir()
        return ours, theirs

    @asynchronous
    async def test_files_and_directories_are_copied_between_two_peers(self) -> None:
        ours, theirs = await self.two_peers()
        (ours / "photos" / "one.jpg").write_bytes(b"1" * 1000)
        (ours / "film").write_bytes(os.urandom(1_000_000) * 12)
        await self.said(self.tool("cp", "--listen", "ours", "-k", "alice.key"), "is at")
        listening = self.tool("cp", "--listen", "theirs", "--writable", "--anyone", "-k", "bob.key")
        await self.said(listening, "is at")
        for arguments in (("alice:film", "bob:"), ("-r", "alice:photos", "bob:")):
            status, _, err = await self.run_command("cp", *arguments, **self.environment)
            self.assertEqual((status, err), (0, ""), arguments)
        self.assertEqual((theirs / "film").read_bytes(), (ours / "film").read_bytes())
        self.assertEqual((theirs / "photos" / "one.jpg").read_bytes(), b"1" * 1000)
        self.assertEqual(list((self.directory / "cache" / "dmsg" / "cp").iterdir()), [])
        # The command is killed after it resumed. The next run does not fetch the complete part again.
        (theirs / "film").unlink()
        copying = self.tool("cp", "alice:film", "bob:")
        part = theirs / ".film.dmsg-part"
        await self.until(lambda: part.exists() and part.stat().st_size > 1_000_000 or (theirs / "film").exists())
        copying.transport.signalProcess("KILL")  # type: ignore[union-attr]
        await copying.ended
        status, out, err = await self.run_command("cp", "alice:film", "bob:", **self.environment)
        self.assertEqual(status, 0, err)
        self.assertEqual((theirs / "film").read_bytes(), (ours / "film").read_bytes())
        for arguments, words, expected in (
            (("alice:film", "alice:photos/one.jpg", "bob:x"), "need a target that ends in : or /", 1),
            (("alice:film", "alice:photos/film", "bob:"), "two sources have this name", 1),
            (("alice:nothing", "bob:"), "there is no", 4),
        ):
            status, _, err = await self.run_command("cp", *arguments, **self.environment)
            self.assertEqual(status, expected, arguments)
            self.assertIn(words, err)
        self.assertEqual(list((self.directory / "cache" / "dmsg" / "cp").iterdir()), [])

    @asynchronous
    async def test_a_second_copy_to_the_same_target_is_refused(self) -> None:
        """The second says so, and takes nothing from the first."""
        ours, theirs = await self.two_peers()
        (ours / "film").write_bytes(os.urandom(1_000_000) * 24)
        await self.said(self.tool("cp", "--listen", "ours", "-k", "alice.key"), "is at")
        await self.said(self.tool("cp", "--listen", "theirs", "--writable", "--anyone", "-k", "bob.key"), "is at")
        copying = self.tool("cp", "alice:film", "bob:")
        stages = self.directory / "cache" / "dmsg" / "cp"
        await self.until(lambda: any(stages.glob("*/.film.dmsg-part")))
        copying.transport.signalProcess("STOP")  # type: ignore[union-attr]
        status, _, err = await self.run_command("cp", "alice:film", "bob:", **self.environment)
        self.assertEqual(status, 1, err)
        self.assertIn("makes the same copy already", err)
        copying.transport.signalProcess(signal.SIGCONT)  # type: ignore[union-attr]
        self.assertEqual(await copying.ended, 0, copying.err)
        self.assertEqual((theirs / "film").read_bytes(), (ours / "film").read_bytes())
        self.assertEqual(list(stages.iterdir()), [])

    @asynchronous
    async def test_a_directory_copy_resumes_without_fetching_again(self) -> None:
        """Files that were received are compared and not fetched again; they do not count as existing files that must
        not be replaced.
        """
        ours, theirs = await self.two_peers()
        (ours / "photos" / "one.jpg").write_bytes(os.urandom(5_000_000))
        (ours / "film").write_bytes(b"film")
        await self.said(self.tool("cp", "--listen", "ours", "-k", "alice.key"), "is at")
        copy = ("cp", "-r", "alice:photos", "alice:film", "bob:")
        status, _, err = await self.run_command(*copy, **self.environment)
        self.assertEqual(status, 3, err)  # Bob is not there.
        await self.said(self.tool("cp", "--listen", "theirs", "--writable", "--anyone", "-k", "bob.key"), "is at")
        (ours / "photos" / "two.jpg").write_bytes(b"new")
        status, out, err = await self.run_command(*copy, "--json", **self.environment)
        self.assertEqual(status, 0, err)
        moved = [(one["copied"], one["bytes"]) for one in map(json.loads, out.splitlines())]
        self.assertEqual(moved, [("photos", 3), ("film", 0), ("photos", 5_000_003), ("film", 4)])
        for name in ("photos/one.jpg", "photos/two.jpg", "film"):
            self.assertEqual((theirs / name).read_bytes(), (ours / name).read_bytes())
        self.assertEqual(list((self.directory / "cache" / "dmsg" / "cp").iterdir()), [])
