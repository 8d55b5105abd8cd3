"""``dmsg send`` and ``dmsg receive`` with a code: real processes, a person at a terminal, strangers."""

from __future__ import annotations

import json
import os
from typing import Any

from twisted.internet import threads

from dmsg.apps.codes.stream import MAX_WRONG_GUESSES
from dmsg.apps.codes.words import EXAMPLE, Code
from dmsg.apps.partial_files import part_name
from dmsg.keys import SecKey, read_key_file, write_key_file
from tests.cli.qr_reader import read_qr
from tests.cli.test_commands import Command
from tests.cli.test_tools import ToolCase
from tests.support import asynchronous


class CodeCase(ToolCase):
    """A network, something to send, and where it goes."""

    async def network(self) -> None:
        self.url = await self.start_discovery()
        await self.start_server(f"--discovery={self.url}")
        await self.until_listed(self.url, 1)
        # Transfers by code use a key of their own, whatever the environment says.
        self.environment = {"DMSG_DISCOVERY": self.url, "DMSG_KEY_FILE": "nowhere.key", "DMSG_NAMES": "names"}
        (self.directory / "inbox").mkdir()

    async def sends(self, *arguments: str) -> tuple[Command, str]:
        """A sender, and its code."""
        sender = self.tool("send", "--min-servers=1", *arguments)
        return sender, (await self.said(sender, r"code: (\S+)"))[1]

    async def receives(self, code: str, *arguments: str) -> tuple[int, str, str]:
        return await self.run_command("receive", code, "--min-servers=1", "--dir=inbox", *arguments, **self.environment)

    def at_terminal(self, *arguments: str) -> tuple[Command, Any]:
        """Run both commands as a person sees them, with one terminal for input and output."""
        return self.start_at_terminal(*arguments, environment=self.environment)

    async def ends(self, command: Command, status: int, *texts: str) -> None:
        self.assertEqual(await command.ended, status, command.out + command.err)
        text = (command.out + command.err).decode()
        for one in texts:
            self.assertIn(one, text)
        self.assertNotIn("Traceback", text)


