"""``dmsg send`` to several receivers: by one code, and to a group."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from dmsg.apps.partial_files import part_name
from dmsg.cli.params import DurationType
from dmsg.clients.address_book import AddressBook
from dmsg.clients.groups import Groups
from dmsg.keys import SecKey, write_key_file
from tests.cli.files.test_send_by_code import CodeCase
from tests.cli.json_output import check
from tests.cli.test_commands import Command
from tests.forking import COMMAND
from tests.support import asynchronous
from tests.testing.traced_files import is_available

READING = ("read", "pread64", "readv", "preadv", "preadv2", "mmap", "sendfile", "splice", "copy_file_range")
"""System calls by which a program may read a file."""
_CALL = re.compile(r"^\d+ +(\w+)\(.*<[^>]*/([^/>]+)>.*\) += (\d+)", re.MULTILINE)
"""Regular expression for a system call with the descriptor of a file, in the output of strace."""


def bytes_read(trace: str, name: str) -> int:
    """Return how many bytes of a file a traced program has read.

    :raises AssertionError: the program has used a call whose result is not the number of bytes.
    """
    calls = [(call, int(result)) for call, file, result in _CALL.findall(trace) if file == name]
    assert not [call for call, _ in calls if call == "mmap"], calls
    return sum(result for _, result in calls)


class ManyTests(CodeCase):
    """Real processes."""

    @asynchronous
    async def test_two_receivers_use_one_code_and_a_third_cannot(self) -> None:
        await self.network()
        content = os.urandom(1_000_000)
        (self.directory / "film.mkv").write_bytes(content)
        sender = self.tool("send", "--json", "--to-many", "--receivers=2", "film.mkv", "--min-servers=1")
        code = (await self.said(sender, r'"code": "([^"]+)"'))[1]
        places = [self.directory / "one", self.directory / "two"]
        receiving = [
            self.run_command("receive", code, "--min-servers=1", f"--dir={one.name}", "--yes", **self.environment)
            for one in places
        ]
        for status, _, err in await gatherResults([Deferred.fromCoroutine(one) for one in receiving]):
            self.assertEqual(status, 0, err)
        await self.ends(sender, 0)
        self.assertEqual(check(("send",), sender.out.decode()), 3)
        told = [json.loads(line) for line in sender.out.splitlines()[1:]]
        self.assertEqual(sorted(one["receiver"] for one in told), ["receiver 1", "receiver 2"])
        self.assertEqual([one["sent"] for one in told], [["film.mkv"]] * 2)
        for one in places:
            self.assertEqual((one / "film.mkv").read_bytes(), content)
        status, _, _ = await self.receives(code, "--yes")
        self.assertEqual(status, 3)

    @asynchronous
    async def test_each_receiver_costs_at_most_one_reading_of_the_file(self) -> None:
        """The system calls of the sender are counted.  The second receiver already has a part of the file."""
        if not is_available():
            raise SkipTest("strace is not here, or may not trace programs")
        await self.network()
        content = os.urandom(3_000_000)
        (self.directory / "film.mkv").write_bytes(content)
        (self.directory / "two").mkdir()
        part = self.directory / "two" / part_name("film.mkv")
        part.write_bytes(content[:1_000_000])
        trace = self.directory / "trace"
        sender = self.traced(
            trace, "send", "--to-many", "--receivers=2", "--expires=60s", "film.mkv", "--min-servers=1"
        )
        code = (await self.said(sender, r"code: (\S+)"))[1]
        self.assertEqual(bytes_read(trace.read_text(), "film.mkv"), 0, "the file is read for receivers only")
        for name in ("one", "two"):
            status, _, err = await self.run_command(
                "receive", code, "--min-servers=1", f"--dir={name}", "--yes", **self.environment
            )
            self.assertEqual(status, 0, err)
            self.assertEqual((self.directory / name / "film.mkv").read_bytes(), content)
        await self.ends(sender, 0, "to receiver 1", "to receiver 2")
        self.assertEqual(bytes_read(trace.read_text(), "film.mkv"), 2 * len(content))

    def traced(self, trace: Path, *arguments: str) -> Command:
        """Run the command, with a record of the system calls by which it may read files."""
        command = Command()
        tracer = [
            "strace",
            "-f",
            "-qq",
            "-y",
            "-s",
            "0",
            "-e",
            f"trace={','.join(READING)}",
            "-o",
            str(trace.absolute()),
        ]
        environment = {**os.environ, "DMSG_CONFIG": "config.toml", **self.environment}
        argv = [*tracer, sys.executable, "-c", COMMAND, *arguments]
        run: Any = reactor.spawnProcess
        process = run(command, argv[0], argv, env=environment, path=str(self.directory))
        self._end_with_test(command, process)
        return command

    @asynchronous
    async def test_a_receiver_that_stands_still_does_not_slow_others(self) -> None:
        """One receiver is stopped in the middle of the file. It gets the rest after the other receiver has the whole
        file.
        """
        await self.network()
        content = os.urandom(40_000_000)
        (self.directory / "film.mkv").write_bytes(content)
        sender, code = await self.sends("--to-many", "--receivers=2", "film.mkv")
        arguments = ("receive", code, "--min-servers=1", "--yes")
        still = self.tool(*arguments, "--dir=one")

        def has_begun() -> bool:
            return any(one.is_file() and one.stat().st_size for one in (self.directory / "one").rglob("*"))

        while not has_begun():
            await deferLater(reactor, 0.001)
        still.transport.signalProcess(signal.SIGSTOP)  # type: ignore[union-attr]
        self.assertFalse((self.directory / "one" / "film.mkv").exists())
        status, _, err = await self.run_command(*arguments, "--dir=two", **self.environment)
        self.assertEqual(status, 0, err)
        self.assertFalse(still.ended.called or (self.directory / "one" / "film.mkv").exists())
        still.transport.signalProcess(signal.SIGCONT)  # type: ignore[union-attr]
        await self.ends(still, 0)
        await self.ends(sender, 0, "to receiver 1", "to receiver 2")
        for name in ("one", "two"):
            self.assertEqual((self.directory / name / "film.mkv").read_bytes(), content)

    @asynchronous
    async def test_a_code_that_nobody_uses_expires(self) -> None:
        await self.network()
        (self.directory / "a").write_bytes(b"a")
        sender, _ = await self.sends("--expires=1s", "a")
        await self.ends(sender, 3, "nobody used the code in time")
        sender, code = await self.sends("--to-many", "--receivers=2", "--expires=3s", "a")
        self.assertEqual((await self.receives(code, "--yes"))[0], 0)
        await self.ends(sender, 3, "sent a to receiver 1: 1 B", "1 of 2 receivers used it")
        self.assertIn(b"no further receiver is admitted: the code has expired", sender.err)
        self.assertNotIn(b"nobody used the code", sender.err)

    @asynchronous
    async def test_with_verify_each_receiver_is_asked_for_and_one_is_turned_away(self) -> None:
        await self.network()
        (self.directory / "a").write_bytes(b"a")
        sender, typed = self.at_terminal(
            "send", "a", "--to-many", "--receivers=2", "--verify", "--no-qr", "--min-servers=1"
        )
        code = (await self.said(sender, r"code: (\S+)"))[1]
        shown, statuses = set(), []
        for number, answer in enumerate((b"no\n", b"yes\n"), 1):
            receiver = self.tool("receive", code, "--yes", f"--dir={number}", "--min-servers=1")
            shown.add(
                (await self.said(sender, rf"(?s)receiver {number}: compare.*verify: (\d{{4}} \d{{4}} \d{{4}})"))[1]
            )
            await self.said(sender, rf"(?s)receiver {number}: compare.*show the same\? \[y/N\]")
            typed.write(answer)
            statuses.append(await receiver.ended)
        self.assertNotEqual(statuses[0], 0)
        self.assertEqual((len(shown), statuses[1]), (2, 0))
        await self.ends(
            sender, 1, "not sent to receiver 1: the other side shows a different number", "did not get the files"
        )
        self.assertEqual(list(self.directory.glob("*/a")), [self.directory / "2" / "a"])

    @asynchronous
    async def test_members_of_a_group_get_it_and_absent_ones_are_named(self) -> None:
        await self.network()
        (self.directory / "a").write_bytes(b"a")
        book = AddressBook(self.directory / "names")
        for name in ("bob", "carol"):
            key = SecKey.from_seed(name.encode())
            book.add(name, key.public)
            if name == "bob":
                write_key_file(self.directory / "bob.key", key)
        Groups(book).add("family", ("bob", "carol"))
        bob = self.tool(
            "receive", "--listen", "--anyone", "--key-file=bob.key", "--dir=inbox", "--once", "--min-servers=1"
        )
        await self.said(bob, r"receiving at (\S+)")
        status, out, err = await self.run_command(
            "send", "a", "@family", "--min-servers=1", **{**self.environment, "DMSG_KEY_FILE": ""}
        )
        self.assertEqual(status, 1, err)
        self.assertRegex(out, r"(?m)^sent a to bob: 1 B")
        self.assertRegex(out, r"(?m)^not sent to carol: ")
        self.assertIn("1 of 2 receivers did not get the files: carol", err)
        await self.ends(bob, 0)
        status, out, _ = await self.run_command(
            "send", "a", "@family", "--json", "--min-servers=1", **{**self.environment, "DMSG_KEY_FILE": ""}
        )
        self.assertEqual((status, check(("send",), out)), (3, 3), "two failures and the error")
        self.assertEqual((self.directory / "inbox" / "a").read_bytes(), b"a")

    @asynchronous
    async def test_both_sides_show_names_and_not_keys(self) -> None:
        await self.network()
        (self.directory / "a").write_bytes(b"a")
        book = AddressBook(self.directory / "names")
        for name in ("ann", "bob"):
            key = SecKey.from_seed(name.encode())
            book.add(name, key.public)
            write_key_file(self.directory / f"{name}.key", key)
        receiving = ("receive", "--listen", "--allow=ann", "--key-file=bob.key", "--dir=inbox", "--min-servers=1")
        bob = self.tool(*receiving)
        await self.said(bob, r"receiving at (\S+)")
        sending = ("send", "a", "bob", "--min-servers=1")
        environment = {**self.environment, "DMSG_KEY_FILE": "ann.key"}
        status, out, err = await self.run_command(*sending, **environment)
        self.assertEqual((status, out.partition(":")[0]), (0, "sent a to bob"), err)
        await self.said(bob, "received inbox/a from ann: 1 B")
        status, _, err = await self.run_command(*sending, **environment)
        self.assertEqual(status, 1, err)
        self.assertIn("a is not sent to bob: ", err)
        await self.said(bob, "the transfer from ann failed: a exists already")

    @asynchronous
    async def test_options_that_do_not_fit_are_one_line(self) -> None:
        (self.directory / "a").write_bytes(b"a")
        for arguments, expected in (
            (("--to-many", "a"), "--receivers N, --expires TIME, or both"),
            (("--receivers=2", "a"), "--receivers needs --to-many"),
            (("--to-many", "--receivers=2", "-"), "a pipe can only be read once"),
            (("--expires=1x", "a"), "is not a duration"),
            (("a", "@nobody"), "no group"),
        ):
            status, out, err = await self.run_command(
                "send", *arguments, DMSG_NAMES="names", DMSG_DISCOVERY="http://127.0.0.1:9"
            )
            self.assertEqual((status, out), (2, ""), err)
            self.assertIn(expected, err)


class DurationTests(SynchronousTestCase):
    """Values of ``--expires``."""

    def test_units_are_seconds_minutes_hours_and_days(self) -> None:
        kind = DurationType(7 * 86400.0)
        found = [kind.convert(text, None, None) for text in ("90s", "30m", "1H", " 2d ")]
        self.assertEqual(found, [90.0, 1800.0, 3600.0, 172800.0])
        for wrong in ("", "0s", "8d", "1", "-1h", "1 h", "²h", "999999999d"):
            self.assertRaises(Exception, kind.convert, wrong, None, None)
