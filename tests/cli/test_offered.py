"""Services of a command as seen by a stranger who has only the public key, and the text that tells the user who may
connect.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from tests.cli.files.test_send_by_code import CodeCase
from tests.cli.test_agent import AgentCase
from tests.cli.test_commands import Command
from tests.cli.test_tools import ToolCase
from tests.support import asynchronous

OPEN = "dmsg: open to anyone who knows the key; --allow NAME to restrict"


class HomeTests(AgentCase):
    """The line of README of before, typed in a home directory after ``dmsg up``."""

    def at_home(self, *arguments: str) -> Command:
        """A command of the person whose home it is."""
        return self.start(*arguments, **self.environment, PWD=str(self.home))

    async def stranger(self, *arguments: str) -> tuple[int, str]:
        """A command of somebody else on another machine: status, and what is said."""
        elsewhere = {
            "HOME": str(self.directory),
            "DMSG_AGENT": "off",
            "DMSG_DISCOVERY": self.url,
            "XDG_CONFIG_HOME": "",
        }
        status, out, err = await self.run_command(*arguments, "--retry=0", "--min-servers=1", **elsewhere)
        return status, out + err

    @asynchronous
    async def test_a_home_is_not_given_away(self) -> None:
        await self.network()
        key = (await self.up())["up"]
        before = sorted(os.listdir(self.home))
        home = str(self.home)
        listen = ("cp", "--listen", home, "--writable")
        for options, wanted in (
            ((), "confirm with --anything"),
            (("--anything",), "--allow NAME, or confirm with --anyone"),
        ):
            status, _, err = await self.run_command(*listen, *options, **self.environment)
            self.assertEqual(status, 2)
            self.assertIn(wanted, err)
        for command in (("serve", home), ("receive", "--listen", "--anyone", "--dir", home), ("serve", "/")):
            status, _, err = await self.run_command(*command, **self.environment)
            self.assertEqual((status, "--anything" in err), (2, True), err)
        # Fetching by URL is no way around the checks.
        own = str(self.home / "config" / "dmsg" / "key")
        by_url: tuple[tuple[str, ...], ...] = ((".bash_profile", "-O"), ("x", "-o", own), ("x", "-d", f"@{own}"))
        for url, *given in by_url:
            status, out, err = await self.run_command("curl", f"dmsg://{key}/{url}", *given, **self.environment)
            self.assertIn(status, (1, 2))
            self.assertRegex(out + err, "begins with a dot|dmsg's own")
        # With all options given, these files are refused all the same.
        listening = self.at_home(*listen, "--anything", "--anyone")
        await self.said(listening, "is at")
        await self.said(listening, OPEN)
        for name in ("authorized_keys", ".bash_profile", "x.desktop", "evil.toml"):
            (self.directory / name).write_text("evil")
        tries = (
            ("cp", "--hidden", f"{key}:config/dmsg/key", "stolen"),
            ("cp", "-r", "--hidden", f"{key}:config", "."),
            ("cp", "evil.toml", f"{key}:config/dmsg/config.toml"),
            ("cp", "authorized_keys", f"{key}:.ssh/authorized_keys"),
            ("cp", "--hidden", ".bash_profile", f"{key}:"),
            ("cp", "x.desktop", f"{key}:.config/autostart/x.desktop"),
        )
        for one in tries:
            status, said = await self.stranger(*one)
            self.assertEqual(status, 0 if "-r" in one else 4 if "refused by" in said else 1, (one, said))
            if "-r" not in one:
                self.assertRegex(said, "dmsg's own|begin with a dot|there is no file key", one)
        self.assertFalse((self.directory / "stolen").exists())
        self.assertFalse((self.directory / "config" / "dmsg").exists())
        self.assertEqual(sorted(os.listdir(self.home)), before)
        self.assertFalse((self.home / "config" / "dmsg" / "config.toml").exists())
        # With --hidden, the command gives names with dots, but still no file of dmsg's own.
        listening.transport.signalProcess("INT")  # type: ignore[union-attr]
        await listening.ended
        (self.home / ".plan").write_text("to be read")
        listening = self.at_home(*listen, "--anything", "--anyone", "--hidden", "--overwrite")
        await self.said(listening, "is at")
        for one in tries[:3]:
            await self.stranger(*one)
        self.assertFalse((self.directory / "stolen").exists())
        self.assertFalse((self.home / "config" / "dmsg" / "config.toml").exists())
        status, said = await self.stranger("cp", "--hidden", f"{key}:.plan", ".")
        self.assertEqual(status, 0, said)
        self.assertEqual((self.directory / ".plan").read_text(), "to be read")

    @asynchronous
    async def test_status_lists_the_allowed_peers_of_each_service(self) -> None:
        await self.network()
        key = (await self.up())["up"]
        (self.home / "public").mkdir()
        (self.home / "public" / "notes.txt").write_text("hello")
        await self.run_it("name", "group", "add", "friends", "alice")
        shown = await self.run_it("name", "group", "list")
        self.assertEqual(shown, "@friends alice\n")
        public = str(self.home / "public")
        serving = await self.service("serve", public, says="open to anyone")
        copying = await self.service(
            "cp", "--listen", public, "--writable", "--allow", "@friends", says="open to @friends"
        )
        told = {one["port"]: one for one in (await self.asked())["services"]}
        self.assertEqual((told[80]["anyone"], told[80]["allow"]), (True, []))
        self.assertEqual(told[80]["offers"], f"files of {public}")
        self.assertEqual(
            (told[24]["anyone"], told[24]["allow"], told[24]["allowed"]), (False, [str(self.key.public)], 1)
        )
        text = await self.run_it("status")
        self.assertRegex(text, r"port 24 +\S+ cp \(process \d+\) +files of \S+, and accepts files +open to alice ")
        self.assertRegex(text, r"port 80 +\S+ serve \(process \d+\) +files of \S+ +open to anyone who knows the key ")
        receiver = await self.service("receive", "--listen", "--anyone", "--dir", public, says="receiving at")
        (self.directory / "notes").mkdir()
        await self.run_it("send", "notes", key)  # The command sends through the agent, and has no client of its own.
        await self.run_it("send", "--text", "the door is open", key)
        await self.said(receiver, "the door is open")
        self.assertTrue((self.home / "public" / "notes").is_dir())
        # The agent refuses other keys, and accepts the members of the group.
        status, said = await self.stranger("cp", f"{key}:notes.txt", "got")
        self.assertNotEqual(status, 0, said)
        status, said = await self.stranger("cp", f"{key}:notes.txt", "got", "-k", "alice.key")
        self.assertEqual(status, 0, said)
        for one in (serving, copying, receiver):
            one.transport.signalProcess("INT")  # type: ignore[union-attr]
            await one.ended
        # An empty group does not mean everybody.
        await self.run_it("name", "group", "remove", "friends", "alice")
        status, _, err = await self.run_command("serve", public, "--allow", "@friends", **self.environment)
        self.assertEqual(status, 2)
        self.assertIn("@friends has no members", err)


class SaidTests(AgentCase):
    """Each command that accepts connections tells who may connect, in one line and in its JSON object."""

    @asynchronous
    async def test_every_command_says_what_peers_can_reach(self) -> None:
        await self.network()
        await self.up()
        (self.directory / "public").mkdir()
        commands: tuple[tuple[str, ...], ...] = (
            ("serve", "public"),
            ("cp", "--listen", "public"),
            ("expose", "9"),
            ("receive", "--listen", "--anyone", "--dir", "public"),
            ("iperf", "--serve"),
            ("nc", "-l", "7"),
        )
        running = [(one, self.tool(*one, "--quiet", *(("--json",) if one[0] != "nc" else ()))) for one in commands]
        for one, command in running:
            await self.said(command, re.escape(OPEN))
            if one[0] != "nc":
                await self.until(lambda command=command: b"}\n" in command.out)
                told: dict[str, Any] = json.loads(command.out)
                self.assertEqual((told["anyone"], told["allow"]), (True, []), one)
        proxy = self.tool("socks", "--listen", "0", "--interface", "0.0.0.0", "--json")
        await self.said(proxy, "open to every machine that can reach 0.0.0.0")
        await self.until(lambda: b"}\n" in proxy.out)
        self.assertIs(json.loads(proxy.out)["anyone"], True)
        proxy = self.tool("socks", "--listen", "0")
        await self.said(proxy, "open to every program on this machine")


class ReceiveTests(CodeCase):
    """``dmsg receive``, with a code and at a key."""

    @asynchronous
    async def test_a_name_with_a_dot_is_not_taken(self) -> None:
        await self.network()
        (self.directory / ".bash_profile").write_text("evil")
        status, _, err = await self.run_command("send", ".bash_profile", **self.environment)
        self.assertEqual(status, 1)
        self.assertIn("use --hidden to send it", err)
        sender, code = await self.sends(".bash_profile", "--hidden")
        await self.said(sender, rf"dmsg receive --hidden {code}")
        status, _, err = await self.receives(code, "--yes")
        self.assertEqual(status, 1, err)
        self.assertIn("unless both ends say --hidden; the code is used up", err)
        await self.ends(sender, 4, "begin with a dot")
        self.assertEqual(os.listdir(self.directory / "inbox"), [])
        sender, code = await self.sends(".bash_profile", "--hidden")
        status, _, err = await self.receives(code, "--yes", "--hidden")
        self.assertEqual((status, os.listdir(self.directory / "inbox")), (0, [".bash_profile"]), err)
        await self.ends(sender, 0)

    @asynchronous
    async def test_at_a_key(self) -> None:
        await self.network()
        for options, wanted in (
            (("receive",), "dmsg receive --listen"),
            (("receive", "--listen"), "--allow NAME, or confirm with --anyone"),
            (("receive", "--listen", "7-guitar-alpha"), "cannot be combined"),
            (("receive", "--once", "7-guitar-alpha"), "need --listen"),
            (("receive", "--max-total", "5", "7-guitar-alpha"), "need --listen"),
        ):
            status, _, err = await self.run_command(*options, **self.environment)
            self.assertEqual(status, 2, err)
            self.assertIn(wanted, err)
        del self.environment["DMSG_KEY_FILE"]
        receiver = self.tool("receive", "--listen", "--anyone", "--dir=inbox", "--min-servers=1")
        key = (await self.said(receiver, r"receiving at ([a-z2-7]{53})"))[1]
        await self.said(receiver, OPEN)
        (self.directory / "notes" / ".git").mkdir(parents=True)
        (self.directory / "notes" / "a.txt").write_text("a")
        (self.directory / "b.txt").write_text("b")
        (self.directory / ".bash_profile").write_text("evil")

        async def send(*what: str) -> tuple[int, str, str]:
            return await self.run_command("send", *what, "--min-servers=1", **self.environment)

        status, out, err = await send("notes", "b.txt", key)
        self.assertEqual(status, 0, err)
        self.assertIn(f"sent notes, b.txt to {key}", out)
        self.assertIn("not sent: notes/.git: its name begins with a dot", err)
        await self.said(receiver, "received inbox/notes, inbox/b.txt from ")
        self.assertEqual(sorted(os.listdir(self.directory / "inbox")), ["b.txt", "notes"])
        self.assertEqual(os.listdir(self.directory / "inbox" / "notes"), ["a.txt"])
        self.assertEqual((await send("--text", "the door is open", key))[0], 0)
        await self.said(receiver, "[a-z2-7]{53}: the door is open")
        for what in ((".bash_profile", "--hidden"), (".bash_profile", "notes", "--hidden")):
            status, _, err = await send(*what, key)
            self.assertNotEqual(status, 0)
            self.assertIn("begin with a dot", err)
        (self.directory / "c.txt").write_text("c")
        self.assertEqual((await send("c.txt", key))[0], 0)
        self.assertEqual(sorted(os.listdir(self.directory / "inbox")), ["b.txt", "c.txt", "notes"])

    @asynchronous
    async def test_a_code_that_is_asked_for(self) -> None:
        await self.network()
        (self.directory / "film").write_bytes(b"x" * 1000)
        sender, code = await self.sends("film")
        receiver, typed = self.at_terminal("receive", "--dir", "inbox", "--yes", "--min-servers=1")
        await self.said(receiver, "code: ")
        typed.write(b"7-guitra-alpha-juice\n")
        await self.said(receiver, "'guitar' perhaps")
        begun, _, last = code.rpartition("-")
        typed.write(f"{begun}-{last[:4]}\t\n".encode())
        # The shell rings the bell if other words begin with the whole word, as "youth" begins with "you".
        await self.ends(receiver, 0, "received inbox/film")
        self.assertRegex((receiver.out + receiver.err).decode(), f"{last}\a?\r\n")
        await self.ends(sender, 0)


class IntakeTests(ToolCase):
    """Listeners for anyone, whose limit a stranger tries to use up."""

    @asynchronous
    async def test_strangers_leave_room_for_people_of_the_address_book(self) -> None:
        await self.network()
        for name in ("one", "two"):
            (self.directory / name).write_bytes(os.urandom(400_000))
        for number, (listen, into) in enumerate(
            ((("receive", "--listen", "--dir"), ("send", "")), (("cp", "--writable", "--listen"), ("cp", ":")))
        ):
            inbox = f"inbox{number}"
            (self.directory / inbox).mkdir()
            options = ("--anyone", "--max-total", "1000000", "-k", f"{number}.key", "--create")
            listening = self.tool(*listen, inbox, *options)
            key = (await self.said(listening, r" (?:at|is at) ([a-z2-7]{50,})"))[1]

            async def send(
                name: str, *key_file: str, command: str = into[0], to: str = key + into[1]
            ) -> tuple[int, str]:
                status, _, err = await self.run_command(
                    command, name, to, "--min-servers=1", *key_file, **self.environment
                )
                return status, err

            self.assertEqual((await send("one"))[0], 0)
            status, err = await send("two")
            self.assertNotEqual(status, 0)
            self.assertIn("accepts 500.0 kB from all peers together that are not in its address book", err)
            self.assertEqual((await send("two", "-k", "alice.key"))[0], 0)
            self.assertEqual(sorted(os.listdir(self.directory / inbox)), ["one", "two"])