class SendingTests(CodeCase):
    """Transfers by two commands, on a machine without any configuration."""

    @asynchronous
    async def test_files_and_a_directory_arrive(self) -> None:
        await self.network()
        (self.directory / "film.mkv").write_bytes(os.urandom(3_000_000))
        (self.directory / "notes" / "more").mkdir(parents=True)
        (self.directory / "notes" / "more" / "a.txt").write_text("a")
        (self.directory / "notes" / "out").symlink_to("/etc/passwd")
        sender, code = await self.sends("film.mkv", "notes/")
        self.assertRegex(code, r"^\d{4}-[a-z]+-[a-z]+-[a-z]+$")
        status, out, err = await self.receives(code.upper().replace("-", " "), "--yes")
        self.assertEqual(status, 0, err)
        self.assertIn("received inbox/film.mkv, inbox/notes: 3.0 MB", out)
        await self.ends(sender, 0, "sent film.mkv, notes: 3.0 MB", "not sent: notes/out:")
        self.assertEqual((self.directory / "inbox" / "notes" / "more" / "a.txt").read_text(), "a")
        self.assertEqual(
            (self.directory / "inbox" / "film.mkv").read_bytes(), (self.directory / "film.mkv").read_bytes()
        )

    @asynchronous
    async def test_a_text_and_a_pipe_arrive(self) -> None:
        await self.network()
        sender, code = await self.sends("--text", "the door\nis \x1b[31mopen")
        self.assertEqual(await self.receives(code), (0, "the door\nis \x1b[31mopen\n", ""))
        await self.ends(sender, 0, "sent the text")
        sender, code = await self.sends("-")
        transport: Any = sender.transport
        receiver = self.tool("receive", code, "--yes", "--min-servers=1")
        transport.write(b"line\n" * 100_000)
        transport.closeStdin()
        await self.ends(receiver, 0, "received standard input: 500.0 kB")
        self.assertEqual(receiver.out, b"line\n" * 100_000)
        await self.ends(sender, 0, "sent standard input")
        os.mkfifo(self.directory / "fifo")
        sender, code = await self.sends("fifo")
        receiver = self.tool("receive", code.replace("-", "\u2013"), "--yes", "--min-servers=1")
        await threads.deferToThread((self.directory / "fifo").write_bytes, b"a pipe that has a name")
        await self.ends(receiver, 0, "received fifo: 22 B")
        self.assertEqual(receiver.out, b"a pipe that has a name")
        await self.ends(sender, 0, "sent fifo")

    @asynchronous
    async def test_one_ctrl_c_ends_a_receiver_whose_output_is_not_read(self) -> None:
        """The whole pipe has arrived, or the sender still waits; both end at once."""
        await self.network()
        for size in (50_000, 5_000_000):
            sender, code = await self.sends("-")
            arguments = "receive", code, "--yes", "--min-servers=1"
            receiver, is_full = self.start_with_full_pipe(*arguments, **self.environment)
            transport: Any = sender.transport
            transport.write(bytes(size))
            transport.closeStdin()
            await self.until(is_full)
            receiver.transport.signalProcess("INT")  # type: ignore[union-attr]
            await self.ends(receiver, 130)
            await self.ends(sender, 4, "the other side gave up")

    @asynchronous
    async def test_a_receiver_of_a_pipe_does_not_read_its_input(self) -> None:
        """The input is meant for the next program of a script."""
        await self.network()
        sender, code = await self.sends("-")
        read, write = os.pipe()
        self.addCleanup(os.close, read)
        os.write(write, b"for the next one")
        os.close(write)
        receiver = self.start("receive", code, "--yes", "--min-servers=1", stdin=read, **self.environment)
        sender.transport.closeStdin()  # type: ignore[union-attr]
        await self.ends(receiver, 0)
        self.assertEqual((os.read(read, 100), os.get_blocking(read)), (b"for the next one", True))

    @asynchronous
    async def test_json_output_describes_the_transfer(self) -> None:
        await self.network()
        (self.directory / "a").write_bytes(b"a")
        sender = self.tool("send", "--json", "--words=4", "a", "--min-servers=1")
        code = (await self.said(sender, r'"code": "(\d{4}-[a-z]+-[a-z]+-[a-z]+-[a-z]+)"'))[1]
        status, out, err = await self.receives(code, "--yes", "--json")
        self.assertEqual(status, 0, err)
        self.assertEqual(json.loads(out)["received"], ["inbox/a"])
        await self.ends(sender, 0)
        self.assertEqual(json.loads(sender.out.splitlines()[1])["sent"], ["a"])

    @asynchronous
    async def test_a_transfer_resumes_after_the_receiver_is_killed(self) -> None:
        """Bytes that have arrived are not sent again, although the second transfer uses another code."""
        await self.network()
        film = self.directory / "film.mkv"
        film.write_bytes(os.urandom(1_000_000) * 150)
        sender, code = await self.sends("film.mkv", "--resume=4")
        receiver = self.tool("receive", code, "--yes", "--dir=inbox", "--min-servers=1")
        part = self.directory / "inbox" / part_name("film.mkv")
        await self.until(lambda: part.exists() and part.stat().st_size > 1_000_000)
        transport: Any = receiver.transport
        transport.signalProcess("KILL")
        await receiver.ended
        size = part.stat().st_size
        await self.ends(sender, 5, "the other side is away", "what has arrived is kept")
        sender, code = await self.sends("film.mkv")
        status, out, err = await self.receives(code, "--yes", "--json")
        self.assertEqual(status, 0, err)
        self.assertEqual(json.loads(out)["bytes"], film.stat().st_size - size)
        self.assertEqual((self.directory / "inbox" / "film.mkv").read_bytes(), film.read_bytes())


