"""The command line as a person uses it: real processes against a real network."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.protocol import ProcessProtocol

from dmsg.keys import PubKey, SecKey, read_key_file
from tests.cli.json_output import check
from tests.forking import COMMAND
from tests.net.support import EntityCase
from tests.support import asynchronous

LONGEST_LINE = 100
"""Bytes of a line that a command prints again and again."""


class Command(ProcessProtocol):
    """Run of ``dmsg``."""

    def __init__(self) -> None:
        self.out = b""
        self.err = b""
        self.ended: Deferred[int] = Deferred()

    def outReceived(self, data: bytes) -> None:
        self.out += data

    def errReceived(self, data: bytes) -> None:
        self.err += data

    def processEnded(self, reason: Any) -> None:
        self.ended.callback(reason.value.exitCode if reason.value.exitCode is not None else -1)


class CommandCase(EntityCase):
    """Runs ``dmsg`` in a directory of its own."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()

    def start(
        self,
        *arguments: str,
        stdin: int | str = "w",
        stdout: int | str = "r",
        code: str = COMMAND,
        **environment: str,
    ) -> Command:
        """Run it; standard input stays open.

        :param stdin: another descriptor than a pipe from the test.
        :param stdout: another descriptor than a pipe to the test.
        """
        command = Command()
        argv = [sys.executable, "-c", code, *arguments]
        env = {**os.environ, "COLUMNS": "200", "DMSG_CONFIG": "config.toml", **environment}
        run: Any = reactor.spawnProcess
        descriptors = {0: stdin, 1: stdout, 2: "r"}
        process = run(command, sys.executable, argv, env=env, path=str(self.directory), childFDs=descriptors)
        self._end_with_test(command, process)
        return command

    def start_with_full_pipe(self, *arguments: str, **environment: str) -> tuple[Command, Callable[[], bool]]:
        """Run it with a standard output that nobody reads.

        :return: the command, and a function that tells whether its pipe is full.
        """
        read, write = os.pipe()
        self.addCleanup(os.close, read)
        size = fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        command = self.start(*arguments, stdout=write, **environment)
        os.close(write)
        waiting = 0

        def is_full() -> bool:
            nonlocal waiting
            before, waiting = waiting, int.from_bytes(fcntl.ioctl(read, termios.FIONREAD, bytes(4)), sys.byteorder)
            # A line that does not fit is not written in part.
            return waiting > size - LONGEST_LINE and waiting == before

        return command, is_full

    def start_at_terminal(
        self, *arguments: str, environment: Mapping[str, str] | None = None, size: tuple[int, int] = (100, 40)
    ) -> tuple[Command, Any]:
        """Run the command as a person sees it: one terminal for its input, its output and its errors.

        :param size: columns and rows of the terminal.
        :return: the command, whose output has all that the terminal shows, and its process.
        """
        command = Command()
        argv = [sys.executable, "-c", COMMAND, *arguments]
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        env |= {"TERM": "xterm-256color", "DMSG_CONFIG": "config.toml", **(environment or {})}
        run: Any = reactor.spawnProcess
        master, slave = pty.openpty()
        columns, rows = size
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        terminal = (master, slave, "")
        process = run(command, sys.executable, argv, env=env, path=str(self.directory), usePTY=terminal)
        self._end_with_test(command, process)
        return command, process

    def _end_with_test(self, command: Command, process: Any) -> None:
        def end() -> Deferred[Any] | None:
            if process.pid is None:
                return None
            process.signalProcess("KILL")
            done: Deferred[Any] = Deferred()
            command.ended.addBoth(done.callback)
            return done

        self.addCleanup(end)

    async def run_command(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Exit status, output, errors."""
        command = self.start(*arguments, **environment)
        status = await command.ended
        self.assertNotIn(b"Traceback", command.out + command.err)
        if "--json" in arguments:
            check(arguments, command.out.decode())
        return status, command.out.decode(errors="replace"), command.err.decode()


class KeyTests(CommandCase):
    """``dmsg key`` and what goes wrong before any network."""

    @asynchronous
    async def test_key_new_creates_a_key_that_key_show_prints(self) -> None:
        status, out, _ = await self.run_command("key", "new", "a.key")
        self.assertEqual(status, 0)
        key = read_key_file(self.directory / "a.key")
        self.assertEqual(out.strip(), key.public.text)
        self.assertEqual(await self.run_command("key", "show", "a.key"), (0, out, ""))
        self.assertEqual(await self.run_command("key", "show", "a.key", "--hex"), (0, f"{key.public}\n", ""))
        status, out, err = await self.run_command("key", "new", "a.key")
        self.assertEqual((status, out), (1, ""))
        self.assertIn("exists already", err)

    @asynchronous
    async def test_bad_input_is_one_line(self) -> None:
        (self.directory / "open.key").write_text("secret 00\n")
        (self.directory / "open.key").chmod(0o644)
        (self.directory / "file").write_text("x")
        key = SecKey.generate().public.hex()
        away = "http://127.0.0.1:1"
        for arguments in (
            ("key", "show", "none.key"),
            ("key", "show", "open.key"),
            ("ping", "02ab", "-d", away),
            ("ping", key, "-d", away, "-k", "open.key"),
            ("send", "none", key, "-d", away),
            ("send", "file", "zz" * 33, "-d", away),
            ("discovery", "list", "-d", away),
            ("discovery", "show", key, "-d", "nonsense"),
            ("discovery", "show", key, "-d", "ftp://x"),
            ("discovery", "show", key, "-d", "http://user:secret@127.0.0.1:1"),
            ("discovery", "show", key, "-d", "http://127.0.0.1:99999"),
            ("discovery", "delete", "-k", "none.key", "-d", away),
            ("receive", "--listen", "--anyone", "--dir", "nowhere/deep", "-d", away),
            ("bench", "--size", "0", "-d", away),
            ("demo", "--size", "1"),
            ("nothing",),
        ):
            status, out, err = await self.run_command(*arguments)
            self.assertGreater(status, 0, arguments)
            self.assertNotIn("secret@", err)
            errors = [line for line in err.splitlines() if not line.startswith(("Usage:", "Try "))]
            self.assertEqual(len([line for line in errors if line.strip()]), 1, (arguments, err))

    @asynchronous
    async def test_help_has_examples(self) -> None:
        for command in ("key", "discovery", "listen", "connect", "send", "receive", "ping", "bench", "demo"):
            status, out, _ = await self.run_command(command, "--help")
            self.assertEqual(status, 0)
            self.assertIn("Example", out, command)
        status, out, _ = await self.run_command("--help")
        self.assertIn("receive", out)


class NetworkCommandTests(CommandCase):
    """Commands that need a network."""

    async def network(self) -> str:
        url = await self.start_discovery()
        await self.start_server(f"--discovery={url}")
        await self.until_listed(url, 1)
        return url

    async def said(self, command: Command, pattern: str) -> re.Match[str]:
        """Wait for a line."""
        return await self.until(lambda: re.search(pattern, (command.out + command.err).decode()))

    @asynchronous
    async def test_a_sent_file_is_received(self) -> None:
        url = await self.network()
        content = os.urandom(3_000_000)
        (self.directory / "photo.jpg").write_bytes(content)
        (self.directory / "inbox").mkdir()
        receiving = self.start(
            "receive",
            "--listen",
            "--anyone",
            "--dir",
            "inbox",
            "--once",
            "--min-servers",
            "1",
            "-k",
            "bob.key",
            "--create",
            DMSG_DISCOVERY=url,
        )
        key = (await self.said(receiving, r"receiving at ([a-z2-7]{53})"))[1]
        status, out, _ = await self.run_command("send", "photo.jpg", key, "--min-servers", "1", DMSG_DISCOVERY=url)
        self.assertEqual(status, 0)
        self.assertEqual(await receiving.ended, 0)
        self.assertEqual((self.directory / "inbox" / "photo.jpg").read_bytes(), content)
        self.assertEqual(os.listdir(self.directory / "inbox"), ["photo.jpg"])
        for text in (out, receiving.out.decode()):
            self.assertIn(hashlib.sha256(content).hexdigest(), text)
            self.assertIn("3.0 MB", text)
        self.assertEqual(read_key_file(self.directory / "bob.key").public.text, key)

    @asynchronous
    async def test_a_file_that_is_there_is_not_replaced(self) -> None:
        url = await self.network()
        (self.directory / "file").write_text("new")
        (self.directory / "inbox").mkdir()
        (self.directory / "inbox" / "file").write_text("old")
        receiving = self.start(
            "receive", "--listen", "--anyone", "--dir", "inbox", "--once", "--min-servers", "1", DMSG_DISCOVERY=url
        )
        key = (await self.said(receiving, r"receiving at ([a-z2-7]{53})"))[1]
        status, _, err = await self.run_command("send", "file", key, "--min-servers", "1", DMSG_DISCOVERY=url)
        self.assertEqual(status, 1)
        self.assertIn("exists already", err)
        self.assertEqual(await receiving.ended, 1)
        self.assertEqual((self.directory / "inbox" / "file").read_text(), "old")

    @asynchronous
    async def test_listen_and_connect_are_joined(self) -> None:
        url = await self.network()
        listening = self.start("listen", "-w", "60", "--min-servers", "1", DMSG_DISCOVERY=url)
        key = (await self.said(listening, r"listening: ([a-z2-7]{53})"))[1]
        connecting = self.start("connect", key, "--min-servers", "1", DMSG_DISCOVERY=url)
        await self.said(connecting, "connected:")
        await self.said(listening, "connected:")
        connecting.transport.write(b"to the listener\n")  # type: ignore[union-attr]
        listening.transport.write(b"to the caller\n")  # type: ignore[union-attr]
        await self.until(lambda: connecting.out == b"to the caller\n")
        listening.transport.closeStdin()  # type: ignore[union-attr]
        big = b"0123456789abcdef" * 40_000
        connecting.transport.write(big)  # type: ignore[union-attr]
        connecting.transport.closeStdin()  # type: ignore[union-attr]
        self.assertEqual(await gatherResults([connecting.ended, listening.ended]), [0, 0])
        self.assertEqual(listening.out, b"to the listener\n" + big)

    @asynchronous
    async def test_the_sender_reports_data_that_did_not_arrive(self) -> None:
        """The listener is stopped in the middle. The sender does not report data as sent that the listener has not
        received.
        """
        url = await self.network()
        listening = self.start("listen", "-w", "60", "--min-servers", "1", DMSG_DISCOVERY=url)
        key = (await self.said(listening, r"listening: ([a-z2-7]{53})"))[1]
        connecting = self.start("connect", key, "--min-servers", "1", DMSG_DISCOVERY=url)
        listening.transport.pauseProducing()  # type: ignore[union-attr]
        await self.said(connecting, "connected:")
        connecting.transport.write(bytes(40_000_000))  # type: ignore[union-attr]
        connecting.transport.closeStdin()  # type: ignore[union-attr]
        listening.transport.resumeProducing()  # type: ignore[union-attr]
        await self.until(lambda: len(listening.out) > 1_000_000)
        listening.transport.signalProcess("INT")  # type: ignore[union-attr]
        self.assertEqual(await listening.ended, 130)
        self.assertLess(len(listening.out), 40_000_000)
        self.assertEqual(await connecting.ended, 1)
        self.assertRegex(connecting.err.decode(), "before all of the input had arrived|lost|aborted|ended")

    @asynchronous
    async def test_ctrl_c_is_no_end_of_input(self) -> None:
        """The other side hears of it, although everything that was written so far has arrived."""
        url = await self.network()
        for interrupted in ("listener", "caller"):
            listening = self.start("listen", "-w", "60", "--min-servers", "1", DMSG_DISCOVERY=url)
            key = (await self.said(listening, r"listening: ([a-z2-7]{53})"))[1]
            connecting = self.start("connect", key, "--min-servers", "1", DMSG_DISCOVERY=url)
            for one, other in ((listening, connecting), (connecting, listening)):
                await self.said(one, "connected:")
                one.transport.write(b"hello")  # type: ignore[union-attr]
                await self.until(lambda other=other: other.out == b"hello")
            first, second = (listening, connecting) if interrupted == "listener" else (connecting, listening)
            first.transport.signalProcess("INT")  # type: ignore[union-attr]
            self.assertEqual((await first.ended, await second.ended), (130, 1), interrupted)
            self.assertIn("dmsg: the remote ended it early", second.err.decode())

    @asynchronous
    async def test_both_ends_report_a_full_disk(self) -> None:
        url = await self.network()
        full = os.open("/dev/full", os.O_WRONLY)
        self.addCleanup(os.close, full)
        listening = self.start("listen", "-w", "60", "--min-servers", "1", stdout=full, DMSG_DISCOVERY=url)
        key = (await self.said(listening, r"listening: ([a-z2-7]{53})"))[1]
        connecting = self.start("connect", key, "--min-servers", "1", DMSG_DISCOVERY=url)
        connecting.transport.write(bytes(5_000_000))  # type: ignore[union-attr]
        connecting.transport.closeStdin()  # type: ignore[union-attr]
        self.assertEqual(await gatherResults([listening.ended, connecting.ended]), [1, 1])
        self.assertIn("dmsg: standard output: No space left on device\n", listening.err.decode())
        self.assertIn("the remote ended it early", connecting.err.decode())

    @asynchronous
    async def test_a_full_disk_at_the_very_end(self) -> None:
        """The other end is done, and so is the input, when it is seen that what came cannot be written."""
        url = await self.network()
        full = os.open("/dev/full", os.O_WRONLY)
        self.addCleanup(os.close, full)
        listening = self.start("listen", "-w", "1", "--min-servers", "1", DMSG_DISCOVERY=url)
        key = (await self.said(listening, r"listening: ([a-z2-7]{53})"))[1]
        listening.transport.write(b"hello")  # type: ignore[union-attr]
        listening.transport.closeStdin()  # type: ignore[union-attr]
        connecting = self.start("connect", key, "-w", "60", "--min-servers", "1", stdout=full, DMSG_DISCOVERY=url)
        connecting.transport.closeStdin()  # type: ignore[union-attr]
        self.assertEqual(await connecting.ended, 1, connecting.err)
        self.assertIn("dmsg: standard output: No space left on device\n", connecting.err.decode())
        await listening.ended

    @asynchronous
    async def test_ping_bench_and_discovery_print_results(self) -> None:
        url = await self.network()
        serving = self.start("bench", "--serve", "--min-servers", "1", "-k", "s.key", "--create", DMSG_DISCOVERY=url)
        key = (await self.said(serving, r"serving at ([a-z2-7]{53})"))[1]
        status, out, _ = await self.run_command(
            "ping", key, "-c", "3", "-i", "0", "--min-servers", "1", DMSG_DISCOVERY=url
        )
        self.assertEqual(status, 0)
        self.assertIn("3 sent, 0 lost", out)
        status, out, _ = await self.run_command(
            "bench", key, "--seconds", "0.1", "--size", "100", "--min-servers", "1", DMSG_DISCOVERY=url
        )
        self.assertEqual(status, 0)
        self.assertIn("100 B", out)
        status, out, _ = await self.run_command("discovery", "list", DMSG_DISCOVERY=url)
        self.assertRegex(out, r"[a-z2-7]{53} +127\.0\.0\.1:\d+ +\d+")
        status, out, _ = await self.run_command("discovery", "show", key, DMSG_DISCOVERY=url)
        self.assertIn(str(PubKey.from_text(key)), out)
        serving.transport.signalProcess("KILL")  # type: ignore[union-attr]
        await serving.ended
        status, out, _ = await self.run_command("discovery", "delete", "-k", "s.key", DMSG_DISCOVERY=url)
        self.assertEqual((status, out), (0, f"deleted the entry of {key}\n"))
        status, _, err = await self.run_command("ping", key, "--min-servers", "1", DMSG_DISCOVERY=url)
        self.assertEqual(status, 3)
        short = PubKey.from_text(key).short
        self.assertRegex(err, rf"^dmsg: discovery {url} has no entry of {short}: is its program running.*\n$")

    @asynchronous
    async def test_signals_end_commands_with_their_status(self) -> None:
        """Ctrl-C ends each with 130, SIGTERM with 143, SIGHUP with 129, without a word; the entry is withdrawn."""
        url = await self.network()
        for arguments, ready, number, expected in (
            (("listen",), "listening", "INT", 130),
            (("listen",), "listening", "TERM", 143),
            (("receive", "--listen", "--anyone"), "receiving", "INT", 130),
            (("receive", "--listen", "--anyone"), "receiving", "HUP", 129),
            (("bench", "--serve"), "serving", "INT", 130),
            (("bench", "--seconds", "60"), "round trip", "TERM", 143),
        ):
            command = self.start(*arguments, "--min-servers", "1", DMSG_DISCOVERY=url)
            await self.said(command, ready)
            command.transport.signalProcess(number)  # type: ignore[union-attr]
            self.assertEqual(await command.ended, expected, arguments)
            self.assertNotIn(b"Traceback", command.out + command.err)
        listed = await self.discovery._running.store.count()
        self.assertEqual(listed, 1)  # The server is listed.

    @asynchronous
    async def test_the_demo_prints_its_table(self) -> None:
        status, out, err = await self.run_command("demo", "--size", str(1024 * 1024))
        self.assertEqual((status, err), (0, ""))
        self.assertIn("was killed (SIGKILL)", out)
        self.assertIn("all files arrived as they were sent", out)
