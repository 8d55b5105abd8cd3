"""``dmsg analytics``: what goes wrong before Spark is started, and names of pseudonyms."""

from __future__ import annotations

import datetime
import errno
import importlib.util

from click.testing import CliRunner
from twisted.trial.unittest import SkipTest

from dmsg.cli.pipeline.commands import analytics
from dmsg.keys import SecKey
from dmsg.telemetry import verify
from dmsg.telemetry.pseudonyms import Pseudonyms, load_or_create_secret
from tests.cli.json_output import check, document
from tests.cli.test_commands import CommandCase
from tests.support import asynchronous


class AnalyticsTests(CommandCase):
    """Errors of one line; the rest is in ``tests/analytics``."""

    @asynchronous
    async def test_bad_input_is_one_line(self) -> None:
        (self.directory / "empty").mkdir()
        (self.directory / "file").write_text("x")
        for arguments in (
            ("run", "--spool", "nowhere", "--out", "tables"),
            ("run", "--spool", "empty", "--out", "file"),
            ("run", "--spool", "empty", "--receipts", "nowhere", "--out", "tables"),
            ("run", "--spool", "empty", "--out", "tables", "--conf", "nonsense"),
            ("stream", "--spool", "nowhere", "--out", "tables"),
            ("top", "--out", "tables", "nonsense"),
            ("top", "--out", "tables", "uptime_day", "--by", "nonsense"),
            ("tables", "--out", "empty"),
            ("tables", "--out", "a[b]"),
            ("optimize", "--out", "empty"),
            ("optimize", "--out", "file"),
            ("report", "--out", "empty", "--as-of", "nonsense"),
            ("verify", "--spool", "nowhere", "--out", "checked"),
            ("verify", "--spool", "empty", "--out", "file"),
            ("simulate", "--out", "sim", "--transports", "0"),
            ("name", "--telemetry", "empty", "127.0.0.1"),
            ("name", "--telemetry", "nowhere", "127.0.0.1"),
            ("nothing",),
        ):
            status, _, err = await self.run_command("analytics", *arguments)
            self.assertGreater(status, 0, arguments)
            errors = [line for line in err.splitlines() if line.strip() and not line.startswith(("Usage:", "Try "))]
            self.assertEqual(len(errors), 1, (arguments, err))

    def test_a_full_disk_is_one_line(self) -> None:
        """The first part that cannot write reports the full disk; here it is the check of receipts."""
        (self.directory / "spool").mkdir()

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        self.patch(verify, "verify_spool", fail)
        directories = ("--spool", str(self.directory / "spool"), "--out", str(self.directory / "checked"))
        done = CliRunner().invoke(analytics, ("verify", *directories))
        self.assertEqual(done.exit_code, 1)
        self.assertRegex(done.stderr, "^dmsg: no room [^\\n]* make room and repeat the command[^\\n]*\\n$")

    @asynchronous
    async def test_a_run_prints_the_fields_of_the_schema(self) -> None:
        """Fields of a run without new events, which needs no Java; a stream prints the same without two of them."""
        if importlib.util.find_spec("pyspark") is None:
            raise SkipTest("Spark is not installed")
        (self.directory / "spool").mkdir()
        command = ("analytics", "run", "--spool", "spool", "--out", "tables", "--json")
        status, out, err = await self.run_command(*command)
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(check(command, out), 1)
        commands = document()["$defs"]["commands"]
        of_run, of_stream = (commands[name] for name in ("analytics run", "analytics stream"))
        self.assertEqual({*of_run["properties"]} - {"seconds", "receipts_refused"}, {*of_stream["properties"]})
        for fields in (of_run, of_stream):
            self.assertEqual([*fields["properties"]], fields["required"])

    @asynchronous
    async def test_a_java_failure_is_one_line_with_the_cause(self) -> None:
        """The line has the cause from Java's output and no other part of the output."""
        if importlib.util.find_spec("pyspark") is None:
            raise SkipTest("Spark is not installed")
        home = self.directory.absolute() / "java"
        (home / "bin").mkdir(parents=True)
        java = home / "bin" / "java"
        java.write_text(
            "#!/bin/sh\n"
            'case "$*" in *-version*) echo \'openjdk version "17.0.1"\' >&2; exit 0;; esac\n'
            "echo 'WARNING: this and that' >&2\n"
            "echo 'Exception in thread \"main\" java.lang.OutOfMemoryError: Java heap space' >&2\n"
            "echo '    at here' >&2\n"
            "exit 1\n"
        )
        java.chmod(0o755)
        status, _, err = await self.run_command("analytics", "simulate", "--out", "sim", JAVA_HOME=str(home))
        self.assertEqual(status, 1)
        self.assertIn("OutOfMemoryError: Java heap space", err)
        self.assertEqual(len(err.splitlines()), 1, err)

    @asynchronous
    async def test_pseudonyms_are_printed_for_keys_and_networks(self) -> None:
        names = Pseudonyms(load_or_create_secret(self.directory))
        key = SecKey.generate().public
        day = (datetime.date(2026, 3, 1) - datetime.date(1970, 1, 1)).days
        status, out, err = await self.run_command(
            "analytics", "name", "--telemetry", ".", "--day", "2026-03-01", key.hex(), "203.0.113.7", "2001:db8::1"
        )
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(
            out.splitlines(),
            [
                f"{names.client(key)} {key.hex()}",
                f"{names.network('203.0.113.99', day)} 203.0.113.7",
                f"{names.network('2001:db8::2', day)} 2001:db8::1",
            ],
        )
        status, again, _ = await self.run_command(
            "analytics", "name", "--telemetry", ".", "--secret", "secret", key.hex()
        )
        self.assertEqual((status, again), (0, out.splitlines(keepends=True)[0]))
        status, out, err = await self.run_command("analytics", "name", "--telemetry", ".", "nonsense")
        self.assertEqual((status, out, len(err.splitlines())), (1, "", 1))