class RefusingTests(CodeCase):
    """Failures are reported at both ends."""

    @asynchronous
    async def test_a_wrong_code_fails_at_both_ends(self) -> None:
        await self.network()
        (self.directory / "a").write_bytes(b"a")
        sender, code = await self.sends("a")
        wrong = str(Code.make(Code.parse(code).nameplate))
        status, _, err = await self.receives(wrong, "--yes")
        self.assertEqual((status, err.count("\n")), (4, 1), err)
        self.assertIn("the code is wrong", err)
        await self.said(sender, f"somebody tried a wrong code; after {MAX_WRONG_GUESSES - 1} more")
        status, _, err = await self.receives(code, "--yes")
        self.assertEqual(status, 0, err)
        await self.ends(sender, 0, "sent a")
        status, _, err = await self.receives(code, "--yes")
        self.assertEqual(status, 3)
        self.assertIn("nobody waits with a code that begins with", err)

    @asynchronous
    async def test_existing_too_large_and_unconfirmed_transfers_are_refused(self) -> None:
        await self.network()
        (self.directory / "a").write_bytes(b"aaaa")
        (self.directory / "inbox" / "a").write_bytes(b"old")
        for arguments, here, there in (
            (["--yes"], "a exists already", "a exists already"),
            (["--yes", "--overwrite", "--max-size=3"], "4 B is too much", "4 B is too much"),
            (["--overwrite"], "nobody can answer", "nobody can answer the question"),
        ):
            sender, code = await self.sends("a")
            status, _, err = await self.receives(code, *arguments)
            self.assertEqual(status, 1)
            self.assertIn(here, err)
            await self.ends(sender, 4, there)
        self.assertEqual((self.directory / "inbox" / "a").read_bytes(), b"old")

    @asynchronous
    async def test_what_overwrite_cannot_replace_is_not_said_to_need_overwrite(self) -> None:
        await self.network()
        (self.directory / "a").write_bytes(b"a")
        (self.directory / "inbox" / "a").mkdir()
        sender, code = await self.sends("a")
        status, _, err = await self.receives(code, "--yes", "--overwrite")
        self.assertEqual(status, 1)
        self.assertIn("a exists already: only a file replaces a file: remove it, or use --dir", err)
        await self.ends(sender, 4, "a exists already")

    @asynchronous
    async def test_a_closed_or_full_output_fails_at_both_ends(self) -> None:
        """The reader has closed the pipe, or the disk is full; both ends report the failure at once."""
        await self.network()
        full = os.open("/dev/full", os.O_WRONLY)
        self.addCleanup(os.close, full)
        for arguments in (("-",), ("--text", "a")):
            for stdout, status in ((full, 1), (None, 141)):
                sender, code = await self.sends(*arguments)
                transport: Any = sender.transport
                if stdout is None:
                    read, write = os.pipe()
                    os.close(read)
                    stdout = write
                    self.addCleanup(os.close, write)
                receiver = self.start("receive", code, "--yes", "--min-servers=1", stdout=stdout, **self.environment)
                if arguments == ("-",):
                    transport.write(b"line\n" * 1000)
                self.assertEqual(await receiver.ended, status, (arguments, receiver.err))
                self.assertNotEqual(await sender.ended, 0, arguments)
                self.assertNotIn(b"Traceback", receiver.err + sender.err)

    @asynchronous
    async def test_a_pipe_that_ends_at_a_full_disk_fails_at_both_ends(self) -> None:
        """The sender has sent everything before the failure is noticed; both ends report its reason."""
        await self.network()
        full = os.open("/dev/full", os.O_WRONLY)
        self.addCleanup(os.close, full)
        for size in (1, 1000, 300_000):
            sender, code = await self.sends("-")
            transport: Any = sender.transport
            transport.write(bytes(size))
            transport.closeStdin()
            receiver = self.start("receive", code, "--yes", "--min-servers=1", stdout=full, **self.environment)
            self.assertEqual(await receiver.ended, 1, receiver.err)
            self.assertEqual(await sender.ended, 4, sender.err)
            reason = "standard output: No space left on device"
            self.assertEqual(receiver.err.decode(), f"dmsg: {reason}\n")
            self.assertTrue(sender.err.decode().endswith(f"dmsg: the other side gave up: {reason}\n"), sender.err)

    @asynchronous
    async def test_a_code_that_cannot_be_printed_is_not_explained(self) -> None:
        await self.network()
        full = os.open("/dev/full", os.O_WRONLY)
        self.addCleanup(os.close, full)
        sender = self.start("send", "--text", "a", "--min-servers=1", stdout=full, **self.environment)
        self.assertEqual(await sender.ended, 1, sender.err)
        self.assertEqual(sender.err.decode(), "dmsg: standard output: No space left on device\n")

    @asynchronous
    async def test_ctrl_c_withdraws_the_code(self) -> None:
        """The number leads nowhere any more, and the code to nobody."""
        await self.network()
        sender, code = await self.sends("--text", "a")
        transport: Any = sender.transport
        transport.signalProcess("INT")
        transport.signalProcess("INT")
        await self.ends(sender, 130)
        status, _, err = await self.receives(code)
        self.assertEqual(status, 3)
        self.assertIn("nobody waits", err)

    @asynchronous
    async def test_mistakes_print_one_line_before_any_connection(self) -> None:
        """Each mistake is reported in one line."""
        (self.directory / "a").write_bytes(b"a")
        away = ("-d", "http://127.0.0.1:1")
        for arguments, text in (
            (("send",), "nothing to send"),
            (("send", "nothing"), "nothing: No such file"),
            (("send", "a", "nobody"), "nobody: no such file, and no key"),
            (("send", "a", "a", "02" + "ab" * 32), "two of the given files are called a"),
            (("send", "--text", "x", "a", "02" + "ab" * 32), "exclude each other"),
            (("send", "-", "a"), "standard input (-) can only be sent alone"),
            (("send", "a", "--text", "x"), "exclude each other"),
            (("send", "--text", "x" * 40_000), "32768 characters"),
            (("send", "a", "./a"), "two of the given files are called a"),
            (("send", ""), "a FILE argument is empty"),
            (("send", "a", ""), "a FILE argument is empty"),
            (("send", "--verify", "a"), "needs a terminal"),
            (("receive", "--verify", EXAMPLE), "needs a terminal"),
            (("receive", "7-guitar"), "at least three words"),
            (("receive", "7-guitar-alpha"), "too old for this one"),
            (("receive", EXAMPLE.replace("5274", "5247")), "do not match; it was not tried"),
            (("receive", "7"), "is not a code"),
            (("receive", "7-guitra-alpha-zoo"), "'guitar' perhaps?"),
            (("receive", "film.mkv"), "is not a code"),
        ):
            status, _, err = await self.run_command(*arguments, *away, DMSG_NAMES="names")
            self.assertGreater(status, 0, arguments)
            self.assertIn(text, err)
            lines = [line for line in err.splitlines() if line.strip() and not line.startswith(("Usage:", "Try "))]
            self.assertEqual(len(lines), 1, err)


class PersonTests(CodeCase):
    """Transfers at a terminal."""

    @asynchronous
    async def test_the_receiver_asks_a_person_before_accepting(self) -> None:
        await self.network()
        (self.directory / "film.mkv").write_bytes(bytes(1_200_000))
        for answer, status in ((b"\n", 0), (b"n\n", 4)):
            sender, _ = self.at_terminal("send", "film.mkv", "--min-servers=1")
            code = (await self.said(sender, r"code: (\S+)"))[1]
            await self.said(sender, "on the other machine")
            self.assertEqual(read_qr(sender.out.decode()), code)
            receiver, typed = self.at_terminal("receive", code, "--dir", "inbox", "--min-servers=1")
            await self.said(receiver, r"film\.mkv, 1\.2 MB, from a stranger; take it\? \[Y/n\] ")
            typed.write(answer)
            self.assertEqual(await receiver.ended, status, receiver.out)
            self.assertEqual(await sender.ended, status, sender.out)
            self.assertEqual((self.directory / "inbox" / "film.mkv").exists(), status == 0)
            if status == 0:
                (self.directory / "inbox" / "film.mkv").unlink()
            else:
                self.assertIn(b"does not want it", sender.out)

    @asynchronous
    async def test_both_ends_show_the_offer_and_progress(self) -> None:
        await self.network()
        (self.directory / "a").write_bytes(b"a")
        for answers, status in ((("y", "y"), 0), (("y", "n"), 4)):
            sender, here = self.at_terminal("send", "--verify", "a", "--no-qr", "--min-servers=1")
            code = (await self.said(sender, r"code: (\S+)"))[1]
            receiver, there = self.at_terminal(
                "receive", "--verify", code, "--yes", "--dir", "inbox", "--overwrite", "--min-servers=1"
            )
            shown = set()
            for command, typed, answer in ((sender, here, answers[0]), (receiver, there, answers[1])):
                shown.add((await self.said(command, r"verify: (\d{4} \d{4} \d{4})"))[1])
                await self.said(command, r"show the same\? \[y/N\]")
                typed.write(b"what\n")
                await self.said(command, r"yes or no\? ")
                typed.write(answer.encode() + b"\n")
            self.assertEqual(len(shown), 1)
            self.assertEqual(await receiver.ended, status, receiver.out)
            self.assertEqual(await sender.ended, status, sender.out)

    @asynchronous
    async def test_input_typed_before_the_question_is_ignored(self) -> None:
        await self.network()
        (self.directory / "a").write_bytes(b"a")
        sender, code = await self.sends("a")
        receiver, typed = self.at_terminal("receive", code, "--dir", "inbox", "--min-servers=1")
        typed.write(b"\n")
        await self.said(receiver, r"take it\?")
        typed.write(b"n\n")
        self.assertEqual(await receiver.ended, 4)
        self.assertIn(b"you declined the offer", receiver.out)
        await self.ends(sender, 4, "does not want it")
        self.assertFalse((self.directory / "inbox" / "a").exists())

    @asynchronous
    async def test_a_pipe_is_not_for_a_terminal(self) -> None:
        await self.network()
        sender, code = await self.sends("-")
        receiver, _ = self.at_terminal("receive", code, "--yes", "--min-servers=1")
        transport: Any = sender.transport
        transport.write(b"\x1b]0;title\x07")
        self.assertEqual(await receiver.ended, 1)
        self.assertIn(b"not shown on a terminal", b" ".join(receiver.out.split()))
        self.assertNotIn(b"title", receiver.out)
        await self.ends(sender, 4, "standard output is a terminal")

    @asynchronous
    async def test_file_names_are_not_interpreted_as_markup(self) -> None:
        await self.network()
        (self.directory / "[b]a[link=x]").write_bytes(bytes(1_000_000))
        sender, _ = self.at_terminal("send", "[b]a[link=x]", "--no-qr", "--min-servers=1")
        code = (await self.said(sender, r"code: (\S+)"))[1]
        receiver, _ = self.at_terminal("receive", code, "--yes", "--dir", "inbox", "--min-servers=1")
        self.assertEqual(await receiver.ended, 0, receiver.out)
        self.assertEqual(await sender.ended, 0, sender.out)

    @asynchronous
    async def test_ctrl_c_at_the_question_ends_both(self) -> None:
        await self.network()
        (self.directory / "a").write_bytes(b"a")
        sender, _ = self.at_terminal("send", "a", "--no-qr", "--min-servers=1")
        code = (await self.said(sender, r"code: (\S+)"))[1]
        receiver, typed = self.at_terminal("receive", code, "--dir", "inbox", "--min-servers=1")
        await self.said(receiver, r"take it\?")
        typed.write(b"\x03")
        self.assertEqual(await receiver.ended, 130)
        # The shell's prompt gets a line of its own, after the ^C of the terminal.
        self.assertTrue(receiver.out.endswith(b"^C\r\n"), receiver.out)
        self.assertEqual(await sender.ended, 4)
        self.assertIn("the other side gave up", sender.out.decode())
        self.assertNotIn("▀", sender.out.decode())
        for command in (receiver, sender):
            self.assertNotIn(b"Traceback", command.out)

    @asynchronous
    async def test_a_question_that_is_withdrawn_leaves_its_line(self) -> None:
        await self.network()
        (self.directory / "a").write_bytes(b"a")
        sender, typed = self.at_terminal("send", "a", "--no-qr", "--min-servers=1")
        code = (await self.said(sender, r"code: (\S+)"))[1]
        receiver, _ = self.at_terminal("receive", code, "--dir", "inbox", "--min-servers=1")
        await self.said(receiver, r"take it\? \[Y/n\] ")
        typed.write(b"\x03")
        self.assertEqual(await receiver.ended, 4, receiver.out)
        self.assertIn(b"[Y/n] \r\ndmsg: the other side gave up", receiver.out)


class PairTests(CodeCase):
    """``dmsg pair``."""

    async def pairs(self, name: str, *arguments: str, key: str = "alice.key", names: str = "alice.names") -> Command:
        environment = {**self.environment, "DMSG_KEY_FILE": key, "DMSG_NAMES": names}
        return self.start("pair", name, *arguments, "--create", "--min-servers=1", **environment)

    @asynchronous
    async def test_pairing_stores_the_other_key_at_both_sides(self) -> None:
        await self.network()
        alice = await self.pairs("bob", "--no-qr")
        code = (await self.said(alice, r"code: (\S+)"))[1]
        bob = await self.pairs("alice", code, "--group", "@family", key="bob.key", names="bob.names")
        await self.ends(bob, 0, "alice is a")
        await self.ends(alice, 0, "bob is a")
        for names, name, key in (("alice.names", "bob", "bob.key"), ("bob.names", "alice", "alice.key")):
            known = (self.directory / names).read_text().split()
            self.assertEqual(known, [name, str(read_key_file(self.directory / key).public)])
        self.assertEqual((self.directory / "bob.names.groups").read_text(), "family alice\n")
        self.assertFalse((self.directory / "alice.names.groups").exists())

    @asynchronous
    async def test_mistakes_in_pairing_print_one_line(self) -> None:
        await self.network()
        write_key_file(self.directory / "alice.key", SecKey.generate())
        (self.directory / "alice.names").write_text(f"bob {SecKey.generate().public}\n")
        for arguments, text in (
            (("bob",), "stands for"),
            (("a b",), "is not a name"),
            (("carol", "--group", "@a b"), "is not a name"),
            (("carol", "7"), "is not a code"),
            (("carol", "7-guitra-alpha-zoo"), "'guitar' perhaps?"),
        ):
            command = await self.pairs(*arguments)
            await self.ends(command, 2, text)

    @asynchronous
    async def test_pairing_without_a_key_file_uses_the_default_key(self) -> None:
        """The key is that of `dmsg up`; it is created at the first use and stays."""
        await self.network()
        code = ""
        commands = []
        for who, other in (("alice", "bob"), ("bob", "alice")):
            home = {"DMSG_CONFIG": str((self.directory / who / "config.toml").absolute()), "DMSG_NAMES": f"{who}.names"}
            arguments = ["pair", other, *([code] if code else ["--no-qr"]), "--min-servers=1"]
            commands.append(self.start(*arguments, DMSG_DISCOVERY=self.url, **home))
            code = code or (await self.said(commands[0], r"code: (\S+)"))[1]
        for command in reversed(commands):
            await self.ends(command, 0, "your key from now on")
        for who, other in (("alice", "bob"), ("bob", "alice")):
            known = (self.directory / f"{who}.names").read_text().split()
            self.assertEqual(known, [other, str(read_key_file(self.directory / other / "key").public)])

    @asynchronous
    async def test_a_peer_that_runs_send_instead_fails_at_both_ends(self) -> None:
        """The other side runs another command: both hear that it was not that."""
        await self.network()
        alice = await self.pairs("bob", "--no-qr")
        code = (await self.said(alice, r"code: (\S+)"))[1]
        status, _, err = await self.receives(code, "--yes")
        self.assertEqual(status, 1)
        self.assertIn("malformed", err)
        await self.ends(alice, 1, "the other side")
        self.assertFalse((self.directory / "alice.names").exists())


class OddTreesTests(CodeCase):
    """Fifty directories with odd names, sent by a code between two processes."""

    NAMES = (
        " leading",
        "trailing ",
        "two  blanks",
        "tab\there",
        "new\nline",
        "-rf",
        "--help",
        "quote'",
        'quote"',
        "back\\slash",
        "*",
        "?",
        "[x]",
        "$HOME",
        "`id`",
        "a;b",
        "a&b",
        "a|b",
        "a<b>",
        "%s%n",
        "~",
        "#",
        "!",
        ".hidden",
        "..twodots",
        "...",
        "CON",
        "ünïcödé",
        "日本語",
        "ελληνικά",
        "emoji🎉",
        "e\u0301",
        "\u00e9",
        "\u202eright to left",
        "\x1b[31mred",
        "\x07bell",
        "a" * 200,
        "é" * 100,
        EXAMPLE,
        "02" + "ab" * 32,
        "name:colon",
        "C:",
        "=",
        "@file",
        "^",
        "{}",
        "con.txt",
        "\x7f",
        "zero\u200bwidth",
        "not utf-8: \udcff\udcfe",
    )

    @asynchronous
    async def test_trees_with_odd_names_arrive_unchanged(self) -> None:
        await self.network()
        ours, theirs = self.directory / "ours", self.directory / "theirs"
        theirs.mkdir()
        self.assertEqual(len(set(self.NAMES)), 50)
        for number, name in enumerate(self.NAMES):
            below = ours / name / name
            below.mkdir(parents=True)
            (below / name).write_bytes(name.encode("utf-8", "surrogateescape") * number)
            os.chmod(below / name, 0o600 | (number % 2) * 0o145)
            os.utime(below / name, (1_700_000_000 + number,) * 2)
            os.symlink(f"{name}/{name}", ours / name / "link")
        sending = self.start("send", "ours", "--hidden", **self.environment)
        code = (await self.said(sending, r"code: (\S+)"))[1]
        status, _, err = await self.run_command(
            "receive", code, "--yes", "--hidden", "--dir", "theirs", **self.environment
        )
        self.assertEqual(status, 0, err)
        self.assertEqual(await sending.ended, 0)
        for number, name in enumerate(self.NAMES):
            file = theirs / "ours" / name / name / name
            self.assertEqual(file.read_bytes(), name.encode("utf-8", "surrogateescape") * number)
            self.assertEqual(file.stat().st_mode & 0o777, 0o600 | (number % 2) * 0o145)
            self.assertEqual(file.stat().st_mtime, 1_700_000_000 + number)
            self.assertEqual(os.readlink(theirs / "ours" / name / "link"), f"{name}/{name}")
        shown = (sending.out + sending.err).decode()
        self.assertNotIn("\x07", shown)
